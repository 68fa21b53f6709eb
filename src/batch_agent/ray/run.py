"""The driver's side of a run whose workers are actors of a Ray cluster. It feeds rows and delivers results.

The run is kept in Redis, or in the driver's own run directory. In the second case the workers reach it through a relay.
The directory has the results files and ``run.json`` of every run directory. Its record is ``shared.db`` instead of
``journal.db``.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from pydantic import JsonValue

from batch_agent.agent.prepare import Prepared
from batch_agent.cluster.fed_run import FedRun
from batch_agent.cluster.fed_stages import FedStages
from batch_agent.cluster.feeder_session import FeederSession
from batch_agent.cluster.open import store_opener
from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import SpecError
from batch_agent.events import Sink
from batch_agent.job import AgentResult
from batch_agent.messages import JsonObject
from batch_agent.ray.relay import Relay, RelayServer
from batch_agent.ray.workers import Ray, RayWorkers, ray_package
from batch_agent.record.address import StoreAddress, is_store_url
from batch_agent.record.base import Store
from batch_agent.record.redis.store import RedisRunStore
from batch_agent.record.rundir import RunDir, State
from batch_agent.record.shared import RunStore
from batch_agent.record.shared_sqlite import SHARED, SqliteRunStore
from batch_agent.run.steering import Controls
from batch_agent.spec import BatchSpec

T = TypeVar("T")

RELAY = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "max_concurrency": 4096}


class RayRun(FedRun[T]):
    """``prepared.spec.run_dir`` is a Redis URL, a directory on this machine, or None for a temporary record."""

    def __init__(
        self,
        prepared: Prepared,
        cluster: Ray,
        sinks: Sequence[Sink] = (),
        command: Mapping[str, JsonValue] | None = None,
    ) -> None:
        spec = prepared.spec
        super().__init__(prepared, self._open, sinks, command, feed_only=True)
        self._cluster, self._where, self._resume = cluster, spec.run_dir, spec.resume
        self._url = str(spec.run_dir) if is_store_url(spec.run_dir) else None
        self._store: RunStore | None = None
        self._directory: RunDir | None = None

    def _open(self) -> RunStore:
        assert self._store is not None
        return self._store

    async def _work(self, prepared: Prepared) -> None:
        async with AsyncExitStack() as extent:
            if await asyncio.to_thread(self._cluster.connect, user_modules(self.spec_json)):
                extent.push_async_callback(asyncio.to_thread, ray_package().shutdown)
            target = await self._open_record(extent)
            await extent.enter_async_context(RayWorkers(self._cluster, target))
            await super()._work(prepared)

    async def _open_record(self, extent: AsyncExitStack) -> object:
        """Open the record; return its URL or the relay, through which workers reach it."""
        if self._url is not None:
            address = StoreAddress.parse(self._url)
            self._store = await asyncio.to_thread(RedisRunStore.open, address)
            return self._url
        if self._where is None:
            self._where = tempfile.mkdtemp(prefix="batch-agent-")
            # Not removed earlier: the session writes there after this method.
            weakref.finalize(self, shutil.rmtree, self._where, ignore_errors=True)
        path, schema = Path(self._where), self._prepared.schema
        directory = await asyncio.to_thread(RunDir.open, path, resume=self._resume, open_store=_open_shared)
        directory.schema = schema
        store = cast(SqliteRunStore, directory.journal)
        self._directory, self._store = directory, store
        self._sitting = partial(DirectorySession, directory, **self._sitting.keywords)  # type: ignore[assignment]
        relay = ray_package().remote(Relay).options(**RELAY).remote()
        server = RelayServer(relay, store)
        extent.push_async_callback(asyncio.to_thread, server.close)
        return relay

    async def _row_finished(self, result: AgentResult[object], worker: int) -> None:
        if isinstance(self._session, DirectorySession):
            self._session.write(result)
        await super()._row_finished(result, worker)


class RayStages(FedStages):
    """A pipeline in Redis whose workers are actors."""

    def __init__(
        self,
        prepared: Prepared,
        cluster: Ray,
        stages_work: Callable[[], Awaitable[object]],
        sinks: Sequence[Sink] = (),
        command: Mapping[str, JsonValue] | None = None,
        *,
        controls: Controls,
    ) -> None:
        if not is_store_url(prepared.spec.run_dir):
            raise SpecError("cluster: a pipeline on Ray is kept in Redis: give run_dir as redis://host:6379/0/NAME")
        self._cluster, self._url = cluster, str(prepared.spec.run_dir)
        spec = prepared.spec.model_copy(update={"feed_only": True})
        opener = store_opener(prepared)
        super().__init__(replace(prepared, spec=spec), opener, stages_work, sinks, command, controls=controls)

    async def _work(self, prepared: Prepared) -> None:
        modules = {module.__name__: module for run in self._runs.values() for module in user_modules(run.spec_json)}
        async with AsyncExitStack() as extent:
            if await asyncio.to_thread(self._cluster.connect, list(modules.values())):
                extent.push_async_callback(asyncio.to_thread, ray_package().shutdown)
            await extent.enter_async_context(RayWorkers(self._cluster, self._url))
            await super()._work(prepared)


class DirectorySession(FeederSession):
    """A feeder's session with a run in its own directory. It also writes the files of a run directory."""

    def __init__(self, directory: RunDir, store: RunStore, spec: BatchSpec) -> None:
        super().__init__(store, spec)
        self._directory = directory
        self._unwritten: list[AgentResult[object]] = []
        self._writing: asyncio.Future[None] | None = None

    async def begin(
        self,
        fingerprint: bytes,
        facts: JsonObject,
        *,
        rows_under: bytes,
        schema: OutputSchema[object] | None,
        **options: Any,
    ) -> None:
        await super().begin(fingerprint, facts, rows_under=rows_under, schema=schema, **options)
        await self.run(self._directory.begin_files)
        await self.run(lambda: self._directory.write_run(self.facts))

    def write(self, result: AgentResult[object]) -> None:
        """Write the result to the files, together with others that arrive in the meantime."""
        self._unwritten.append(result)
        if self._writing is None or self._writing.done():
            self._writing = self.run(self._write)

    def _write(self) -> None:
        while self._unwritten:
            results, self._unwritten = self._unwritten, []
            self._directory.write(results)

    async def end(self, state: State, why: str, summary: JsonObject) -> None:
        if self._writing is not None:
            await self._writing
        if self._feed is not None:
            await self.run(self._write)
            await self.run(lambda: self._directory.end_files(every=state == "complete"))
            await self.run(lambda: self._directory.write_summary(summary))
            await self.run(lambda: self._directory.write_run(self.last_facts(state, why, summary)))
        try:
            await super().end(state, why, summary)
        finally:
            self._directory.close()


def _open_shared(path: Path, *, begun: bool) -> Store:
    """Open the record of a run directory, for ``RunDir``."""
    if path.exists():
        raise SpecError(
            f"{path.parent} was started on one machine: continue it there, or give another directory for the cluster"
        )
    return cast(Store, SqliteRunStore(path.parent / SHARED))


def user_modules(spec: JsonObject) -> list[ModuleType]:
    """Return the user's own modules that a spec names, without those of installed packages."""
    named = [spec.get(name) for name in ("output_schema", "worker", "compaction", "runtime")]
    tools = spec.get("tools")
    found = {}
    for name in (*named, *(tools if isinstance(tools, list) else ())):
        if isinstance(name, str) and ":" in name:
            package = name.partition(":")[0].partition(".")[0]
            module = sys.modules.get(package)
            if module is not None and _is_users(module):
                found[package] = module
    return list(found.values())


def _is_users(module: ModuleType) -> bool:
    path = Path(module.__file__ or "")
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return bool(module.__file__) and not installed and module.__name__ not in ("batch_agent", *sys.stdlib_module_names)
