"""Code that all wires share: ids of tool calls, token counts, rate-limit headers, readers of streamed answers, and
texts that a server accepts. Pure.

``http/backend`` has what the wires over HTTP share beyond this."""

from __future__ import annotations

import math
import re
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import orjson
from pydantic import JsonValue

from batch_agent.backends.base import OnToolCall, RequestShape
from batch_agent.errors import (
    BackendError,
    BadResponse,
    ContextOverflow,
    RateLimited,
    Rejected,
    SpecError,
    Timeout,
    Unavailable,
)
from batch_agent.http.connection import Event, EventTooLarge, SSEParser
from batch_agent.http.failures import (
    BadAddress,
    BrokenOff,
    ClosedEarly,
    ConnectFailed,
    ConnectTimedOut,
    NotHttp,
    ProxyRefused,
    ProxyUnreachable,
    TooLarge,
    TransportError,
)
from batch_agent.messages import Allowance, JsonObject, Message, Quota, Reply, ToolCall, Usage
from batch_agent.outputs.surrogates import mended_all, read_json, readable_json

SHOWN_CHARS = 500
OVERLOAD_STATUSES = frozenset({503, 529})  # in addition to 429
NO_KEY = "no key was sent: set BATCH_AGENT_API_KEY, or give api_key="
SHORTEST_SECRET = 4  # replacing a shorter text would only garble the message

_CONTROL = re.compile(r"[\x00-\x20\x7f-\x9f\u2028\u2029\u200b-\u200f\u202a-\u202e\u2066-\u2069]+")


@dataclass(frozen=True, slots=True)
class Wording:
    """How the servers of one wire name errors, and hints that help. Hints follow the server's message."""

    statuses: Mapping[str, int]  # HTTP status by error name, for errors inside a 200
    overflow: re.Pattern[str]  # matches a code, type or message that says: the conversation is too long
    spent: frozenset[str] = frozenset()  # codes of a 429 that no waiting resolves
    filtered: frozenset[str] = frozenset()  # codes of content moderation: it refuses this prompt, not the run
    key_hint: str = "check the API key"
    path_hint: str = "check the path of the URL"


CHAT = Wording(
    statuses={
        "rate_limit_exceeded": 429,
        "rate_limit_error": 429,
        "insufficient_quota": 429,
        "overloaded_error": 503,
        "server_error": 500,
        "internal_server_error": 500,
        "InternalServerError": 500,
        "ServiceUnavailableError": 503,
        "invalid_request_error": 400,
        "BadRequestError": 400,
        "exceed_context_size_error": 400,
        "context_length_exceeded": 400,
    },
    # OpenAI and vLLM; SGLang; llama.cpp and its Python server.
    overflow=re.compile(
        r"context_length_exceeded|maximum context length|longer than the model's context"
        r"|exceed_context_size_error|available context size|exceed\w* (the )?context (window|size)",
        re.IGNORECASE,
    ),
    # A used-up quota also answers 429.
    spent=frozenset({"insufficient_quota"}),
    filtered=frozenset({"content_filter", "content_policy_violation"}),
    path_hint="check the path of the URL: it usually ends in /v1",
)


@dataclass(frozen=True, slots=True)
class ServerError:
    """The error object of a body, in the formats that servers use."""

    message: str
    kind: str = ""
    code: str = ""
    param: str = ""

    @classmethod
    def of(cls, value: object) -> ServerError:
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping):  # Gemini
            value = value[0]
        if isinstance(value, Mapping):
            inner = value.get("error")
            if isinstance(inner, Mapping):
                value = inner
            message = value.get("message") or value.get("detail") or (inner if isinstance(inner, str) else "")
            if not isinstance(message, str) or not message:
                message = _as_json(value)
            details = value.get("details")  # Anthropic puts a code here
            code = value.get("code") or (details.get("error_code") if isinstance(details, Mapping) else None)
            return cls(message, str(value.get("type") or ""), str(code or ""), str(value.get("param") or ""))
        return cls(value if isinstance(value, str) else _as_json(value))

    @classmethod
    def in_body(cls, body: bytes) -> ServerError:
        document = json_of(body)
        return cls(body[: 64 * SHOWN_CHARS].decode("utf-8", "replace")) if document is None else cls.of(document)

    def fields(self, *, overflow: bool) -> dict[str, str | int]:
        """Return the other fields of the server's error, beside its message, for a client that reads them."""
        code = "context_length_exceeded" if overflow and (not self.code or self.code.isdecimal()) else self.code
        told = {"type": self.kind, "param": self.param, "code": int(code) if code.isdecimal() else code}
        return {name: value for name, value in told.items() if value}

    def is_overflow(self, wording: Wording) -> bool:
        told = (self.code, self.kind, self.message)
        return self.param == "input_tokens" or any(wording.overflow.search(text) for text in told)

    def status(self, wording: Wording) -> int | None:
        """Return the HTTP status that the error would have had, for an error inside a 200."""
        if re.fullmatch(r"[45]\d\d", self.code):
            return int(self.code)
        return wording.statuses.get(self.code) or wording.statuses.get(self.kind)


