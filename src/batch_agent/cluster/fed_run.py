"""The feeder's side of a run in a shared store. For its user it is an ordinary ``Run``.

It reads the inputs and delivers the results. Unless ``feed_only`` is set, this process is also a worker. That worker
uses the same dispatcher, so that events and statistics are the same as on one machine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from pydantic import JsonValue

from batch_agent.agent.prepare import Prepared
from batch_agent.cluster.feeder import Feeder
from batch_agent.cluster.feeder_session import FeederSession
from batch_agent.cluster.lending import Lending
from batch_agent.cluster.row_json import encode_row
from batch_agent.cluster.spec_json import pieces, schema_json, spec_json
from batch_agent.cluster.worker_run import ROWS, WorkerRun, open_worker_session
from batch_agent.compiler.schema import OutputSchema
from batch_agent.dispatch.row_channel import RowChannel
from batch_agent.errors import InputError, SpecError
from batch_agent.events import (
    DrainStarted,
    Ended,
    Event,
    JobFinished,
    JobStarted,
    ModelChosen,
    RunFinished,
    RunStarted,
    Sink,
    TurnFinished,
)
from batch_agent.job import AgentResult, Placed, UnreadableRow
from batch_agent.messages import JsonObject, Usage
from batch_agent.record.shared import RunStore
from batch_agent.run.batch import Batch
from batch_agent.run.delivery import Delivery
from batch_agent.run.recording import asked_json
from batch_agent.run.run import Run
from batch_agent.run.shared import Shared
from batch_agent.spec import BatchSpec

T = TypeVar("T")
logger = logging.getLogger("batch_agent")

# Events that the feeder emits itself, for the rows of all workers.
OWN_EVENTS = (RunStarted, RunFinished, JobStarted, JobFinished, ModelChosen, DrainStarted)


class FedRun(Run[T]):
    """``open_shared`` opens the store of the run; it blocks. With ``feed_only`` this process works on no row.

    A ``stage`` of a pipeline runs ``within`` the state of the pipeline's run, and uses what ``lent`` returns. Its rows
    are instances of ``row_schema``, if they are outputs of another stage.
    """

    def __init__(
        self,
        prepared: Prepared,
        open_shared: Callable[[], RunStore],
        sinks: Sequence[Sink] = (),
        command: Mapping[str, JsonValue] | None = None,
        *,
        feed_only: bool,
        within: Shared | None = None,
        lent: Callable[[], Lending] | None = None,
        stage: str = "",
        row_schema: type[object] | None = None,
    ) -> None:
        spec = prepared.spec
        refuse_force(spec)
        self.spec_json = spec_json(prepared)  # raises before anything is sent
        self._row_schema = row_schema
        self._open_shared, self._feed_only, self._lent, self._stage = open_shared, feed_only, lent, stage
        self._sitting = partial(FeederSession, spec=spec)
        self._fed: Feeder | None = None
        self._worker_run: WorkerRun | None = None
        self._number = 0  # of the worker in this process
        local = spec.model_copy(update={"run_dir": None, "resume": False, "no_hoist": True})
        super().__init__(replace(prepared, spec=local), sinks, command, within=within)
        self._feed.reading = True  # the worker has its own feed for the rows that it starts
        self._delivery: Delivery[object] = Delivery(local.on_result, self._hold)

    async def _work(self, prepared: Prepared) -> None:
        session = self._session = self._sitting(await asyncio.to_thread(self._open_shared))
        first = next(iter(await self._rows.peek()), None)
        value = first.value if isinstance(first, Placed) else first
        session.facts = facts_for_workers(prepared, self.spec_json, value)
        if self._row_schema is not None:
            session.facts[ROWS] = schema_json(self._row_schema)
        shapes, shared = prepared.shapes, self.shared
        shared.spending.set_prices((shapes.first, shapes.later, shapes.repair), prepared.prices)
        await self._begin_record(prepared)
        self._fed = feeder = Feeder(
            session,
            self._rows,
            prepared.plan,
            prepared.schema,
            started=self._row_started,
            finished=self._row_finished,
            row_schema=None if self._row_schema is None else OutputSchema.of(self._row_schema),
            originals=_originals(self._prepared.spec.inputs),
        )
        if self._cannot_continue:  # before this stage began
            feeder.stop()
        if self._lent is not None:
            self._lender = self._lent()
        else:
            self._lender = Lending(session.store.lent(), f"feeder-{session.feed.sitting}", session.lease)
            await self._lender.begin(prepared.backend)
        async with self._budget(), asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(feeder.keep())
            self._feeder = tasks.create_task(feeder.feed())
            delivering = tasks.create_task(feeder.deliver())
            working = None if self._feed_only else tasks.create_task(self._work_here(prepared, session))
            await asyncio.wait({delivering, *filter(None, (working,))}, return_when=asyncio.FIRST_COMPLETED)
            if not delivering.done() and self._cannot_continue:  # the other workers cannot either
                self._feed.close()
                delivering.cancel()
            await asyncio.wait({delivering})
            if feeder.fed and not feeder.outstanding:
                self._feed.end()
            keeping.cancel()
            if self._worker_run is not None:
                self._worker_run.drain()

    @property
    def _cannot_continue(self) -> bool:
        return self.shared.dispatcher.over is not None or bool(self.shared.spending.exhausted)

    async def _work_here(self, prepared: Prepared, session: FeederSession) -> None:
        """Work on rows in this process, as one of the workers."""
        store = session.store
        self._number = await session.run(lambda: store.join({"feeder": True}))
        work = await session.run(lambda: open_worker_session(store, self._number, session.facts, patience=float("inf")))
        within = replace(self.shared, emit=self._from_worker, pool=None, session=None)
        assert isinstance(self._lender, Lending)
        self._worker_run = run = WorkerRun(prepared, work, self._lender, within, stage=self._stage)
        run.id = self.id  # events of its rows carry the id of this run
        try:
            await run.finish()
        finally:
            self.shared.pool = run.shared.pool

    def _how_ended(self) -> tuple[Ended, BaseException | None]:
        if self._fed is not None and self._fed.failure is not None:
            self._failed_by = self._fed.failure
            return "failed", self._failed_by
        return super()._how_ended()

    def _from_worker(self, event: Event) -> None:
        if not isinstance(event, OWN_EVENTS):
            self._emit(event)

    def _out_of_budget(self, limit: str) -> None:
        super()._out_of_budget(limit)
        self.stop_feeding()

    def stop_feeding(self) -> None:
        """Feed no more rows; started rows finish."""
        if self._fed is not None:
            self._fed.stop()

    def drain(self) -> None:
        self.stop_feeding()
        if self._worker_run is not None:
            self._worker_run.drain()
        super().drain()

    @property
    def _steered_batch(self) -> Batch:
        run = self._worker_run
        return super()._steered_batch if run is None else run._steered_batch

    def _hold(self, full: bool) -> None:
        if self._fed is not None:
            self._fed.hold(full)

    def _row_started(self, index: int, job_id: str) -> None:
        self._emit(JobStarted(self.shared.clock(), self.id, index, job_id))

    async def _row_finished(self, result: AgentResult[object], worker: int) -> None:
        if worker != self._number and not result.resumed:
            self._emit_turns(result)
        self._emit(JobFinished.of(result, self.shared.clock(), self.id))
        await self._delivery.deliver(result)

    def _emit_turns(self, result: AgentResult[object]) -> None:
        """Emit the turns of a row of another worker, so that its usage and cost are counted here."""
        for turn in range(1, result.turns + 1):
            last = turn == result.turns
            usage, cost = (result.usage, result.cost) if last else (Usage(), None)
            self._emit(TurnFinished(self.shared.clock(), self.id, result.index, turn, usage, 0.0, None, cost))


def refuse_force(spec: BatchSpec) -> None:
    """Raise SpecError for an option that a shared store does not support."""
    if spec.force_resume:
        raise SpecError(
            "force_resume works only for run directories: copy the run into one with batch-agent copy URL DIR"
        )


def _originals(inputs: object) -> Sequence[object] | dict[int, object] | None:
    if isinstance(inputs, RowChannel):
        return {}
    return inputs if isinstance(inputs, list | tuple) else None


def facts_for_workers(prepared: Prepared, spec: JsonObject, first: object) -> JsonObject:
    """Return what a worker needs to prepare the same run. ``first`` is its first input."""
    try:
        shown = "null" if isinstance(first, UnreadableRow) else encode_row(first).decode()
    except InputError:  # this row fails alone
        shown = "null"
    model: JsonObject = {} if prepared.model is None else {"model": prepared.spec.model or prepared.model}
    return {"spec": {**spec, **model}, "first": shown, "pieces": {**pieces(prepared)}, "asked": asked_json(prepared)}
