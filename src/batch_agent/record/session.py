"""One session of a run in its directory: opened, begun when the fingerprint is known, and ended.

Decides which record belongs to a row, and how much of it is reused. Finished rows are returned, unfinished rows
continue, failed rows are retried from the failed step.
"""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

from batch_agent.compiler.schema import OutputSchema
from batch_agent.job import AgentResult, Job
from batch_agent.messages import JsonObject
from batch_agent.record.base import Account, Identity, OpenStore, Progress
from batch_agent.record.codec import FORMAT
from batch_agent.record.journal import Journal
from batch_agent.record.keys import Keys
from batch_agent.record.rundir import RunDir, State, read_run
from batch_agent.record.sqlite import SqliteJournal
from batch_agent.record.steps import Past
from batch_agent.record.trail import Trail
from batch_agent.version import __version__

T = TypeVar("T")
logger = logging.getLogger("batch_agent")


@dataclass(frozen=True, slots=True)
class Resuming:
    """How to use existing records. ``force``: rows keep their answers even if the spec changed. ``retry``: the types of
    failure that are retried; True means all, False none."""

    resume: bool = False
    force: bool = False
    retry: bool | Sequence[str] = True


class Record(Protocol):
    """Records the rows of one run."""

    @property
    def has_past(self) -> bool:
        """Whether rows may have a record, so that they must be looked up."""
        ...

    def identity(self, job: Job, question: str) -> Identity:
        """Return the identity of a row. Called once for each row that becomes a job, in input order."""
        ...

    def new_trail(self, identity: Identity) -> Trail: ...

    async def trails(self, identities: Sequence[Identity]) -> list[Trail]: ...

    def publish(self, result: AgentResult[object]) -> None:
        """Record the result of a row."""
        ...


class RunSession(Record, Protocol):
    """A session of a run at its record, from ``begin`` to ``end``."""

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
    ) -> None: ...

    def part(self, fingerprint: bytes) -> Record:
        """Return a separate record for a run inside this one."""
        ...

    async def spent_before(self) -> tuple[int, float, tuple[int, ...] | None]: ...

    def touch(self) -> None: ...

    def say_trouble(self, trouble: str | None, since: float) -> None: ...

    @property
    def lag(self) -> float: ...

    async def flush(self) -> bool: ...

    async def end(self, state: State, why: str, summary: JsonObject) -> None: ...


