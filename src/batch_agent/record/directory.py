"""The record of a run in its directory: the queue and the leases are in memory, steps and facts in files.

A row's result is not kept apart from its lines in the result files: a worker of the next session computes it again from
the row's steps, under the schema of that session. All files belong to the process that feeds the run; other processes
on this machine reach them through ``store_server``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from threading import Lock as ThreadLock
from typing import cast

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import SpecError, StoreError
from batch_agent.files.results import from_json, to_json
from batch_agent.job import AgentResult
from batch_agent.messages import JsonObject
from batch_agent.record.memory import MemoryStore
from batch_agent.record.row_json import decode_result, line_of
from batch_agent.record.rundir import RunDir, read_run
from batch_agent.record.sqlite import FACTS, TABLE, SqliteJournal
from batch_agent.record.store import (
    GATHERING,
    NUMBERS,
    Identity,
    KeptStep,
    Lease,
    Phase,
    Resuming,
    Row,
    RowChange,
    Spent,
    Totals,
)
from batch_agent.share.table import BUDGET_COST, BUDGET_TOKENS, DOLLAR, Table

logger = logging.getLogger("batch_agent")

# Calls that read or write files, or wait.
BLOCKING = frozenset(
    {
        "open",
        "facts",
        "open_feed",
        "feed",
        "write_facts",
        "close_feed",
        "spent",
        "learnt",
        "claim",
        "job_lines",
        "add_job_lines",
    }
    | {"close", "beat", "resign", "steer", "wait_calls"}
)
OpenJournal = Callable[..., SqliteJournal]
KEEPS = (
    'on_change="keep" (--keep-answers): rows of %s keep the answers they have, even if the task, model, schema, tools '
    "or the rows themselves changed"
)


class DirectoryStore(MemoryStore):
    gathering, writes = GATHERING, True

    def __init__(
        self,
        path: Path,
        *,
        open_journal: OpenJournal = SqliteJournal.open,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(clock, wall)
        self.path = self.folder = path
        self._schema: OutputSchema[object] | None = None
        self._open_journal = open_journal
        self._directory: RunDir | None = None
        self._disk = ThreadLock()  # held while files are read or written
        self._has_past = False
        self._forced = False  # answers are kept by force, whatever the session before did
        self._learnt: tuple[int, ...] | None = None  # statistics of calls
        self._numbers = count(1)  # of agents in the journal
        self._agents: dict[str, dict[int, int]] = {}  # by place: numbers of the agents of other processes

    def blocks(self, call: str) -> bool:
        return call in BLOCKING and (call != "feed" or self._has_past)

    def describe(
        self, schema: OutputSchema[object] | None, row_schema: OutputSchema[object] | None, *, messages: bool
    ) -> None:
        self._schema = schema

    def open(self, resuming: Resuming) -> None:
        with self._disk:
            resume, self._forced = resuming.resume or resuming.force, resuming.force
            self._directory = RunDir.open(self.path, resume=resume, open_journal=self._open_journal)
            table = self._journal.fact(TABLE)
            self._table = Table.from_json(cast(JsonObject, from_json(table.encode())) if table else {})
            self._table.forget_members(self._wall())

    def close(self) -> None:
        with self._disk:
            if self._directory is not None:
                self._directory.close()
                self._directory = None
        super().close()

    def _open_stage(self, name: str) -> MemoryStore:
        return DirectoryStore(self.path / name, open_journal=self._open_journal, clock=self._clock, wall=self._wall)

    @property
    def _dir(self) -> RunDir:
        if self._directory is None:
            raise StoreError(f"the run directory {self.path} is closed")
        return self._directory

    @property
    def _journal(self) -> SqliteJournal:
        return self._dir.journal

    # A session

    def _begin(self, facts: JsonObject, resuming: Resuming) -> JsonObject | None:
        if self._directory is None:
            self.open(resuming)
        with self._disk:
            directory, journal = self._dir, self._journal
            first = journal.next_agent()
            self._numbers, self._has_past = count(first), first > 1
            previous = self._previous()
            fingerprint = str(facts.get("fingerprint", ""))
            if self._has_past and resuming.adopted is not None:
                journal.adopt(resuming.adopted())
            if self._has_past:
                journal.sort_by("row" if resuming.force else "key")
            journal.begin(bytes.fromhex(fingerprint), str(facts.get("session_started")))
            changed = previous is not None and previous.get("fingerprint") not in (None, fingerprint)
            directory.begin_files(drop=resuming.drop)
            self._table.forget_members(self._wall())
            self._put_facts(facts)
        self._warn(changed=changed, forced=resuming.force)
        return previous

    def facts(self) -> JsonObject | None:
        """Return the facts of this session, or of the one before it."""
        if self._facts is not None or self._directory is None:
            return super().facts()
        with self._disk:
            return self._previous()

    def _previous(self) -> JsonObject | None:
        """Return the facts of the session before. Raises StoreError if they are lost and rows have a record: without
        them it is unknown whether the recorded answers were kept by force."""
        try:
            return read_run(self.path)
        except (SpecError, StoreError) as error:
            kept = self._journal.fact(FACTS)
            if kept is not None:
                logger.warning("%s; its copy in the journal is used", error)
                facts = cast(JsonObject, from_json(kept.encode()))
                self._dir.write_run(facts)
                return facts
            if isinstance(error, SpecError) or self._journal.next_agent() == 1:  # run.json is missing
                return None
            if self._forced:
                logger.warning("%s", error)
                return None
            raise StoreError(
                f"{self.path / 'run.json'} is damaged, and says whether the recorded answers were kept after a change "
                'of the options. To use them, resume with on_change="keep" (--keep-answers); else delete run.json and '
                "resume: answers to other questions are then asked again"
            ) from None

    def _warn(self, *, changed: bool, forced: bool) -> None:
        if self._dir.lost_journal:
            logger.warning("the journal of %s is missing: every row is processed again", self.path)
        elif not self._has_past:
            return
        elif forced:
            logger.warning(KEEPS, self.path)
        elif changed:
            logger.warning(
                "the task, model, schema or tools of %s have changed: rows without an answer to the new request are "
                'sent. Old answers stay in the journal: the earlier options, or on_change="keep" (--keep-answers), '
                "use them",
                self.path,
            )

    def _write_facts(self, facts: JsonObject) -> None:
        with self._disk:
            self._put_facts(facts)

    def _put_facts(self, facts: JsonObject) -> None:
        shown = {name: value for name, value in facts.items() if name != "summary"}
        self._dir.write_run(shown)
        self._journal.set_fact(FACTS, to_json(shown).decode())

    def _end(self, facts: JsonObject, phase: Phase) -> None:
        """Write the end of the session. Each file is written even if another cannot be."""
        with self._disk:
            failure: BaseException | None = None
            summary, directory = facts.get("summary"), self._dir

            writes: list[Callable[[], None]] = [
                lambda: directory.end_files(every=facts.get("state") == "complete"),
                lambda: self._journal.commit((), self._totals(), self._learnt),
                lambda: self._put_facts(facts),
            ]
            if isinstance(summary, dict):
                writes.append(lambda: directory.write_summary(summary))
            for write in writes:
                try:
                    write()
                except StoreError as error:
                    failure = failure or error
            if failure is not None:
                raise failure

    # Rows

    def _read_steps(self, agent: int) -> Sequence[KeptStep]:
        with self._disk:
            return self._journal.kept_steps(agent)

    def _keeps_past(self) -> bool:
        return self._has_past

    def _past(self, rows: Sequence[Row]) -> list[list[KeptStep]] | None:
        if not self._has_past:
            return None
        with self._disk:
            found = self._journal.claim_steps(
                [Identity(row.key, row.content) for row in rows], [row.index for row in rows]
            )
            return [list(steps) for steps in found]

    def claim(self, lease: Lease, wanted: Sequence[Identity]) -> list[tuple[KeptStep, ...]]:
        with self._disk:
            if not self._has_past or self._directory is None:  # a closed stage: the row has its result
                return [()] * len(wanted)
            return self._journal.claim_steps(wanted)

    def agent_numbers(self, worker: int) -> Iterator[int]:
        return self._numbers if worker in self._here else super().agent_numbers(worker)

    def _record(
        self, worker: int, changes: Sequence[RowChange], learnt: tuple[int, ...] | None
    ) -> Sequence[tuple[KeptStep, ...]]:
        with self._lock:
            facts, self._lent = {TABLE: _text(self._table)} if self._lent else {}, False
        with self._disk:
            here = worker in self._here
            directory = self._directory
            if directory is None and not (changes or here):  # a worker leaves when all rows have their results
                return ()
            directory = directory or self._dir
            self._learnt = learnt or self._learnt
            recorded: list[tuple[KeptStep, ...]] = []
            steps: list[KeptStep] = []
            ended: list[RowChange] = []
            for change in changes:
                recorded.append(change.steps if here else self._renumbered(change))
                steps += recorded[-1]
                if change.result is not None:
                    ended.append(change)
            directory.journal.commit(steps, self._totals(ended), self._learnt, facts)
            if ended:
                directory.schema = self._schema
                directory.write(list(map(self._written, ended)))
            for change in ended:
                self._agents.pop(change.lease.place, None)
            return recorded

    def _written(self, change: RowChange) -> AgentResult[object] | bytes:
        """Return the result of a row, or its line if it has one already: another process wrote it."""
        result = change.result
        if not isinstance(result, bytes):
            return cast("AgentResult[object]", result)
        if not change.error:
            return line_of(result)
        return decode_result(result, change.lease.index, None, resumed=change.resumed)[0]

    def _renumbered(self, change: RowChange) -> tuple[KeptStep, ...]:
        """Return the steps of another process with numbers of this journal for their agents."""
        steps = []
        for step in change.steps:
            if step.agent >> NUMBERS:  # else the step continues an agent that has its number
                numbers = self._agents.setdefault(change.lease.place, {})
                if step.agent not in numbers:
                    numbers[step.agent] = next(self._numbers)
                step = KeptStep(numbers[step.agent], step.key, step.content, step.kind, step.body)
            steps.append(step)
        return tuple(steps)

    def _totals(self, ended: Sequence[RowChange] = ()) -> Totals:
        failed = resumed = 0
        for change in ended:
            failed += bool(change.error)
            resumed += change.resumed
        ok = self._ok + len(ended) - failed
        return Totals(ok, self._failed + failed, self._resumed + resumed, self._done)

    def _read_jobs(self) -> list[bytes]:
        with self._disk:
            return self._dir.job_lines()

    def _write_jobs(self, lines: Sequence[bytes]) -> None:
        with self._disk:
            self._dir.add_job_lines(lines)

    # What is spent

    def spent(self) -> Spent:
        with self._disk:
            tokens, cost = self._journal.spent()
            self._table.outside = {BUDGET_TOKENS: tokens, BUDGET_COST: round(cost * DOLLAR)}
        return super().spent()

    def learnt(self) -> tuple[int, ...] | None:
        with self._disk:
            return self._journal.learnt()

    def _write_table(self, table: JsonObject) -> None:
        with self._disk:
            if self._directory is not None:
                self._journal.set_fact(TABLE, to_json(table).decode())


def _text(table: Table) -> str:
    return to_json(table.to_json()).decode()
