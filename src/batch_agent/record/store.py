"""The protocol between a run and its record. Every run has a record: in memory, in a run directory, or in Redis.

A record has the queue of rows, their leases, their steps and results, the shares of its workers, the calls that run
once for all of them, and the requests that control the run. Three stores implement it: ``memory``, ``directory`` and
``redis``; ``store_server`` makes the first two available to other processes. Every call may block, is atomic, and may
come from any thread. It raises StoreError if the record cannot be written or read. A call of a worker that is repeated
after its answer was lost has the effect of one call. A run makes its calls through ``Store``, which does not block.

All times are by the store's clock: no call carries a worker's clock. ``share.table`` decides how limits are divided.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, ParamSpec, Protocol, TypeVar, cast

from batch_agent.blocking import on_this_loop
from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import BatchAgentError, StoreError
from batch_agent.messages import JsonObject
from batch_agent.share.table import DOLLAR, Allotment, Claim, Grant, Learnt, Steering, Table
from batch_agent.value_type import value_type

T = TypeVar("T")
P = ParamSpec("P")


@value_type
class Identity:
    """Identifies the record of a row. ``key`` is the digest of its whole question, ``row`` the digest of the input
    alone."""

    key: bytes
    row: bytes


@value_type
class Spent:
    """What was spent, and what was done for it: by a worker since its latest commit, or by a whole session. ``nano`` is
    the cost in units of 1e-9 $; None if no price is known. ``counts`` are numbers of the worker's statistics by name,
    which the feeder adds to its summary. ``events`` are its events as lines of JSON, for the observers of the
    feeder."""

    tokens: int = 0
    nano: int | None = None
    counts: Mapping[str, float] = field(default_factory=dict)
    events: bytes = b""

    @property
    def cost(self) -> float | None:
        """The cost in $."""
        return None if self.nano is None else self.nano / DOLLAR

    def __add__(self, more: Spent) -> Spent:
        """Return the sum of the numbers. Events are no sum: the store passes them on."""
        nano = more.nano if self.nano is None else self.nano + (more.nano or 0)
        counts = self.counts
        if more.counts:
            counts = {**counts, **{name: counts.get(name, 0) + count for name, count in more.counts.items()}}
        return Spent(self.tokens + more.tokens, nano, counts)


NOTHING_SPENT = Spent()


@value_type
class Totals:
    """The number of rows that a session has ended, of which ``resumed`` came from the record, and what the session has
    spent."""

    ok: int = 0
    failed: int = 0
    resumed: int = 0
    spent: Spent = NOTHING_SPENT

    @property
    def tokens(self) -> int:
        return self.spent.tokens

    @property
    def cost(self) -> float | None:
        return self.spent.cost


Phase = Literal["running", "draining", "ended"]
NUMBERS = 32  # low bits of the number of an agent of another process; the high bits are the number of its worker
GROUP = 16  # rows that a worker takes per call; the last ones of a run should not be with one worker
WAIT, WINDOW = 1.0, 4096  # of a store whose queue is in another process
# Seconds that a commit waits for more records: little beside a model call, a third of the commits. A commit to another
# process wakes both, so it waits longer.
GATHERING, GATHERING_FAR = 0.006, 0.024
LEASE = 15.0  # seconds; the default of ``--lease``
OBSERVED = "observed"  # fact of a session whose feeder has observers
LARGEST_SHARED = 4 * 1024 * 1024  # bytes of the largest result of a call that is shared
FOLLOWED_SECONDS = 5.0  # after which a row is no longer reported, if no viewer asks again
UNKEPT_SECONDS = 10.0  # seconds that a result which is not cached stays available to the workers that waited for it


class FeederReplaced(StoreError):
    """Another process feeds this run now. Writes of this process are refused."""


@value_type
class KeptStep:
    """One step of one agent of a row. A row that is processed in parts has several agents. ``key`` and ``content`` are
    the agent's Identity; ``kind`` and ``body`` are the step as ``record.codec`` encodes it."""

    agent: int
    key: bytes
    content: bytes
    kind: int
    body: bytes


@value_type
class Row:
    """An input from the feeder. ``key`` is the digest of its whole question (``Identity.key``), ``content`` the digest
    of the input alone; both are b"" if a worker computes them. ``value`` is the input: JSON outside of the process of
    the store, else the object itself. ``job`` is the row as the feeder compiled it, or the result of a row that could
    not be compiled. A worker in another process gets ``prompt``, ``own_id``, ``shortened`` and ``affinity`` of the job
    instead, or None if it compiles the row."""

    index: int  # from 0
    key: bytes
    content: bytes
    value: object
    job: object = None


