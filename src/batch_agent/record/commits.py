"""The record as agents use it: adding a step does not block; an agent waits only before a step that needs the record.
``Trail`` is the record of one agent, ``Commits`` that of a worker.

Group commit: while one commit is being written, all new records are collected for the next one. A commit costs about
the same for one record and for a thousand, so the disk does not limit how many agents run. All bookkeeping is on the
event loop's thread. Commits are written in a thread of the store, one at a time and in order. A store in memory is
called at once: there is nothing to wait for, and no steps are kept.

A slow disk, or a file locked by another process, is waited for. Meanwhile no request should be sent, because its answer
could not be recorded soon. ``on_overdue`` reports when that begins and ends.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from operator import itemgetter
from typing import Any, Protocol
from zlib import crc32

import orjson

from batch_agent.backends.base import RequestShape
from batch_agent.errors import JobError, StoreError
from batch_agent.files.results import to_json
from batch_agent.job import AgentResult
from batch_agent.messages import Message, content_shown
from batch_agent.record.codec import encode
from batch_agent.record.keys import KEY_BYTES, shape_fields
from batch_agent.record.steps import Failed, Past, Restarted, Step, Used
from batch_agent.record.store import (
    GATHERING,
    Commit,
    Identity,
    KeptStep,
    Lease,
    Row,
    RowChange,
    Spent,
    Store,
)
from batch_agent.share.table import BUDGET_COST, BUDGET_TOKENS, DOLLAR, Claim, Grant

# Digests of requests. They tell whether a resumed agent sends the same request that was recorded.
#
# A conversation only grows, so digests are chained: new messages are hashed together with the digest of all earlier
# ones. Reasoning, and data that only one provider's wire can read, are omitted: they come from recorded answers.
#
# The tool loop sends the requests of its row one after the other. Its chain begins with the key of the row and costs
# one hash per request, because it is on the hot path (``next_asked``). A user's worker has any number of
# conversations, so its requests have the digest of their content alone (``request_digest``).

BYTES = 16
SHAPES = 256  # number of shapes whose digests are cached
WHOLE, SHORT = 16, 4  # hexadecimal digits of the digest of a request, and of a part that only explains a difference
PARTS = ("model", "tools", "output schema", "sampling")
PART_OF = {
    **{"model": "model", "tools": "tools", "tool_choice": "tools"},
    **{"schema": "output schema", "schema_name": "output schema"},
}


@dataclass(frozen=True, slots=True)
class ShapeDigest:
    """``whole`` is the digest of all fields. ``parts`` is a short digest for each of PARTS, concatenated."""

    whole: bytes
    parts: str


class ShapeDigests:
    """The digests of the request shapes that a run has used, each computed once. Neither max_tokens nor logprobs
    changes a complete answer, so they are no part of them."""

    def __init__(self) -> None:
        self._known: dict[RequestShape, ShapeDigest] = {}

    def of(self, shape: RequestShape) -> ShapeDigest:
        digest = self._known.get(shape)
        if digest is None:
            if len(self._known) >= SHAPES:  # a worker may use an unlimited number of shapes
                self._known.clear()
            digest = self._known[shape] = _shape_digest(replace(shape, max_tokens=None, logprobs=False))
        return digest


def _shape_digest(shape: RequestShape) -> ShapeDigest:
    fields = shape_fields(shape)
    if shape.schema is not None and shape.tool_choice == "none":
        # Tools that are listed but must not be used only serve the server's prefix cache. Without them, the question is
        # the same.
        fields = {**fields, "tools": (), "tool_choice": None}
    parts: dict[str, dict[str, object]] = {part: {} for part in PARTS}
    for name, value in fields.items():
        parts[PART_OF.get(name, "sampling")][name] = value
    written = [json.dumps(json.loads(to_json(parts[part])), sort_keys=True).encode() for part in PARTS]
    return ShapeDigest(_hash(*written), "".join(_hash(part).hex()[:SHORT] for part in written))


def message_digest(before: bytes, message: Message) -> bytes:
    """Return the digest of a conversation that continues with ``message``. ``before`` is the digest of all earlier
    messages."""
    return _hash(before, _written(message))


def request_digest(conversation: bytes, shape: ShapeDigest) -> str:
    """Return the digest under which a worker's request is recorded."""
    return _hash(conversation, shape.whole).hex()[:WHOLE]


