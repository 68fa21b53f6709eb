"""Values exchanged between an agent and a model: messages, tool calls, usage, and the conversation.

The values are independent of wires; ``backends`` translates them. A conversation only grows, and each wire keeps a view
of it that grows too. Written parts never change, so turn n+1 extends turn n byte for byte where the wire allows it. A
server's prefix cache depends on this.
"""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from hashlib import sha256
from os import PathLike, fspath
from typing import TYPE_CHECKING, Literal, Protocol, Self, TypeVar, cast, get_args

from batch_agent.value_type import value_type

if TYPE_CHECKING:
    from pydantic import JsonValue

Role = Literal["system", "user", "assistant", "tool"]
JsonObject = dict[str, "JsonValue"]

IMAGE_TOKENS = 1000  # of a picture of unknown size: about what models count for a full page


class Attachment:
    """Content of a message that is not text: the path of a file, a URL from which the server fetches it (http, https),
    a ``data:`` URL, or bytes. ``url`` is what was given, with bytes as a ``data:`` URL.

    Not a dataclass, so that no code writes its bytes out as plain data.
    """

    __slots__ = ("_digest", "tokens", "url")
    kind = "attachment"

    def __init__(self, source: str | bytes | PathLike[str], *, tokens: int = IMAGE_TOKENS, digest: str = "") -> None:
        """``tokens``: about how many tokens a model counts for it. ``digest``: the SHA-256 of its bytes, if known."""
        self.url = _data_url(source, "") if isinstance(source, bytes) else fspath(source)
        self.tokens = tokens
        self._digest = digest

    @classmethod
    def of(cls, data: bytes, media_type: str, *, tokens: int = IMAGE_TOKENS, digest: str = "") -> Self:
        return cls(_data_url(data, media_type), tokens=tokens, digest=digest)

    @property
    def is_data(self) -> bool:
        return self.url.startswith("data:")

    @property
    def is_address(self) -> bool:
        return self.url.startswith(("http://", "https://"))

    @property
    def mark(self) -> str:
        """Return the text for the picture in records, transcripts and row ids, with the picture's hash."""
        if not self.is_data:
            return f"[{self.kind} {self.url}]"
        self._digest = self._digest or sha256(_data(self.url)).hexdigest()
        return f"[{self.kind} sha256:{self._digest}]"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Attachment) and self.kind == other.kind and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url[:60]!r})"


class Image(Attachment):
    """A picture: the path of a file, an address from which the server fetches it (http, https), a ``data:`` URL, or
    bytes."""

    __slots__ = ()
    kind = "image"


class Document(Attachment):
    """A document: the path of a file that is read later; or the file itself as a ``data:`` URL, for a wire that accepts
    files. ``name`` is the name of the file."""

    __slots__ = ("name",)
    kind = "document"

    def __init__(
        self, source: str | PathLike[str], *, name: str = "", tokens: int = IMAGE_TOKENS, digest: str = ""
    ) -> None:
        super().__init__(source, tokens=tokens, digest=digest)
        self.name = name


def _data_url(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{b64encode(data).decode()}"


def _data(url: str) -> bytes:
    """Return the bytes in a ``data:`` URL; the bytes of its text if they cannot be decoded."""
    text = url.partition(",")[2]
    try:
        return b64decode(text, validate=True)
    except ValueError:
        return text.encode("utf-8", "surrogatepass")


Part = str | Attachment
Content = str | tuple[Part, ...]


def content_text(content: Content) -> str:
    """Return the text of a message, without its pictures."""
    return content if isinstance(content, str) else "".join(part for part in content if isinstance(part, str))


def with_images(text: str, images: Sequence[Attachment]) -> Content:
    return (text, *images) if images else text


def images_of(content: Content) -> tuple[Attachment, ...]:
    return () if isinstance(content, str) else tuple(part for part in content if isinstance(part, Attachment))


def content_shown(content: Content) -> str:
    """Return the text with a mark for each picture."""
    return content if isinstance(content, str) else "".join(p if isinstance(p, str) else p.mark for p in content)


def content_json(content: Content) -> JsonValue:
    """Return the content in the common chat format."""
    if isinstance(content, str):
        return content
    return [_part_json(part) for part in content]


def _part_json(part: Part) -> JsonValue:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Document):
        return {"type": "file", "file": {"filename": part.name, "file_data": part.url}}
    return {"type": "image_url", "image_url": {"url": part.url}}


@value_type
class ToolCall:
    """A call as the model wrote it; ``arguments`` is JSON text, kept unchanged. Its ``id`` is unique in the
    conversation: the backend ensures that."""

    id: str
    name: str
    arguments: str


@value_type
class ToolSpec:
    """A tool as the model sees it."""

    name: str
    description: str
    parameters: JsonObject


@value_type
class Sealed:
    """Parts of an answer that only its own wire can read (signatures of reasoning, ids): recorded unchanged, and sent
    back only to that wire."""

    wire: str
    value: JsonValue


