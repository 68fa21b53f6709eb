"""A client's request in the engine's form, and the checks that all dialects share. Pure.

A request is read into a RequestShape and messages, whatever the backend's wire is: prices, limits and the record need
them. ``lost`` names what messages cannot represent. Such a request can still be forwarded in its own wire format.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

import orjson
from pydantic import JsonValue

from batch_agent.backends.base import ClientBody, RequestShape
from batch_agent.door import RequestRefused
from batch_agent.messages import Content, Image, JsonObject, Message, Part, Reply

# Fields that affect how a request is delivered or accounted, but not its meaning.
DELIVERY = frozenset(
    ("stream", "stream_options", "metadata", "user", "prompt_cache_key", "safety_identifier", "client_metadata")
) | {"service_tier", "store"}
CONVERSATION = frozenset({"messages", "input", "system", "instructions"})  # read into messages
KINDS = 256  # request kinds that are cached
BESIDE = DELIVERY | CONVERSATION
BILLING = "x-anthropic-billing-header:"  # start of a system block that differs from session to session


class BadRequest(RequestRefused):
    """The client's request is invalid. ``param`` is the invalid field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(400, message, param=param)


@dataclass(frozen=True, slots=True)
class Envelope:
    """What an answer contains beside the model's text."""

    name: str  # unique to the request
    created: int  # seconds since the epoch
    model: str


class ClientDialect(Protocol):
    """One wire format, from the server's side."""

    @property
    def wire(self) -> str:
        """Return the backends' name for the same wire."""

    def read_kind(self, body: JsonObject, model: str) -> RequestKind:
        """Return everything except the conversation; ``model`` is the default model. Raises BadRequest."""

    def read_messages(self, body: JsonObject, lost: list[str]) -> list[Message]:
        """Return the conversation; adds to ``lost`` what messages cannot represent. Raises BadRequest."""

    def document(self, reply: Reply, request: ClientRequest, envelope: Envelope) -> JsonObject:
        """Return the whole answer as one JSON document."""

    def events(self, document: JsonObject, request: ClientRequest) -> Iterator[bytes]:
        """Yield the same answer as server-sent events."""

    def error(self, refused: RequestRefused) -> JsonObject:
        """Return an error document."""

    def error_event(self, refused: RequestRefused) -> bytes:
        """Return the error as an event inside a stream that has begun."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestKind:
    """What requests share that differ only in their conversations."""

    shape: RequestShape
    lost: Sequence[str] = ()  # what the shape cannot represent, and only a backend of the same wire supports
    custom_tools: frozenset[str] = frozenset()  # tools that take text instead of arguments
    # Tools' original names, by the name shown to the model.
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class ClientRequest:
    """``body`` is the request as it arrived. ``head`` is the digest of everything beside the messages, the same in
    every session. If messages cannot represent everything (see ``lost``), it covers the whole request."""

    dialect: ClientDialect
    body: JsonObject
    kind: RequestKind
    messages: Sequence[Message]
    lost: Sequence[str]
    head: bytes
    headers: Mapping[str, str] = field(default_factory=dict)  # that belong to the wire

    @property
    def shape(self) -> RequestShape:
        return self.kind.shape

    @property
    def stream(self) -> bool:
        return self.body.get("stream") is True

    @property
    def client_body(self) -> ClientBody:
        return ClientBody(self.dialect.wire, self.body, self.head, self.headers)


class RequestReader:
    """Reads requests, and caches their kinds: an agent sends the same tools with every request."""

    def __init__(self) -> None:
        self._known: dict[bytes, RequestKind] = {}

    def read(self, dialect: ClientDialect, body: JsonObject, model: str) -> ClientRequest:
        """Return the request; ``model`` is the default model. Raises BadRequest."""
        head = _digest(dialect, body, BESIDE)
        kind = self._known.get(head)
        if kind is None:
            if len(self._known) >= KINDS:
                self._known.clear()
            kind = self._known[head] = dialect.read_kind(body, model)
        lost: list[str] = []
        messages = dialect.read_messages(body, lost)
        if lost:
            head = _digest(dialect, body, DELIVERY)
        return ClientRequest(dialect, body, kind, messages, [*kind.lost, *lost], head)


def _digest(dialect: ClientDialect, body: JsonObject, left_out: Collection[str]) -> bytes:
    digest = blake2b(dialect.wire.encode(), digest_size=16)
    digest.update(orjson.dumps({name: value for name, value in body.items() if name not in left_out}))
    return digest.digest()


def is_billing(block: JsonValue) -> bool:
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith(BILLING)


# Reading


def objects(value: JsonValue, where: str) -> list[JsonObject]:
    """Return a list of objects; empty if it is missing."""
    if value is None:
        return []
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return [item for item in value if isinstance(item, dict)]
    raise BadRequest(f"{where} must be a list of objects", where)


def mapping_of(value: JsonValue, where: str) -> JsonObject:
    """Return an object; empty if it is missing."""
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    raise BadRequest(f"{where} must be an object", where)


def string(value: JsonValue, where: str) -> str:
    """Return a text; empty if it is missing."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    raise BadRequest(f"{where} must be a string", where)