@value_type
class Lease:
    """The right of one worker to work on one row, with what is recorded of it.

    ``place`` is the row's place in the queue. ``token`` is the fencing token: it grows each time the row is leased, and
    a commit with an older token is refused. ``steps`` is what earlier holders recorded; ``claimed`` are the agents
    among them that this worker continues. ``retry``: the types of recorded failures that are tried again. ``checks``: a
    recorded answer is used only for the same request. ``more``: ``claim`` may find steps of further agents of the row.
    ``name`` is that of the row's record, if it is not its place.
    """

    row: Row
    place: str
    token: int
    steps: tuple[KeptStep, ...] = ()
    retry: bool | tuple[str, ...] = True
    checks: bool = True
    more: bool = False
    name: str = ""
    claimed: set[int] = field(default_factory=set)

    @property
    def index(self) -> int:
        return self.row.index

    def bare(self) -> Lease:
        """Return the lease without the parts that a store does not need to find it again."""
        row = self.row
        return Lease(Row(row.index, row.key, row.content, None), self.place, self.token, name=self.name)


@value_type
class RowChange:
    """Changes of one row in a commit: steps to append and, if the row has ended, its result.

    ``result`` is JSON (``encode_result``) from a worker in another process than the store, else an AgentResult.
    ``error`` is the type of the error, "" for a successful row. ``resumed``: the result came from the record.
    """

    lease: Lease
    steps: tuple[KeptStep, ...] = ()
    result: object = None
    error: str = ""
    resumed: bool = False


@value_type
class Commit:
    """What a worker records at once: the changes of rows, and what it has spent and done since its latest commit, which
    counts even if all rows are lost. ``learnt`` are statistics of calls, for the next session."""

    changes: Sequence[RowChange] = ()
    spent: Spent = NOTHING_SPENT
    learnt: tuple[int, ...] | None = None