@value_type
class Message:
    role: Role
    content: Content
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""  # kept for the transcript, never sent back
    tool_name: str = ""  # the tool of a result
    sealed: Sealed | None = None  # of an answer

    def to_dict(self) -> JsonObject:
        """Return the message in the common chat format, as in exported transcripts."""
        out: JsonObject = {"role": self.role, "content": content_json(self.content)}
        if self.reasoning:
            out["reasoning"] = self.reasoning
        if self.tool_calls:
            out["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        if self.tool_call_id:
            out["tool_call_id"] = self.tool_call_id
        return out

    @classmethod
    def from_dict(cls, message: Mapping[str, object]) -> Self:
        """Return a message in that format. Raises ValueError for another format."""
        role, content = message.get("role"), message.get("content")
        if role not in get_args(Role):
            raise ValueError(f"a message needs a role, one of {', '.join(get_args(Role))} (got {role!r})")
        calls = message.get("tool_calls") or ()
        if not isinstance(calls, list | tuple):
            raise ValueError("the tool_calls of a message are a list")
        call_id = message.get("tool_call_id") or ""
        name = message.get("name") or ""
        return cls(
            cast(Role, role), _content_of(content), tuple(map(_call_of, calls)), str(call_id), tool_name=str(name)
        )


def _content_of(content: object) -> Content:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise ValueError(f"the content of a message is text or a list of parts, not {type(content).__name__}")
    return tuple(map(_part_of, content))


def _part_of(part: object) -> Part:
    if isinstance(part, str | Attachment):
        return part
    if isinstance(part, Mapping):
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, Mapping) else image
        if isinstance(url, str):
            return Image(url)
        if isinstance(part.get("text"), str):
            return cast(str, part["text"])
    raise ValueError("a part of a message is text, an Image, or a mapping with text or image_url")


def _call_of(call: object) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call is a mapping with an id and a function, which has a name and arguments")
    return ToolCall(str(call.get("id") or ""), function["name"], str(function.get("arguments") or "{}"))


@value_type
class Usage:
    """Tokens as the server counted them. ``cached_tokens`` (read from its cache) and ``cache_write_tokens`` (written to
    it at a price) are separate parts of ``prompt_tokens``; ``reasoning_tokens`` are part of ``completion_tokens``."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cache_write_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.cache_write_tokens + other.cache_write_tokens,
        )


@value_type
class Allowance:
    """One rate limit of a provider, from its headers, and the seconds until it is full again."""

    limit: int | None = None
    remaining: int | None = None
    resets_in: float | None = None


@value_type
class Quota:
    """A provider's rate limits, sent with an answer. ``tokens`` counts prompt and answer together; some providers also
    count each alone."""

    requests: Allowance | None = None
    tokens: Allowance | None = None
    prompt_tokens: Allowance | None = None
    completion_tokens: Allowance | None = None


@value_type
class TokenChance:
    """A token of an answer, and the log-probability with which the model chose it; None if that is not reported.
    ``others``: the likeliest tokens at this place with their log-probabilities, if the server reports them."""

    text: bytes
    logprob: float | None
    others: tuple[tuple[bytes, float], ...] = ()

    @property
    def chance(self) -> float | None:
        return None if self.logprob is None else math.exp(min(0.0, self.logprob))


@value_type
class Reply:
    """One complete answer of a model. An incomplete answer is an error, not a Reply."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage = field(default_factory=Usage)
    reasoning: str = ""
    first_token: float | None = None  # seconds from sending to the first token, if streamed
    finish_reason: str = "stop"
    saved: Usage | None = None  # set for a cached answer: what it used when it was first computed
    sealed: Sealed | None = None
    quota: Quota | None = field(default=None, compare=False)  # for the capacity of its endpoint; never recorded
    model: str = field(default="", compare=False)  # the server's name for the model; never recorded
    # Of an answer whose doubts are wanted: its tokens, until the doubts are known. None: not reported.
    tokens: tuple[TokenChance, ...] | None = field(default=None, compare=False, repr=False)
    doubts: Mapping[str, float | None] | None = None  # by field
    answered_by: str = ""  # model of the standby that answered; "": the model that was asked

    def message(self) -> Message:
        """Return the answer as a message of its conversation."""
        return Message("assistant", self.text, self.tool_calls, reasoning=self.reasoning, sealed=self.sealed)


class WireView(Protocol):
    """A conversation in the format of one wire. Its content belongs to the wire; it must only grow. It refers to the
    texts of the messages, so that the conversation of an agent is in memory once; only what all agents share is kept
    encoded."""

    def extend(self, messages: Sequence[Message]) -> None:
        """Append these messages."""

    def fork(self) -> Self:
        """Return a copy for a conversation that continues separately."""


V = TypeVar("V", bound=WireView)


class Conversation:
    """An append-only list of messages, and the wires' views of it.

    ``parent`` is the part shared by all agents of a run: it is complete, and each wire encodes it once for all of them.
    """

    __slots__ = ("__weakref__", "_views", "messages", "parent")

    def __init__(self, messages: Iterable[Message] = (), parent: Conversation | None = None) -> None:
        self.messages: list[Message] = [*parent.messages, *messages] if parent is not None else list(messages)
        self.parent = parent
        self._views: dict[
            Callable[[], WireView], tuple[WireView, int]
        ] = {}  # with the number of messages each has encoded

    def append(self, message: Message) -> None:
        self.messages.append(message)

    def view(self, wire: Callable[[], V]) -> V:
        """Return this conversation in the format of ``wire``, a function that creates an empty view and identifies the
        wire: pass the same one each time. Only the wire's own code may read the view, and none may change it."""
        view, taken = self._views.get(wire) or self._begin(wire)
        if taken < len(self.messages):
            view.extend(self.messages[taken:])
            self._views[wire] = view, len(self.messages)
        return view  # type: ignore[return-value]  # cast is a call, and each turn comes here

    def _begin(self, wire: Callable[[], WireView]) -> tuple[WireView, int]:
        if self.parent is None:
            return wire(), 0
        return self.parent.view(wire).fork(), len(self.parent.messages)
