"""A worker: joins a run that another process feeds, and works until the run is done or the worker is stopped.

``worker_run`` is its run of a batch, ``stage_worker`` that of a pipeline.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from batch_agent.agent.prepare import Prepared, prepare
from batch_agent.cluster.leases import Over
from batch_agent.cluster.lending import Lending
from batch_agent.cluster.spec_json import read_spec
from batch_agent.cluster.stage_worker import StagesRun
from batch_agent.cluster.worker_run import WorkerRun, in_thread, open_worker_session, prepare_worker
from batch_agent.errors import SpecError, StoreError
from batch_agent.fleet.hostfile import KEPT_HOSTFILES
from batch_agent.messages import JsonObject
from batch_agent.record.address import StoreAddress
from batch_agent.record.redis.store import RedisRunStore
from batch_agent.record.rundir import stage_names
from batch_agent.record.shared import LEASE, RunStore

WAIT = 60.0  # seconds to wait for a run, or for a new feeder
LOOK = 0.25  # seconds between two checks for a run


class NoRunCame(StoreError):
    """There was no run to work on, or it had no feeder."""


@dataclass(frozen=True, slots=True)
class WorkReport:
    """Number of rows that a worker finished, and the reason why it left."""

    rows: int
    why: Over


class Worker:
    """Works on the run of a store.

    ``import_from`` is the directory of the user's modules. ``wait`` is the number of seconds to wait for a run to
    start, or for a new feeder.
    """

    def __init__(self, store: RunStore, *, import_from: Path | None = None, wait: float = WAIT) -> None:
        self._store, self._import_from, self._wait = store, import_from, wait
        self._leaving = asyncio.Event()
        self.run: WorkerRun | StagesRun | None = None

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
        for spec in cast("dict[str, JsonObject]", facts.get("specs", {})).values():
            prepare(read_spec(spec, [], self._import_from))  # raises before this worker takes rows of another stage
        description: JsonObject = {"host": platform.node(), "process": os.getpid()}
        worker = await in_thread(lambda: self._store.join(description))
        lender = Lending(lent, str(worker), float(cast(float, facts.get("lease", LEASE))))
        if stages := stage_names(facts):
            return await self._work_on_stages(prepared, stages, lender)
        session = await in_thread(lambda: open_worker_session(self._store, worker, facts, patience=self._wait))
        self.run = run = WorkerRun(prepared, session, lender)
        if self._leaving.is_set():
            session.leases.leave()
        await run.finish()
        return self._report(run.statistics().done, session.leases.over)

    async def _work_on_stages(self, prepared: Prepared, names: Sequence[str], lender: Lending) -> WorkReport:
        stages = {name: self._store.stage(name) for name in names}
        try:
            self.run = run = StagesRun(
                prepared, self._store, stages, lender, import_from=self._import_from, patience=self._wait
            )
            if self._leaving.is_set():
                run.drain()
            await run.finish()
        finally:
            for store in stages.values():
                store.close()
        return self._report(run.finished, run.over)

    def _report(self, rows: int, why: Over) -> WorkReport:
        if why == "no feeder":
            raise NoRunCame(f"the queue is empty, and the run had no feeder for {self._wait:g} s")
        return WorkReport(rows, why or "done")

    async def _facts(self) -> JsonObject | None:
        """Wait for a run and return its facts. None if the run is done, or if this worker is stopped."""
        deadline = asyncio.get_running_loop().time() + self._wait
        while not self._leaving.is_set():
            facts = await in_thread(self._store.facts)
            if facts is not None:
                if facts.get("state") == "complete":
                    return None
                standing = await in_thread(self._store.standing)
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
    address.refuse_stage()
    deadline = asyncio.get_running_loop().time() + wait
    while True:
        try:
            return await in_thread(lambda: RedisRunStore.open(address))
        except StoreError as error:
            if asyncio.get_running_loop().time() >= deadline:
                raise SpecError(str(error)) from None
        await asyncio.sleep(LOOK)