def next_asked(before: bytes, shape: ShapeDigest, new: Sequence[Message]) -> tuple[bytes, str]:
    """Return the digest of a request of the tool loop, and the text to record for it. ``before`` is the digest of the
    previous request, ``new`` are the messages since."""
    written = list(map(_written, new))
    digest = _hash(before, shape.whole, *written)
    return digest, digest.hex()[:WHOLE] + shape.parts + "".join([f"{crc32(text) & 0xFFFF:04x}" for text in written])


def difference(then: str, now: str, new: Sequence[Message], first: int) -> str:
    """Return a description of the differences between two requests. ``new`` are the messages of the present request
    that were added since the previous one. The first of them is number ``first`` of the conversation, counted from
    1."""
    before, after = _pieces(then), _pieces(now)
    found = [
        f"the {part} {'differ' if part == 'tools' else 'differs'}"
        for place, part in enumerate(PARTS)
        if before[place] != after[place]
    ]
    said, says = before[len(PARTS) :], after[len(PARTS) :]
    for place in range(max(len(said), len(says))):
        number = first + place
        if place >= len(says):
            found.append(f"message {number} is missing")
        elif place >= len(said):
            found.append(f"message {number} ({new[place].role}) is new")
        elif said[place] != says[place]:
            found.append(f"message {number} ({new[place].role}) differs")
    return ", ".join(found) or "the task, the system prompt or an earlier message differs"


def _pieces(asked: str) -> list[str]:
    return [asked[start : start + SHORT] for start in range(WHOLE, len(asked), SHORT)]


def _hash(*parts: bytes) -> bytes:
    return blake2b(b"".join(parts), digest_size=BYTES).digest()


def _written(message: Message) -> bytes:
    """Return the bytes of a message that are hashed: the recorded form, with images as their placeholders."""
    content = message.content
    value = (
        message.role,
        content if isinstance(content, str) else content_shown(content),
        [(call.id, call.name, call.arguments) for call in message.tool_calls] if message.tool_calls else (),
        message.tool_call_id,
    )
    try:
        return orjson.dumps(value)
    except TypeError:  # a lone surrogate, which a model can write
        return json.dumps(value).encode("ascii")


UNKNOWN_OUTCOME = (
    "Error: the run was interrupted while {name} was running, and its outcome is unknown: it may or may not have taken "
    "effect. It was not run again. Find out before you repeat it."
)
NOTHING = Past(0, ())  # the record of a new agent


NO_IDENTITY = Identity(b"", b"")
NOBODY = Lease(Row(-1, b"", b"", None), "", 0)


class FailedBefore(JobError):
    """The record ends with this failure, which is not retried."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.error.message)
        self.failed = failed


class Trail:
    """``retried``: the agent failed and is retried. ``restarts``: it starts again in a new conversation. ``ended``: the
    record is complete. ``has_past``: an earlier session recorded something. ``fresh``: this session did some work for
    it. ``records``: new steps are kept. ``checks``: a recorded answer is used only for the same request. ``past`` is
    the whole record."""

    __slots__ = (
        "_commits",
        "_latest",
        "_restarts",
        "agent",
        "checks",
        "ended",
        "fresh",
        "has_past",
        "identity",
        "lease",
        "past",
        "records",
        "retried",
        "stays_failed",
    )

    def __init__(
        self,
        commits: Commits | None = None,
        lease: Lease = NOBODY,
        identity: Identity = NO_IDENTITY,
        past: Past | None = None,
        *,
        retried: bool = False,
        restarts: bool = False,
    ) -> None:
        """``past`` is the record of the agent. Without one, the agent gets a new number."""
        self._commits, self.lease, self.identity = commits, lease, identity
        self.past = NOTHING if past is None else past.restarted() if restarts else past
        self._restarts = restarts  # and this is not recorded yet
        # Its number in the journal; 0 for all agents of a run without a record.
        self.agent = past.agent if past is not None else 0 if commits is None else commits.new_agent()
        self._latest = 0
        self.records = commits is not None
        self.retried = retried
        self.checks = lease.checks
        self.stays_failed = self.past.failed is not None and not retried  # its failure is not tried again
        self.ended = self.past.done or self.stays_failed
        self.has_past = bool(self.past.turns or self.past.worked) or self.ended
        self.fresh = not self.has_past

    def anew(self) -> Trail:
        """Return a trail of the same row without a record, for an agent that starts again."""
        return Trail(self._commits, self.lease, self.identity)

    @property
    def asked(self) -> bytes:
        """The digest of the whole question of its row, without the row's id."""
        return self.identity.key[:KEY_BYTES]

    def add(self, step: Step) -> None:
        """Record a step of this session. It is on disk after ``settle``."""
        if self._commits is not None:
            if self._restarts:
                self._restarts = False
                self._commits.add(self, Restarted(self.past.spent or Used()))
            self._latest = self._commits.add(self, step)

    async def settle(self) -> None:
        """Wait until all added steps are on disk. Raises StoreError if that is impossible."""
        if self._commits is not None and not self._commits.has(self._latest):
            await self._commits.durable(self._latest)


