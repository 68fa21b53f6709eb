from __future__ import annotations

import re
import socket
import ssl

import pytest

from batch_agent.backends.http.wire import Faults, ServerError, Wording, retry_after
from batch_agent.errors import BackendError, BadResponse, ContextOverflow, RateLimited, Rejected, Timeout, Unavailable
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

FAULTS = Faults("POST http://host/v1", ["sk-secret-value", "sk-secret", "abc"])


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, Rejected) for status in (400, 401, 402, 403, 404, 405, 409, 413, 415, 422, 501)),
        *((status, Unavailable) for status in (408, 425, 500, 502, 503, 504, 520, 529)),
        (429, RateLimited),
    ],
)
def test_a_status_is_an_error_of_its_type(status: int, kind: type[BackendError]) -> None:
    error = FAULTS.answered(status, {}, b'{"error": {"message": "said", "type": "t"}}')
    assert type(error) is kind
    assert error.status == status
    assert str(error).startswith(f"POST http://host/v1 answered {status}: said")


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, b'{"error": {"message": "too long", "param": "input_tokens", "code": 400}}'),
        (400, b'{"error": {"message": "too long", "code": "context_length_exceeded"}}'),
        (400, b'{"object": "error", "message": "This model\'s maximum context length is 2048 tokens."}'),
        (400, b'{"message": "The input (61709 tokens) is longer than the model\'s context length (40960 tokens)."}'),
        (400, b'{"error": {"code": 400, "message": "m", "type": "exceed_context_size_error", "n_ctx": 8192}}'),
        (500, b'{"error": {"message": "the request exceeds the available context size"}}'),
        (400, b"Requested tokens (2285) exceed context window of 2048"),
    ],
)
def test_a_conversation_that_is_too_long_is_told_from_other_refusals(status: int, body: bytes) -> None:
    assert type(FAULTS.answered(status, {}, body)) is ContextOverflow


def test_a_spent_quota_is_not_a_rate_limit() -> None:
    assert type(FAULTS.answered(429, {}, b'{"error": {"message": "x", "code": "insufficient_quota"}}')) is Rejected


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"error": {"message": "plain"}}', "plain"),
        (b'{"error": "text"}', "text"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": ["body"]}]}', '{"detail":[{"loc":["body"]}]}'),
        (b'{"error": {"message": {"a": 1}}}', '{"message":{"a":1}}'),
        (b"[1]", "[1]"),
        (b'"text"', "text"),
        (b"\xff\xfe bytes", "\ufffd\ufffd bytes"),
        (b"a\x1b[31m\r\n\x00b", "a [31m b"),
        (b"", "(nothing)"),
    ],
)
def test_what_the_server_said_is_shown_cleaned(body: bytes, shown: str) -> None:
    assert str(FAULTS.answered(400, {}, body)) == f"POST http://host/v1 answered 400: {shown}"


def test_long_bodies_are_cut_and_no_half_of_a_secret_is_left() -> None:
    message = str(FAULTS.answered(400, {}, b"x" * 495 + b"sk-secret-value and more"))
    assert "sk-" not in message
    assert len(str(FAULTS.answered(400, {}, b"y" * 1_000_000))) < 600


def test_the_longer_of_two_secrets_goes_first_and_what_is_no_secret_stays() -> None:
    assert FAULTS.clean("sk-secret-value sk-secret abc") == "[redacted] [redacted] abc"


def test_hints_name_the_key_and_the_path() -> None:
    assert "API key" in str(FAULTS.answered(401, {}, b"{}"))
    assert "/v1" in str(FAULTS.answered(404, {}, b'{"detail": "Not Found"}'))
    unknown = b'{"error": {"message": "The model `x` does not exist.", "type": "NotFoundError", "code": 404}}'
    assert "path" not in str(FAULTS.answered(404, {}, unknown))


def test_a_wire_has_words_of_its_own_for_errors_and_hints() -> None:
    own = Wording(
        {"tired_error": 529}, re.compile("too many words"), key_hint="set MY_KEY", path_hint="no path is needed"
    )
    faults = Faults("POST http://host", wording=own)
    assert str(faults.answered(401, {}, b"{}")).endswith("(set MY_KEY)")
    assert str(faults.answered(404, {}, b"{}")).endswith("(no path is needed)")
    assert type(faults.answered(400, {}, b"too many words")) is ContextOverflow
    assert type(FAULTS.answered(400, {}, b"too many words")) is Rejected
    tired = {"type": "tired_error", "message": "later"}
    assert type(faults.reported(tired)) is Unavailable
    assert type(FAULTS.reported(tired)) is BadResponse