class Faults:
    """Turns failures at one URL into BackendErrors with a message: what happened, where, and what the server said.
    ``where`` is a method and a URL without credentials.

    Statuses, error objects and transport failures become errors only here. Texts from servers and libraries pass
    through ``clean`` before they are shown: it removes secrets and control characters, and shortens them.
    """

    __slots__ = ("_secrets", "_wording", "where")

    def __init__(self, where: str, secrets: Iterable[str] = (), wording: Wording = CHAT) -> None:
        self.where = where
        self._wording = wording
        self._secrets = sorted({s for s in secrets if len(s) >= SHORTEST_SECRET}, key=len, reverse=True)

    def clean(self, text: str) -> str:
        # Remove secrets before shortening, which could otherwise leave half of one.
        for secret in self._secrets:
            text = text.replace(secret, "[redacted]")
        text = _CONTROL.sub(" ", text).strip()
        return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"

    def answered(self, status: int, headers: Mapping[str, str], body: bytes) -> BackendError:
        """Return the error for a status other than 2xx."""
        said = ServerError.in_body(body)
        if 300 <= status < 400:
            target = self.clean(headers.get("Location", "nowhere").partition("?")[0])
            return Rejected(f"{self.where} redirects ({status}) to {target}: use that address instead", status=status)
        message = f"{self.where} answered {status}: {self.clean(said.message) or '(nothing)'}{self._hint(status, said)}"
        error = self._build(status, said, message, retry_after(headers))
        error.quota = read_quota(headers)
        return error

    def reported(self, error: object) -> BackendError:
        """Return the error for an error object inside an answer with status 200."""
        said = ServerError.of(error)
        message = f"{self.where} reported an error in its answer: {self.clean(said.message) or '(nothing)'}"
        status = said.status(self._wording) or (400 if said.is_overflow(self._wording) else None)
        return BadResponse(message) if status is None else self._build(status, said, message, None)

    def bad(self, what: str, *, text: str = "") -> BadResponse:
        """Return the error for an unreadable or incomplete answer; ``text`` is the part that arrived."""
        return BadResponse(f"{self.where}: {what}", text=text)

    def raised(self, error: TransportError | OSError) -> BackendError:
        """Return the error for a failure of the transport."""
        said = self.clean(str(error))
        match error:
            case ConnectTimedOut():
                return Timeout(f"{self.where}: the connection timed out; is the host reachable?", unreached=True)
            case TimeoutError():
                return Timeout(f"{self.where}: the established connection timed out")
            case ProxyRefused(status=status):
                message = f"{self.where}: the proxy refused the connection with status {status}"
                return Unavailable(message, status=status, unreached=True)
            case NotHttp():
                return self.bad(f"the response is not valid HTTP: {said}")
            case TooLarge():
                return self.bad(f"the answer has {said}; it was cut off at this limit")
            case BadAddress():
                return Rejected(f"{self.where} is not a valid address")
            case _:
                unreached = isinstance(error, TransportError) and error.unreached
                failure = Unavailable(f"{self.where}: {_broken(error, said)}", unreached=unreached)
                failure.stale = isinstance(error, ClosedEarly) and error.stale
                return failure

    def _build(self, status: int, said: ServerError, message: str, wait: float | None) -> BackendError:
        error = self._error(status, said, message, wait)
        error.fields = said.fields(overflow=isinstance(error, ContextOverflow))
        return error

    def _error(self, status: int, said: ServerError, message: str, wait: float | None) -> BackendError:
        if status in (400, 413, 422, 500) and said.is_overflow(self._wording):
            return ContextOverflow(message, status=status)
        if not self._wording.filtered.isdisjoint((said.code, said.kind)):
            return Rejected(message)
        if status == 429:
            if not self._wording.spent.isdisjoint((said.code, said.kind)):
                return Rejected(message, status=status)
            return RateLimited(message, status=status, retry_after=wait)
        if status in (408, 425) or (status >= 500 and status != 501):
            return Unavailable(message, status=status, retry_after=wait, overload=status in OVERLOAD_STATUSES)
        return Rejected(message, status=status)

    def _hint(self, status: int, said: ServerError) -> str:
        if status in (401, 403):
            return f" ({self._wording.key_hint})"
        if status in (404, 405) and not (said.kind or said.code):
            return f" ({self._wording.path_hint})"
        return ""


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Return the seconds to wait that the server requests: ``Retry-After`` as a number or a date, or
    ``retry-after-ms``. A date is compared with the server's own clock, its ``Date``, if it sends one."""
    milliseconds = _number(headers.get("retry-after-ms", ""))
    if milliseconds is not None:
        return milliseconds / 1000
    value = headers.get("Retry-After", "")
    seconds = _number(value)
    if seconds is not None or not value:
        return seconds
    when, here = _time(value), _time(headers.get("Date", ""))
    if when is None:
        return None
    return max(0.0, when - (here if here is not None else time.time() if now is None else now))


