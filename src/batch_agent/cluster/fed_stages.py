"""The feeder's side of a pipeline in a shared store. Each stage is a shared run of its own, with its rows and leases.

The run around the stages has no rows. Its record has what belongs to the whole: the facts, the lease of the feeder, and
the table from which workers get their shares. Functions between the stages run in this process.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from pydantic import JsonValue

from batch_agent.agent.prepare import Prepared
from batch_agent.backends.base import Backend
from batch_agent.cluster.fed_run import FedRun, facts_for_workers, refuse_force
from batch_agent.cluster.feeder_session import FeederSession
from batch_agent.cluster.lending import Lending
from batch_agent.cluster.spec_json import spec_json
from batch_agent.errors import Interrupted
from batch_agent.events import Sink
from batch_agent.record.shared import RunStore
from batch_agent.run.recording import begin_session
from batch_agent.run.run import Run
from batch_agent.run.steering import Controls


class FedStages(Run[object]):
    """``open_shared`` opens the store of the pipeline, or of the stage with that name; it blocks. ``stages_work`` runs
    the stages, which ``stage`` returns."""

    def __init__(
        self,
        prepared: Prepared,
        open_shared: Callable[[str], RunStore],
        stages_work: Callable[[], Awaitable[object]],
        sinks: Sequence[Sink] = (),
        command: Mapping[str, JsonValue] | None = None,
        *,
        controls: Controls,
    ) -> None:
        refuse_force(prepared.spec)
        self._spec_json = spec_json(prepared)
        self._given, self._open_shared, self._stages_work = prepared.spec, open_shared, stages_work
        self._runs: dict[str, FedRun[object]] = {}
        self._stage_backends: list[Backend] = []
        local = prepared.spec.model_copy(update={"run_dir": None, "resume": False})
        plan = copy.copy(prepared.plan)
        plan.total = None  # the pipeline has ended when its stages have, whatever was counted
        super().__init__(replace(prepared, spec=local, plan=plan), sinks, command, controls=controls)
        self._feed.reading = True  # it starts no agent itself

    def stage(self, name: str, prepared: Prepared, row_schema: type[object] | None) -> Run[object]:
        """Return the run of a stage, whose rows are instances of ``row_schema``.

        Raises SpecError for options that other processes cannot use.
        """
        run = self._runs[name] = FedRun(
            prepared,
            partial(self._open_shared, name),
            feed_only=self._given.feed_only,
            within=self.shared,
            lent=self._lending,
            stage=name,
            row_schema=row_schema,
        )
        self._stage_backends.append(prepared.backend)
        return run

    def _lending(self) -> Lending:
        assert isinstance(self._lender, Lending), "the stages run inside this run"
        return self._lender

    async def _work(self, prepared: Prepared) -> None:
        session = self._session = FeederSession(await asyncio.to_thread(self._open_shared, ""), self._given)
        first = next(iter(await self._rows.peek()), None)
        session.facts = facts_for_workers(prepared, self._spec_json, first)
        session.facts["specs"] = {name: run.spec_json for name, run in self._runs.items()}
        await begin_session(
            session,
            prepared,
            self._command,
            None,
            account=self.shared.spending,
            stages=list(self._runs),
            on_backlog=lambda full: None,
            on_overdue=lambda overdue: None,
        )
        self._lender = lender = Lending(session.store.lent(), f"feeder-{session.feed.sitting}", session.lease)
        await lender.begin(*self._stage_backends)
        async with self._budget(), asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(_keep(session))
            with suppress(Interrupted):  # a stage ended early, and its record says why
                await self._stages_work()
                self._feed.end()
            keeping.cancel()

    def _out_of_budget(self, limit: str) -> None:
        super()._out_of_budget(limit)
        for run in self._runs.values():
            run.stop_feeding()


async def _keep(session: FeederSession) -> None:
    """Renew the lease of the feeder until cancelled. Raises FeederReplaced."""
    while True:
        await asyncio.sleep(session.lease / 3)
        await session.run(lambda: session.store.keep_feed(session.feed.sitting))
