"""Conversion of the answer of an MCP tool to what the model reads: text, and images after it."""

from __future__ import annotations

import json
from collections.abc import Iterator

from mcp import types

from batch_agent.errors import InputError, ToolFailed
from batch_agent.files.pictures import read_image
from batch_agent.messages import Content, Image


def content_of(name: str, result: types.CallToolResult) -> Content:
    """Return the result as text, which names its images, followed by the images. Raises ToolFailed if the tool reports
    a failure."""
    images: list[Image] = []
    parts = [_block(block, images) for block in result.content]
    if result.structured_content is not None and not _repeats(parts, result.structured_content):
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = "\n".join(parts)
    if result.is_error:
        raise ToolFailed(text or f"{name} failed and gave no reason")
    return (text, *images) if images else text or "(no output)"


def _block(block: types.ContentBlock, images: list[Image]) -> str:
    """Return the text for a block. An image that models accept is added to ``images``."""
    match block:
        case types.TextContent():
            return block.text
        case types.ImageContent():
            named = f"image {block.mime_type}, about {len(block.data) * 3 // 4} bytes"
            try:
                images.append(read_image(Image(f"data:{block.mime_type};base64,{block.data}")))
            except InputError as error:
                return f"[{named}, not shown: {error}]"
            return f"[{named}]"
        case types.AudioContent():
            return f"[audio {block.mime_type}, about {len(block.data) * 3 // 4} bytes, not shown]"
        case types.ResourceLink():
            return " ".join(["[link", *_described(block), f"{block.uri}]"])
        case types.EmbeddedResource(resource=types.TextResourceContents() as resource):
            return f"[resource {resource.uri}]\n{resource.text}"
        case types.EmbeddedResource(resource=types.BlobResourceContents() as resource):
            kind = resource.mime_type or "of unknown type"
            return f"[resource {resource.uri} {kind}, about {len(resource.blob) * 3 // 4} bytes, not shown]"
    return f"[{type(block).__name__}, not shown]"


def _described(link: types.ResourceLink) -> Iterator[str]:
    yield link.name
    if link.description:
        yield f"({link.description})"


def _repeats(parts: list[str], structured: object) -> bool:
    """Return whether the texts repeat the structured result, as the protocol recommends for older clients."""
    values = [_value(part) for part in parts]
    same = [structured]
    if isinstance(structured, dict) and structured.keys() == {"result"}:  # SDKs wrap other values like this
        same.append(structured["result"])
    return any(form in values or form in (values, parts) for form in same)


def _value(text: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value