class Session:
    def __init__(self, directory: RunDir, thread: ThreadPoolExecutor, resuming: Resuming) -> None:
        self._directory = directory
        self._thread = thread
        self._resuming = resuming
        self._journal: Journal | None = None
        self._keys = Keys(b"")
        self._facts: JsonObject = {}
        self.has_past = False

    @classmethod
    async def open(cls, path: Path, resuming: Resuming, open_store: OpenStore = SqliteJournal.open) -> Session:
        """Open and lock the directory. Nothing of an earlier session is changed before ``begin``."""
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-agent-journal")
        loop = asyncio.get_running_loop()
        opening = loop.run_in_executor(thread, lambda: RunDir.open(path, resume=resuming.resume, open_store=open_store))
        try:
            return cls(await asyncio.shield(opening), thread, resuming)
        except BaseException:
            if await to_its_end(opening) is None:  # cancelled during the opening
                await to_its_end(loop.run_in_executor(thread, opening.result().close))
            thread.shutdown(wait=False)
            raise

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
        """Begin the session. ``facts`` are further fields of ``run.json``. ``rows_under`` is the digest that row keys
        start from, usually the fingerprint. ``schema`` is the output schema. ``account`` reports what this session
        spends."""
        self._keys = Keys(rows_under)
        self._directory.schema = schema
        began = now_text()
        next_agent, previous, forced = await self._run(lambda: self._prepare(fingerprint, began))
        self.has_past = next_agent > 1
        self._facts = {
            "state": "running",
            "why": None,
            "fingerprint": fingerprint.hex(),
            "forced": forced,
            "started": previous.get("started", began),
            "session_started": began,
            "ended": None,
            "versions": versions(),
            "command": previous.get("command"),
            **facts,
        }
        self._warn(previous)
        await self._run(lambda: self._directory.write_run(self._facts))
        self._journal = Journal(
            self._directory.journal,
            self._directory,
            self._thread,
            next_agent=next_agent,
            account=account,
            on_backlog=on_backlog,
            on_overdue=on_overdue,
        )

    def _prepare(self, fingerprint: bytes, began: str) -> tuple[int, JsonObject, bool]:
        journal = self._directory.journal
        next_agent = journal.next_agent()
        previous: JsonObject = {}
        with suppress(Exception):  # only a record of the past; the run works without it
            previous = read_run(self._directory.path)
        # Answers that were kept by ``force`` stay valid until the spec changes again.
        kept = bool(previous.get("forced")) and previous.get("fingerprint") == fingerprint.hex()
        forced = self._resuming.force or kept
        if next_agent > 1:
            journal.sort_by("row" if forced else "key")
        journal.begin(fingerprint, began)
        self._directory.begin_files()
        return next_agent, previous, forced

    def _warn(self, previous: JsonObject) -> None:
        if self._directory.lost_journal:
            logger.warning("the journal of %s is missing: every row is processed again", self._directory.path)
        elif not self.has_past:
            return
        elif self._facts["forced"]:
            logger.warning(
                "force_resume=True (--force-resume): rows of %s keep the answers they have, even if the task, model, "
                "schema or tools changed",
                self._directory.path,
            )
        elif previous.get("fingerprint") not in (None, self._facts["fingerprint"]):
            logger.warning(
                "the task, model, schema or tools of %s have changed: rows are processed again. Old answers stay in "
                "the journal; force_resume=True, on the command line --force-resume, uses them",
                self._directory.path,
            )

    def say_trouble(self, trouble: str | None, since: float) -> None:
        """Write to ``run.json`` what currently blocks the run, and since when, for readers outside."""
        if self._journal is not None and self._facts.get("trouble") != trouble:
            self._facts["trouble"], self._facts["trouble_since"] = trouble, since if trouble else None
            facts = dict(self._facts)
            self._run(lambda: self._directory.write_run(facts)).add_done_callback(_heard)

    # Rows

    def part(self, fingerprint: bytes) -> Part:
        """Return a separate record for a run inside this one, in the same journal."""
        return Part(self, fingerprint)

    def identity(self, job: Job, question: str) -> Identity:
        """Return the identity of a row. Called once for each row that becomes a job, in input order."""
        return self._keys.identity(job, question)

    def new_trail(self, identity: Identity) -> Trail:
        return Trail(self._open_journal, identity)

    async def trails(self, identities: Sequence[Identity]) -> list[Trail]:
        found = await self._open_journal.claim(identities)
        return [self._trail(identity, past) for identity, past in zip(identities, found, strict=True)]

    def _trail(self, identity: Identity, past: Past | None) -> Trail:
        retried = past is not None and past.failed is not None and self._retried(past.failed.error.type)
        return Trail(self._open_journal, identity, past, retried=retried, checks=not self._facts["forced"])

    def _retried(self, error_type: str) -> bool:
        retry = self._resuming.retry
        return retry if isinstance(retry, bool) else error_type in retry

    def publish(self, result: AgentResult[object]) -> None:
        self._open_journal.publish(result)

    async def spent_before(self) -> tuple[int, float, tuple[int, ...] | None]:
        """Return the tokens and $ of earlier sessions, with unreturned leases, and their statistics of calls."""
        journal = self._directory.journal
        return await self._run(lambda: (*journal.spent(), journal.learnt()))

    def touch(self) -> None:
        """Commit soon what was spent, and a new lease."""
        self._open_journal.touch()

    def beside(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run ``function`` in the journal's thread, between two commits."""
        return self._run(function)

    @property
    def lag(self) -> float:
        """Seconds that the oldest record has waited for the disk."""
        return 0.0 if self._journal is None else self._journal.lag

    async def flush(self) -> bool:
        """Wait until everything added or published is on disk; returns False if that failed. A cancellation does not
        stop the wait."""
        return self._journal is not None and await to_its_end(self._journal.flush()) is None

    # The end

    async def end(self, state: State, why: str, summary: JsonObject) -> None:
        """Write what is left and unlock the directory. A cancellation does not interrupt this. Raises StoreError if
        something could not be written."""
        failure = None
        if self._journal is not None:
            failure = await to_its_end(self._journal.flush())
            state = "failed" if failure is not None else state
            why = why or ("" if failure is None else str(failure))
        progress = None if self._journal is None else self._journal.progress
        failure = await to_its_end(self._run(lambda: self._finish(state, why, summary, progress))) or failure
        self._thread.shutdown(wait=False)
        if failure is not None:
            raise failure

    def _finish(self, state: State, why: str, summary: JsonObject, progress: Progress | None) -> None:
        with ExitStack() as last_things:  # run in reverse order; each runs even if another fails
            last_things.callback(self._directory.close)
            if progress is not None:
                rows: JsonObject = {
                    "read": self._keys.count,
                    "digest": self._keys.digest,
                    "ok": progress.ok,
                    "failed": progress.failed,
                    "resumed": progress.resumed,
                }
                facts = {**self._facts, "state": state, "why": why or None, "ended": now_text(), "rows": rows}
                last_things.callback(self._directory.write_summary, summary)
                last_things.callback(self._directory.write_run, facts)
                last_things.callback(self._directory.journal.commit, (), progress)
            last_things.callback(self._directory.end_files, every=state == "complete")

    def _run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, function)

    @property
    def _open_journal(self) -> Journal:
        assert self._journal is not None, "begin() must be called before rows arrive"
        return self._journal


class Part:
    """The rows of a run inside another one. They have their own fingerprint, and no lines in the outer run's files."""

    def __init__(self, session: Session, fingerprint: bytes) -> None:
        self._session = session
        self._keys = Keys(fingerprint)

    @property
    def has_past(self) -> bool:
        return self._session.has_past

    def identity(self, job: Job, question: str) -> Identity:
        return self._keys.identity(job, question)

    def new_trail(self, identity: Identity) -> Trail:
        return self._session.new_trail(identity)

    async def trails(self, identities: Sequence[Identity]) -> list[Trail]:
        return await self._session.trails(identities)

    def publish(self, result: AgentResult[object]) -> None:
        """Does nothing: the code that started the inner run has its results."""


def _heard(written: asyncio.Future[None]) -> None:
    if not written.cancelled() and (error := written.exception()) is not None:
        logger.warning("the reason why the run is blocked could not be written to run.json: %s", error)


async def to_its_end(future: asyncio.Future[Any]) -> BaseException | None:
    """Wait until the future is done, even through cancellations. Returns its exception, or None."""
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([future])
    return future.exception()


def now_text() -> str:
    """Return the current time in the format of ``run.json``."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> JsonObject:
    """Return the versions of the software that records a run."""
    return {
        "batch-agent": __version__,
        "python": platform.python_version(),
        "journal": FORMAT,
    }