NOWHERE = Trail()
MANY = 16  # records of a large commit: the next one waits as long as the store says
OVERDUE = 1.0  # seconds that a commit may take before no new request is sent
BACKLOG = 1024  # records and results that may wait for the disk; above that, no new agent starts
AT_ONCE = 64  # agents that are resumed in the same turn of the event loop after a commit


class Meter:
    """What a worker has spent and done since its latest commit. ``so_far`` returns the tokens and $ that it has spent,
    ``learnt`` statistics of its calls. ``budgets`` are counted in the table of shares, so they are left out. ``work``
    returns the numbers and the events of a worker that reports to a feeder in another process."""

    def __init__(
        self,
        so_far: Callable[[], tuple[int, float | None]] = lambda: (0, None),
        budgets: Collection[str] = (),
        learnt: Callable[[], tuple[int, ...] | None] = lambda: None,
        work: Callable[[], tuple[Mapping[str, float], bytes]] | None = None,
    ) -> None:
        self._so_far, self._budgets, self._learnt, self._work = so_far, budgets, learnt, work
        self._tokens = self._nano = 0  # at the latest commit

    def commit(self) -> Commit:
        """Return the commit that begins now, without changes of rows."""
        tokens, cost = self._so_far()
        more, nano = 0 if BUDGET_TOKENS in self._budgets else tokens - self._tokens, None
        if cost is not None and BUDGET_COST not in self._budgets:
            before, self._nano = self._nano, round(cost * DOLLAR)
            nano = self._nano - before
        self._tokens = tokens
        spent = Spent(more, nano) if self._work is None else Spent(more, nano, *self._work())
        return Commit((), spent, self._learnt())


class Claimant(Protocol):
    """The budget of a run with one worker, of which each commit claims a part (``RunStore.lend``)."""

    @property
    def member(self) -> str: ...

    def claims(self, *, last: bool) -> Mapping[str, Claim]:
        """Return the claims of the commit that begins now; {} for none. ``last``: nothing more will be spent."""
        ...

    def granted(self, grants: Mapping[str, Grant]) -> None:
        """The commit with the latest claims is on disk."""
        ...

    def broken(self, error: StoreError) -> None:
        """Nothing can be recorded any more, so nothing more can be granted."""
        ...


def _ended(lease: Lease, steps: Sequence[KeptStep], result: AgentResult[object]) -> RowChange:
    error = "" if result.error is None else result.error.type
    return RowChange(lease, tuple(steps), result, error, result.resumed)


