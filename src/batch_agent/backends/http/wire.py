"""Code that all wires share: ids of tool calls, token counts, and texts that a server accepts. Pure.

``http/backend`` has what the wires over HTTP share beyond this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import orjson
from pydantic import JsonValue

from batch_agent.backends.base import OnToolCall, RequestShape
from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject, Message, Reply, ToolCall, Usage
from batch_agent.outputs.surrogates import mended_all, read_json, readable_json

if TYPE_CHECKING:  # it would import an HTTP client
    from batch_agent.backends.http.faults import Faults

LARGEST_COUNT = 2**53  # tokens: a larger number is not a count, but no reason to fail


class CallIds:
    """Creates ids for the tool calls of one answer that are unique in the conversation: engine and server match results
    to calls by them. A server's own id is kept if it is unique. Some servers send no id, the same id for all calls, or
    the same ids in every turn."""

    __slots__ = ("_messages", "_used")

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages  # of the request
        self._used: set[str] | None = None  # None at first: most answers call no tool

    def take(self, call_id: str) -> str:
        if self._used is None:
            self._used = {call.id for message in self._messages for call in message.tool_calls}
        position = 0
        while not call_id or call_id in self._used:
            call_id = f"call_{len(self._messages)}_{position}"
            position += 1
        self._used.add(call_id)
        return call_id


class Naming(CallIds):
    """Creates the ToolCalls of one answer with unique ids. ``faults`` creates the errors of reading it."""

    __slots__ = ("faults",)

    def __init__(self, messages: Sequence[Message], faults: Faults) -> None:
        super().__init__(messages)
        self.faults = faults

    def call(self, call_id: str, name: str, arguments: str) -> ToolCall:
        if not name:
            raise self.faults.bad("the answer has a tool call without a name")
        return ToolCall(self.take(call_id), name, readable_json(arguments) if arguments.strip() else "{}")


def report_calls(reply: Reply, on_tool_call: OnToolCall | None) -> None:
    """Report the tool calls of an answer that was not streamed."""
    if on_tool_call is not None:
        for call in reply.tool_calls:
            on_tool_call(call)


def echoed_object(arguments: str) -> JsonObject:
    """Return a model's arguments as servers accept them back: they parse them, and refuse a conversation with invalid
    JSON. The tool's error message has what the model really wrote."""
    return mapping(json_of(arguments))


def echoed(arguments: str) -> str:
    """Return the same as text, unchanged if possible."""
    return readable_json(arguments) if isinstance(json_of(arguments), dict) else "{}"


def written(value: object) -> bytes:
    """Return a part of a conversation as JSON. Invalid characters are replaced, so that one row cannot stop the run."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return orjson.dumps(mended_all(value))


def written_options(shape: RequestShape, fields: Mapping[str, object], reserved: Sequence[str]) -> bytes:
    """Return the fields that all requests of a shape share, as a JSON object without None values. ``extra_body``
    overrides all fields except ``reserved`` ones. Raises SpecError for what cannot be encoded."""
    for name in reserved:
        if name in shape.extra_body:
            raise SpecError(f"extra_body cannot set {name!r}: the engine sets this field itself")
    said = {name: value for name, value in fields.items() if value is not None}
    try:
        return orjson.dumps(said | dict(shape.extra_body))
    except orjson.JSONEncodeError as error:
        raise SpecError(f"the options of the request cannot be written as JSON: {error}") from None


def counted(value: JsonValue, *names: str) -> int:
    """Return the first of these counts that is valid; 0 if there is none."""
    for name in names:
        number = value.get(name) if isinstance(value, dict) else None
        if type(number) is int and number > 0:
            return min(number, LARGEST_COUNT)
    return 0


def usage_of(prompt: int, cached: int, completion: int, reasoning: int = 0, written: int = 0) -> Usage:
    """Return the usage, with cached tokens as part of the prompt, even if the provider counts them apart."""
    if cached + written > prompt:
        prompt += cached + written
    return Usage(prompt, cached, completion, reasoning, written)


def mapping(value: JsonValue) -> JsonObject:
    """Return the value if it is an object, or an empty one."""
    return value if isinstance(value, dict) else {}


def string_of(value: JsonValue) -> str:
    """Return the value if it is text, or ""."""
    return value if isinstance(value, str) else ""


def objects_of(value: JsonValue) -> list[JsonObject]:
    """Return the objects of a list; empty if the value is not a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def json_of(data: bytes | str) -> JsonValue:
    """Return the parsed JSON, or None if it is invalid."""
    try:
        return read_json(data)
    except ValueError:
        return None


def object_of(data: bytes, faults: Faults) -> JsonObject:
    """Return an answer that must be a JSON object."""
    value = json_of(data)
    if isinstance(value, dict):
        return value
    shown = faults.clean(data.decode("utf-8", "replace")) or "(nothing)"
    if data.lstrip()[:1] == b"<":
        raise faults.bad(f"the answer is a web page, not JSON; check that the URL is that of an API. {shown}")
    raise faults.bad(f"the answer is not a JSON object: {shown}")
