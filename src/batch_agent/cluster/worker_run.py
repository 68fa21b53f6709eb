"""The run of a worker. It is an ordinary ``Run``: its inputs are leased rows, and its record is the shared one."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

from batch_agent.agent.fingerprint import fingerprint_of
from batch_agent.agent.prepare import Prepared, prepare
from batch_agent.cluster.leases import WorkerLeases
from batch_agent.cluster.lending import Lending
from batch_agent.cluster.row_json import decode_row
from batch_agent.cluster.spec_json import imported, pieces, read_spec
from batch_agent.cluster.worker_session import WorkerSession
from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject
from batch_agent.record.session import versions
from batch_agent.record.shared import LEASE, RunStore
from batch_agent.run.run import Run
from batch_agent.run.shared import Shared

T = TypeVar("T")

ROWS = "row_schema"  # the fact that names the class of the rows


class WorkerRun(Run[object]):
    """The run of one worker. Its results go to the shared record. A ``stage`` of a pipeline runs ``within`` the state
    of the worker's other stages."""

    def __init__(
        self,
        prepared: Prepared,
        session: WorkerSession,
        lender: Lending,
        within: Shared | None = None,
        *,
        stage: str = "",
    ) -> None:
        leases = session.leases
        spec = prepared.spec.model_copy(update={"inputs": leases, "run_dir": None, "on_result": None, "resume": False})
        plan = copy.copy(prepared.plan)
        plan.total = None
        super().__init__(replace(prepared, spec=spec, plan=plan), session=session, within=within, lender=lender)
        self._leases = leases
        lender.share_answers(prepared.backend)
        if stage:
            lender.count_stage(stage, self._metrics.spent)
        leases.on_lost, leases.on_need = self._drop, lender.soon
        if self.shared.dispatcher.scheduler.closed:  # the budget was used up before this stage began
            self.drain()

    async def _check_first(self) -> None:
        self._feed.set_reading(True)  # rows of other stages do not wait for evidence from this one
        try:
            await super()._check_first()
        finally:
            self._feed.set_reading(False)

    def _drop(self, index: int) -> None:
        if self._batch is not None:
            self._batch.drop(index)

    @property
    def holds_rows(self) -> bool:
        return bool(self._leases.held)

    def drain(self) -> None:
        self._leases.leave()
        super().drain()

    async def finish(self) -> None:
        """Work until the leases end."""
        async with self:
            async for _ in self.results():
                pass


def open_worker_session(store: RunStore, worker: int, facts: JsonObject, *, patience: float) -> WorkerSession:
    """Return the session of a worker. Calls the store, so it blocks."""
    rows = facts.get(ROWS)
    leases = WorkerLeases(
        store,
        worker,
        lease=float(cast(float, facts.get("lease", LEASE))),
        generation=store.standing().generation,
        patience=patience,
        schema=None if rows is None else OutputSchema.of(cast("type[object]", imported(str(rows)))),
    )
    return WorkerSession(leases, str(facts["fingerprint"]), messages=facts.get("keep") != "results")


async def in_thread(function: Callable[[], T]) -> T:
    """Run a blocking call of the store in a thread."""
    return await asyncio.get_running_loop().run_in_executor(None, function)


def prepare_worker(facts: JsonObject, import_from: Path | None) -> Prepared:
    """Prepare the feeder's run in this process. Raises SpecError, which names what differs."""
    theirs, ours = cast(JsonObject, facts.get("versions", {})), versions()
    for name in ("batch-agent", "journal"):
        if theirs.get(name) != ours[name]:
            raise SpecError(
                f"the run was started with {name} {theirs.get(name)}, this worker has {ours[name]}: install the same"
            )
    prepared = prepare(read_spec(cast(JsonObject, facts["spec"]), [], import_from))
    prepared.plan.check_first(decode_row(str(facts["first"]).encode()))
    if fingerprint_of(prepared).hex() != facts["fingerprint"]:
        known, here = cast("dict[str, str]", facts.get("pieces", {})), pieces(prepared)
        differ = sorted(name for name in {*known, *here} if known.get(name) != here.get(name))
        raise SpecError(
            f"the requests of this worker would differ from those of the run in: {', '.join(differ) or 'the worker'}. "
            "Give it the same code and environment (--import-from)"
        )
    return prepared
