"""The server of ``batch-agent serve``: connects its parts, does regular work, and shows its state (``Admin``)."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import replace
from functools import partial
from math import inf
from time import monotonic

from aiohttp import web

from batch_agent.agent.prepare import prepare
from batch_agent.blocking import in_thread
from batch_agent.dispatch.cancellation import first_error
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.load_poller import LoadPoller
from batch_agent.dispatch.members import following
from batch_agent.dispatch.spending import Spending
from batch_agent.door import Door, RequestRefused, add_to_answer, given_key, is_loopback, json_response
from batch_agent.errors import SpecError, StoreError
from batch_agent.events import TypedSink
from batch_agent.messages import JsonObject
from batch_agent.observe.exposition import metrics_response
from batch_agent.observe.metrics import Clock
from batch_agent.record.address import StoreAddress
from batch_agent.record.lock import Lock
from batch_agent.run.observers import Observers
from batch_agent.run.shared_state import SharedState
from batch_agent.run.spec_json import spec_json
from batch_agent.run.trust import join_line
from batch_agent.serve import ServeOptions
from batch_agent.serve.api import Api, refuse, send_files
from batch_agent.serve.asking import Interactive, travelling_spec
from batch_agent.serve.batches import RUNS_PREFIX, ServedBatches
from batch_agent.serve.catalog import ConfiguredTenant, ServedBatch, Tenant, label_of
from batch_agent.serve.clock import ServedClock, since_boot
from batch_agent.serve.directory import ADDRESS_FILE, ERRORS, LOCK_FILE, OUTPUT, PART, Presence, claim
from batch_agent.serve.governor import Governor
from batch_agent.serve.ledger import TokenLedger
from batch_agent.serve.line_scheduler import LineScheduler
from batch_agent.serve.logs import LoggedRequest, note
from batch_agent.serve.models import ServedModels
from batch_agent.serve.numbers import ServeNumbers
from batch_agent.serve.objects import batch_object, read_limit, shown_beside
from batch_agent.serve.parts import ServerParts
from batch_agent.serve.recovery import open_catalog
from batch_agent.serve.rows import row_of, rows_of
from batch_agent.serve.upstreams import ModelServers, for_clients
from batch_agent.serve.webhooks import Webhooks
from batch_agent.spec import BatchSpec
from batch_agent.view.security import add_headers, static_file

logger = logging.getLogger("batch_agent")

# The page is that of ``view`` with a script of its own. The key stays in the tab, and is sent as a header. So another
# site cannot use it, and there is no cookie to protect.
SCRIPTS = ("dom", "serve")
PATHS = ("/", "/static/app.js", "/static/app.css")
UNLOGGED = {*PATHS, "/health", "/health/live", "/metrics"}
MOST_LOGGED = 500  # characters of an error in the log line of a request
BOOKS_SECONDS = 1.0  # between two looks at tenants and tokens
SWEEP_SECONDS = 60.0  # between two searches for what may be removed
LAST_SECONDS = 1.0  # for clients to read the error of an answer that took too long at the end


class BatchService:
    """All parts of a server. ``serve`` runs it; ``ready`` gets its address and key."""

    def __init__(
        self, options: ServeOptions, models: ServedModels, configured: Sequence[ConfiguredTenant] | None = None
    ) -> None:
        """``configured``: the tenants of the configuration; None if the server is started without a configuration."""
        self.options = replace(options, shared=options.shared or bool(options.store))
        self.models = models
        self._lock = self._take_data()
        options = self.options = replace(self.options, now=self._follow_clock().now)
        with ExitStack() as undone:
            undone.callback(self._lock.release)
            self.catalog = open_catalog(options.data, shared=options.shared, clock=options.now)
            undone.callback(self.catalog.close)
            self.catalog.set_keep(options.keep)
            self.key = self.catalog.operator_key()
            self._configure(configured)
            if not is_loopback(options.host) and len(self.catalog.tenants()) < 2:
                raise SpecError(
                    f"--host {options.host} can be reached from other machines, and there is no tenant: add one with "
                    f"batch-agent serve keys add NAME --data {options.data}"
                )
            if options.store and not models.url:
                raise SpecError("with --store, workers open the models too: give URLs, and keys in their environment")
            undone.pop_all()
        self.presence = Presence(options.data)
        self.away = ""  # why the data directory cannot be used now
        self.room = True  # the disk has more than the reserve free
        self.stopping = False  # what is in flight ends, and nothing new begins

    def _follow_clock(self) -> ServedClock:
        """Return the clock of this server."""
        wall, elapsed = self.options.now, self.options.elapsed
        is_real = wall is time.time and elapsed is None
        keeps = self.options.data if (is_real or elapsed) and not self.options.shared else None
        self.clock = ServedClock(wall, elapsed or (since_boot if is_real else wall), keeps)
        return self.clock

    def _configure(self, configured: Sequence[ConfiguredTenant] | None) -> None:
        if configured is not None:
            for label in self.catalog.configure(configured):
                logger.warning("the key of %s is not in the configuration any more: it is revoked", label)
        elif not self.options.shared:  # another server of this data may have a configuration
            for label in self.catalog.set_configured_away():
                logger.warning("the key of %s is refused until the server is started with --config again", label)

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
            self.ledger = ledger = TokenLedger(self.catalog)
            extent.push_async_callback(ledger.close)
            governor, travels = Governor(options.interactive_latency), bool(options.store)
            self.upstreams = ModelServers(self.models, dispatcher, options.now)
            self.line_scheduler = LineScheduler(
                dispatcher,
                governor,
                ledger,
                now=options.now,
                blocked=self.blocked,
                stopped=self.upstreams.stopped,
                travels=travels,
            )
            extent.callback(self.line_scheduler.close)
            self.batches = ServedBatches(
                self.catalog, self.models, shared, self.line_scheduler, options, self.webhooks.wake, self.look_held_up
            )
            self.interactive = Interactive(
                self.models, dispatcher, self.line_scheduler, self.upstreams, options.outage_patience
            )
            self.api = Api(self.catalog, self.batches, self.interactive, self.models, options)
            self.admin = Admin(self)
            await self.batches.forget_runs()  # raises if the store is unreachable
            await self._keep_books()
            self.door = door = Door(self._handle, refuse, host=options.host, port=options.port)
            await extent.enter_async_context(door)  # before any line is sent: the port may be in use
            self._tell_address(door.url)
            extent.callback(self._tell_address, "")
            try:
                async with asyncio.TaskGroup() as tasks:
                    await self._start(ServerParts(tasks))
                    try:
                        await ready(door.url, self.key)
                    finally:
                        await self._drain(door)
                        with suppress(StoreError):
                            await self._keep_books()
            except BaseExceptionGroup as group:
                raise first_error(group) from None

    async def _start(self, parts: ServerParts) -> None:
        """Start the parts that work until the server ends, and continue its batches."""
        self.parts = parts
        parts.start("lines", self.line_scheduler.run)
        parts.start("tokens", self.ledger.run)
        parts.start("webhooks", self.webhooks.run)
        parts.start("upstreams", self.upstreams.run)
        if self.models.capabilities.reports_load:
            poller = LoadPoller(self.models, self.dispatcher, None, lambda full: None, self.line_scheduler)
            parts.start("load", poller.read_on)
        await self.batches.resume(parts.tasks)
        parts.start("books", self._look_after)

    async def _drain(self, door: Door) -> None:
        """Start nothing more, and let answers and lines in flight end. An answer that takes longer than ``drain`` is
        replaced by an error."""
        self.stopping, seconds = True, self.options.drain
        await asyncio.gather(door.drain(seconds), self.batches.drain(seconds))
        self.interactive.stop()
        await door.drain(LAST_SECONDS)

    def _take_data(self) -> Lock:
        """Take the lock of the data. Raises SpecError if another process serves it, unless all of them share it."""
        try:
            claim(self.options.data)
            return Lock(
                self.options.data / LOCK_FILE,
                "stop it, or give --shared to all servers of this data",
                shared=self.options.shared,
            )
        except StoreError as error:
            raise SpecError(str(error)) from None
        except OSError as error:
            raise SpecError(f"cannot open {self.options.data}: {error}") from None

    def _share(self) -> SharedState:
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
            control_requests=True,
        )
        dispatcher.spending = spending = Spending(spec, None, lambda short: None, lambda limit: None)
        dispatchers = {self.models.name: dispatcher}
        nothing = TypedSink()
        nothing.handlers = {}  # runs make no events for it
        return SharedState(clock, nothing, dispatcher, spending, dispatchers, None, None, Observers(), paced=True)

    @property
    def joining(self) -> str:
        """Return the command with which another machine works on all batches; "" without a store."""
        options = self.options
        if not options.store:
            return ""
        spec = spec_json(prepare(travelling_spec(self.models, None, inputs=(), run_dir=f"{options.store}/any")))
        url = str(StoreAddress.parse(options.store, named=False))
        return join_line(f"'{url}/{RUNS_PREFIX}*' --wait inf", {"spec": spec})

    def _tell_address(self, url: str) -> None:
        """Write the address at which this server listens into the data, for commands that only know the data directory;
        "" when it ends."""
        with suppress(OSError):
            path = self.options.data / ADDRESS_FILE
            path.write_text(url) if url else path.unlink(missing_ok=True)

    async def _close(self, dispatcher: Dispatcher) -> None:
        dispatcher.close()
        await dispatcher.wait_closed()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path in UNLOGGED:
            return await self._respond(request)
        with LoggedRequest(request) as log:
            add_to_answer(request, log.headers)
            try:
                answer = await self._respond(request)
            except RequestRefused as refused:
                log.status = refused.status
                note(error=str(refused)[:MOST_LOGGED])
                raise
            except Exception:
                log.status = 500
                raise
            log.status = answer.status
            return answer

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/health/live" and request.method in ("GET", "HEAD"):
            return json_response({"status": "ok"})
        if self.stopping:
            raise RequestRefused(503, "the server is stopping", headers={"Retry-After": "5", "Connection": "close"})
        if request.path == "/health" and request.method in ("GET", "HEAD"):
            status, document = self.upstreams.health()
            return json_response(document, status)
        if request.path in PATHS and request.method in ("GET", "HEAD"):
            return add_headers(static_file(request.path.removeprefix("/static/").strip("/") or "index.html", SCRIPTS))
        if request.path == "/metrics" and request.method == "GET":
            return metrics_response(await self.admin.metrics(request))
        try:
            if request.path.startswith("/serve/"):
                return await self.admin.handle(request)
            return await self.api.handle(request)
        except (RequestRefused, StoreError, OSError) as error:
            if isinstance(error, ConnectionError) or getattr(error, "status", 404) not in (404, 507):
                raise
            if why := await in_thread(self.presence.away):
                logger.warning("a request for %s failed: %s", request.path, error)
                raise RequestRefused(503, f"{why}: try again", headers={"Retry-After": "5"}) from None
            if not isinstance(error, StoreError):
                raise
            logger.warning("a request for %s failed: %s", request.path, error)
            status = 507 if await in_thread(self.look_held_up) else 500
            raise RequestRefused(status, "the catalog cannot be written now") from None

    # What is due from time to time

    def _has_room(self) -> bool:
        return shutil.disk_usage(self.options.data).free >= self.options.reserve

    def look_held_up(self) -> str:
        """Return the reason why nothing can be written now, or "". Blocks."""
        try:
            return self.presence.away() or ("" if self._has_room() else "the disk is almost full")
        except OSError as error:
            return f"the data directory {self.options.data} cannot be read: {error.strerror}"

    def blocked(self) -> str:
        """Return the reason why no line may start, or ""."""
        if self.away:
            return f"{self.away}: no new line starts until it is there again"
        return "" if self.room else "the disk is almost full: no new line starts"

    async def _look_after(self) -> None:
        """Do the regular work until cancelled. A failure is logged once, until all work succeeds again."""
        swept = -inf
        failed = False
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(BOOKS_SECONDS)
            self.clock.look()
            try:
                await self._look_at_data()
                if self.away:
                    continue
                await self._keep_books()
                if clock() - swept >= min(SWEEP_SECONDS, self.options.keep / 10):
                    swept = clock()
                    await self._sweep()
                failed = False
            except (StoreError, OSError) as error:
                if not failed:
                    logger.warning("%s", error)
                failed = True

    async def _look_at_data(self) -> None:
        """Check whether the data directory is present, and whether the disk has room."""
        away = await in_thread(self.presence.away)
        if away and not self.away:
            logger.warning("%s: the server waits until it is there again", away)
        elif self.away and not away:
            try:
                await in_thread(self.catalog.reopen)
            except SpecError as error:
                away = str(error)
            else:
                logger.warning("the data directory %s is there again: the server continues", self.options.data)
        self.away = away
        if not away:
            self.room = await in_thread(self._has_room)

    async def _keep_books(self) -> None:
        """Write what tenants have used, and read their terms again, which may have changed."""
        for each in await in_thread(self.catalog.tenants):
            self.line_scheduler.set_terms(each.name, each.share, each.tokens_per_day)
        await self.ledger.write()
        revoked = await in_thread(self.catalog.revoked)  # a tenant may be unknown if the catalog was lost
        unfinished = await in_thread(self.catalog.unfinished)
        await self.batches.take_over(unfinished)
        for batch in unfinished:
            if batch.tenant in revoked or batch.stop == "cancelled":  # the latter by another process
                await self.batches.cancel(batch.id)

    async def _sweep(self) -> None:
        """Remove files and batches whose time is over."""
        now = self.options.now()
        await in_thread(self.clock.save)
        for file in await in_thread(self.catalog.expired_files):
            await in_thread(self.catalog.remove_file, file)
        for batch in await in_thread(self.catalog.ended_before, now - self.options.keep):
            await self.batches.remove(batch)
        await self.batches.forget_runs()


ROW_STATES = ("succeeded", "failed", "waiting")


class Admin:
    """What people and monitoring see of a server: its state, its batches, their outcomes, and the numbers for
    Prometheus. The operator's key sees everything; the key of a tenant sees what belongs to the tenant. `/metrics` is
    the operator's, unless the server listens on loopback."""

    def __init__(self, service: BatchService) -> None:
        self._service = service
        self._began = monotonic()
        self._numbers = ServeNumbers(service)
        self.open_metrics = is_loopback(service.options.host)  # they need no key

    async def _tenant(self, request: web.BaseRequest) -> Tenant:
        tenant = await in_thread(self._service.catalog.tenant_of, given_key(request))
        if tenant is None:
            raise RequestRefused(401, "the key is missing or wrong", headers={"WWW-Authenticate": "Bearer"})
        note(tenant=tenant.label)
        return tenant

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer ``/serve/status``, ``/serve/batches``, and ``rows``, ``cancel`` and ``export`` of a batch."""
        tenant = await self._tenant(request)
        names = request.path.strip("/").split("/")[1:]
        match request.method, names:
            case "GET", ["status"]:
                return json_response(await in_thread(self.status, tenant))
            case "GET", ["batches"]:
                limit, after = read_limit(request.query, 1000, 100), request.query.get("after")
                if after is not None:
                    await self._batch(tenant, after)
                own = None if tenant.is_operator else tenant.name
                ask = partial(self._service.catalog.batches, own, after=after, limit=limit)
                return json_response({"data": [self.shown(batch) for batch in await in_thread(ask)]})
            case "GET", ["batches", id]:
                return json_response(self.shown(await self._batch(tenant, id)))
            case "GET", ["batches", id, "rows"]:
                return json_response(await self._rows(await self._batch(tenant, id), request.query))
            case "POST", ["batches", id, "cancel"]:
                batch = await self._batch(tenant, id)
                return json_response(self.shown(await self._service.batches.cancel(id) or batch))
            case "GET", ["batches", id, "export"]:
                folder = self._service.batches.folder((await self._batch(tenant, id)).id)
                names = [OUTPUT, ERRORS, OUTPUT + PART, ERRORS + PART]
                return await send_files(request, [folder / name for name in names], "application/x-jsonl")
        raise RequestRefused(404, f"{request.path} does not exist")

    async def _rows(self, batch: ServedBatch, query: Mapping[str, str]) -> JsonObject:
        """Return a page of the lines of a batch in the requested state, or the one requested line."""
        state = query.get("state", "succeeded")
        after = query.get("after", "0")
        limit = read_limit(query, 200, 50)
        if state not in ROW_STATES or not after.isdecimal() or len(after) > 18:
            raise RequestRefused(400, f"state is one of {', '.join(ROW_STATES)}, and after the next of a page")
        folder = self._service.batches.folder(batch.id)
        running = self._service.batches.running.get(batch.id)
        state_of = running.state_of if running is not None else None
        note = ""
        if running is None and not batch.is_over and not batch.completed and not batch.failed:
            state_of = lambda number: "waiting"  # noqa: E731
        elif state_of is None and state == "waiting" and not batch.is_over:
            note = "another process works on this batch: it shows these lines"
        if own := query.get("custom_id"):
            row = await in_thread(row_of, folder, own, state_of)
            return {"data": [] if row is None else [row], "next": None, "note": None}
        rows, next = await in_thread(rows_of, folder, state, int(after), limit, state_of)
        return {"data": [*rows], "next": next, "note": note or None}

    async def _batch(self, tenant: Tenant, id: str) -> ServedBatch:
        own = None if tenant.is_operator else tenant.name
        batch = await in_thread(self._service.catalog.batch, id, own)
        if batch is None:
            raise RequestRefused(404, f"there is no batch {id[:64]!r}")
        return batch

    def shown(self, batch: ServedBatch) -> JsonObject:
        """Return a batch for people: the object of OpenAI's API, whichever API created it, with tenant and rate."""
        batch = self._service.batches.progress(batch)
        running = self._service.batches.running.get(batch.id)
        rate = None
        if running is not None and running.began:
            seconds = asyncio.get_running_loop().time() - running.began
            rate = round(running.answered / max(seconds, 0.001), 3)
        document = batch_object(batch, self._service.batches.estimate(batch))
        return {**document, **shown_beside(batch), "lines_per_second": rate}

    def status(self, tenant: Tenant) -> JsonObject:
        """Return the state of the server, or the part of it that a tenant may see. Blocks."""
        own = None if tenant.is_operator else tenant.name
        unfinished = [batch for batch in self._service.catalog.unfinished() if own in (None, batch.tenant)]
        left = 0
        for batch in map(self._service.batches.progress, unfinished):
            left += batch.total - batch.completed - batch.failed
        line_scheduler, governor = self._service.line_scheduler, self._service.line_scheduler.governor
        why = line_scheduler.why or (self._service.upstreams.why() if unfinished else "")
        if own is not None:
            why = for_clients(why)
        document: JsonObject = {
            "uptime_seconds": round(monotonic() - self._began),
            "batches": len(unfinished),
            "lines_left": left,
            "waiting_because": why or self._service.blocked() or None,
            "latency_target": governor.shown,
            "latency_ratio": round(governor.ratio, 3),
            "target_given_up": governor.reason or None,
        }
        if own is not None:
            account = line_scheduler.account(own)
            return {**document, **self._tokens(own), "lines_in_flight": account.inflight}
        tenants: JsonObject = {
            label_of(name): {"share": account.share, **self._tokens(name), "lines_in_flight": account.inflight}
            for name, account in sorted(line_scheduler.accounts.items())
        }
        people = {
            "in_flight": governor.active,
            "waiting": governor.waiting,
            "requests": self._service.interactive.requests,
        }
        return {
            **document,
            "lines_in_flight": line_scheduler.inflight,
            "interactive": {**people},
            "tenants": tenants,
            "endpoints": [*self._service.upstreams.shown()],
        }

    def _tokens(self, tenant: str) -> JsonObject:
        ledger = self._service.ledger
        return {"tokens_today": ledger.today(tenant), "tokens_reserved": ledger.reserved(tenant)}

    # Prometheus

    async def metrics(self, request: web.BaseRequest) -> str:
        """Return the page of numbers. Raises RequestRefused."""
        if not self.open_metrics and not (await self._tenant(request)).is_operator:
            raise RequestRefused(403, "/metrics needs the operator's key")
        return await in_thread(self._numbers.page)