@value_type
class SharedResult:
    """A result, in the order in which rows ended. ``position`` is where reading continues. ``own``: the row was fed in
    the session of the feeder that reads, so that this feeder delivers it. ``value`` is the input of a row whose result
    came as JSON, if the store has it."""

    position: str
    index: int
    result: object
    own: bool
    worker: int = 0  # number of the worker, if the store knows it
    value: object = None


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of rows: those that are queued and have not begun, that are leased, and that have ended in this session.
    ``fed``: every input was fed."""

    unstarted: int = 0
    leased: int = 0
    ok: int = 0
    failed: int = 0
    fed: bool = False


@dataclass(frozen=True, slots=True)
class RunStanding:
    """Instructions for a worker. ``draining``: take no new rows; ``ended``: leave. ``generation`` changes when the run
    is resumed with another spec; workers of an earlier generation leave. ``feeder``: a feeder holds its lease.
    ``observed``: the feeder has observers, for which workers send their events."""

    phase: Phase
    generation: int
    feeder: bool
    counts: Counts
    observed: bool = False

    @property
    def done(self) -> bool:
        """Whether every input was fed, and every row has ended."""
        counts = self.counts
        return self.phase == "ended" or (counts.fed and not counts.unstarted and not counts.leased)


@dataclass(frozen=True, slots=True)
class FeederSession:
    """A session of a feeder. ``number`` is its fencing token; ``previous`` are the facts before it."""

    number: int
    previous: JsonObject | None
    position: str  # position of the latest result


@value_type
class Adoption:
    """A row that takes over a recorded row. ``row`` is the recorded one: the number of its agent in a directory, its
    name in Redis. ``key`` and ``content`` identify the row from now on. ``forced``: its answer belongs to another
    question and is kept by force."""

    row: int | str
    key: bytes
    content: bytes
    forced: bool = False


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """A row in the record. ``name`` has the form of ``Adoption.row``. ``key`` is b"" if the row has no answer to its
    question. ``row`` is the digest of its input, if the store knows it. ``rank``: 0 if it has an answer, 1 if it has
    begun, 2 if it failed. ``index`` is the position of its input, if the store knows it."""

    name: int | str
    key: bytes
    row: bytes | None
    rank: int
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Resuming:
    """How to use an existing record. ``force``: rows keep their answers even if the spec changed. ``retry``: the types
    of failure that are retried; True means all, False none. ``drop``: earlier results no longer belong to the run,
    unless a row claims them. ``cut``: rows whose answer was cut at max_tokens are asked again. ``decides``: workers
    decide again, from the steps of each row, which of its answers stays. ``adopted``: rows that take over the record of
    another row, before the first row is fed. ``answered``: failed rows that people have answered, with the digests of
    their inputs; they are not retried."""

    resume: bool = False
    force: bool = False
    retry: bool | tuple[str, ...] = True
    drop: bool = False
    cut: bool = False
    decides: bool = False
    adopted: Callable[[], Iterator[Adoption]] | None = None
    answered: Mapping[int, bytes] = field(default_factory=dict[int, bytes])

    def retry_of(self, row: Row) -> bool | tuple[str, ...]:
        """Return the types of failure that are retried for a row."""
        return False if self.answered.get(row.index) == row.content else self.retry


@dataclass(frozen=True, slots=True)
class SharedCall:
    """The state of a call when a worker asks for it. ``mine``: this worker must run it and report its end. ``theirs``:
    another worker runs it, under ``token``. ``done``: ``text`` is its result. ``position`` is where reading of the
    stream of ended calls continues."""

    state: Literal["mine", "theirs", "done"]
    token: str
    position: str
    text: str = ""
    ok: bool = True


class WorkStore(Protocol):
    """The record of one run, as its workers use it.

    ``wait``: the most seconds for which a call of ``take`` or ``results`` waits. A store that does not wait answers at
    once, and calls its listeners. ``group``: rows that a worker takes per call. ``window``: rows that the feeder keeps
    in the queue for several workers. ``gathering``: seconds for which a large commit waits for more records; with 0,
    each result is a commit. ``writes``: commits are written, to files or to another process; else steps are not kept.
    ``lasts``: another process can feed the run after this one. ``unstarted``: rows in the queue that were not taken, or
    whose lease has ended, as far as this process knows. ``folder``: the run directory, if this process has it.
    """

    wait: float
    group: int
    window: int
    gathering: float
    writes: bool
    lasts: bool

    @property
    def unstarted(self) -> int: ...

    @property
    def folder(self) -> Path | None: ...

    def blocks(self, call: str) -> bool:
        """Return whether this call may block now: it reads or writes files, or another process answers it."""
        ...

    def describe(
        self, schema: OutputSchema[object] | None, row_schema: OutputSchema[object] | None, *, messages: bool
    ) -> None:
        """Say what the results and the rows of the run are, for a store that writes them: the schema of the outputs,
        that of rows which are outputs of another stage, and whether transcripts are kept."""
        ...

    def facts(self) -> JsonObject | None:
        """Return the content of ``run.json``, with what workers need; None if there is no run."""
        ...

    def stage(self, name: str) -> WorkStore:
        """Return the record of a stage of this run, which is a pipeline. Close it like any other store."""
        ...

    def close(self) -> None: ...

    def listen(self, changed: Callable[[], None], *, results: bool = False) -> None:
        """Call ``changed`` when rows, results or workers come; with ``results``, not when only the inputs end. A store
        that waits does nothing, or calls it when the process of the record has ended. It may be called from any
        thread."""
        ...

    # Workers

    def standing(self) -> RunStanding: ...

    def join(self, description: JsonObject) -> int:
        """Return the number of a new worker, from 1. No number is used twice."""
        ...

    def agent_numbers(self, worker: int) -> Iterator[int]:
        """Return the numbers for new agents of a worker. No agent of another worker has one of them."""
        ...

    def take(self, worker: int, most: int, wait: float) -> list[Lease]:
        """Lease up to ``most`` rows: first those whose lease has ended, then new ones. Waits up to ``wait`` seconds
        for the first."""
        ...

    def claim(self, lease: Lease, wanted: Sequence[Identity]) -> list[tuple[KeptStep, ...]]:
        """Return the steps that earlier agents with these identities recorded. Each recorded agent is returned once."""
        ...

    def renew(self, worker: int, leases: Sequence[Lease]) -> tuple[set[str], RunStanding]:
        """Renew these leases. Returns the places of the lost ones, and the state of the run."""
        ...

    def commit(self, worker: int, number: int, commit: Commit) -> set[str]:
        """Record the changes of rows whose lease is valid, all of them or none. Returns the places of the others, of
        which nothing is recorded. When it returns, the changes survive a loss of power. ``number`` grows with each
        commit of a worker; the latest commit may be repeated."""
        ...

    def hand_back(self, worker: int, leases: Sequence[Lease]) -> None:
        """End these leases. The rows can be leased again at once."""
        ...

    def leave(self, worker: int) -> None: ...

    # What workers share in addition to rows; ``member`` is the unique name of a worker

    def beat(
        self,
        member: str,
        seconds: float,
        claims: Mapping[str, Claim],
        learnt: Mapping[str, Learnt],
        status: JsonObject,
    ) -> Allotment:
        """Report to the table of shares, and return what it grants. The membership ends ``seconds`` after the call."""
        ...

    def resign(self, member: str) -> None:
        """End the membership. The unspent part of the member's budget is returned."""
        ...

    def table(self) -> tuple[Table, float]:
        """Return a copy of the table, and the store's time."""
        ...

    def steer(self, request: JsonObject) -> Steering:
        """Send a request to all workers (``share.table.steered``). Raises SpecError for an invalid request."""
        ...

    def begin_call(self, member: str, key: str, token: str, seen: str) -> SharedCall:
        """Start a call, or return its state if another worker runs it or it has ended. A call whose worker is dead can
        be started again. ``token`` is new. ``seen`` is the token of a run that the worker waited for: its result is
        accepted even if it is not cached."""
        ...

    def end_call(self, key: str, token: str, text: str | None, ok: bool, keep: float) -> None:
        """Record the end of a call. ``text`` None means that it did not run and can be started again. The text is kept
        for ``keep`` seconds; 0 keeps it only for the workers that wait. Does nothing if another worker took the call
        over."""
        ...

    def wait_calls(self, position: str, seconds: float) -> tuple[str, set[str]]:
        """Return the next position, and the keys of calls that ended after ``position``. Waits up to ``seconds`` for
        the first."""
        ...

    def put_file(self, name: str, text: str) -> None:
        """Store a small file, such as a hostfile, for workers on other machines."""
        ...

    def get_file(self, name: str) -> str | None:
        """Return the text of a file, or None if there is none of that name."""
        ...

    # Jobs at batch APIs, of the run and of all its stages

    def outlasts(self) -> bool:
        """Return whether the record is still there after the feeder's process has ended."""
        ...

    def job_lines(self) -> list[bytes]:
        """Return what all workers have recorded about jobs, in the order in which it was added."""
        ...

    def add_job_lines(self, lines: Sequence[bytes]) -> None:
        """Record lines about jobs, all of them or none. When it returns, they survive a loss of power."""
        ...

    def followed_rows(self) -> list[str]:
        """Return the rows that viewers follow now: the index, in a pipeline ``STAGE/INDEX``."""
        ...

    def report_rows(self, rows: Mapping[str, JsonObject]) -> None:
        """Store the conversations of running rows for viewers. They are kept for a few seconds."""
        ...


