"""A feeder's session with a shared run: the facts of the run, and the lease that makes this process the only feeder."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, TypeVar

from batch_agent.compiler.schema import OutputSchema
from batch_agent.job import AgentResult, Job
from batch_agent.messages import JsonObject
from batch_agent.record.base import Account, Identity
from batch_agent.record.keys import Keys
from batch_agent.record.rundir import State, stage_names
from batch_agent.record.session import now_text, to_its_end, versions
from batch_agent.record.shared import FeederSitting, RunStore
from batch_agent.record.trail import Trail
from batch_agent.spec import BatchSpec

T = TypeVar("T")
logger = logging.getLogger("batch_agent")

CALLS = 4  # most concurrent calls of the store: feeding, reading results, renewing the lease


class FeederSession:
    """``facts`` are the facts that workers need, in addition to those of every run."""

    has_past = False

    def __init__(self, store: RunStore, spec: BatchSpec) -> None:
        self.store, self.lease = store, spec.lease
        self.retry: bool | Collection[str] = spec.retry_failed
        if isinstance(spec.retry_failed, str):
            self.retry = (spec.retry_failed,)
        self.facts: JsonObject = {}
        self.keys = Keys(b"")
        self._resume, self._keep_results_only = spec.resume, spec.keep == "results"
        self._feed: FeederSitting | None = None
        self._threads = ThreadPoolExecutor(max_workers=CALLS, thread_name_prefix="batch-agent-feeder")
        self.ok = self.failed = self.resumed = 0

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
        self.keys = Keys(rows_under)
        began = now_text()
        previous = await self.run(self.store.facts) or {}
        self.facts = {
            **self.facts,
            "state": "running",
            "why": None,
            "fingerprint": fingerprint.hex(),
            "forced": False,
            "started": previous.get("started", began),
            "session_started": began,
            "ended": None,
            "versions": versions(),
            "command": previous.get("command"),
            "lease": self.lease,
            "keep": "results" if self._keep_results_only else "all",
            **facts,
        }
        self._feed = await self.run(
            lambda: self.store.open_feed(self.facts, resume=self._resume, keep_results_only=self._keep_results_only)
        )
        changed = bool(previous) and previous.get("fingerprint") != self.facts["fingerprint"]
        if changed and not stage_names(self.facts):  # a pipeline has no rows of its own
            logger.warning(
                "the task, model, schema or tools of the run have changed: all rows are sent again, and workers that "
                "were started before the change leave"
            )

    @property
    def feed(self) -> FeederSitting:
        assert self._feed is not None, "begin() is called before rows are fed"
        return self._feed

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run a blocking call of the store in a thread."""
        return asyncio.get_running_loop().run_in_executor(self._threads, function)

    def say_trouble(self, trouble: str | None, since: float) -> None:
        if self._feed is not None and self.facts.get("trouble") != trouble:
            self.facts["trouble"], self.facts["trouble_since"] = trouble, since if trouble else None
            facts, sitting = dict(self.facts), self._feed.sitting
            self.run(lambda: self.store.write_facts(sitting, facts)).add_done_callback(_log_failure)

    async def end(self, state: State, why: str, summary: JsonObject) -> None:
        """Write the end of the run, so that workers leave. Raises StoreError if that fails."""
        failure = None
        if self._feed is not None:
            facts = self.last_facts(state, why, summary)
            sitting = self._feed.sitting
            failure = await to_its_end(self.run(lambda: self.store.close_feed(sitting, facts, "ended")))
        self._threads.shutdown(wait=False)
        self.store.close()
        if failure is not None:
            raise failure

    def last_facts(self, state: State, why: str, summary: JsonObject) -> JsonObject:
        """Return the facts of the run at the end of this session."""
        rows: JsonObject = {
            "read": self.keys.count,
            "digest": self.keys.digest,
            "ok": self.ok,
            "failed": self.failed,
            "resumed": self.resumed,
        }
        return {
            **self.facts, "state": state, "why": why or None, "ended": now_text(), "rows": rows, "summary": summary,
        }  # fmt: skip

    # The rest of the session interface. A feeder works on no row, so most of it is not supported.

    def part(self, fingerprint: bytes) -> NoReturn:
        raise NotImplementedError("a feeder records no rows")

    def identity(self, job: Job, question: str) -> Identity:
        return self.keys.identity(job, question)

    def new_trail(self, identity: Identity) -> NoReturn:
        raise NotImplementedError("a feeder records no rows")

    async def trails(self, identities: Sequence[Identity]) -> list[Trail]:
        raise NotImplementedError("a feeder records no rows")

    def publish(self, result: AgentResult[object]) -> None:
        raise NotImplementedError("a feeder records no rows")

    async def spent_before(self) -> tuple[int, float, tuple[int, ...] | None]:
        return 0, 0.0, None

    def touch(self) -> None:
        """Do nothing: the workers record what they spend."""

    @property
    def lag(self) -> float:
        return 0.0

    async def flush(self) -> bool:
        return True


def _log_failure(written: asyncio.Future[None]) -> None:
    if not written.cancelled() and (error := written.exception()) is not None:
        logger.warning("the reason why the run is blocked could not be recorded: %s", error)