def test_a_redirect_tells_where_to() -> None:
    error = FAULTS.answered(307, {"Location": "https://other/v1?key=hidden"}, b"")
    assert type(error) is Rejected
    assert "https://other/v1:" in str(error)
    assert "hidden" not in str(error)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "3"}, 3.0),
        ({"Retry-After": "0.5"}, 0.5),
        ({"Retry-After": "-3"}, 0.0),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:10 GMT"}, 10.0),
        ({"Retry-After": "Wed, 21 Oct 2015 07:27:00 GMT"}, 0.0),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:10 GMT", "Date": "Wed, 21 Oct 2015 07:28:07 GMT"}, 3.0),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:10 GMT", "Date": "today"}, 10.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "inf"}, None),
        ({"Retry-After": "Wed, 99 Oct 99999 07:27:00 GMT"}, None),
        ({"retry-after-ms": "1500", "Retry-After": "2"}, 1.5),
    ],
)
def test_the_wait_is_read_from_seconds_milliseconds_and_dates(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers, now=1445412480.0) == seconds


def test_the_wait_is_on_the_error() -> None:
    for status in (429, 503):
        error = FAULTS.answered(status, {"Retry-After": "3"}, b"")
        assert isinstance(error, RateLimited | Unavailable)
        assert error.retry_after == 3.0


def test_an_error_that_comes_in_a_list_is_read() -> None:
    said = ServerError.of([{"error": {"code": 400, "message": "Unknown name", "status": "INVALID_ARGUMENT"}}])
    assert (said.message, said.code) == ("Unknown name", "400")


REFUSED = ConnectionRefusedError(111, "Connection refused")


@pytest.mark.parametrize(
    ("failure", "kind", "words", "unreached"),
    [
        (ConnectTimedOut(), Timeout, "the connection timed out; is the host reachable", True),
        (TimeoutError(110, "Connection timed out"), Timeout, "timed out", False),
        (ConnectFailed(REFUSED), Unavailable, "connection refused; is the server running?", True),
        (ConnectFailed(socket.gaierror(-2, "Name unknown")), Unavailable, "host name was not found (DNS)", True),
        (ConnectFailed(ssl.SSLCertVerificationError(1, "self-signed")), Unavailable, "certificate could not be", True),
        (ConnectFailed(ssl.SSLError(1, "wrong version")), Unavailable, "TLS handshake failed", True),
        (ConnectFailed(OSError(113, "No route to host")), Unavailable, "no connection: [Errno 113] No route", True),
        (ProxyUnreachable(REFUSED), Unavailable, "proxy set in the environment is unreachable", True),
        (ProxyRefused(407), Unavailable, "the proxy refused the connection with status 407", True),
        (BadAddress("x"), Rejected, "not a valid address", False),
        (ClosedEarly(), Unavailable, "closed the connection before it answered", False),
        (ClosedEarly("Connection reset by peer"), Unavailable, "the connection broke: Connection reset", False),
        (BrokenOff("closed in the body"), Unavailable, "the answer broke off: closed in the body", False),
        (ssl.SSLError(1, "bad record"), Unavailable, "the connection broke: ", False),
        (NotHttp("Expected HTTP/"), BadResponse, "not valid HTTP: Expected HTTP/", False),
        (TooLarge(64), BadResponse, "more than 64 bytes; it was cut off at this limit", False),
    ],
)
def test_a_failure_of_the_transport_is_an_error_of_its_type(
    failure: TransportError | OSError, kind: type[BackendError], words: str, unreached: bool
) -> None:
    error = FAULTS.raised(failure)
    assert type(error) is kind
    assert words in str(error)
    assert error.unreached is unreached


def test_what_the_transport_says_shows_no_secret() -> None:
    assert "sk-secret" not in str(FAULTS.raised(NotHttp("Authorization: sk-secret-value")))
