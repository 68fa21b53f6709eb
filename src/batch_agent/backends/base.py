"""``Backend``, the base class of everything that answers requests, and the values it exchanges with the engine.

A backend turns one ModelRequest into one complete Reply or raises a BackendError. It does not retry, queue, limit or
time out: the engine does that for all backends. A new backend implements ``name`` and ``infer``, and overrides the
defaults that do not fit it. It is finished when it passes the suite in ``testing/contract``.
"""

# ruff: noqa: B027 (a method that does nothing is a default here, not a forgotten @abstractmethod)
from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, Self, TypeAlias

from pydantic import JsonValue

from batch_agent.errors import BackendError, Rejected, SpecError
from batch_agent.messages import Attachment, Conversation, JsonObject, Message, Reply, ToolCall, ToolSpec, content_text
from batch_agent.scheduler.engine_load import Load as Load
from batch_agent.scheduler.server import Standby
from batch_agent.scheduler.server_state import ServerState
from batch_agent.value_type import lazy_property


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. It may learn more about its server over time, so do not keep old values."""

    native_schema: bool = False  # enforces a JSON schema sent with the request
    schema_with_tools: bool = False  # ... also when the same request offers tools
    schema_proven: bool = True  # False: enforcement is uncertain, so the prompt contains the schema too
    schema_note: str = ""  # why enforcement was found not to work
    schema_beside_tools: bool = False  # ... also when the request shows tools and forbids calls, and still reads them
    streaming: bool = True  # can report tool calls while the answer is still being generated
    images: bool = False  # accepts images; otherwise a message with one is refused (``text_only``)
    documents: frozenset[str] = frozenset()  # file formats accepted unchanged: pdf, docx, html
    # Concurrent requests if the user gives no number and the backend knows one; None: the engine finds it.
    default_inflight: int | None = None
    reports_load: bool = False  # ``load`` returns values, so polling it makes sense
    reports_context: bool = False  # ``facts`` may return a model's context length
    patient: bool = False  # answers take hours: a turn has no time limit except the user's
    price: float = 1.0  # fraction of the provider's list price
    batch: bool = False  # ``infer_batch`` is one request, faster than separate ones
    prefills_ahead: bool = False  # computes an agent's history while its tool runs, if it gets hints
    logprobs: bool = False  # reports the log-probabilities of an answer's tokens, if a shape wants them
    prefix_leader: bool = False  # computes a shared prefix once if one request is sent ahead of the others


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RequestShape:
    """What sibling requests share, apart from their messages. Compared by identity: a run creates one or two of these,
    and a backend may cache what it derived from each (the encoded head of a request body, a compiled grammar) in a
    WeakKeyDictionary."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: JsonValue = None  # "auto" | "none" | "required" | a tool's name | the wire's own object
    schema: JsonObject | None = None  # JSON schema that the answer must match
    schema_name: str = "answer"
    extra_body: Mapping[str, JsonValue] = field(default_factory=dict)
    logprobs: bool = False  # the answer's tokens with their log-probabilities are wanted


