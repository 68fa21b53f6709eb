"""``Backend``, the base class of everything that answers, and the values that cross that boundary.

A backend turns one ModelRequest into one complete Reply or raises one of the BackendErrors. It does not retry, queue,
limit or time out: the engine does, once, for all backends. A new backend implements ``name`` and ``infer``, and
overrides the defaults that are not true of it. A finished backend passes the suite in ``tests/backends/contract.py``.
"""

# ruff: noqa: B027 (a method that does nothing is a default here, not a forgotten @abstractmethod)
from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, TypeAlias

from pydantic import JsonValue

from batch_agent.errors import BackendError, Rejected, SpecError
from batch_agent.messages import Conversation, Image, JsonObject, Message, Reply, ToolCall, ToolSpec, content_text
from batch_agent.scheduler.server import Server


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. It may learn more about its server while it is in use, so read it anew."""

    native_schema: bool = False  # keeps to a JSON schema that comes with the request
    schema_with_tools: bool = False  # ... also when the same request offers tools
    schema_proven: bool = True  # False: it may or may not, so the prompt tells the schema too
    schema_note: str = ""  # what came of it, where it was found not to
    schema_beside_tools: bool = False  # ... also when it shows tools and forbids their use, and reads them all the same
    streaming: bool = True  # can report tool calls while the model is still talking
    images: bool = False  # can be shown pictures; one that cannot refuses a message with one (``text_only``)
    # Calls in flight when the user names no number, for a backend that knows; None: the number is found.
    default_inflight: int | None = None
    reports_load: bool = False  # ``load`` has an answer, so polling it makes sense
    reports_context: bool = False  # ``facts`` may tell a model's context
    patient: bool = False  # answers take hours: a turn has no time limit but the user's
    price: float = 1.0  # the part of its provider's listed price that it asks
    batch: bool = False  # ``infer_batch`` is one request, and faster than as many single ones
    prefills_ahead: bool = False  # computes an agent's history while its tool runs, if it gets hints
    prefix_leader: bool = False  # computes what all requests begin with once, if one of them goes ahead of the others


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RequestShape:
    """What sibling requests have in common apart from their messages.

    Compared by identity: a run makes one or two of these, and a backend may remember what it derived from each (the
    encoded head of a request body, a compiled grammar) in a WeakKeyDictionary.
    """

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: JsonValue = None  # "auto" | "none" | "required" | a tool's name | the wire's own object
    schema: JsonObject | None = None  # the answer must be JSON of this schema
    schema_name: str = "answer"
    extra_body: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClientBody:
    """A request as a client of the gateway sent it, in the format of ``wire``. A backend that speaks this wire sends
    the fields unchanged and puts the whole answer on the Reply (``sealed``); others ask with shape and conversation.
    ``digest`` is of all that the conversation does not say, ``headers`` are those that belong to the wire."""

    wire: str
    fields: JsonObject
    digest: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class ModelRequest:
    """One turn to be taken. Whoever asks it fills in where it goes; backends change nothing of it but what it has
    ``said``."""

    shape: RequestShape
    conversation: Conversation
    job_id: str
    turns_left: int = 0  # how near the agent is to its end; fewer goes sooner
    agent: int = 0  # its number, unique in the run; a job_id may come twice
    endpoint: str = ""  # the name of the server it is sent to, of ``Backend.servers``
    run: str = ""  # the id of the run; "" outside of one
    turn: int = 0  # the answer that is asked for, from 1; the same when it is asked for again
    tries: int = 0  # how often it was asked for before, and failed
    pin_seconds: float = 0.0  # an engine that can should keep the context for so long after the answer
    last: bool = False  # no tool can follow it: as far as is known, the agent ends with it
    hints: bool = True  # a server that can plan may be told what it can expect of the agent
    traceparent: str = ""  # the trace that it belongs to, as W3C's header says it; "": it is not traced
    usual_tokens: int | None = None  # what answers of this run have had so far, on average
    on_begin: Callable[[], None] | None = field(default=None, compare=False, repr=False)  # a streamed answer begins
    # The text that has come so far where the answer is streamed, for whoever gives the turn up before its end.
    said: list[str] = field(default_factory=list, compare=False, repr=False)
    client: ClientBody | None = field(default=None, compare=False, repr=False)  # of a request through the gateway


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a server is, in its own words. None: it does not say."""

    running: int = 0  # requests being computed
    waiting: int = 0  # requests in its queue
    kv_usage: float | None = None  # 0 to 1
    kv_tokens: int | None = None  # how many its cache can hold
    preemptions: int | None = None  # since it started
    prefix_queries: int | None = None  # prompt tokens it looked for in its cache, since it started
    prefix_hits: int | None = None  # ... and found
    first_token_count: int | None = None  # answers begun since it started
    first_token_seconds: float | None = None  # ... and the sum of the times that took
    offloads: bool = False  # what is evicted is kept in a larger memory, whose size it does not say
    generated: int | None = None  # tokens since it started


def total_inflight(servers: Iterable[Server]) -> int | None:
    """Requests in flight at all servers together; None if one of them has no number of its own."""
    numbers = [server.default_inflight for server in servers]
    return None if None in numbers else sum(number for number in numbers if number is not None)


