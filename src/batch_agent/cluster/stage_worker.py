"""A worker of a pipeline: one run for each stage that has rows, with slots and budget in common.

The pipeline's feeder decides when a stage begins and ends. A worker joins a stage when it has begun, and again if a new
feeder begins it again.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from batch_agent.agent.prepare import Prepared
from batch_agent.cluster.leases import Over
from batch_agent.cluster.lending import Lending
from batch_agent.cluster.worker_run import WorkerRun, in_thread, open_worker_session, prepare_worker
from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject
from batch_agent.record.shared import RunStore
from batch_agent.run.run import Run
from batch_agent.run.shared_backends import SharedBackends

LOOK = 0.5  # seconds between two looks at the pipeline, and at a stage without rows


class StagesRun(Run[object]):
    """The run of one worker around its runs of the stages. It has no row of its own.

    ``store`` is that of the pipeline, ``stages`` those of its stages. ``patience`` is the number of seconds to wait if
    there is no feeder. ``over`` is the reason why it ended, and ``finished`` counts the rows.
    """

    def __init__(
        self,
        prepared: Prepared,
        store: RunStore,
        stages: Mapping[str, RunStore],
        lender: Lending,
        *,
        import_from: Path | None,
        patience: float,
    ) -> None:
        self._backends = SharedBackends()
        plan = copy.copy(prepared.plan)
        plan.total = None
        spec = prepared.spec.model_copy(update={"inputs": list(stages)})
        super().__init__(replace(self._backends.share(prepared), spec=spec, plan=plan), lender=lender)
        self._feed.reading = True  # it starts no agent itself
        self._store, self._stores, self._shares = store, stages, lender
        self._import_from, self._patience = import_from, patience
        self._runs: dict[str, WorkerRun] = {}  # stages that this worker works on now
        self._leaving = asyncio.Event()
        self.over: Over = ""
        self.finished = 0

    async def finish(self) -> None:
        """Work until the pipeline ends or this worker leaves."""
        async with self:
            async for _ in self.results():
                pass

    def drain(self) -> None:
        self._leave("asked to leave")
        super().drain()

    def cancel(self) -> None:
        self.over = self.over or "asked to leave"
        super().cancel()

    def cancel_row(self, row: str | int) -> None:
        run, row = self._stage_row(row)
        run.cancel_row(row)

    def retry_row(self, row: str | int) -> None:
        run, row = self._stage_row(row)
        run.retry_row(row)

    def live_row(self, row: str | int) -> JsonObject:
        run, row = self._stage_row(row)
        return run.live_row(row)

    def _stage_row(self, row: str | int) -> tuple[WorkerRun, str]:
        stage, _, name = str(row).partition("/")
        if stage not in self._runs:
            raise SpecError(f"this worker has no row of the stage {stage!r}")
        return self._runs[stage], name

    async def _work(self, prepared: Prepared) -> None:
        async with self._budget(), asyncio.TaskGroup() as tasks:
            for name, store in self._stores.items():
                tasks.create_task(self._work_on(name, store))
            self._leave(await self._pipeline_ends())

    def _leave(self, why: Over) -> None:
        """Take no more rows; rows that have begun finish."""
        self.over = self.over or why
        self._leaving.set()
        for run in self._runs.values():
            run.drain()

    async def _pipeline_ends(self) -> Over:
        """Wait for the end of the pipeline, and return the reason to leave."""
        lonely_since: float | None = None
        while not self._leaving.is_set():
            standing = await in_thread(self._store.standing)
            if standing.phase != "running":
                facts = await in_thread(self._store.facts) or {}
                return "done" if facts.get("state") == "complete" else "asked to leave"
            now = asyncio.get_running_loop().time()
            if standing.feeder or any(run.holds_rows for run in self._runs.values()):
                lonely_since = None
            else:
                lonely_since = lonely_since or now
                if now - lonely_since >= self._patience:
                    return "no feeder"
            await self._pause()
        return self.over

    async def _work_on(self, stage: str, store: RunStore) -> None:
        """Work on a stage whenever it has rows, until this worker leaves."""
        while (facts := await self._begun(store)) is not None:
            prepared = self._backends.share(prepare_worker(facts, self._import_from))
            number = await in_thread(partial(store.join, {"stage": stage}))
            session = await in_thread(partial(open_worker_session, store, number, facts, patience=float("inf")))
            run = self._runs[stage] = WorkerRun(prepared, session, self._shares, self.shared, stage=stage)
            if self._leaving.is_set():
                run.drain()
            try:
                await run.finish()
            finally:
                del self._runs[stage]
                self.finished += run.statistics().done
            if run.shared.dispatcher.over is not None or self.shared.spending.exhausted:
                return  # the feeder ends the stage

    async def _begun(self, store: RunStore) -> JsonObject | None:
        """Wait until a stage has rows to work on, and return its facts; None if this worker leaves."""
        while not self._leaving.is_set():
            facts = await in_thread(store.facts)
            if facts is not None:
                standing = await in_thread(store.standing)
                waits = standing.counts.unstarted + standing.counts.leased
                if standing.phase == "running" and not standing.done and (standing.feeder or waits):
                    return facts
            await self._pause()
        return None

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._leaving.wait(), LOOK)