@dataclass(frozen=True, slots=True)
class ClientBody:
    """A request as a client of the gateway sent it, in the format of ``wire``. A backend of this wire sends the fields
    unchanged and puts the whole answer on the Reply (``sealed``); other backends use the shape and the conversation.
    ``digest`` covers everything outside the conversation; ``headers`` are those that belong to the wire."""

    wire: str
    fields: JsonObject
    digest: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class ModelRequest:
    """One turn to request. The caller fills in the endpoint; backends change only ``said`` and ``heard_at``."""

    shape: RequestShape
    conversation: Conversation
    job_id: str
    turns_left: int = 0  # at most, with this one; 0 or less: not limited
    agent: int = 0  # agent number, unique in the run; a job_id may occur twice
    endpoint: str = ""  # name of the server it is sent to, from ``Backend.servers``
    run: str = ""  # id of the run; "" outside a run
    turn: int = 0  # number of the requested answer, from 1; a retry has the same number
    tries: int = 0  # failed attempts so far
    priority: int = 0  # lower values go first, on an engine that schedules by priority
    pin_seconds: float = 0.0  # how long an engine with pins should keep the context after the answer
    last: bool = False  # no tool call can follow: the agent is expected to end with this turn
    hints: bool = True  # whether a scheduling server may receive hints about the agent
    traceparent: str = ""  # W3C traceparent header; "": not traced
    usual_tokens: int | None = None  # average tokens of this run's answers so far
    seed: int | None = None  # of this request, instead of the seed of its shape
    standby: Standby | None = None  # that it is sent to, instead of a server with the model of its shape
    heard_at: float = 0.0  # loop time of the latest piece of a streamed answer; 0: none
    # Called when a streamed answer begins.
    on_begin: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    # The text of a streamed answer so far, for a caller that cancels the turn.
    said: list[str] = field(default_factory=list, compare=False, repr=False)
    client: ClientBody | None = field(default=None, compare=False, repr=False)  # set for a request through the gateway
    # Gets the bytes of a streamed answer as they come, for a client whose own request is sent (``ClientBody``).
    relay: Callable[[bytes], None] | None = field(default=None, compare=False, repr=False)


def total_inflight(servers: Iterable[ServerState]) -> int | None:
    """Return the concurrency limit of all servers together; None if one has no limit of its own."""
    numbers = [server.default_inflight for server in servers]
    return None if None in numbers else sum(number for number in numbers if number is not None)


class Listener(Protocol):
    """A user of a backend whose servers may join and leave."""

    def changed(self) -> None:
        """Called when servers joined or left, or when something new is known about them."""
        ...


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server reports about a model. None: not reported."""

    context: int | None = None  # tokens of prompt and answer together


def text_only(message: Message) -> str:
    """Return the text of a message. Raises Rejected if it has an image, for a backend without image input."""
    if isinstance(message.content, str):
        return message.content
    if attached := next((part.kind for part in message.content if isinstance(part, Attachment)), None):
        raise Rejected(f"this backend does not accept {attached}s, and the conversation has one")
    return content_text(message.content)


OnToolCall = Callable[[ToolCall], None]
Prompt: TypeAlias = str | Sequence[Message] | Conversation
Answers: TypeAlias = list[Reply | BackendError]


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a server is up. "unknown": it has no route that shows it."""

    state: Literal["up", "down", "unknown"]
    reason: str = ""  # why it is down or unknown
    models: tuple[str, ...] | None = None  # the models it serves; None: not reported


class JobLines(Protocol):
    """Lines that are only appended, by all workers of a run. The calls block."""

    def job_lines(self) -> list[bytes]: ...

    def add_job_lines(self, lines: Sequence[bytes]) -> None: ...