class RunStore(WorkStore, Protocol):
    """The record of one run, as its feeder uses it."""

    def stage(self, name: str) -> RunStore: ...

    def open(self, resuming: Resuming) -> None:
        """Prepare for a session of this process as the feeder. Raises SpecError if there is a run and it is not to be
        resumed, StoreError if another process has it. ``close`` undoes this."""
        ...

    def open_feed(self, facts: JsonObject, resuming: Resuming, *, keep_results_only: bool = False) -> FeederSession:
        """Become the feeder once the lease of an earlier one has ended. Another ``fingerprint`` in the facts empties
        the queue and begins a new generation. Raises SpecError if there is a run and it is not to be resumed;
        StoreError if another feeder keeps its lease."""
        ...

    def keep_feed(self, session: int) -> RunStanding:
        """Renew the feeder's lease and return the state of the run. Raises FeederReplaced."""
        ...

    def write_facts(self, session: int, facts: JsonObject) -> None: ...

    def announce(self) -> bool:
        """Tell readers for a while that this process is about to feed the run. Returns False if it feeds it, or if they
        see it anyway."""
        ...

    def stop_announcing(self) -> None: ...

    def carried(self, values: Sequence[object]) -> Sequence[object]:
        """Return these inputs as workers get them: as they are, or as they come back from JSON. An UnreadableRow
        replaces one that cannot be sent."""
        ...

    def feed(self, session: int, rows: Sequence[Row]) -> list[object]:
        """Add rows to the queue. Returns, for each row, its result from an earlier session if the store keeps results;
        None if it was queued. A failed row is queued again if it is to be retried. A row that ended and whose result is
        not kept is queued with its steps: a worker computes the result again. A row whose ``job`` is its failure may be
        returned as that, instead of being queued."""
        ...

    def end_inputs(self, session: int) -> None:
        """Record that every input was fed. Rows of earlier sessions that were not fed again leave the queue."""
        ...

    def results(self, session: int, after: str, most: int, wait: float) -> list[SharedResult]:
        """Return at most ``most`` results after that position. Waits up to ``wait`` seconds for the first."""
        ...

    def set_phase(self, session: int, phase: Phase) -> None: ...

    def follow_row(self, row: str) -> JsonObject | None:
        """Ask the worker of a row to report its conversation, and return what it last reported; None if there is
        nothing yet. A row of a pipeline is ``STAGE/ROW``."""
        ...

    def close_feed(self, session: int, facts: JsonObject, phase: Phase) -> None:
        """Write the facts and the phase, and release the feeder's lease."""
        ...

    def worked(self) -> Mapping[str, float]:
        """Return the sum of the counts in the commits of this session, by name."""
        ...

    def events(self, session: int, after: str, most: int) -> list[tuple[str, bytes]]:
        """Return the events of at most ``most`` commits of this session after that position ("0": from the first),
        each with its position, and delete those up to it. They are kept only if the facts of the session say that it is
        ``observed``, and only until the session ends. Raises FeederReplaced."""
        ...

    def spent(self) -> Spent:
        """Return what all earlier sessions have spent. What a session held of a budget and did not return counts as
        spent."""
        ...

    def learnt(self) -> tuple[int, ...] | None:
        """Return the statistics of calls that the latest session recorded, if the store keeps them."""
        ...

    def lend(self, member: str, claims: Mapping[str, Claim]) -> Mapping[str, Grant]:
        """Report to the table of shares for the only member, which is in this process, and return what it may hold
        after the next commit, which writes the table. Its membership does not end."""
        ...


