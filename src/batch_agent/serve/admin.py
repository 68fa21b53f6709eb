"""What people and monitoring see of a server: its state, its batches, their outcomes, and the numbers for Prometheus.

The operator's key sees everything; the key of a tenant sees what belongs to the tenant. ``/metrics`` is the operator's,
unless the server listens on loopback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from time import monotonic

from aiohttp import web
from pydantic import JsonValue

from batch_agent.blocking import in_thread
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.door import RequestRefused, given_key, json_response
from batch_agent.messages import JsonObject
from batch_agent.observe.exposition import Counter, Gauge, page
from batch_agent.serve.api import send_files
from batch_agent.serve.batches import ServedBatches
from batch_agent.serve.catalog import Catalog, ServedBatch, Tenant
from batch_agent.serve.interactive import Interactive
from batch_agent.serve.lines import ERRORS, OUTPUT, PART
from batch_agent.serve.objects import batch_object, read_limit
from batch_agent.serve.page import row_of, rows_of
from batch_agent.serve.turnstile import Turnstile

ROW_STATES = ("succeeded", "failed", "waiting")


class Admin:
    def __init__(
        self,
        catalog: Catalog,
        batches: ServedBatches,
        interactive: Interactive,
        turnstile: Turnstile,
        dispatcher: Dispatcher,
    ) -> None:
        self._catalog, self._batches, self._interactive = catalog, batches, interactive
        self._turnstile, self._dispatcher = turnstile, dispatcher
        self._began = monotonic()
        self.open_metrics = False  # they need no key

    async def _tenant(self, request: web.BaseRequest) -> Tenant:
        tenant = await in_thread(partial(self._catalog.tenant_of, given_key(request)))
        if tenant is None:
            raise RequestRefused(401, "the key is missing or wrong", headers={"WWW-Authenticate": "Bearer"})
        return tenant

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer ``/serve/status``, ``/serve/batches``, and ``rows``, ``cancel`` and ``export`` of a batch."""
        tenant = await self._tenant(request)
        names = request.path.strip("/").split("/")[1:]
        match request.method, names:
            case "GET", ["status"]:
                return json_response(await in_thread(partial(self.status, tenant)))
            case "GET", ["batches"]:
                limit = read_limit(request.query, 1000, 100)
                own = None if tenant.is_operator else tenant.name
                ask = partial(self._catalog.batches, own, after=request.query.get("after"), limit=limit)
                return json_response({"data": [self.shown(batch) for batch in await in_thread(ask)]})
            case "GET", ["batches", id]:
                return json_response(self.shown(await self._batch(tenant, id)))
            case "GET", ["batches", id, "rows"]:
                return json_response(await self._rows(await self._batch(tenant, id), request.query))
            case "POST", ["batches", id, "cancel"]:
                batch = await self._batch(tenant, id)
                return json_response(self.shown(await self._batches.cancel(id) or batch))
            case "GET", ["batches", id, "export"]:
                folder = self._batches.folder((await self._batch(tenant, id)).id)
                names = [OUTPUT, ERRORS, OUTPUT + PART, ERRORS + PART]
                return await send_files(request, [folder / name for name in names], "application/x-jsonl")
        raise RequestRefused(404, f"{request.path} does not exist")

    async def _rows(self, batch: ServedBatch, query: Mapping[str, str]) -> JsonObject:
        """Return a page of the lines of a batch, with the state that is asked for, or the one line that is."""
        state, after, limit = query.get("state", "succeeded"), query.get("after", "0"), read_limit(query, 200, 50)
        if state not in ROW_STATES or not after.isdecimal() or len(after) > 18:
            raise RequestRefused(400, f"state is one of {', '.join(ROW_STATES)}, and after the next of a page")
        folder, running = self._batches.folder(batch.id), self._batches.running.get(batch.id)
        state_of = running.state_of if running is not None else None
        note = ""
        if running is None and not batch.is_over and not batch.completed and not batch.failed:
            state_of = lambda number: "waiting"  # noqa: E731
        elif state_of is None and state == "waiting" and not batch.is_over:
            note = "another process works on this batch: it shows these lines"
        if own := query.get("custom_id"):
            row = await in_thread(partial(row_of, folder, own, state_of))
            return {"data": [] if row is None else [row], "next": None, "note": None}
        rows, next = await in_thread(partial(rows_of, folder, state, int(after), limit, state_of))
        return {"data": [*rows], "next": next, "note": note or None}

    async def _batch(self, tenant: Tenant, id: str) -> ServedBatch:
        own = None if tenant.is_operator else tenant.name
        batch = await in_thread(partial(self._catalog.batch, id, own))
        if batch is None:
            raise RequestRefused(404, f"there is no batch {id[:64]!r}")
        return batch

    def shown(self, batch: ServedBatch) -> JsonObject:
        """Return a batch for people: the object of OpenAI's API for either API, with tenant and rate."""
        batch = self._batches.progress(batch)
        running = self._batches.running.get(batch.id)
        rate = None
        if running is not None and running.began:
            seconds = asyncio.get_running_loop().time() - running.began
            rate = round(running.answered / max(seconds, 0.001), 3)
        document = batch_object(batch, self._batches.estimate(batch))
        return {**document, "tenant": batch.tenant, "api": batch.wire, "lines_per_second": rate}

    def status(self, tenant: Tenant) -> JsonObject:
        """Return the state of the server, or what a tenant may see of it. Blocks."""
        own = None if tenant.is_operator else tenant.name
        unfinished = [batch for batch in self._catalog.unfinished() if own in (None, batch.tenant)]
        left = 0
        for batch in map(self._batches.progress, unfinished):
            left += batch.total - batch.completed - batch.failed
        turnstile, governor = self._turnstile, self._turnstile.governor
        document: JsonObject = {
            "uptime_seconds": round(monotonic() - self._began),
            "batches": len(unfinished),
            "lines_left": left,
            "waiting_because": turnstile.why or None,
            "latency_target": governor.target,
            "latency_ratio": round(governor.ratio, 3),
            "target_given_up": governor.reason or None,
        }
        if own is not None:
            account = turnstile.account(own)
            return {**document, "tokens_today": account.today, "lines_in_flight": account.inflight}
        endpoints: list[JsonValue] = [
            {
                "endpoint": each.name.strip("|") or "backend",
                "up": each.is_working,
                "in_flight": each.inflight,
                "limit": each.slots,
                "reason": each.health.reason if not each.is_working else "",
            }
            for each in self._dispatcher.scheduler.endpoints
        ]
        tenants: JsonObject = {
            name: {"share": account.share, "tokens_today": account.today, "lines_in_flight": account.inflight}
            for name, account in tuple(turnstile.accounts.items())
        }
        people = {"in_flight": governor.active, "waiting": governor.waiting, "requests": self._interactive.requests}
        return {
            **document,
            "lines_in_flight": turnstile.inflight,
            "interactive": {**people},
            "tenants": tenants,
            "endpoints": endpoints,
        }

    # Prometheus

    async def metrics(self, request: web.BaseRequest) -> str:
        """Return the page of numbers. Raises RequestRefused."""
        if not self.open_metrics and not (await self._tenant(request)).is_operator:
            raise RequestRefused(403, "/metrics needs the operator's key")
        return await in_thread(self._numbers)

    def _numbers(self) -> str:
        turnstile, governor = self._turnstile, self._turnstile.governor
        name = "batch_agent_serve"
        lines = Gauge(f"{name}_lines_in_flight", "Lines of batches in flight.", ("tenant",))
        tokens = Counter(f"{name}_tokens_total", "Tokens used since the start.", ("tenant",))
        for tenant, account in sorted(turnstile.accounts.items()):
            lines.set(account.inflight, tenant)
            tokens.add(account.tokens, tenant)
        batches = Gauge(f"{name}_batches", "Batches that have not ended, by status.", ("status",))
        left = Gauge(f"{name}_lines_left", "Lines that are not done.", ("tenant",))
        counts: dict[str, int] = {}
        for batch in map(self._batches.progress, self._catalog.unfinished()):
            batches.set(batches.values.get((batch.status,), 0) + 1, batch.status)
            counts[batch.tenant] = counts.get(batch.tenant, 0) + batch.total - batch.completed - batch.failed
        for tenant, count in sorted(counts.items()):
            left.set(count, tenant)
        requests = Counter(f"{name}_interactive_requests_total", "Interactive requests.")
        requests.add(self._interactive.requests)
        failures = Counter(f"{name}_interactive_failures_total", "Interactive requests that failed.")
        failures.add(self._interactive.failures)
        people = Gauge(f"{name}_interactive_in_flight", "Interactive requests in flight.")
        people.set(governor.active)
        ratio = Gauge(
            f"{name}_interactive_latency_ratio", "Latency of interactive requests over that of an idle engine."
        )
        ratio.set(governor.ratio)
        endpoints = Gauge(f"{name}_endpoint_up", "Whether an endpoint is up.", ("endpoint",))
        for endpoint in self._dispatcher.scheduler.endpoints:
            endpoints.set(float(endpoint.is_working), endpoint.name.strip("|") or "backend")
        return page([lines, tokens, batches, left, requests, failures, people, ratio, endpoints])