def whole(body: Mapping[str, JsonValue], *names: str) -> int | None:
    """Return the value of the first of these fields that is present, as a positive integer; None if none is."""
    for name in names:
        value = body.get(name)
        if value is not None:
            if type(value) is not int or value < 1:
                raise BadRequest(f"{name} must be a whole number of at least 1", name)
            return value
    return None


def number(body: Mapping[str, JsonValue], name: str) -> float | None:
    value = body.get(name)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise BadRequest(f"{name} must be a number", name)


def texts(value: JsonValue, where: str) -> tuple[str, ...]:
    """Return a text or a list of texts, as a tuple."""
    if value is None:
        return ()
    given = [value] if isinstance(value, str) else value
    if isinstance(given, list) and all(isinstance(item, str) for item in given):
        return tuple(item for item in given if isinstance(item, str))
    raise BadRequest(f"{where} must be a string or a list of strings", where)


def image_of(value: JsonValue, where: str) -> Image:
    """Return a picture from an object with a ``url``, or from the URL itself. A path on this machine is refused."""
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str) or not url.startswith(("http://", "https://", "data:")):
        raise BadRequest(f"{where} must have an http, https or data URL", where)
    return Image(url)


def joined(parts: Sequence[Part]) -> Content:
    """Return the parts of a message as content: plain text if there is no picture among them."""
    if any(isinstance(part, Image) for part in parts):
        return tuple(parts)
    return "".join(part for part in parts if isinstance(part, str))


# The formats that chat completions and responses share


def read_content(content: JsonValue, lost: list[str]) -> Content:
    """Return the text and the pictures of a message; adds other parts to ``lost``."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Part] = []
    for part in objects(content, "content"):
        match part.get("type"):
            case "text" | "input_text" | "output_text":
                parts.append(string(part.get("text"), "text"))
            case "refusal":
                parts.append(string(part.get("refusal"), "refusal"))
            case "image_url":
                parts.append(image_of(part.get("image_url"), "image_url"))
            case "input_image" if part.get("image_url") is not None:
                parts.append(image_of(part.get("image_url"), "image_url"))
            case other:
                lost.append(f"a part of the type {other!r}")
    return joined(parts)


def read_schema(form: JsonObject, described: JsonObject) -> tuple[JsonObject | None, str]:
    """Return the schema of the answer, if the request asks for JSON, and its name."""
    kind, schema = form.get("type"), described.get("schema")
    if kind != "json_schema":
        schema = {"type": "object"} if kind == "json_object" else None
    return (schema if isinstance(schema, dict) else None), string(described.get("name"), "name") or "answer"


def read_choice(choice: JsonValue, inside: str = "") -> JsonValue:
    """Return a tool choice: a keyword, or a tool's name, which may be ``inside`` another object."""
    if choice is None or isinstance(choice, str):
        return choice
    named = mapping_of(choice, "tool_choice")
    named = mapping_of(named.get(inside), "tool_choice") if inside else named
    return string(named.get("name"), "tool_choice") or "auto"


# Writing


def sse(value: JsonValue, event: str = "") -> bytes:
    data = orjson.dumps(value)
    return b"event: %b\ndata: %b\n\n" % (event.encode(), data) if event else b"data: %b\n\n" % data


def own_document(reply: Reply, wire: str) -> JsonObject | None:
    """Return the whole answer of a server with the client's own wire format; None for other servers."""
    sealed = reply.sealed
    if sealed is not None and sealed.wire == f"{wire} document" and isinstance(sealed.value, dict):
        return sealed.value
    return None