class Backend(ABC):
    """Base class of all backends. A run enters it once; entering it again shares what is open."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Return scheme and host for display, without credentials."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    @property
    def wires(self) -> frozenset[str]:
        """The wires in which this backend accepts a client's own request (``ClientBody``)."""
        return frozenset()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        pass

    # Requests

    def check(self, shape: RequestShape) -> None:
        """Raise SpecError for a shape that this backend can never send. Called before anything is sent."""

    def answer_limit(self, shape: RequestShape) -> int | None:
        """Return the largest number of tokens of an answer that requests of this shape state; None if they state none.
        A budget reserves this number."""
        return shape.max_tokens

    @abstractmethod
    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        """Return the answer to one turn. With ``on_tool_call`` the answer is streamed, and each tool call is reported
        once, as soon as it is complete. The Reply then has the same ToolCall values in the order they began. Cancelling
        this coroutine also ends the request on the server."""

    async def infer_batch(self, requests: Sequence[ModelRequest]) -> Answers:
        """Return the answers to one turn of each request, in order. All requests have one shape. A failed request is an
        error in its place and does not affect the others."""
        return await asyncio.gather(*(caught(self.infer(request)) for request in requests))

    async def generate_batch(self, prompts: Sequence[Prompt], shape: RequestShape | None = None) -> Answers:
        """Return the answers to many single-turn conversations, in the order of the prompts; a failed one is its error.
        A prompt is the user's text or a conversation. If ``shape`` names no model, the backend's only model is used.
        Nothing here limits or retries: for thousands of prompts, run a batch."""
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

    # Facts about its servers

    async def models(self) -> list[str]:
        """Return the names of the served models, for a user who named none."""
        return []

    async def facts(self, model: str) -> Facts:
        """Return what the server reports about the model. Called when a run starts, before its first request; the
        backend caches facts about the server itself. Raises BackendError on failure, which never fails a row."""
        return Facts()

    async def load(self, endpoint: str = "") -> Load | None:
        """Return how busy the endpoint is; None if it does not report that. A BackendError here never fails a row."""
        return None

    async def probe(self, endpoint: str = "") -> Probe:
        """Return whether the endpoint's server is up, with a free request. Never raises BackendError."""
        return Probe("unknown")

    # Its servers

    @property
    def servers(self) -> Mapping[str, ServerState]:
        """Return what all dispatchers know about each server behind this backend, by the name in
        ``ModelRequest.endpoint``."""
        return {"": self._server}

    @lazy_property
    def _server(self) -> ServerState:
        return ServerState(self.name)

    @property
    def standbys(self) -> Mapping[str, Standby]:
        """Return the standbys among the servers, by name. A standby answers only while no other server works."""
        return {}

    def lend(self, server: ServerState) -> None:
        """Set the knowledge about the only server, which dispatchers share. Only for a backend that is not a fleet."""
        setattr(self, "_server", server)  # noqa: B010 -- a property for type checkers

    @property
    def is_fleet(self) -> bool:
        """Whether the servers have names of their own, and may join and leave."""
        return any(self.servers)

    def join(self, listener: Listener) -> None:
        """Notify ``listener`` from now on when servers join or leave."""

    def leave(self, listener: Listener) -> None:
        """Stop notifying ``listener``."""

    async def locate(self, model: str) -> None:
        """Find out which members serve the model. Members that do not answer soon are left out."""

    # Answers that take hours

    def keep(self, record: JobLines, *, outlasts: bool) -> None:
        """Set where a ``patient`` backend records what it has sent, so that other workers and a resumed run find it
        again. ``outlasts``: the record is there after the run has ended, so jobs need not be cancelled then. Called
        before the backend is entered."""

    def has_bought(self, request: ModelRequest) -> bool:
        """Return whether the answer was already paid for, in an earlier session or by a cancelled turn. If that answer
        cannot be fetched, the request fails and is retried."""
        return False


async def caught(asking: Awaitable[Reply]) -> Reply | BackendError:
    """Return the answer, or the BackendError that was raised."""
    try:
        return await asking
    except BackendError as error:
        return error


async def only_model(backend: Backend) -> str:
    """Return the only model that the backend serves. Raises SpecError if there are none or several."""
    names = await backend.models()
    if len(names) != 1:
        raise SpecError(f"{backend.name} serves {', '.join(names) or 'no model'}: set the model in the shape")
    return names[0]


def conversation_of(prompt: Prompt) -> Conversation:
    if isinstance(prompt, Conversation):
        return prompt
    return Conversation([Message("user", prompt)] if isinstance(prompt, str) else prompt)


@dataclass(frozen=True, slots=True)
class Found:
    """The result of work that another worker did."""

    text: str
    ok: bool


class Once(Protocol):
    async def begin(self, key: str) -> Found | str:
        """Start work that only one worker should do. Returns the result of another worker, after waiting for it; or a
        token: then the caller must do the work and call ``end``."""
        ...

    def end(self, key: str, token: str, found: Found | None, keep: float) -> None:
        """Report that the work has ended. ``found`` is None if it failed, or if other workers may not use the result.
        The result is kept for ``keep`` seconds. With 0 only the workers that wait for it now get it."""
        ...
