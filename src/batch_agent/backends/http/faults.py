"""Turns failures at one URL into BackendErrors with a message: what happened, where, and what the server said.

Statuses, error objects and transport failures become errors only here. Texts from servers and libraries pass through
``clean`` before they are shown: it removes secrets and control characters, and shortens them.
"""

from __future__ import annotations

import math
import re
import socket
import ssl
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import orjson

from batch_agent.backends.http.wire import json_of, read_quota
from batch_agent.errors import (
    BackendError,
    BadResponse,
    ContextOverflow,
    RateLimited,
    Rejected,
    Timeout,
    Unavailable,
)
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

SHOWN_CHARS = 500
OVERLOAD_STATUSES = frozenset({503, 529})  # in addition to 429
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

    def is_overflow(self, wording: Wording) -> bool:
        told = (self.code, self.kind, self.message)
        return self.param == "input_tokens" or any(wording.overflow.search(text) for text in told)

    def status(self, wording: Wording) -> int | None:
        """Return the HTTP status that the error would have had, for an error inside a 200."""
        if re.fullmatch(r"[45]\d\d", self.code):
            return int(self.code)
        return wording.statuses.get(self.code) or wording.statuses.get(self.kind)


class Faults:
    """Builds the errors of one route. ``where`` is a method and a URL without credentials."""

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
    ``retry-after-ms``."""
    milliseconds = _number(headers.get("retry-after-ms", ""))
    if milliseconds is not None:
        return milliseconds / 1000
    value = headers.get("Retry-After", "")
    seconds = _number(value)
    if seconds is not None or not value:
        return seconds
    try:
        when = parsedate_to_datetime(value).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
    return max(0.0, when - (time.time() if now is None else now))


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
