"""What wires have in common, whatever they look like: the ids of tool calls, counts of tokens, and texts that a server
takes. Pure; ``http_backend`` has what those over HTTP share beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import orjson
from pydantic import JsonValue

from batch_agent.backends.base import OnToolCall, RequestShape
from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject, Message, Reply, ToolCall, Usage
from batch_agent.outputs.surrogates import mended_all, read_json, readable_json

if TYPE_CHECKING:  # an HTTP client would come along
    from batch_agent.backends.http.faults import Faults

LARGEST_COUNT = 2**53  # tokens: what is more is no count, and no reason to fail


class CallIds:
    """Ids for the tool calls of one answer, none of which another call of its conversation has: the engine and the
    server pair results with calls by them. A server's own id is kept where it is such a one. Some servers send none,
    the same for all calls of an answer, or the same again in every turn."""

    __slots__ = ("_messages", "_used")

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages  # those that the request had
        self._used: set[str] | None = None  # most answers call nothing

    def take(self, call_id: str) -> str:
        if self._used is None:
            self._used = {call.id for message in self._messages for call in message.tool_calls}
        position = 0
        while not call_id or call_id in self._used:
            call_id = f"call_{len(self._messages)}_{position}"
            position += 1
        self._used.add(call_id)
        return call_id


class Naming:
    """Makes the ToolCalls of one answer, each with an id of its own; errors of reading it are ``faults``'."""

    __slots__ = ("_ids", "faults")

    def __init__(self, messages: Sequence[Message], faults: Faults) -> None:
        self.faults = faults
        self._ids = CallIds(messages)

    def call(self, call_id: str, name: str, arguments: str) -> ToolCall:
        if not name:
            raise self.faults.bad("the answer has a tool call without a name")
        return ToolCall(self._ids.take(call_id), name, readable_json(arguments) if arguments.strip() else "{}")


def report_calls(reply: Reply, on_tool_call: OnToolCall | None) -> None:
    """Of an answer that came as a whole: to whoever would have heard of them while it was streamed."""
    if on_tool_call is not None:
        for call in reply.tool_calls:
            on_tool_call(call)


def echoed_object(arguments: str) -> JsonObject:
    """A model's arguments as servers take them back: they parse them, and refuse a conversation with a broken one. What
    the model really wrote is in the tool's error message."""
    return mapping(json_of(arguments))


def echoed(arguments: str) -> str:
    """The same as text, verbatim where it can be."""
    return readable_json(arguments) if isinstance(json_of(arguments), dict) else "{}"


def written(value: object) -> bytes:
    """A part of a conversation as JSON, its texts mended where they must be: no row is worth more than the run."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return orjson.dumps(mended_all(value))


def written_options(shape: RequestShape, fields: Mapping[str, object], reserved: Sequence[str]) -> bytes:
    """The fields that all requests of a shape have, as a JSON object; None: not said. ``extra_body`` has the last word,
    but for what is ``reserved``, which a request is made of. SpecError for what cannot be written."""
    for name in reserved:
        if name in shape.extra_body:
            raise SpecError(f"extra_body cannot set {name!r}: it is what a request is made of")
    said = {name: value for name, value in fields.items() if value is not None}
    try:
        return orjson.dumps(said | dict(shape.extra_body))
    except orjson.JSONEncodeError as error:
        raise SpecError(f"the options of the request cannot be written as JSON: {error}") from None


def counted(value: JsonValue, *names: str) -> int:
    """The first of these counts that an object has and that is one; 0 without."""
    for name in names:
        number = value.get(name) if isinstance(value, dict) else None
        if type(number) is int and number > 0:
            return min(number, LARGEST_COUNT)
    return 0


def usage_of(prompt: int, cached: int, completion: int, reasoning: int = 0, written: int = 0) -> Usage:
    """With what passes a cache as a part of the prompt, also of a provider that counts it apart."""
    if cached + written > prompt:
        prompt += cached + written
    return Usage(prompt, cached, completion, reasoning, written)


def mapping(value: JsonValue) -> JsonObject:
    """Empty for what is no object."""
    return value if isinstance(value, dict) else {}


def json_of(data: bytes | str) -> JsonValue:
    """None for what is no JSON."""
    try:
        return read_json(data)
    except ValueError:
        return None


def object_of(data: bytes, faults: Faults) -> JsonObject:
    """An answer that must be a JSON object."""
    value = json_of(data)
    if isinstance(value, dict):
        return value
    shown = faults.clean(data.decode("utf-8", "replace")) or "(nothing)"
    if data.lstrip()[:1] == b"<":
        raise faults.bad(f"the answer is a web page, not JSON; is this the URL of an API? {shown}")
    raise faults.bad(f"the answer is not a JSON object: {shown}")
