"""One server as the scheduler sees it: how much it can take, how it is, what it refused, what it has in flight."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from batch_agent.scheduler.capacity import Capacity
from batch_agent.scheduler.health import Health
from batch_agent.scheduler.limit_search import MOST, LimitSearch
from batch_agent.scheduler.rates import Rates
from batch_agent.scheduler.refusals import Refusals


@dataclass(frozen=True, slots=True)
class Terms:
    """What is known of an endpoint before it is asked. ``start`` is where the search for the right number begins; None
    where the number is known, and is ``ceiling``."""

    ceiling: int | None = None
    start: int | None = None
    rpm: int | None = None
    tpm: int | None = None

    def endpoint(self, name: str) -> Endpoint:
        rates = None if self.rpm is None and self.tpm is None else Rates(self.rpm, self.tpm)
        if self.start is None:
            return Endpoint(name, self.ceiling, rates=rates)
        most = MOST if self.ceiling is None else min(MOST, self.ceiling)
        return Endpoint(name, most, LimitSearch(self.start, most=most), rates)


class Endpoint:
    __slots__ = (
        "capacity",
        "context",
        "given_up",
        "health",
        "held_until",
        "inflight",
        "leaving",
        "models",
        "most_in_flight",
        "name",
        "rates",
        "refusals",
        "weight",
    )

    def __init__(
        self,
        name: str = "",
        ceiling: int | None = None,
        search: LimitSearch | None = None,
        rates: Rates | None = None,
        *,
        weight: float = 1.0,
        models: frozenset[str] | None = None,
        context: int | None = None,
    ) -> None:
        self.name = name
        self.weight = weight  # of its share, among others
        self.models = models  # that it serves; None: any
        self.context = context  # tokens; None: as many as any
        self.capacity = Capacity(ceiling, search)
        self.rates = rates  # None while no budget is known
        self.health = Health()
        self.refusals = Refusals()
        self.inflight = 0
        self.most_in_flight = 0  # since it last came back
        self.held_until = 0.0  # it asked to be left alone until then
        self.given_up = ""  # why it gets no more requests in this run
        self.leaving = False  # it gets no more, and is gone when it has answered what it has

    def has_slot(self, now: float) -> bool:
        """Whether a request may leave for it now."""
        if self.given_up or self.leaving or now < self.held_until:
            return False
        if self.rates is not None and self.rates.free_at(now) > now:
            return False
        state = self.health.state
        if state == "down":
            return now >= self.health.next_trial
        limit = self.capacity.limit
        return state != "on trial" and (limit is None or self.inflight < limit)

    @property
    def spare(self) -> float:
        """Slots that stay idle if nobody takes them. Where it is down that is the one of the next trial."""
        if self.given_up or self.leaving or self.held_until or self.health.state == "on trial":
            return 0
        if self.health.state == "down":
            return 1
        limit = self.capacity.limit
        return inf if limit is None else max(0, limit - self.inflight)

    @property
    def slots(self) -> int | None:
        """How many it has while it works; None: no end of them."""
        return 0 if self.given_up or self.leaving or self.health.is_down else self.capacity.limit

    def take(self, now: float) -> bool:
        """A request leaves. True when it is a trial."""
        self.inflight += 1
        if self.inflight > self.most_in_flight:
            self.most_in_flight = self.inflight
        limit = self.capacity.limit
        if limit is not None and self.inflight >= limit:
            self.capacity.filled = True
        trial = self.health.state == "down"
        if trial:
            self.health.try_now(now)
        self.health.heard = now
        return trial

    def go_down(self) -> None:
        self.capacity.restart(self.most_in_flight)
        self.most_in_flight = 0
