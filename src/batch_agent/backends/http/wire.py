"""Code that all wires share: ids of tool calls, token counts, rate-limit headers, readers of streamed answers, and
texts that a server accepts. Pure.

``http/backend`` has what the wires over HTTP share beyond this."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import orjson
from pydantic import JsonValue

from batch_agent.backends.base import OnToolCall, RequestShape
from batch_agent.errors import BadResponse, SpecError
from batch_agent.http.sse import Event, EventTooLarge, SSEParser
from batch_agent.messages import Allowance, JsonObject, Message, Quota, Reply, ToolCall, Usage
from batch_agent.outputs.surrogates import mended_all, read_json, readable_json

if TYPE_CHECKING:
    from batch_agent.backends.http.faults import Faults


_Names = tuple[str, tuple[str, str, str]]  # Quota's field, and the headers for limit, remaining and reset


def _names(form: str, kinds: Mapping[str, str]) -> tuple[_Names, ...]:
    return tuple(
        (field, (form.format("limit", kind), form.format("remaining", kind), form.format("reset", kind)))
        for kind, field in kinds.items()
    )


_BOTH = {"requests": "requests", "tokens": "tokens"}
_FAMILIES = (
    _names("x-ratelimit-{}-{}", _BOTH),
    _names(
        "anthropic-ratelimit-{1}-{0}",
        _BOTH | {"input-tokens": "prompt_tokens", "output-tokens": "completion_tokens"},
    ),
)
_UNITS = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|us|µs|ns|d|h|m|s)")
_DURATION = re.compile(rf"(?:{_PART.pattern})+")
_SECONDS = re.compile(r"\d+(?:\.\d+)?")
_MOMENTS = 1e9  # a number of seconds above this is a Unix timestamp


def read_quota(headers: Mapping[str, str], now: float | None = None) -> Quota | None:
    """Return the quota in the headers, or None. ``now`` is Unix time, for headers with timestamps."""
    found: dict[str, Allowance] = {}
    for family in _FAMILIES:
        for field, (limit, remaining, reset) in family:
            # Every answer passes here, and most have no such headers: two look-ups decide.
            if remaining in headers or limit in headers:
                allowance = Allowance(
                    _count(headers.get(limit)), _count(headers.get(remaining)), _seconds(headers.get(reset), now)
                )
                if allowance.limit is not None or allowance.remaining is not None:
                    found[field] = allowance
    return Quota(**found) if found else None


def _count(text: str | None) -> int | None:
    if text is None:
        return None
    text = text.strip()
    # Longer than any limit; Python refuses to parse much longer ones.
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _seconds(text: str | None, now: float | None) -> float | None:
    if text is None:
        return None
    text = text.strip()[:64]
    if _SECONDS.fullmatch(text):
        number = float(text)
        return number if number < _MOMENTS else _until(number, now)
    if _DURATION.fullmatch(text):
        return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return _until((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp(), now)


def _until(moment: float, now: float | None) -> float:
    return max(0.0, moment - (time.time() if now is None else now))


class AnswerReader(ABC):
    """Reads one streamed answer. ``said`` receives the text piece by piece, for a caller that cancels; ``clock`` times
    the first piece."""

    def __init__(self, naming: Naming, on_tool_call: OnToolCall, clock: Callable[[], float], said: list[str]) -> None:
        self._naming, self._faults = naming, naming.faults
        self._on_tool_call = on_tool_call
        self._clock, self._sent_at = clock, clock()
        self._first_token: float | None = None
        self._said = said

    @abstractmethod
    def feed(self, chunk: bytes) -> bool:
        """Process a chunk. Returns True when the stream has ended. Reports each tool call as soon as it is complete."""

    @abstractmethod
    def finish(self) -> Reply:
        """Called at the end of the stream. Returns the answer, or raises the error that it is incomplete."""

    @property
    def _so_far(self) -> str:
        return "".join(self._said)

    def _begun(self) -> None:
        if self._first_token is None:
            self._first_token = self._clock() - self._sent_at

    def _broken(self, what: str) -> BadResponse:
        return self._faults.bad(what, text=self._so_far)

    def _unfinished(self) -> BadResponse:
        return self._broken("the stream stopped before the answer was complete")


# An answer of a million tokens has a million events. What an event leaves in memory is at most its data without the
# names of fields and the like, and at least a small object.
MOST_HELD_BYTES = 64 * 1024 * 1024
ENVELOPE_BYTES, LEAST_HELD_BYTES = 256, 48


class EventReader(AnswerReader):
    """Reads an answer in server-sent events. ``_done``: the rest of the stream does not matter. ``_held`` is an upper
    bound of the memory that the answer takes: a server that never ends its answer must not fill the memory."""

    def __init__(self, naming: Naming, on_tool_call: OnToolCall, clock: Callable[[], float], said: list[str]) -> None:
        super().__init__(naming, on_tool_call, clock, said)
        self._sse = SSEParser()
        self._done = False
        self._held = 0

    @abstractmethod
    def _event(self, name: str, event: JsonObject) -> None: ...

    def feed(self, chunk: bytes) -> bool:
        try:
            events = self._sse.feed(chunk)
        except EventTooLarge as error:
            raise self._broken(f"the stream has {error}") from None
        self._take(events)
        return self._done

    def _close(self) -> None:
        """Process what the end of the stream completes."""
        self._take(self._sse.close())

    def _take(self, events: list[Event]) -> None:
        for name, data in events:
            if self._done or data.strip() == b"[DONE]":
                self._done = True
                return
            if name == "error":
                raise self._faults.reported(json_of(data) or data.decode("utf-8", "replace"))
            size = len(data) - ENVELOPE_BYTES
            self._held += size if size > LEAST_HELD_BYTES else LEAST_HELD_BYTES
            self._event(name, object_of(data, self._faults))
        self._check_held()

    def _check_held(self) -> None:
        if self._held > MOST_HELD_BYTES:
            raise self._faults.bad(f"the answer does not end: it has more than {MOST_HELD_BYTES:,} bytes")


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
        self._messages, self._used, self.faults = messages, None, faults

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
    try:
        return arguments if isinstance(orjson.loads(arguments), dict) else "{}"
    except orjson.JSONDecodeError:  # a lone surrogate, or no JSON
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
    if isinstance(value, dict):
        for name in names:
            number = value.get(name)
            if type(number) is int and number > 0:
                return number if number < LARGEST_COUNT else LARGEST_COUNT
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
    try:
        value: JsonValue = orjson.loads(data)
    except orjson.JSONDecodeError:
        value = json_of(data)
    if isinstance(value, dict):
        return value
    shown = faults.clean(data.decode("utf-8", "replace")) or "(nothing)"
    if data.lstrip()[:1] == b"<":
        raise faults.bad(f"the answer is a web page, not JSON; check that the URL is that of an API. {shown}")
    raise faults.bad(f"the answer is not a JSON object: {shown}")