class Commits:
    """Writes the steps and results of one worker. ``meter`` knows what it has spent. ``budget`` claims parts of a
    budget with the commits. ``on_committed`` is called with the places of rows that other workers have now, and with
    the leases of rows whose results are recorded; ``on_written`` after each commit. ``on_backlog`` is called with True
    when too many records wait for the store to start new agents, and with False when that ends. ``on_overdue`` is
    called with True when a commit takes too long, and with False when it is done. ``on_failed`` is called with the
    error of a commit: nothing can be recorded any more."""

    def __init__(
        self,
        store: Store,
        worker: int,
        *,
        meter: Meter | None = None,
        budget: Claimant | None = None,
        on_committed: Callable[[set[str], Sequence[Lease]], None] = lambda lost, ended: None,
        on_backlog: Callable[[bool], None] = lambda _: None,
        on_overdue: Callable[[bool], None] = lambda _: None,
        on_failed: Callable[[StoreError], None] = lambda _: None,
        on_written: Callable[[], None] | None = None,
    ) -> None:
        self._store, self._worker, self._on_committed = store, worker, on_committed
        self._loop = asyncio.get_running_loop()
        self.keeps = store.writes  # steps; else all agents have the trail NOWHERE
        self._numbers = store.blocking.agent_numbers(worker)
        self._meter = Meter() if meter is None else meter
        self._budget, self._on_written = budget, on_written
        self._grants: Mapping[str, Grant] = {}  # those of the running commit
        self._on_backlog, self._on_overdue, self._on_failed = on_backlog, on_overdue, on_failed
        self._alarm: asyncio.TimerHandle | None = None
        self._is_overdue = False
        self._pause = min(store.gathering, GATHERING)  # seconds that the next commit waits
        self._touched = False  # a commit was requested, even without new records
        self._committing_since = self._gathering_since = 0.0  # when the oldest record that is not on disk was added
        self._backlogged = False
        self._entries: list[tuple[Trail, Step]] = []
        self._results: list[tuple[Lease, AgentResult[object]]] = []
        self._committing: list[Lease] = []  # rows whose results are in the running commit
        self._waiters: dict[int, list[asyncio.Future[None]]] = {}
        self._gathering = 1  # the number of the next commit
        self._durable = 0  # the number of the last commit on disk
        self._busy = False  # a commit is running or scheduled
        self._failure: StoreError | None = None

    @property
    def lag(self) -> float:
        """Seconds since the oldest record that is not on disk was added; 0 if there is none."""
        if not self._busy:
            return 0.0
        return self._loop.time() - (self._committing_since or self._gathering_since)

    def trail(self, lease: Lease, identity: Identity, past: Past | None = None, **how: bool) -> Trail:
        """Return the trail of an agent that works on a row."""
        return Trail(self, lease, identity, past, **how) if self.keeps else NOWHERE

    def new_agent(self) -> int:
        return next(self._numbers)

    def add(self, trail: Trail, step: Step) -> int:
        """Add a step of an agent to the next commit. Returns the number of that commit, for ``durable``."""
        if self._failure is not None:
            raise self._failure
        self._entries.append((trail, step))
        if not self._gathering_since or len(self._entries) + len(self._results) >= BACKLOG:
            self._wake()
        return self._gathering

    def publish(self, lease: Lease, result: AgentResult[object]) -> int:
        """Record the result of a row, with everything added before it. Returns the number of the commit."""
        if self._failure is not None:
            raise self._failure
        self._results.append((lease, result))
        self._wake()
        return self._gathering

    def touch(self) -> None:
        """Commit soon even without new records, to write what the session has spent, and its advance."""
        if self._failure is None:
            self._touched = True
            self._wake()

    def has(self, commit: int) -> bool:
        """Return whether that commit is on disk. Raises StoreError if a commit has failed."""
        if self._failure is not None:
            raise self._failure
        return commit <= self._durable

    def durable(self, commit: int) -> asyncio.Future[None]:
        """Return a future that is done when that commit, which is to come, is on disk. It raises StoreError if the
        commit fails."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.setdefault(commit, []).append(waiter)
        return waiter

    def flush(self) -> asyncio.Future[None]:
        """Return a future that is done when everything added or published is on disk. It raises StoreError if the
        commit has failed."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        if self._failure is not None:
            waiter.set_exception(self._failure)
        elif self._busy:
            is_wanted = self._entries or self._results or self._touched
            last = self._gathering if is_wanted else self._gathering - 1
            self._waiters.setdefault(last, []).append(waiter)
        else:
            waiter.set_result(None)
        return waiter

    async def end(self) -> StoreError | None:
        """Write everything that is left, and return the advance of the session. A cancellation does not interrupt this.
        Returns the error if something could not be written."""
        failure = await to_its_end(self.flush())
        if failure is None and self._store.gathering:
            claims = None if self._budget is None else self._budget.claims(last=True)
            last = partial(self._write, self._gathering, [], [], self._meter.commit(), claims)
            failure = await to_its_end(self._loop.run_in_executor(self._store.commits, last))
        if failure is not None and not isinstance(failure, StoreError):
            failure = StoreError(f"the run cannot be recorded: {failure!r}")
        return failure

    def close(self) -> None:
        """Refuse everything from now on."""
        self._failure = self._failure or StoreError("the record of the run is closed")

    def _wake(self) -> None:
        if not self._store.gathering:
            self._commit_at_once()
            return
        if not self._gathering_since:
            self._gathering_since = self._loop.time()
        if not self._busy:
            self._busy = True
            self._loop.call_later(self._pause, self._commit)
        elif not self._backlogged and len(self._entries) + len(self._results) >= BACKLOG:
            self._backlogged = True
            self._on_backlog(True)

    def _commit(self) -> None:
        entries, self._entries = self._entries, []
        results, self._results = self._results, []
        self._touched = False
        self._pause = self._store.gathering if len(entries) >= MANY else min(self._store.gathering, GATHERING)
        self._committing_since, self._gathering_since = self._gathering_since, 0.0
        number = self._gathering
        self._gathering += 1
        self._committing = list(map(itemgetter(0), results))
        claims = None if self._budget is None else self._budget.claims(last=False)
        write = partial(self._write, number, entries, results, self._meter.commit(), claims)
        self._alarm = self._loop.call_later(OVERDUE, self._set_overdue, True)
        self._loop.run_in_executor(self._store.commits, write).add_done_callback(self._committed)

    def _commit_at_once(self) -> None:
        """Commit results to a store whose commits take no time, and which keeps nothing else."""
        results, self._results = self._results, []
        self._touched = False
        self._durable = number = self._gathering
        self._gathering += 1
        changes = [_ended(lease, (), result) for lease, result in results]
        try:
            lost = self._store.blocking.commit(self._worker, number, Commit(changes))
        except StoreError as error:
            self._fail(error)
        else:
            self._on_committed(lost, [lease for lease, _ in results])

    def _write(
        self,
        number: int,
        entries: list[tuple[Trail, Step]],
        results: list[tuple[Lease, AgentResult[object]]],
        begun: Commit,
        claims: Mapping[str, Claim] | None,
    ) -> set[str]:
        steps: dict[tuple[str, int], tuple[Lease, list[KeptStep]]] = {}  # by place and token
        for trail, step in entries:
            lease, identity = trail.lease, trail.identity
            kept, place = KeptStep(trail.agent, identity.key, identity.row, *encode(step)), (lease.place, lease.token)
            found = steps.get(place)
            if found is None:
                steps[place] = lease, [kept]
            else:
                found[1].append(kept)
        changes = []
        for lease, result in results:
            _, own = steps.pop((lease.place, lease.token), (lease, []))
            changes.append(_ended(lease, own, result))
        for lease, own in steps.values():
            changes.append(RowChange(lease, tuple(own)))
        if claims and self._budget is not None:
            self._grants = self._store.fed.lend(self._budget.member, claims)
        return self._store.blocking.commit(self._worker, number, Commit(changes, begun.spent, begun.learnt))

    def _committed(self, commit: asyncio.Future[set[str]]) -> None:
        number = self._gathering - 1
        error = asyncio.CancelledError() if commit.cancelled() else commit.exception()
        if self._alarm is not None:
            self._alarm.cancel()
        if self._is_overdue:
            self._set_overdue(False)
        if error is None:
            self._durable = number
            if self._grants and self._budget is not None:
                grants, self._grants = self._grants, {}
                self._budget.granted(grants)
            if self._on_written is not None:
                self._on_written()
            if (lost := commit.result()) or self._committing:
                self._on_committed(lost, self._committing)
            if number in self._waiters:
                self._release(self._waiters.pop(number))
        else:
            self._fail(error if isinstance(error, StoreError) else StoreError(f"the run cannot be recorded: {error!r}"))
        self._committing_since = 0.0
        self._busy = bool(self._entries or self._results or self._touched)
        if self._busy:
            self._loop.call_later(self._pause, self._commit)
        if self._backlogged and len(self._entries) < BACKLOG:
            self._backlogged = False
            self._on_backlog(False)

    def _set_overdue(self, overdue: bool) -> None:
        if overdue != self._is_overdue:
            self._is_overdue = overdue
            self._on_overdue(overdue)

    def _fail(self, error: StoreError) -> None:
        self._failure = error
        self._entries.clear()
        self._results.clear()
        self._touched = False
        if self._budget is not None:
            self._budget.broken(error)
        waiters, self._waiters = self._waiters, {}
        for waiting in waiters.values():
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_exception(error)
        self._on_failed(error)  # also if no agent waits: the results of rows that an earlier session ended

    def _release(self, waiters: list[asyncio.Future[None]]) -> None:
        for waiter in waiters[:AT_ONCE]:
            if not waiter.done():
                waiter.set_result(None)
        if len(waiters) > AT_ONCE:
            self._loop.call_soon(self._release, waiters[AT_ONCE:])


async def to_its_end(future: asyncio.Future[Any]) -> BaseException | None:
    """Wait until the future is done, even through cancellations. Returns its exception, or None."""
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([future])
    return future.exception()