def _time(date: str) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return max(0.0, number) if math.isfinite(number) else None


def _broken(error: TransportError | OSError, said: str) -> str:
    match error:
        case ProxyUnreachable():
            return f"the proxy set in the environment is unreachable: {said}"
        case ConnectFailed(cause=ssl.SSLCertVerificationError()):
            return f"the TLS certificate could not be verified: {said}"
        case ConnectFailed(cause=ssl.SSLError()):
            return f"the TLS handshake failed; does the server speak https? {said}"
        case ConnectFailed(cause=socket.gaierror()):
            return "the host name was not found (DNS)"
        case ConnectFailed(cause=ConnectionRefusedError()):
            return "connection refused; is the server running?"
        case ConnectFailed():
            return f"no connection: {said}"
        case ClosedEarly() if not said:
            return "the server closed the connection before it answered"
        case BrokenOff():
            return f"the answer broke off: {said}"
        case _:
            return f"the connection broke: {said or type(error).__name__}"


def _as_json(value: object) -> str:
    return orjson.dumps(value, default=str).decode()


_Names = tuple[str, tuple[str, str, str]]  # Quota's field, and the headers for limit, remaining and reset


def _names(form: str, kinds: Mapping[str, str]) -> tuple[_Names, ...]:
    return tuple(
        (field, (form.format("limit", kind), form.format("remaining", kind), form.format("reset", kind)))
        for kind, field in kinds.items()
    )


RATE_LIMIT = "ratelimit"  # part of the names of all these headers
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
    if RATE_LIMIT not in " ".join(headers).lower():  # most answers
        return None
    found: dict[str, Allowance] = {}
    for family in _FAMILIES:
        for field, (limit, remaining, reset) in family:
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
        self._clock = clock
        self._sent_at = clock()
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
    """Reads an answer in server-sent events. ``_done``: the rest of the stream does not matter. ``_held``: upper bound
    of the memory that the answer takes, because a server may never end its answer."""

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
    """Creates the ToolCalls of one answer with unique ids. ``faults`` creates errors for calls that cannot be read."""

    __slots__ = ("faults",)

    def __init__(self, messages: Sequence[Message], faults: Faults) -> None:
        self._messages = messages
        self._used = None
        self.faults = faults

    def call(self, call_id: str, name: str, arguments: str) -> ToolCall:
        if not name:
            raise self.faults.bad("the answer has a tool call without a name")
        if not arguments.isascii() or "\\u" in arguments:
            arguments = readable_json(arguments)
        return ToolCall(self.take(call_id), name, arguments if arguments.strip() else "{}")


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
    """Return the arguments of a call as text that servers accept back, unchanged if possible."""
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
    """Return the first of these values that is a valid count; 0 if there is none."""
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
