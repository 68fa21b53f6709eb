"""The record of a worker. Its journal writes the steps and the result of each row under the lease of that row.

A commit is one call of the store. The store refuses rows whose lease is lost. Their agents are dropped before any code
that waits for the commit continues.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast

from batch_agent.cluster.leases import HeldRow, WorkerLeases
from batch_agent.cluster.row_json import encode_result
from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import SpecError
from batch_agent.job import AgentResult, Job
from batch_agent.messages import JsonObject
from batch_agent.record.base import Account, Entry, Identity, Progress, Store
from batch_agent.record.codec import DONE, ENDED, FAILED, WRITES, decode, encode
from batch_agent.record.journal import Journal, Log
from batch_agent.record.keys import Keys
from batch_agent.record.rundir import State
from batch_agent.record.session import to_its_end
from batch_agent.record.shared import KeptStep, RowChange, RowLease
from batch_agent.record.steps import Past, read_past
from batch_agent.record.trail import Trail
from batch_agent.value_type import value_type

logger = logging.getLogger("batch_agent")

_RANKS = {DONE: 0, ENDED: 0, FAILED: 2}
NUMBERS = 32  # low bits of an agent's number; the high bits are the number of the worker


@value_type
class LeasedIdentity(Identity):
    """The identity of an agent that works under a lease."""

    row_lease: RowLease


class WorkerJournal(Journal):
    """A journal that writes to a shared run. ``encoded`` returns a result as JSON."""

    def __init__(
        self,
        leases: WorkerLeases,
        thread: ThreadPoolExecutor,
        encoded: Callable[[AgentResult[object]], bytes],
        *,
        account: Account,
        on_backlog: Callable[[bool], None],
        on_overdue: Callable[[bool], None],
    ) -> None:
        super().__init__(
            cast(Store, leases.store),  # only ``_write`` uses it, which is overridden here
            cast(Log, leases.store),
            thread,
            next_agent=leases.worker << NUMBERS | 1,
            account=account,
            on_backlog=on_backlog,
            on_overdue=on_overdue,
        )
        self._leases, self._encoded = leases, encoded
        self._number = 0
        self._ended: list[int] = []  # rows whose results are in the commit
        self._lost: set[str] = set()

    def _write(self, entries: list[Entry], results: list[AgentResult[object]], progress: Progress) -> None:
        held = self._leases.held
        steps: dict[RowLease, list[KeptStep]] = {}
        for entry in entries:
            identity = entry.identity
            assert isinstance(identity, LeasedIdentity)
            step = KeptStep(entry.agent, identity.key, identity.row, *encode(entry.step))
            steps.setdefault(identity.row_lease, []).append(step)
        ended = {held[result.index].lease: result for result in results if result.index in held}
        changes = [
            RowChange(
                lease,
                tuple(steps.get(lease, ())),
                None if (result := ended.get(lease)) is None else self._encoded(result),
                "" if result is None or result.error is None else result.error.type,
            )
            for lease in {**steps, **ended}
        ]
        self._ended, self._lost = [lease.index for lease in ended], set()
        if changes:
            self._number += 1
            number = self._number
            self._lost = self._leases.store.commit(self._leases.worker, number, changes)

    def _committed(self, commit: asyncio.Future[None]) -> None:
        if not commit.cancelled() and commit.exception() is None:
            self._leases.lose(self._lost)
            self._leases.finished(self._ended)
        super()._committed(commit)


class WorkerSession:
    """A worker's session with a shared run.

    ``fingerprint`` is the hash of the feeder's requests. With ``messages``, results include their transcripts.
    """

    has_past = True

    def __init__(self, leases: WorkerLeases, fingerprint: str, *, messages: bool) -> None:
        self.leases = leases
        self._fingerprint, self._messages = fingerprint, messages
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-agent-journal")
        self._journal: WorkerJournal | None = None
        self._keys = Keys(b"")
        self._overdue: set[str] = set()
        self._on_overdue: Callable[[bool], None] = lambda _: None

    async def begin(
        self,
        fingerprint: bytes,
        facts: JsonObject,
        *,
        rows_under: bytes,
        schema: OutputSchema[object] | None,
        account: Account,
        on_backlog: Callable[[bool], None],
        on_overdue: Callable[[bool], None],
    ) -> None:
        if fingerprint.hex() != self._fingerprint:
            raise SpecError("the task, model, schema or tools of this worker are not those of the run")
        self._keys = Keys(rows_under)
        self._on_overdue = on_overdue
        self.leases.on_away = partial(self._set_overdue, "leases")
        self._journal = WorkerJournal(
            self.leases,
            self._thread,
            lambda result: encode_result(result, schema, worker=self.leases.worker, messages=self._messages),
            account=account,
            on_backlog=on_backlog,
            on_overdue=partial(self._set_overdue, "journal"),
        )
        self.leases.begin()

    def _set_overdue(self, what: str, overdue: bool) -> None:
        """Pause sending while a commit or a renewal of the leases waits for the store."""
        before = bool(self._overdue)
        if overdue:
            self._overdue.add(what)
        else:
            self._overdue.discard(what)
        if bool(self._overdue) != before:
            self._on_overdue(overdue)

    # Rows

    def part(self, fingerprint: bytes) -> WorkerPart:
        return WorkerPart(self, fingerprint)

    def identity(self, job: Job, question: str) -> LeasedIdentity:
        return self.leased(self._keys.identity(job, question), job)

    def leased(self, identity: Identity, job: Job) -> LeasedIdentity:
        return LeasedIdentity(identity.key, identity.row, self.leases.held[job.index].lease)

    def new_trail(self, identity: Identity) -> Trail:
        return Trail(self._open_journal, identity)

    async def trails(self, identities: Sequence[Identity]) -> list[Trail]:
        return [self._trail(identity) for identity in identities]

    def _trail(self, identity: Identity) -> Trail:
        assert isinstance(identity, LeasedIdentity)
        row = self.leases.held.get(identity.row_lease.index)
        past = None if row is None else _past_of(row, identity.key)
        # A failed row is in the queue again only if it is to be retried.
        return Trail(self._open_journal, identity, past, retried=past is not None and past.failed is not None)

    def publish(self, result: AgentResult[object]) -> None:
        self.leases.ending.add(result.index)
        self._open_journal.publish(result)

    # The session

    async def spent_before(self) -> tuple[int, float, tuple[int, ...] | None]:
        return 0, 0.0, None

    def touch(self) -> None:
        if self._journal is not None:
            self._journal.touch()

    def say_trouble(self, trouble: str | None, since: float) -> None:
        """Do nothing: the feeder reports the state of the run."""

    @property
    def lag(self) -> float:
        return 0.0 if self._journal is None else self._journal.lag

    async def flush(self) -> bool:
        return self._journal is not None and await to_its_end(self._journal.flush()) is None

    async def end(self, state: State, why: str, summary: JsonObject) -> None:
        failure = None if self._journal is None else await to_its_end(self._journal.flush())
        await self.leases.close()
        self._thread.shutdown(wait=False)
        if failure is not None:
            raise failure

    @property
    def _open_journal(self) -> WorkerJournal:
        assert self._journal is not None, "begin() is called before rows are taken"
        return self._journal


class WorkerPart:
    """Records the agents of rows that are processed in parts. They use the lease of their row."""

    has_past = True

    def __init__(self, session: WorkerSession, fingerprint: bytes) -> None:
        self._session = session
        self._keys = Keys(fingerprint)

    def identity(self, job: Job, question: str) -> LeasedIdentity:
        return self._session.leased(self._keys.identity(job, question), job)

    def new_trail(self, identity: Identity) -> Trail:
        return self._session.new_trail(identity)

    async def trails(self, identities: Sequence[Identity]) -> list[Trail]:
        return await self._session.trails(identities)

    def publish(self, result: AgentResult[object]) -> None:
        """Do nothing: the row itself publishes its result."""


def _past_of(held: HeldRow, key: bytes) -> Past | None:
    """Return what earlier workers recorded for an agent with that key, or None.

    A finished agent is preferred to a running one, and a running one to a failed one. Each agent is returned once.
    """
    agents: dict[int, list[KeptStep]] = {}
    for step in held.row.steps:
        if step.key == key and step.agent not in held.claimed:
            agents.setdefault(step.agent, []).append(step)
    for agent in sorted(agents, key=lambda agent: (_RANKS.get(agents[agent][-1].kind, 1), agent)):
        held.claimed.add(agent)
        steps = agents[agent]
        try:
            return read_past(agent, [decode(step.kind, step.body) for step in steps])
        except ValueError as error:
            if any(step.kind in WRITES for step in steps):
                return Past(agent, (), unreadable=str(error))
            logger.warning("the record of row %d cannot be read and is ignored: %s", held.lease.index, error)
    return None
