"""Conversion of the answer of an MCP tool to text for the model."""

from __future__ import annotations

import json
from collections.abc import Iterator

from mcp import types

from batch_agent.errors import ToolFailed


def text_of(name: str, result: types.CallToolResult) -> str:
    """Return the result as text. Raises ToolFailed if the tool reports a failure."""
    parts = [_block(block) for block in result.content]
    if result.structured_content is not None and not _repeats(parts, result.structured_content):
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = "\n".join(parts)
    if result.is_error:
        raise ToolFailed(text or f"{name} failed and gave no reason")
    return text or "(no output)"


def _block(block: types.ContentBlock) -> str:
    match block:
        case types.TextContent():
            return block.text
        case types.ImageContent() | types.AudioContent():
            # Results are text, in the conversation and in the record.
            return f"[{block.type} {block.mime_type}, about {len(block.data) * 3 // 4} bytes, not shown]"
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