THREADS = {"worker": 2, "feeder": 5, "shares": 8}  # most concurrent calls that block, by who makes them


class Store:
    """The record of a run as the run uses it: each call returns a future, and none blocks the event loop. The threads
    of calls that block belong to the store; the answers of other calls are there at once. A call that has begun is made
    to its end, even if its future is cancelled. ``blocking`` is the store whose calls these are, ``fed`` the same
    in the process that feeds the run. ``commits`` is the thread in which commits that block are made, in their
    order."""

    def __init__(self, blocking: WorkStore) -> None:
        self.blocking, self.fed = blocking, cast(RunStore, blocking)
        self.wait, self.group, self.gathering, self.writes = (
            blocking.wait,
            blocking.group,
            blocking.gathering,
            blocking.writes,
        )
        self.commits = ThreadPoolExecutor(1, thread_name_prefix="batch-agent-commits")
        self._threads = {who: ThreadPoolExecutor(most, f"batch-agent-{who}") for who, most in THREADS.items()}

    def _call(self, who: str, function: Callable[P, T], *given: P.args, **named: P.kwargs) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        if self.blocking.blocks(getattr(function, "__name__", "")):
            return loop.run_in_executor(self._threads[who], partial(function, *given, **named))
        answer: asyncio.Future[T] = loop.create_future()
        try:
            answer.set_result(function(*given, **named))
        except BatchAgentError as error:
            answer.set_exception(error)
        return answer

    def stage(self, name: str) -> Store:
        return Store(self.blocking.stage(name))

    def listen(self, changed: Callable[[], None], *, results: bool = False) -> None:
        """Call ``changed`` on this event loop, whatever thread reports the change."""
        self.blocking.listen(on_this_loop(changed), results=results)

    def close(self) -> asyncio.Future[None]:
        """Close the record, and end the threads."""
        closing = self._call("feeder", self.blocking.close)
        self.end_threads()
        return closing

    def end_threads(self) -> None:
        """End the threads after the calls that have begun. No other call may follow."""
        for pool in (self.commits, *self._threads.values()):
            pool.shutdown(wait=False)

    # Of a worker

    def facts(self) -> asyncio.Future[JsonObject | None]:
        return self._call("worker", self.blocking.facts)

    def standing(self) -> asyncio.Future[RunStanding]:
        return self._call("worker", self.blocking.standing)

    def join(self, description: JsonObject) -> asyncio.Future[int]:
        return self._call("worker", self.blocking.join, description)

    def take(self, worker: int, most: int, wait: float) -> asyncio.Future[list[Lease]]:
        return self._call("worker", self.blocking.take, worker, most, wait)

    def claim(self, lease: Lease, wanted: Sequence[Identity]) -> asyncio.Future[list[tuple[KeptStep, ...]]]:
        return self._call("worker", self.blocking.claim, lease, wanted)

    def renew(self, worker: int, leases: Sequence[Lease]) -> asyncio.Future[tuple[set[str], RunStanding]]:
        return self._call("worker", self.blocking.renew, worker, leases)

    def hand_back(self, worker: int, leases: Sequence[Lease]) -> asyncio.Future[None]:
        return self._call("worker", self.blocking.hand_back, worker, leases)

    def leave(self, worker: int) -> asyncio.Future[None]:
        return self._call("worker", self.blocking.leave, worker)

    # Of what workers share

    def beat(
        self,
        member: str,
        seconds: float,
        claims: Mapping[str, Claim],
        learnt: Mapping[str, Learnt],
        status: JsonObject,
    ) -> asyncio.Future[Allotment]:
        return self._call("shares", self.blocking.beat, member, seconds, claims, learnt, status)

    def resign(self, member: str) -> asyncio.Future[None]:
        return self._call("shares", self.blocking.resign, member)

    def table(self) -> asyncio.Future[tuple[Table, float]]:
        return self._call("shares", self.blocking.table)

    def steer(self, request: JsonObject) -> asyncio.Future[Steering]:
        return self._call("shares", self.blocking.steer, request)

    def begin_call(self, member: str, key: str, token: str, seen: str) -> asyncio.Future[SharedCall]:
        return self._call("shares", self.blocking.begin_call, member, key, token, seen)

    def end_call(self, key: str, token: str, text: str | None, ok: bool, keep: float) -> asyncio.Future[None]:
        return self._call("shares", self.blocking.end_call, key, token, text, ok, keep)

    def wait_calls(self, position: str, seconds: float) -> asyncio.Future[tuple[str, set[str]]]:
        return self._call("shares", self.blocking.wait_calls, position, seconds)

    def put_file(self, name: str, text: str) -> asyncio.Future[None]:
        return self._call("shares", self.blocking.put_file, name, text)

    def outlasts(self) -> asyncio.Future[bool]:
        return self._call("shares", self.blocking.outlasts)

    def followed_rows(self) -> asyncio.Future[list[str]]:
        return self._call("shares", self.blocking.followed_rows)

    def report_rows(self, rows: Mapping[str, JsonObject]) -> asyncio.Future[None]:
        return self._call("shares", self.blocking.report_rows, rows)

    # Of the feeder

    def open_feed(
        self, facts: JsonObject, resuming: Resuming, *, keep_results_only: bool = False
    ) -> asyncio.Future[FeederSession]:
        return self._call("feeder", self.fed.open_feed, facts, resuming, keep_results_only=keep_results_only)

    def announce(self) -> asyncio.Future[bool]:
        return self._call("feeder", self.fed.announce)

    def stop_announcing(self) -> asyncio.Future[None]:
        return self._call("feeder", self.fed.stop_announcing)

    def keep_feed(self, session: int) -> asyncio.Future[RunStanding]:
        return self._call("feeder", self.fed.keep_feed, session)

    def write_facts(self, session: int, facts: JsonObject) -> asyncio.Future[None]:
        return self._call("feeder", self.fed.write_facts, session, facts)

    def feed(self, session: int, rows: Sequence[Row]) -> asyncio.Future[list[object]]:
        return self._call("feeder", self.fed.feed, session, rows)

    def end_inputs(self, session: int) -> asyncio.Future[None]:
        return self._call("feeder", self.fed.end_inputs, session)

    def results(self, session: int, after: str, most: int, wait: float) -> asyncio.Future[list[SharedResult]]:
        return self._call("feeder", self.fed.results, session, after, most, wait)

    def set_phase(self, session: int, phase: Phase) -> asyncio.Future[None]:
        return self._call("feeder", self.fed.set_phase, session, phase)

    def close_feed(self, session: int, facts: JsonObject, phase: Phase) -> asyncio.Future[None]:
        return self._call("feeder", self.fed.close_feed, session, facts, phase)

    def worked(self) -> asyncio.Future[Mapping[str, float]]:
        return self._call("feeder", self.fed.worked)

    def events(self, session: int, after: str, most: int) -> asyncio.Future[list[tuple[str, bytes]]]:
        return self._call("feeder", self.fed.events, session, after, most)

    def spent(self) -> asyncio.Future[Spent]:
        return self._call("feeder", self.fed.spent)

    def learnt(self) -> asyncio.Future[tuple[int, ...] | None]:
        return self._call("feeder", self.fed.learnt)
