"""The server of ``batch-agent serve``: puts its parts together, and does what is due from time to time."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path

from aiohttp import web

from batch_agent.agent.prepare import prepare
from batch_agent.blocking import in_thread
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.load_poller import poll_load
from batch_agent.dispatch.members import following
from batch_agent.dispatch.spending import Spending
from batch_agent.door import PATIENCE_SECONDS, Door, RequestRefused, is_loopback, json_response
from batch_agent.errors import SpecError, StoreError
from batch_agent.events import TypedSink
from batch_agent.observe.metrics import Clock
from batch_agent.observe.metrics_server import metrics_response
from batch_agent.record.address import StoreAddress
from batch_agent.record.lock import Lock
from batch_agent.run.observers import Observers
from batch_agent.run.shared import Shared
from batch_agent.run.spec_json import spec_json
from batch_agent.run.trust import join_line
from batch_agent.serve.admin import Admin
from batch_agent.serve.api import Api, ApiLimits, refuse
from batch_agent.serve.batches import RUNS_PREFIX, ServedBatches, travelling_spec
from batch_agent.serve.catalog import Catalog
from batch_agent.serve.governor import Governor
from batch_agent.serve.interactive import Interactive
from batch_agent.serve.models import ServedModels
from batch_agent.serve.page import PATHS, page_response
from batch_agent.serve.turnstile import Turnstile
from batch_agent.serve.webhooks import Webhooks
from batch_agent.spec import BatchSpec

logger = logging.getLogger("batch_agent")

DEFAULT_PORT = 8787
GB = 1024**3
DAY = 86400.0
BOOKS_SECONDS = 1.0  # between two looks at tenants and tokens
SWEEP_SECONDS = 60.0  # between two searches for what may be removed
LEASE_SECONDS = 10.0  # after which another process takes over the batches of one that is gone
LOCK = "serve.lock"
OLD_SECONDS = 86400.0  # after which no process is still about to enter something in a shared catalog


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """``interactive_latency``: the target as a multiple of the idle latency; None for none. Times in seconds."""

    data: Path
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    max_lines: int = 1_000_000
    reserve: int = GB
    keep: float = 30 * DAY
    anthropic_window: float = DAY
    interactive_latency: float | None = 2.5
    max_inflight: int | None = None
    shared: bool = False  # several processes serve the same data
    store: str = ""  # URL of the Redis server that has the runs of batches; implies ``shared``
    drain: float = 5.0  # for lines in flight, when the server is stopped
    now: Callable[[], float] = time.time


class BatchService:
    """All parts of a server. ``serve`` runs it; ``ready`` gets its address and key."""

    def __init__(self, options: ServeOptions, models: ServedModels) -> None:
        self.options, self.models = replace(options, shared=options.shared or bool(options.store)), models
        options = self.options
        self._lock = self._take_data()
        with ExitStack() as undone:
            undone.callback(self._lock.release)
            self.catalog = Catalog(options.data, shared=options.shared, clock=options.now)
            for name in ("files", "batches"):
                (options.data / name).mkdir(mode=0o700, exist_ok=True)
            self.key = self.catalog.operator_key()
            if not is_loopback(options.host) and len(self.catalog.tenants()) < 2:
                raise SpecError(
                    f"--host {options.host} can be reached from other machines, and there is no tenant: add one with "
                    f"batch-agent serve keys add NAME --data {options.data}"
                )
            if options.store and not models.url:
                raise SpecError("with --store, workers open the models too: give URLs, and keys in their environment")
            undone.pop_all()
        self.room = True  # the disk has more than the reserve free

    def close(self) -> None:
        """Close the catalog, and release the data. ``serve`` does it at its end."""
        self.catalog.close()
        self._lock.release()

    async def serve(self, ready: Callable[[str, str], Awaitable[None]]) -> None:
        """Serve until cancelled. A port in use raises SpecError."""
        options = self.options
        async with AsyncExitStack() as extent:
            extent.callback(self.close)
            await extent.enter_async_context(self.models)
            shared = self._share()
            self.dispatcher = dispatcher = shared.dispatcher
            follower = extent.enter_context(following(self.models, dispatcher))
            if follower is not None:
                follower.use(await self.models.models())
            extent.push_async_callback(self._close, dispatcher)
            self.webhooks = Webhooks(self.catalog, options.now)
            governor = Governor(options.interactive_latency)
            travels = bool(options.store)
            self.turnstile = Turnstile(dispatcher, governor, now=options.now, blocked=self._blocked, travels=travels)
            polled = poll_load(self.models, dispatcher, None, lambda full: None, self.turnstile)
            await extent.enter_async_context(polled)
            self.batches = ServedBatches(
                self.catalog,
                self.models,
                shared,
                self.turnstile,
                max_lines=options.max_lines,
                lease=LEASE_SECONDS if options.shared else None,
                store=options.store,
                now=options.now,
                notify=self.webhooks.wake,
            )
            self.interactive = Interactive(self.models, dispatcher, self.turnstile, PATIENCE_SECONDS)
            limits = ApiLimits(options.reserve, options.anthropic_window, PATIENCE_SECONDS)
            self.api = Api(self.catalog, self.batches, self.interactive, self.models, limits, now=options.now)
            self.admin = Admin(self.catalog, self.batches, self.interactive, self.turnstile, self.dispatcher)
            self.admin.open_metrics = is_loopback(options.host)
            await in_thread(self._clean)
            await self.batches.forget_runs()  # raises if the store is unreachable
            await self._keep_books()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.turnstile.run())
                tasks.create_task(self.webhooks.run())
                await self.batches.resume(tasks)
                door = Door(self._handle, refuse, host=options.host, port=options.port)
                async with door:
                    tasks.create_task(self._look_after())
                    try:
                        await ready(door.url, self.key)
                    finally:
                        await self.batches.drain(self.options.drain)
                        with suppress(StoreError):
                            await self._keep_books()

    def _take_data(self) -> Lock:
        """Take the lock of the data. Raises SpecError if a process serves it already, unless all share it."""
        try:
            self.options.data.mkdir(mode=0o700, parents=True, exist_ok=True)
            return Lock(
                self.options.data / LOCK,
                "stop it, or give --shared to all servers of this data",
                shared=self.options.shared,
            )
        except StoreError as error:
            raise SpecError(str(error)) from None
        except OSError as error:
            raise SpecError(f"cannot open {self.options.data}: {error}") from None

    def _share(self) -> Shared:
        """Return the slots that all batches and interactive requests share."""
        options = self.options
        spec = BatchSpec(
            task="{id}",
            inputs=(),
            backend=self.models,
            model="any",
            **({} if options.max_inflight is None else {"max_inflight": options.max_inflight}),
        )
        clock = Clock()
        clock.start()
        prepared = prepare(spec)
        # An outage is waited out: there are always batches that want the server back.
        dispatcher = Dispatcher(
            self.models,
            prepared.max_inflight,
            prepared.max_agents,
            servers=self.models.servers,
            terms=prepared.terms,
            max_outage=inf,
        )
        dispatcher.spending = spending = Spending(spec, None, lambda short: None, lambda limit: None)
        dispatchers = {self.models.name: dispatcher}
        nothing = TypedSink()
        nothing.handlers = {}  # runs make no events for it
        return Shared(clock, nothing, dispatcher, spending, dispatchers, None, None, Observers(), paced=True)

    @property
    def joining(self) -> str:
        """Return the command that lets another machine work on all batches; "" without a store."""
        options = self.options
        if not options.store:
            return ""
        spec = spec_json(prepare(travelling_spec(self.models, None, inputs=(), run_dir=f"{options.store}/any")))
        url = str(StoreAddress.parse(options.store, named=False))
        return join_line(f"'{url}/{RUNS_PREFIX}*' --wait inf", {"spec": spec})

    async def _close(self, dispatcher: Dispatcher) -> None:
        dispatcher.close()
        await dispatcher.wait_closed()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/health" and request.method in ("GET", "HEAD"):
            return json_response({"status": "ok"})
        if request.path in PATHS and request.method in ("GET", "HEAD"):
            return page_response(request.path)
        if request.path == "/metrics" and request.method == "GET":
            return metrics_response(await self.admin.metrics(request))
        try:
            if request.path.startswith("/serve/"):
                return await self.admin.handle(request)
            return await self.api.handle(request)
        except StoreError as error:
            logger.warning("a request for %s failed: %s", request.path, error)
            raise RequestRefused(507 if not self._has_room() else 500, "the catalog cannot be written now") from None

    # What is due from time to time

    def _has_room(self) -> bool:
        return shutil.disk_usage(self.options.data).free >= self.options.reserve

    def _blocked(self) -> str:
        return "" if self.room else "the disk is almost full: no new line starts"

    async def _look_after(self) -> None:
        swept = -SWEEP_SECONDS
        while True:
            await asyncio.sleep(BOOKS_SECONDS)
            self.room = self._has_room()
            try:
                await self._keep_books()
                if time.monotonic() - swept >= SWEEP_SECONDS:
                    swept = time.monotonic()
                    await self._sweep()
            except (StoreError, OSError) as error:
                logger.warning("%s", error)

    async def _keep_books(self) -> None:
        """Write what tenants have used, and read their terms, which may have changed."""
        spent = self.turnstile.take_spent()
        if spent:
            try:
                await in_thread(partial(self.catalog.add_usage, spent))
            except StoreError:
                for tenant, tokens in spent.items():
                    self.turnstile.spent[tenant] = self.turnstile.spent.get(tenant, 0) + tokens
                raise
        tenants = await in_thread(self.catalog.tenants)
        used = await in_thread(self.catalog.used_today)
        self.turnstile.set_terms({each.name: (each.share, each.tokens_per_day) for each in tenants}, used)
        names = {each.name for each in tenants}
        unfinished = await in_thread(self.catalog.unfinished)
        await self.batches.take_over(unfinished)
        for batch in unfinished:
            if batch.tenant not in names or batch.stop == "cancelled":  # its key was revoked; or by another process
                await self.batches.cancel(batch.id)

    async def _sweep(self) -> None:
        """Remove files and batches that are kept no longer."""
        now = self.options.now()
        for file in await in_thread(self.catalog.expired_files):
            await in_thread(partial(self.catalog.remove_file, file.id))
            await in_thread(partial(self.api.path_of(file).unlink, missing_ok=True))
        for batch in await in_thread(partial(self.catalog.ended_before, now - self.options.keep)):
            await self.batches.remove(batch)
        await self.batches.forget_runs()

    def _clean(self) -> None:
        """Remove what a killed process left: uploads without an end, and folders without a batch."""
        data = self.options.data
        before = time.time() - (OLD_SECONDS if self.options.shared else 0.0)
        for folder in (data / "batches").iterdir():
            if self.catalog.batch(folder.name) is None and folder.stat().st_mtime <= before:
                shutil.rmtree(folder, ignore_errors=True)
        for file in (data / "files").iterdir():
            if not self.catalog.has_file(file.name) and file.stat().st_mtime <= before:
                file.unlink(missing_ok=True)
