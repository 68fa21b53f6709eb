"""A worker's shares of slots, rate limits and budget. They are renewed about once per second, and used without asking.

``share.table`` decides the share of each worker. This module makes claims from the worker's own numbers, and
applies grants as limits of its dispatchers and its ledger. If a worker cannot reach the store, it stops using its
shares when its membership expires, before other workers get them: requests in flight finish, and no new request is
sent.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import platform
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from batch_agent.backends.base import Backend
from batch_agent.backends.cache import CachingBackend
from batch_agent.dispatch.cancellation import shielded
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.spending import PAID_AHEAD, Spending
from batch_agent.errors import SpecError, StoreError
from batch_agent.fleet.hostfile import Hostfile
from batch_agent.messages import JsonObject
from batch_agent.record.commits import to_its_end
from batch_agent.record.store import LEASE, Store
from batch_agent.run.control import Controls
from batch_agent.run.shared_calls import SharedCalls
from batch_agent.run.shared_state import SharedState
from batch_agent.run.trust import hostfile_of, layers, sign_file
from batch_agent.scheduler.budget import Amount
from batch_agent.scheduler.server import Endpoint
from batch_agent.share.table import (
    BUDGET,
    BUDGET_COST,
    BUDGET_TOKENS,
    DOLLAR,
    RATE,
    ROWS,
    SLOTS,
    Allotment,
    Claim,
    Grant,
    Learnt,
    Steering,
)

logger = logging.getLogger("batch_agent")

EVERY = 1.0  # seconds between two beats
MANY = 20  # workers; if there are more, each reports less often
GAP = 0.1  # least seconds between two beats, when a request waits for the next beat
PEAKS = 3  # a worker wants the most requests that it had in flight in this many beats
UNLIMITED = 2**62
FEEDER = "feeder-"  # begin of the name of a feeder as a member, before the number of its session
ENDPOINTS = 32  # maximum in a worker's report


@dataclass(slots=True, eq=False)
class Pot:
    """A shared limit. ``claim`` returns what this worker holds and wants; ``apply`` sets its share. ``learn`` applies
    the rest of a grant."""

    claim: Callable[[], Claim]
    apply: Callable[[int], None]
    learn: Callable[[Grant], None] = lambda grant: None


class Lending:
    """One worker's shares of the limits. ``worker`` is a name that is unique in the run. ``seconds`` is the time after
    which a membership expires."""

    def __init__(self, store: Store, worker: str, seconds: float = LEASE) -> None:
        self._store = store
        self._worker = worker
        self._seconds = seconds
        self.once = SharedCalls(store, worker)
        self._wanted = asyncio.Event()  # set when a request waits for the next beat
        self._peaks: defaultdict[str, deque[int]] = defaultdict(lambda: deque(maxlen=PEAKS))
        self._places: dict[str, Pot] = {}
        self._down: set[str] = set()  # endpoints that another worker found down
        self._steered: Steering | None = None
        self._requests: deque[JsonObject] = deque()  # of the user, that were not sent yet
        self._applies = False  # a request to all workers is being applied
        self._every = EVERY
        self._hostfiles: list[Hostfile] = []  # only in the feeder
        self._kept: dict[str, str] = {}  # path → text of the hostfiles in the store
        self._lost: asyncio.TimerHandle | None = None
        self._beating: asyncio.Future[Allotment] | None = None  # the latest report

    async def begin(self, *backends: Backend) -> None:
        """Start a new session of the run, with this process as the feeder.

        Clear the control actions of earlier sessions, and store the hostfiles for workers on other machines.
        """
        self._hostfiles = [hostfile for backend in backends if (hostfile := hostfile_of(backend)) is not None]
        await self._store.steer({"do": "begin"})
        await self._keep_hostfiles()

    async def _keep_hostfiles(self) -> None:
        for hostfile in self._hostfiles:
            name, text = str(hostfile.path), hostfile.text
            if self._kept.get(name) != text:
                await self._store.put_file(name, sign_file(name, text))
                self._kept[name] = text

    def soon(self) -> None:
        self._wanted.set()

    def steer(self, request: JsonObject) -> bool:
        """Send a request of the user to all workers; each applies it with its next report. Returns False if this is
        called while this worker applies such a request."""
        if self._applies:
            return False
        self._requests.append(request)
        if len(self._requests) == 1:
            self._send_request()
        return True

    def _send_request(self) -> None:
        """Send the first waiting request. The next one follows when it was sent, so that requests arrive in order."""
        self._store.steer(self._requests[0]).add_done_callback(self._request_sent)

    def _request_sent(self, sent: asyncio.Future[Steering]) -> None:
        request = self._requests.popleft()
        if not sent.cancelled() and (error := sent.exception()) is not None:
            logger.warning("the request %s did not reach the workers: %s", request.get("do"), error)
        self.soon()
        if self._requests and not sent.cancelled():
            self._send_request()

    def share_answers(self, backend: Backend) -> None:
        """Let a backend with a response cache share its answers with the other workers."""
        for layer in layers(backend):
            if isinstance(layer, CachingBackend):
                layer.once = self.once

    @asynccontextmanager
    async def at_work(self, shared: SharedState, controls: Controls, backend: Backend) -> AsyncIterator[None]:
        self.share_answers(backend)
        self._stop_using(shared)
        beats: asyncio.Task[None] | None = None
        try:
            await self._beat(shared, controls)
            beats = asyncio.get_running_loop().create_task(self._beats(shared, controls), name="batch-agent lending")
            yield
        finally:
            if beats is not None:
                beats.cancel()
                await asyncio.wait([beats])
            if self._beating is not None:  # a report that came after the member has left would bring it back
                await to_its_end(self._beating)
            if self._lost is not None:
                self._lost.cancel()
            await self._leave(shared)

    async def _beats(self, shared: SharedState, controls: Controls) -> None:
        while True:
            await asyncio.sleep(GAP)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._every - GAP):
                    await self._wanted.wait()
            try:
                await self._beat(shared, controls)
            except StoreError as error:
                logger.warning("the shares of this worker could not be renewed: %s", error)

    async def _beat(self, shared: SharedState, controls: Controls) -> None:
        loop = asyncio.get_running_loop()
        self._wanted.clear()
        self._places = dict(self._find_places(shared))
        claims = {name: place.claim() for name, place in self._places.items()}
        learnt = {name: _learnt(endpoint) for name, _, endpoint in _endpoints(shared)}
        learnt[BUDGET] = Learnt(bool(shared.spending.exhausted), shared.spending.exhausted)
        for name, stage in {} if shared.spending.rows is None else shared.spending.rows.stages.items():
            learnt[f"{ROWS}{name}"] = Learnt(costs=stage.costs)
        status = {**_in_short(controls.status()), "feeder": self._worker.startswith(FEEDER)}
        sent = loop.time()
        self._beating = self._store.beat(self._worker, self._seconds, claims, learnt, status)
        beat = await asyncio.shield(self._beating)
        if self._lost is not None:
            self._lost.cancel()
        self._lost = loop.call_at(sent + self._seconds, self._stop_using, shared)
        await self._keep_hostfiles()
        self._apply(shared, beat, sent)
        self._learn(shared, beat)
        self._steer(controls, beat.steering)
        climbing = any(grant.search is not None and grant.search[1] for grant in beat.grants.values())
        every = EVERY / 4 if climbing else EVERY  # the number that is searched changes often
        self._every = min(every * max(1.0, beat.workers / MANY), max(EVERY, self._seconds / 5))
        await self._report_followed_rows(controls)

    async def _report_followed_rows(self, controls: Controls) -> None:
        """Report the rows of this worker that a viewer follows, with the text that is being streamed."""
        rows: dict[str, JsonObject] = {}
        for row in await self._store.followed_rows():
            with suppress(SpecError):  # another worker has the row
                rows[row] = controls.live_row(row)
        if rows:
            await self._store.report_rows(rows)

    async def _leave(self, shared: SharedState) -> None:
        """Return unused shares. If the store is unreachable, all of them count as used."""
        self._stop_using(shared)
        claims = {name: _final(name, place.claim()) for name, place in self._find_places(shared)}
        try:
            spent = Learnt(bool(shared.spending.exhausted), shared.spending.exhausted)
            await shielded(asyncio.ensure_future(self._return(claims, {BUDGET: spent})))
        except StoreError as error:
            logger.warning("the unused budget of this worker could not be returned: %s", error)
        await self.once.close()

    async def _return(self, claims: Mapping[str, Claim], learnt: Mapping[str, Learnt]) -> None:
        await self._store.beat(self._worker, self._seconds, claims, learnt, {})
        await self._store.resign(self._worker)

    # Claims

    def _find_places(self, shared: SharedState) -> Iterator[tuple[str, Pot]]:
        for name, dispatcher in shared.dispatchers.items():
            whole = dispatcher.scheduler.max_inflight
            if whole is not None:
                yield f"{SLOTS}{name}", self._all_slots(f"{SLOTS}{name}", dispatcher, whole)
        for name, dispatcher, endpoint in _endpoints(shared):
            if _own_limit(dispatcher, endpoint) is not None:
                yield f"{SLOTS}{name} ", self._slots_at(f"{SLOTS}{name} ", dispatcher, endpoint)
            rates = endpoint.server.rates
            for kind in {} if rates is None else rates.shared:
                yield f"{RATE}{name} {kind}", _rate_at(dispatcher, endpoint, kind)
        yield from _budget(shared.spending)
        yield from _time(shared.spending, self._every)
        if shared.spending.rows is not None:
            yield ROWS, _rows(shared.spending)

    def _all_slots(self, name: str, dispatcher: Dispatcher, whole: int) -> Pot:
        scheduler = dispatcher.scheduler

        def claim() -> Claim:
            want = self._want(name, dispatcher, scheduler.inflight, whole)
            return Claim(whole, max(scheduler.inflight, scheduler.allotted or 0), want)

        def apply(share: int) -> None:
            scheduler.allotted = share

        return Pot(claim, apply)

    def _slots_at(self, name: str, dispatcher: Dispatcher, endpoint: Endpoint) -> Pot:
        server = endpoint.server

        def claim() -> Claim:
            limit = _own_limit(dispatcher, endpoint) or 0
            search = server.capacity.search
            want = self._want(name, dispatcher, endpoint.inflight, limit)
            held = max(endpoint.inflight, endpoint.allotted or 0)
            return Claim(limit, held, want, search=None if search is None else search.progress)

        def apply(share: int) -> None:
            endpoint.allotted = share

        def learn(grant: Grant) -> None:
            if grant.leads:
                server.capacity.lead(grant.held, grant.others_open, grant.even)
            elif grant.search is not None:
                dispatcher.endpoints.say(endpoint, server.capacity.follow(grant.search))

        return Pot(claim, apply, learn)

    def _want(self, name: str, dispatcher: Dispatcher, inflight: int, whole: int) -> int:
        self._peaks[name].append(inflight)
        return whole if dispatcher.slots.is_hungry else max(self._peaks[name])

    # Grants

    def _apply(self, shared: SharedState, beat: Allotment, sent: float) -> None:
        for name, grant in beat.grants.items():
            self._places[name].apply(min(grant.held, grant.fair))
            self._places[name].learn(grant)
        if shared.spending.has_advance:
            _grant_budget(shared.spending, beat.grants)
        if shared.spending.per_second:
            time = beat.grants[BUDGET_COST]
            shared.spending.grant_time(sent, time.held / DOLLAR, time.fair / DOLLAR)
        self._wake(shared)

    def _stop_using(self, shared: SharedState) -> None:
        """Send nothing until the next beat. The budget stays usable, because no other worker gets this share."""
        for name, place in self._find_places(shared):
            if not name.startswith(BUDGET):
                place.apply(0)
        self._wake(shared)

    def _wake(self, shared: SharedState) -> None:
        for dispatcher in shared.dispatchers.values():
            for endpoint in dispatcher.scheduler.endpoints:
                dispatcher.scheduler.touch(endpoint)
                dispatcher.endpoints.arm(endpoint)
            dispatcher.endpoints.rate_limits.serve()
            dispatcher.slots.pump()

    # Reports of other workers

    def _learn(self, shared: SharedState, beat: Allotment) -> None:
        for report in beat.learnt.get(BUDGET, ()):
            if report.down:
                shared.spending.exhaust(report.reason)
        for name, stage in {} if shared.spending.rows is None else shared.spending.rows.stages.items():
            stage.learn(report.costs for report in beat.learnt.get(f"{ROWS}{name}", ()))
        for name, dispatcher, endpoint in _endpoints(shared):
            others = beat.learnt.get(name, ())
            down = any(each.down for each in others)
            was_down = name in self._down
            if down and not was_down and not endpoint.health.is_down:
                dispatcher.endpoints.probe(endpoint)
            elif was_down and not down and endpoint.health.state == "down":
                endpoint.health.next_trial = asyncio.get_running_loop().time()
                dispatcher.endpoints.arm(endpoint)
            self._down = self._down | {name} if down else self._down - {name}

    def _steer(self, controls: Controls, steering: Steering) -> None:
        before, self._steered = self._steered, steering
        if before is not None and steering.number == before.number:
            return
        self._applies = True
        try:
            self._apply_steering(controls, steering, before)
        finally:
            self._applies = False

    def _apply_steering(self, controls: Controls, steering: Steering, before: Steering | None) -> None:
        if steering.paused != (before is not None and before.paused):
            controls.pause() if steering.paused else controls.resume()
        if steering.max_inflight is not None and (before is None or steering.max_inflight != before.max_inflight):
            controls.resize(steering.max_inflight)
        if before is None:
            return
        if steering.ending and steering.ending != before.ending:
            controls.drain() if steering.ending == "drain" else controls.cancel()
        for number, action, row in steering.rows:
            if number > before.number:
                with suppress(SpecError):  # another worker has the row
                    controls.cancel_row(row) if action == "cancel-row" else controls.retry_row(row)


def _endpoints(shared: SharedState) -> Iterator[tuple[str, Dispatcher, Endpoint]]:
    """Yield the endpoints with the names that all workers use for them."""
    for name, dispatcher in shared.dispatchers.items():
        for endpoint in dispatcher.scheduler.endpoints:
            yield endpoint.name or name, dispatcher, endpoint


def _own_limit(dispatcher: Dispatcher, endpoint: Endpoint) -> int | None:
    """Return the slot limit of an endpoint for all workers; None if the total of its backend is the stricter limit.
    After a refusal for load each worker has its own limit; then the ceiling is returned."""
    capacity, whole = endpoint.capacity, dispatcher.scheduler.max_inflight
    if capacity.search is not None:
        return capacity.search.limit
    ceiling = UNLIMITED if capacity.ceiling is None else capacity.ceiling
    if endpoint.allotted is None and ceiling >= (UNLIMITED if whole is None else whole):
        return None
    return ceiling


def _rate_at(dispatcher: Dispatcher, endpoint: Endpoint, kind: str) -> Pot:
    rates = endpoint.server.rates
    assert rates is not None
    budget = rates.shared[kind]
    limit = budget.limit or 0

    def claim() -> Claim:
        used = budget.used(asyncio.get_running_loop().time())
        wanted = dispatcher.slots.is_hungry or bool(dispatcher.endpoints.rate_limits.short)
        return Claim(limit, max(used, budget.share or 0), limit if wanted else used, rates.expected(kind))

    return Pot(claim, budget.allot)


def shared_budgets(spending: Spending) -> list[str]:
    """Return the budgets whose spending the table of shares counts. A budget without a limit, or without a price of
    time, is counted in the record with the commits of the workers."""
    if spending.limits != (None, None):
        return [BUDGET_TOKENS, BUDGET_COST]
    return [BUDGET_COST] if spending.per_second else []


class WholeBudget:
    """The budget of a run whose only worker is in this process. With each commit of its record, the worker claims in
    the table of shares what it may spend until the next commit. When other workers join, ``Lending`` makes the
    claims."""

    def __init__(self, spending: Spending, session: int) -> None:
        self._spending = spending
        self.member = f"{FEEDER}{session}"

    def claims(self, *, last: bool) -> Mapping[str, Claim]:
        spending = self._spending
        if not spending.is_alone:
            return {}
        claims = {name: pot.claim() for name, pot in _budget(spending)}
        if spending.per_second:
            used, held, want = (_nano(amount) for amount in spending.claim_own_time())
            limit = spending.time_limit
            claims[BUDGET_COST] = Claim(UNLIMITED if limit is None else _nano(limit), held, want, 0, used)
        return {name: _final(name, claim) for name, claim in claims.items()} if last else claims

    def granted(self, grants: Mapping[str, Grant]) -> None:
        if not self._spending.is_alone:  # others have joined meanwhile
            return
        if self._spending.has_advance:
            _grant_budget(self._spending, grants)
        if self._spending.per_second:
            self._spending.grant_own_time(grants[BUDGET_COST].held / DOLLAR)

    def broken(self, error: StoreError) -> None:
        self._spending.fail_all(error)


def _budget(spending: Spending) -> Iterator[tuple[str, Pot]]:
    """Yield the budgets of what requests use. Tokens and cost are granted together."""
    if spending.has_advance:
        spent, kept, wanted, part, alone = spending.claim()
        tokens, cost = spending.limits
        most = UNLIMITED if tokens is None else tokens
        of_tokens = Claim(most, kept.tokens, wanted.tokens, part.tokens, spent.tokens, alone=alone)
        yield BUDGET_TOKENS, Pot(lambda: of_tokens, _nothing)
        most = UNLIMITED if cost is None else _nano(cost)
        of_cost = Claim(most, _nano(kept.cost), _nano(wanted.cost), _nano(part.cost), _nano(spent.cost), alone=alone)
        if not spending.per_second and (cost is not None or spent.cost):
            yield BUDGET_COST, Pot(lambda: of_cost, _nothing)


def _time(spending: Spending, every: float) -> Iterator[tuple[str, Pot]]:
    """Yield the budget of running time, which is charged once for all workers together. ``every`` is the number of
    seconds between two reports."""
    if spending.per_second:
        own, limit = _nano(spending.time_alone), spending.time_limit
        rate = max(1, _nano(spending.per_second))
        ahead = math.ceil(PAID_AHEAD * max(1.0, every) * rate)
        of_time = Claim(UNLIMITED if limit is None else _nano(limit), own, ahead, 0, own, rate=rate)
        yield BUDGET_COST, Pot(lambda: of_time, _nothing)


def _rows(spending: Spending) -> Pot:
    """Return the shared limit of what the rows that start may still cost."""
    rows = spending.rows
    assert rows is not None

    def claim() -> Claim:
        limit, held, want, part = (math.ceil(amount * DOLLAR) for amount in spending.claim_rows())
        return Claim(limit, held, want, part)

    def apply(share: int) -> None:
        rows.granted(share / DOLLAR)

    def learn(grant: Grant) -> None:
        rows.decide(others_hold=grant.others_open > 0)

    return Pot(claim, apply, learn)


def _nothing(share: int) -> None:
    """Do nothing: ``_grant_budget`` applies both budgets together."""


def _nano(dollars: float) -> int:
    return math.ceil(round(dollars * DOLLAR, 3))


def _grant_budget(spending: Spending, grants: Mapping[str, Grant]) -> None:
    none = Grant(UNLIMITED, UNLIMITED)
    tokens, cost = grants.get(BUDGET_TOKENS, none), grants.get(BUDGET_COST, none)
    spending.granted(
        Amount(tokens.held, cost.held / DOLLAR),
        Amount(tokens.others_spent, cost.others_spent / DOLLAR),
        Amount(tokens.others_open, cost.others_open / DOLLAR),
    )


def _final(name: str, claim: Claim) -> Claim:
    """Return the last claim of a worker that leaves: it holds only what it used."""
    return replace(claim, held=claim.spent if name.startswith(BUDGET) else claim.held, want=0)


def _learnt(endpoint: Endpoint) -> Learnt:
    health = endpoint.health
    return Learnt(health.is_down, health.reason if health.is_down else "")


def _in_short(status: JsonObject) -> JsonObject:
    """Return the part of a worker's status that the status of the whole run shows."""
    kept: JsonObject = {name: status.get(name) for name in ("state", "rows", "agents", "rows_per_second", "cost")}
    endpoints = status.get("endpoints")
    shown = endpoints[:ENDPOINTS] if isinstance(endpoints, list) else []
    return {**kept, "endpoints": shown, "host": platform.node(), "pid": os.getpid()}