class Listener(Protocol):
    """A user of a backend whose servers come and go."""

    def changed(self) -> None:
        """Servers came or went, or something about them is known that was not."""
        ...


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server says of a model. None: it does not say."""

    context: int | None = None  # tokens of prompt and answer together


def text_only(message: Message) -> str:
    """The words of a message, for a backend that cannot see: Rejected when there is a picture among them."""
    if isinstance(message.content, str):
        return message.content
    if any(isinstance(part, Image) for part in message.content):
        raise Rejected("this backend cannot be shown images, and the conversation has one")
    return content_text(message.content)


OnToolCall = Callable[[ToolCall], None]
Prompt: TypeAlias = str | Sequence[Message] | Conversation
Answers: TypeAlias = list[Reply | BackendError]


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a server is there. "unknown": it has no page that tells."""

    state: Literal["up", "down", "unknown"]
    reason: str = ""  # why it is down or unknown
    models: tuple[str, ...] | None = None  # that it serves; None: it did not say


class Backend(ABC):
    """Base class of all backends. It is entered once per run. Entering it again inside shares what is open."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The scheme and where it points, without credentials, for people."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    @property
    def wires(self) -> frozenset[str]:
        """The wires in which it takes a client's own request (``ClientBody``)."""
        return frozenset()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    # Asking

    def check(self, shape: RequestShape) -> None:
        """Raises a SpecError for a shape that this backend could never send. Called before anything is sent."""

    @abstractmethod
    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        """The answer to one turn. With ``on_tool_call`` the answer is streamed and each tool call is reported, once, as
        soon as it is complete. The Reply then carries those same ToolCall values, in the order they began. Cancelling
        this coroutine ends the request on the server too."""

    async def infer_batch(self, requests: Sequence[ModelRequest]) -> Answers:
        """The answers to one turn of each request, in their order. All requests have one shape. A request that fails is
        an error in its own place and does not affect the others."""
        return await asyncio.gather(*(caught(self.infer(request)) for request in requests))

    async def generate_batch(self, prompts: Sequence[Prompt], shape: RequestShape | None = None) -> Answers:
        """The answers to many single-turn conversations, in the order of the prompts; one that failed is its error. A
        prompt is the user's text or a conversation. If ``shape`` names no model, the only one the backend serves is
        asked. Nothing here limits or retries: for thousands of prompts, run a batch."""
        if not prompts:
            return []
        shape = shape or RequestShape("")
        if not shape.model:
            shape = replace(shape, model=await only_model(self))
        return await self.infer_batch(
            [
                ModelRequest(shape, conversation_of(prompt), str(number), agent=number)
                for number, prompt in enumerate(prompts)
            ]
        )

    # What its servers are

    async def models(self) -> list[str]:
        """The names of the models it serves, for a user who named none."""
        return []

    async def facts(self, model: str) -> Facts:
        """What the server says of the model. Asked when a run starts, before its first request; what the server says of
        itself, the backend remembers. Raises a BackendError if asking failed, which is never a reason to fail a row."""
        return Facts()

    async def load(self, endpoint: str = "") -> Load | None:
        """How busy the endpoint is now; None if it does not report that. Raises a BackendError if asking failed, which
        is never a reason to fail a row."""
        return None

    async def probe(self, endpoint: str = "") -> Probe:
        """Whether the endpoint's server is there, asked at no cost to it. Never raises a BackendError."""
        return Probe("unknown")

    # Its servers

    @property
    def servers(self) -> Mapping[str, Server]:
        """What is known of each server behind it, by the name that ``ModelRequest.endpoint`` has. All who ask a server
        share this object."""
        return {"": self._server}

    @cached_property
    def _server(self) -> Server:
        return Server(self.name)

    def lend(self, server: Server) -> None:
        """Sets what is known of its only server, for a backend that is not a fleet."""
        self.__dict__["_server"] = server

    @property
    def is_fleet(self) -> bool:
        """True if its servers have names of their own, and may come and go."""
        return any(self.servers)

    def join(self, listener: Listener) -> None:
        """From now on ``listener`` is notified when servers come or go."""

    def leave(self, listener: Listener) -> None:
        """The opposite of ``join``."""

    async def locate(self, model: str) -> None:
        """Finds out which members serve the model, as far as they answer soon."""

    # Answers that take hours

    def keep(self, directory: Path | None) -> None:
        """Sets where a ``patient`` backend records what it has sent, so that a resumed run finds it again. None: it
        records nothing. Called before the backend is entered."""

    def has_bought(self, request: ModelRequest) -> bool:
        """Whether the answer was paid for already, in an earlier session or by a turn that was given up. If it turns
        out that there is none, the request fails and is asked again."""
        return False


async def caught(asking: Awaitable[Reply]) -> Reply | BackendError:
    """The answer, or the BackendError that was raised instead."""
    try:
        return await asking
    except BackendError as error:
        return error


async def only_model(backend: Backend) -> str:
    """The name of the one model that the backend serves; a SpecError if there are more or none."""
    names = await backend.models()
    if len(names) != 1:
        raise SpecError(f"{backend.name} serves {', '.join(names) or 'no model'}: name one in the shape")
    return names[0]


def conversation_of(prompt: Prompt) -> Conversation:
    if isinstance(prompt, Conversation):
        return prompt
    return Conversation([Message("user", prompt)] if isinstance(prompt, str) else prompt)
