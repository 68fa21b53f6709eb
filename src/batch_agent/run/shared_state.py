"""The state that a run works with, and that inner runs share: slots, budget, tool pool, record, events.

The outermost run owns what must exist once: the ledger, the lock of its run directory, the jobs at batch APIs, the rate
limits. An inner run may have its own directory, for its journal and its results.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from batch_agent.agent.prepare import Prepared, models_of
from batch_agent.backends.base import Backend
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.endpoints import OnHealth
from batch_agent.dispatch.members import following
from batch_agent.dispatch.rate_mark import RateMark
from batch_agent.dispatch.spending import Spending
from batch_agent.errors import BackendError
from batch_agent.events import ControlFinished, Ended, HealthChanged, LimitChanged, Sink
from batch_agent.messages import Usage
from batch_agent.observe.metrics import Clock
from batch_agent.observe.prometheus import LiveNumbers
from batch_agent.observe.status import LabelledEndpoint
from batch_agent.record.commits import Commits
from batch_agent.record.store import Store
from batch_agent.run.observers import Observers
from batch_agent.scheduler.ordering import KvParts
from batch_agent.scheduler.server import Endpoint
from batch_agent.spec import BatchSpec
from batch_agent.tools.pool import ToolPool

if TYPE_CHECKING:
    from batch_agent.run.cascade import Ladder
    from batch_agent.run.changes import Changes
    from batch_agent.run.feeder import Feeder
    from batch_agent.run.lending import Lending

logger = logging.getLogger("batch_agent")


@dataclass(slots=True, eq=False)
class SharedState:
    """``dispatchers`` are those of all backends, by name; ``dispatcher`` is this run's. ``pool``, ``store``,
    ``commits`` and ``lender`` are set while the outermost run works; ``lender`` only if several processes do.
    ``paced``: the inputs of inner runs come only when an agent may start. ``observed``: the outermost run has
    observers of what workers in other processes do."""

    clock: Clock
    emit: Sink
    dispatcher: Dispatcher
    spending: Spending
    dispatchers: dict[str, Dispatcher]
    directory: Path | None  # the run directory of the outermost run
    rate_mark: RateMark | None  # in that directory
    observers: Observers
    models: dict[str, set[str]] = field(default_factory=dict)  # the models that runs use, by name of the backend
    pool: ToolPool | None = None
    store: Store | None = None
    commits: Commits | None = None
    lender: Lending | None = None
    changes: Changes | None = None  # of a resumed run, since it was compared with its record
    paced: bool = False
    observed: bool = False
    ladder: Ladder | None = None  # the entries of a cascade, while its run works
    _was_overdue: bool = False
    _most_slots: int = 0

    async def close(self) -> None:
        """Close what the outermost run has opened."""
        if self.changes is not None:
            self.changes.close()
        await self.observers.close()

    def inside(self, prepared: Prepared, run: str, emit: Sink, on_health: OnHealth, stage: str) -> SharedState:
        """Return the state of a run inside this one: its slots are those of its backend."""
        if self.spending.rows is not None:
            self.spending.rows.stage(stage, run)
        for each in models_of(prepared):
            if each.backend.name not in self.dispatchers:
                dispatcher = open_dispatcher(each, run, self.clock, emit, on_health)
                self.dispatchers[each.backend.name] = dispatcher
                dispatcher.spending = self.spending
        dispatcher = self.dispatchers[prepared.backend.name]
        return replace(self, emit=emit, dispatcher=dispatcher, pool=None, ladder=None)

    @property
    def cannot_continue(self) -> bool:
        return self.dispatcher.over is not None or bool(self.spending.exhausted)

    @property
    def unasked(self) -> str:
        """Text that says which rows of a cascade wait for a model that did not answer; "" if there are none."""
        return "" if self.ladder is None else self.ladder.unasked

    @property
    def slots(self) -> int | None:
        """The number of slots of all backends, for all processes of the run; None for no limit."""
        shared = self.lender is not None
        slots = [_all_slots(each) if shared else each.scheduler.slots for each in self.dispatchers.values()]
        return None if None in slots else sum(each for each in slots if each is not None)

    def at_most_slots(self, peak: int) -> int:
        """Return ``peak``, a sum of the peaks of several processes, but at most the number of slots that the run has
        had: the processes reach their peaks at different times, while slots move between them."""
        slots = self.slots
        if slots is None:
            return peak
        self._most_slots = max(self._most_slots, slots)
        return min(peak, self._most_slots)

    def why(self, ended: Ended) -> str:
        """Return the reason why a run ended in this way, or ""."""
        if ended == "out of budget":
            return self.spending.exhausted
        if self.unasked and ended == "unreachable":
            return self.unasked
        if ended == "pilot":
            return "the rows of its pilot are done"
        over = self.dispatcher.over
        return over[1] if over is not None and ended == over[0] else ""

    def live(self) -> LiveNumbers:
        """Return the current numbers that no event reports."""
        places = self.dispatchers.items()
        endpoints = [(each.name or name, each) for name, of in places for each in of.scheduler.endpoints]
        waiting = sum(of.scheduler.waiting for of in self.dispatchers.values())
        return LiveNumbers(endpoints, waiting, None if self.commits is None else self.commits.lag)

    async def is_time_spent(self, record: Store | None, outer: SharedState | None) -> bool:
        """Return whether earlier sessions have spent the whole budget on running time. ``outer`` is the outer run of a
        stage; if its budget is spent, it has no workers."""
        if outer is not None:
            return outer.lender is None
        return record is not None and self.spending.is_time_spent(await record.spent())

    async def keep_jobs(self, backend: Backend, store: Store) -> None:
        """Let a backend whose answers take hours record its jobs in the record of the outermost run."""
        if backend.capabilities.patient:
            record = self.store or store
            outlasts = await record.outlasts()
            backend.keep(record.blocking, outlasts=outlasts)
            if not outlasts:
                logger.warning("%s: without run_dir an interrupted job is lost, but still charged", backend.name)

    def keep_limits(self, spec: BatchSpec, run: str, feeder: Feeder | None) -> None:
        """Keep the usage of the user's rate limits across kills, and report to the budget how many rows of a stage
        wait."""
        if feeder is not None and self.spending.rows is not None:
            self.spending.rows.stage_of(run).waiting = lambda: feeder.made
        mark = self.rate_mark
        if mark is not None and (spec.rpm is not None or spec.tpm is not None):
            self.dispatcher.endpoints.rate_limits.keep(mark, self.dispatcher.scheduler.endpoints)

    @asynccontextmanager
    async def backends(self, prepared: Prepared, store: Store) -> AsyncIterator[None]:
        """Open the backend of a run, and those of the later entries of its cascade."""
        async with AsyncExitStack() as extent:
            for each in models_of(prepared):
                backend = each.backend
                await self.keep_jobs(backend, store)
                await extent.enter_async_context(backend)
                if each is not prepared:
                    follower = extent.enter_context(following(backend, self.dispatchers[backend.name]))
                    if follower is not None:
                        follower.use(filter(None, (each.model, each.spec.compaction_model)))
            yield

    def set_paused(self, paused: bool) -> None:
        for dispatcher in self.dispatchers.values():
            dispatcher.pause() if paused else dispatcher.resume()

    def set_overdue(self, record: str, overdue: bool) -> None:
        """Send nothing while a commit waits for the disk: answers could not be recorded soon."""
        if overdue and not self._was_overdue:
            self._was_overdue = True
            where = self.directory or "the record of the run"
            logger.warning("%s is slow, or in use: no request is sent while a commit waits", where)
        for dispatcher in self.dispatchers.values():
            dispatcher.slots.set_paused_by(record, overdue)


def open_shared(
    prepared: Prepared,
    run: str,
    clock: Clock,
    emit: Sink,
    on_health: OnHealth,
    directory: Path | None,
    on_exhausted: Callable[[str], None],
) -> SharedState:
    """Return the state of an outermost run."""
    dispatchers: dict[str, Dispatcher] = {}
    spending = open_spending(prepared, dispatchers, on_exhausted)
    for each in models_of(prepared):
        if each.backend.name not in dispatchers:
            dispatchers[each.backend.name] = dispatcher = open_dispatcher(each, run, clock, emit, on_health)
            dispatcher.spending = spending
    rate_mark = None if directory is None else RateMark(directory)
    own = dispatchers[prepared.backend.name]
    return SharedState(clock, emit, own, spending, dispatchers, directory, rate_mark, Observers())


def open_spending(
    prepared: Prepared, dispatchers: Mapping[str, Dispatcher], on_exhausted: Callable[[str], None]
) -> Spending:
    """Return the ledger of an outermost run, with these dispatchers."""

    def time_is_up() -> None:
        why = str(spending.refusal())
        for dispatcher in dispatchers.values():
            dispatcher.refuse_now(why)
            dispatcher.cut_off(spending.add_reason)

    def short(is_short: bool) -> None:
        for dispatcher in dispatchers.values():
            dispatcher.slots.set_short_of_budget(is_short)

    spending = Spending(prepared.spec, prepared.prices, short, on_exhausted, time_is_up)
    return spending


def open_dispatcher(prepared: Prepared, run: str, clock: Clock, emit: Sink, on_health: OnHealth) -> Dispatcher:
    """Return the dispatcher of a backend, for all runs that share it. Its events are those of ``run``."""
    backend = prepared.backend

    def on_limit(endpoint: Endpoint, reason: str) -> None:
        emit(LimitChanged(clock(), run, endpoint.capacity.limit, reason, endpoint.name))

    def on_control(endpoint: str, seconds: float, usage: Usage, cost: float | None, error: str) -> None:
        emit(ControlFinished(clock(), run, endpoint, seconds, usage, cost, error))

    standing_in = False
    own = prepared.model or "the run's model"

    def on_health_told(endpoint: Endpoint, now: float) -> None:
        nonlocal standing_in
        on_health(endpoint, now)
        used = [standby for standby in dispatcher.scheduler.standbys if not standby.is_idle]
        if standing_in != bool(used):
            standing_in = bool(used)
            if used:
                names = " and ".join(f"{each.standby.model} at {each.name}" for each in used if each.standby)
                why = endpoint.given_up or endpoint.health.reason
                logger.warning("every server of %s is down (%s); until one is up, rows go to %s", own, why, names)
            else:
                logger.warning("a server of %s is up again, and answers instead of the standby", own)

    dispatcher = Dispatcher(
        backend,
        prepared.max_inflight,
        prepared.max_agents,
        servers=backend.servers,
        terms=prepared.terms,
        max_outage=prepared.spec.max_outage,
        control_requests=prepared.spec.control_requests,
        on_limit=on_limit,
        on_health=on_health_told if backend.standbys else on_health,
        on_control=on_control,
    )
    if backend.capabilities.reports_load:
        dispatcher.scheduler.use(KvParts.of(prepared.spec.kvflow))
    for endpoint in dispatcher.scheduler.endpoints:
        endpoint.health.patient = backend.capabilities.patient
    return dispatcher


def _all_slots(dispatcher: Dispatcher) -> int | None:
    """Return the number of slots of a backend for all workers of a run. This process may have only a share of them."""
    scheduler = dispatcher.scheduler
    limits = [endpoint.capacity.limit for endpoint in scheduler.endpoints if endpoint.is_working]
    known = [limit for limit in limits if limit is not None]
    at_endpoints = sum(known) if len(known) == len(limits) else None
    most = scheduler.max_inflight
    if at_endpoints is None or most is None:
        return most if at_endpoints is None else at_endpoints
    return min(at_endpoints, most)


def health_change(endpoint: Endpoint, now: float, run: str, wall: Callable[[float], float]) -> HealthChanged:
    """Return the event with the present health of an endpoint. ``wall`` converts times of the run to those of
    events."""
    health = endpoint.health
    since = 0.0
    next_trial = 0.0
    if health.is_down:
        since = wall(health.down_since)
        next_trial = wall(max(health.next_trial, endpoint.server.held_until))
    rule = endpoint.server.rule_of("health")
    return HealthChanged(wall(now), run, endpoint.name, health.state, health.reason, since, next_trial, rule)


def tell_unanswered(emit: Sink, run: str, clock: Clock, error: BackendError | None, since: float, until: float) -> None:
    """Emit that a server did not answer which model it has, or that it has answered now."""
    if error is None:
        emit(HealthChanged(clock(), run, "", "healthy", ""))
    else:
        emit(HealthChanged(clock(), run, "", "down", str(error), clock.at(since), clock.at(until)))


def labelled(shared: SharedState, backend: str | None) -> list[LabelledEndpoint]:
    """Return the endpoints of all backends, or of one, with the models that runs use there."""
    places = shared.dispatchers if backend is None else {backend: shared.dispatcher}
    models = {name: ", ".join(sorted(shared.models.get(name, ()))) for name in places}
    return [
        LabelledEndpoint(endpoint.name or name, models[name], endpoint)
        for name, each in places.items()
        for endpoint in each.scheduler.endpoints
    ]
