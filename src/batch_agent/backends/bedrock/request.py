"""Requests of Bedrock's ``converse``: the turns of Anthropic's wire, its blocks under other names.

The API has one conversation format for all models. Options it has no field for are passed to the model
(``additionalModelRequestFields``). A cache point is a separate block after the cached part.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Self

import orjson
from pydantic import JsonValue

from batch_agent.backends.anthropic.models import model_of
from batch_agent.backends.anthropic.request import Head, MessagesView, told_schema
from batch_agent.backends.anthropic.schema import format_schema
from batch_agent.backends.base import RequestShape
from batch_agent.backends.http.wire import objects_of
from batch_agent.compiler.tokens import BYTES_PER_TOKEN
from batch_agent.documents import MEDIA_TYPES
from batch_agent.errors import Rejected, SpecError
from batch_agent.messages import JsonObject, Message

CACHE_POINT = b'{"cachePoint":{"type":"default"}}'
OWN_FIELDS = ("messages", "system", "toolConfig", "inferenceConfig", "outputConfig")
# Fields of the API itself that extra_body may set; all others go to the model.
API_FIELDS = frozenset(
    {
        "additionalModelRequestFields",
        "additionalModelResponseFieldPaths",
        "guardrailConfig",
        "performanceConfig",
        "promptVariables",
        "requestMetadata",
        "serviceTier",
    }
)
# Models that cache: Claude from 3.7 on, the last 3.5 versions, and Nova. Only Claude caches tools separately.
_CACHES = re.compile(r"anthropic\.claude-(3-7|3-5-haiku|3-5-sonnet-20241022|\w+-\d)|amazon\.nova")
_KEEPS_TOOLS = re.compile(r"anthropic\.claude")
_KEEPS_SCHEMAS = re.compile(r"anthropic\.claude-(haiku|sonnet|opus)-(4-[5-9]|[5-9])")
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_STOPS = 4


def keeps_schemas(model: str) -> bool:
    """Return whether the API is known to enforce schemas for the model."""
    return _KEEPS_SCHEMAS.search(model) is not None


class ConverseView(MessagesView):
    """``called``: the tools used in the conversation. The API refuses a request that does not define them."""

    __slots__ = ("called",)

    def __init__(self) -> None:
        super().__init__()
        self.called: dict[str, None] = {}

    def fork(self) -> Self:
        other = super().fork()
        other.called = self.called.copy()
        return other

    def extend(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.called |= dict.fromkeys(call.name for call in message.tool_calls)
        super().extend(messages)

    def called_tools(self) -> Sequence[bytes]:
        return [orjson.dumps(_tool(name)) for name in self.called]

    @staticmethod
    def written(block: JsonObject) -> JsonObject:
        match block.get("type"):
            case "text":
                return {"text": block["text"]}
            case "image":
                return {"image": _image(block["source"])}
            case "document":
                return {"document": _document(block["source"])}
            case "tool_use":
                return {"toolUse": {"toolUseId": block["id"], "name": block["name"], "input": block["input"]}}
            case "tool_result":
                return {"toolResult": _result(block)}
            case "thinking":
                told: JsonObject = {"text": block.get("thinking"), "signature": block.get("signature")}
                return {"reasoningContent": {"reasoningText": {n: v for n, v in told.items() if v is not None}}}
            case "redacted_thinking":
                return {"reasoningContent": {"redactedContent": block.get("data")}}
            case _:
                return block

    @staticmethod
    def marked(blocks: Sequence[bytes]) -> list[bytes]:
        return [*blocks, CACHE_POINT] if blocks else []


def build_head(shape: RequestShape, *, native_schema: bool) -> Head:
    for name in OWN_FIELDS:
        if name in shape.extra_body:
            raise SpecError(f"extra_body cannot set {name!r}: the engine sets this field itself")
    form = format_schema(shape.schema) if shape.schema is not None and native_schema else None
    # There is no choice 'none', so the request offers no tools instead.
    tools = () if shape.tool_choice == "none" else shape.tools
    chosen = _tool_choice(shape.tool_choice) if tools else None
    caches = _CACHES.search(shape.model) is not None
    try:
        choice = b"" if chosen is None else b',"toolChoice":' + orjson.dumps(chosen)
        told = [] if shape.schema is None or form is not None else [ConverseView.written(told_schema(shape.schema))]
        return Head(
            fields=orjson.dumps(_fields(shape, form))[:-1],
            tools=[orjson.dumps(_tool(tool.name, tool.description, tool.parameters)) for tool in tools],
            told=[orjson.dumps(block) for block in told],
            cached_from=model_of(shape.model).cached_from * BYTES_PER_TOKEN if caches else sys.maxsize,
            goes_on=bool(tools),
            marks_tools=_KEEPS_TOOLS.search(shape.model) is not None,
            tools_field=(b',"toolConfig":{"tools":[', b"]" + choice + b"}"),
        )
    except orjson.JSONEncodeError as error:
        raise SpecError(f"the options of the request cannot be written as JSON: {error}") from None


def check_shape(shape: RequestShape) -> None:
    """Raise SpecError for what the API would refuse in every request."""
    if shape.seed is not None:
        raise SpecError("seed: Bedrock's converse has no seed; leave it out, or give the model's own in extra_body")
    if len(shape.stop) > _STOPS:
        raise SpecError(f"stop: Bedrock's converse takes at most {_STOPS}")
    for tool in shape.tools:
        if not _TOOL_NAME.fullmatch(tool.name):
            raise SpecError(
                f"the tool name {tool.name!r} is invalid for Bedrock: use at most 64 letters, digits, _ and -"
            )


def _fields(shape: RequestShape, form: JsonObject | None) -> JsonObject:
    inference: JsonObject = {
        "maxTokens": shape.max_tokens,
        "temperature": shape.temperature,
        "topP": shape.top_p,
        "stopSequences": [*shape.stop] or None,
    }
    inference = {name: value for name, value in inference.items() if value is not None}
    api = {name: value for name, value in shape.extra_body.items() if name in API_FIELDS}
    model = {name: value for name, value in shape.extra_body.items() if name not in API_FIELDS}
    given = api.pop("additionalModelRequestFields", {})
    if not isinstance(given, dict):
        raise SpecError("extra_body: additionalModelRequestFields must be a mapping")
    output: JsonObject | None = None
    if form is not None:
        schema: JsonObject = {"name": shape.schema_name, "schema": orjson.dumps(form).decode()}
        output = {"textFormat": {"type": "json_schema", "structure": {"jsonSchema": schema}}}
    # Also when empty, because the rest of a body follows a comma.
    return {
        "inferenceConfig": inference,
        **({"outputConfig": output} if output else {}),
        **({"additionalModelRequestFields": {**model, **given}} if model or given else {}),
        **api,
    }


def _image(source: JsonValue) -> JsonObject:
    if not isinstance(source, dict) or source.get("type") != "base64":
        raise Rejected("Bedrock does not fetch images from URLs: give the file or its bytes")
    kind = str(source["media_type"]).removeprefix("image/")
    return {"format": kind, "source": {"bytes": source["data"]}}


def _document(source: JsonValue) -> JsonObject:
    """The name is the same for all: Bedrock warns that models may take a file's name for an instruction."""
    assert isinstance(source, dict)
    kind = next(name for name, media in MEDIA_TYPES.items() if media == source["media_type"])
    return {"format": kind, "name": "document", "source": {"bytes": source["data"]}}


def _result(block: JsonObject) -> JsonObject:
    content = block.get("content", "")
    parts = [*map(ConverseView.written, objects_of(content))]
    if isinstance(content, str):
        parts = [{"text": content or "(nothing)"}]
    status = "error" if block.get("is_error") else "success"
    return {"toolUseId": block["tool_use_id"], "content": [*parts], "status": status}


def _tool(name: str, description: str = "", parameters: JsonObject | None = None) -> JsonObject:
    described: JsonObject = {"description": description} if description.strip() else {}
    schema: JsonObject = {"type": "object", **(parameters or {})}
    return {"toolSpec": {"name": name, **described, "inputSchema": {"json": schema}}}


def _tool_choice(choice: JsonValue) -> JsonValue:
    if not isinstance(choice, str):
        return choice
    kinds: dict[str, JsonValue] = {"auto": {"auto": {}}, "required": {"any": {}}}
    return kinds.get(choice, {"tool": {"name": choice}})
