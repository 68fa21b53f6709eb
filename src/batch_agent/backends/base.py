"""The seam between the engine and whatever answers: one protocol, and the values that cross it.

A backend turns one ModelRequest into one complete Reply or raises one of the BackendErrors. It does not retry, queue,
limit or time out: the engine does, once, for all backends. ``tests/backends/contract.py`` is the suite that a backend
passes when it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from pydantic import JsonValue

from batch_agent.errors import BackendError, Rejected
from batch_agent.messages import Conversation, Image, JsonObject, Message, Reply, ToolCall, ToolSpec, content_text


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. Nothing else is asked of it; what a backend finds out about its server while it is used
    shows here too, so ask it anew."""

    native_schema: bool = False  # keeps to a JSON schema that comes with the request
    schema_with_tools: bool = False  # ... also when the same request offers tools
    schema_proven: bool = True  # False: it may or may not, so the prompt tells the schema too
    schema_note: str = ""  # what came of it, where it was found not to
    schema_beside_tools: bool = False  # ... also when it shows tools and forbids their use, and reads them all the same
    streaming: bool = True  # can report tool calls while the model is still talking
    images: bool = False  # can be shown pictures; one that cannot refuses a message with one (``text_only``)
    # Calls in flight when the user names no number, for a backend that knows; None: the number is found.
    default_inflight: int | None = None
    endpoints: tuple[str, ...] = ("",)  # the names of the servers behind it, of which a turn is granted one
    load: bool = False  # tells how busy it is: it is a Measured
    patient: bool = False  # answers take hours: no time limit of a turn but the user's; it is a Patient
    price: float = 1.0  # the part of its provider's listed price that it asks
    batch: bool = False  # answers many conversations in one request, and better so: it is a Batched
    many: bool = False  # its endpoints are servers of their own, which come and go: it is a Many
    probe: bool = False  # can be asked what it serves before a run: it is a Probed
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


@dataclass(slots=True, eq=False)
class ModelRequest:
    """One turn to be taken. Whoever asks it fills in where it goes; backends change nothing of it but what it has
    ``said``."""

    shape: RequestShape
    conversation: Conversation
    job_id: str
    turns_left: int = 0  # how near the agent is to its end; fewer goes sooner
    agent: int = 0  # its number, unique in the run; a job_id may come twice
    endpoint: str = ""  # the one that was granted, of Capabilities.endpoints
    run: str = ""  # the id of the run; "" outside of one
    turn: int = 0  # the answer that is asked for, from 1; the same when it is asked for again
    tries: int = 0  # how often it was asked for before, and failed
    last: bool = False  # no tool can follow it: as far as is known, the agent ends with it
    hints: bool = True  # a server that can plan may be told what it can expect of the agent
    usual_tokens: int | None = None  # what answers of this run have had so far, on average
    on_begin: Callable[[], None] | None = field(default=None, compare=False, repr=False)  # a streamed answer begins
    # The text that has come so far where the answer is streamed, for whoever gives the turn up before its end.
    said: list[str] = field(default_factory=list, compare=False, repr=False)


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


@dataclass(frozen=True, slots=True)
class Member:
    """One of the servers behind a backend that is many."""

    name: str  # of Capabilities.endpoints
    weight: float = 1.0  # its share among the others
    inflight: int | None = None  # calls in flight when the user names no number; None: the number is found
    models: frozenset[str] | None = None  # that it serves; None: nobody knows
    context: int | None = None  # tokens; None: as many as any


def total_inflight(members: Sequence[Member]) -> int | None:
    """Of all together; None where one of them has no number of its own."""
    numbers = [member.inflight for member in members]
    return None if None in numbers else sum(number for number in numbers if number is not None)


class Party(Protocol):
    """Whoever uses a backend that is many beside others, a run say."""

    @property
    def slots(self) -> int | None:
        """The most it may use; None: no end of them."""
        ...

    def changed(self) -> None:
        """Members came or went, or something about them is known that was not."""
        ...

    def share(self, slots: int | None) -> None:
        """So many of the slots are its own; None: all."""
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


@runtime_checkable
class Backend(Protocol):
    """Entered once per run; entering it again inside (by the user, or a second run) shares what is open."""

    @property
    def name(self) -> str:
        """For people: the scheme and where it points, without credentials."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def check(self, shape: RequestShape) -> None:
        """Called before anything is sent: a SpecError for what this backend could never send."""
        ...

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        """One turn. With ``on_tool_call`` the answer is streamed and each tool call is reported, once, as soon as it is
        complete; the Reply then carries those same ToolCall values, in the order they began. Cancelling this coroutine
        ends the request on the server too."""
        ...

    async def models(self) -> list[str]:
        """The names this backend serves, for a user who named none."""
        ...


@runtime_checkable
class Measured(Backend, Protocol):
    """Where ``Capabilities.load``."""

    async def load(self, endpoint: str = "") -> Load:
        """How busy the endpoint is now. A BackendError where it cannot be asked; never a reason to fail a row."""
        ...


@runtime_checkable
class Probed(Backend, Protocol):
    """Where ``Capabilities.probe``."""

    async def probe(self, model: str) -> Facts:
        """Asked when a run starts, before its first request. What the server says of the model is the answer; what it
        says of itself, the backend remembers. A BackendError where it cannot be asked; never a reason to fail."""
        ...


@runtime_checkable
class Batched(Backend, Protocol):
    """Where ``Capabilities.batch``."""

    async def infer_batch(self, requests: Sequence[ModelRequest]) -> list[Reply | BackendError]:
        """One turn of each, in their order. They share one shape, without tools; one that cannot be answered is an
        error in its own place and takes nobody with it."""
        ...


@runtime_checkable
class Many(Backend, Protocol):
    """Where ``Capabilities.many``."""

    @property
    def members(self) -> Sequence[Member]: ...

    def join(self, party: Party) -> None:
        """From now on the party is told what changes, and those who want slots share them evenly."""
        ...

    def leave(self, party: Party) -> None: ...

    def want(self, party: Party, slots: float) -> None:
        """How many slots the party could use now. What it does not want is the others'."""
        ...

    async def locate(self, model: str) -> None:
        """Find out which members serve the model, as far as they say so soon."""
        ...

    async def knock(self, endpoint: str) -> None:
        """Is it there? Costs it nothing. A BackendError where it does not answer."""
        ...


@runtime_checkable
class Patient(Backend, Protocol):
    """Where ``Capabilities.patient``."""

    def keep(self, directory: Path | None) -> None:
        """Called before it is entered: where it notes what it has sent, so that a run which is resumed picks that up.
        None: nowhere, and nothing is picked up."""
        ...
