"""A worker: joins a run that another process feeds, and works until the run is done or the worker is stopped.

It is an ordinary ``Run``. Its inputs are leased rows, and its record is the shared one.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

from batch_agent.cluster.leases import Over, WorkerLeases
from batch_agent.cluster.lending import Lending
from batch_agent.cluster.row_json import decode_row
from batch_agent.cluster.spec_json import pieces, read_spec
from batch_agent.cluster.worker_session import WorkerSession
from batch_agent.engine.run.lender import Lender
from batch_agent.engine.run.prepare import Prepared, prepare
from batch_agent.engine.run.recording import fingerprint_of
from batch_agent.engine.run.run import Run
from batch_agent.engine.run.shared import Shared
from batch_agent.errors import SpecError, StoreError
from batch_agent.fleet.hostfile import KEPT_HOSTFILES
from batch_agent.messages import JsonObject
from batch_agent.store.address import StoreAddress
from batch_agent.store.redis.store import RedisRunStore
from batch_agent.store.session import versions
from batch_agent.store.shared import LEASE, RunStore

T = TypeVar("T")
logger = logging.getLogger("batch_agent")

WAIT = 60.0  # seconds to wait for a run, or for a new feeder
LOOK = 0.25  # seconds between two checks for a run


class NoRunCame(StoreError):
    """There was no run to work on, or it had no feeder."""


@dataclass(frozen=True, slots=True)
class WorkReport:
    """Number of rows that a worker finished, and the reason why it left."""

    rows: int
    why: Over


class WorkerRun(Run[object]):
    """The run of one worker. Its results go to the shared record."""

    def __init__(
        self, prepared: Prepared, session: WorkerSession, lender: Lender, within: Shared | None = None
    ) -> None:
        leases = session.leases
        spec = prepared.spec.model_copy(update={"inputs": leases, "run_dir": None, "on_result": None, "resume": False})
        plan = copy.copy(prepared.plan)
        plan.total = None
        super().__init__(replace(prepared, spec=spec, plan=plan), session=session, within=within, lender=lender)
        self._leases = leases
        leases.on_lost = self._drop

    def _drop(self, index: int) -> None:
        if self._batch is not None:
            self._batch.drop(index)

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
    leases = WorkerLeases(
        store,
        worker,
        lease=float(cast(float, facts.get("lease", LEASE))),
        generation=store.standing().generation,
        patience=patience,
    )
    return WorkerSession(leases, str(facts["fingerprint"]), messages=facts.get("keep") != "results")


class Worker:
    """Works on the run of a store.

    ``import_from`` is the directory of the user's modules. ``wait`` is the number of seconds to wait for a run to
    start, or for a new feeder.
    """

    def __init__(self, store: RunStore, *, import_from: Path | None = None, wait: float = WAIT) -> None:
        self._store, self._import_from, self._wait = store, import_from, wait
        self._leaving = asyncio.Event()
        self.run: WorkerRun | None = None

    def drain(self) -> None:
        """Take no more rows, finish the running ones, and leave."""
        self._leaving.set()
        if self.run is not None:
            self.run.drain()

    def cancel(self) -> None:
        """Hand back every row and leave."""
        self._leaving.set()
        if self.run is not None:
            self.run.cancel()

    async def work(self) -> WorkReport:
        """Work on the run. Raises SpecError if this process cannot work on it, NoRunCame if there is no run."""
        facts = await self._facts()
        if facts is None:
            return WorkReport(0, "asked to leave" if self._leaving.is_set() else "done")
        lent = self._store.lent()
        KEPT_HOSTFILES.set(lent.get_file)
        prepared = prepare_worker(facts, self._import_from)
        description: JsonObject = {"host": platform.node(), "process": os.getpid()}
        worker = await _in_thread(lambda: self._store.join(description))
        session = await _in_thread(lambda: open_worker_session(self._store, worker, facts, patience=self._wait))
        lender = Lending(lent, str(worker), float(cast(float, facts.get("lease", LEASE))))
        self.run = run = WorkerRun(prepared, session, lender)
        if self._leaving.is_set():
            session.leases.leave()
        await run.finish()
        rows, why = run.statistics().done, session.leases.over
        if why == "no feeder":
            raise NoRunCame(f"the queue is empty, and the run had no feeder for {self._wait:g} s")
        return WorkReport(rows, why or "done")

    async def _facts(self) -> JsonObject | None:
        """Wait for a run and return its facts. None if the run is done, or if this worker is stopped."""
        deadline = asyncio.get_running_loop().time() + self._wait
        while not self._leaving.is_set():
            facts = await _in_thread(self._store.facts)
            if facts is not None:
                if facts.get("state") == "complete":
                    return None
                standing = await _in_thread(self._store.standing)
                left = standing.counts.unstarted + standing.counts.leased
                if standing.phase == "running" and (standing.feeder or left):
                    return facts
            if asyncio.get_running_loop().time() >= deadline:
                what = "there is no run" if facts is None else "the run has no feeder"
                raise NoRunCame(f"{what}; waited {self._wait:g} s (--wait)")
            try:
                await asyncio.wait_for(self._leaving.wait(), LOOK)
            except TimeoutError:
                continue
        return None


async def _in_thread(function: Callable[[], T]) -> T:
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


async def work(url: str, *, import_from: str | Path | None = None, wait: float = WAIT) -> WorkReport:
    """Work on the run at ``url`` until it is done."""
    store = await open_store(url, wait)
    try:
        return await Worker(store, import_from=None if import_from is None else Path(import_from), wait=wait).work()
    finally:
        store.close()


async def open_store(url: str, wait: float) -> RedisRunStore:
    """Open the store at ``url``.

    Raises SpecError for a wrong URL, and if the store is unreachable for ``wait`` seconds.
    """
    address = StoreAddress.parse(url)
    deadline = asyncio.get_running_loop().time() + wait
    while True:
        try:
            return await _in_thread(lambda: RedisRunStore.open(address))
        except StoreError as error:
            if asyncio.get_running_loop().time() >= deadline:
                raise SpecError(str(error)) from None
        await asyncio.sleep(LOOK)
