"""One server as the scheduler sees it: how much it can take, how it is, what it refused, what it has in flight."""

from __future__ import annotations

from math import inf

from batch_agent.scheduler.capacity import Capacity
from batch_agent.scheduler.health import Health
from batch_agent.scheduler.refusals import Refusals


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
        "refusals",
        "weight",
    )

    def __init__(
        self,
        name: str = "",
        ceiling: int | None = None,
        *,
        weight: float = 1.0,
        models: frozenset[str] | None = None,
        context: int | None = None,
    ) -> None:
        self.name = name
        self.weight = weight  # of its share, among others
        self.models = models  # that it serves; None: any
        self.context = context  # tokens; None: as many as any
        self.capacity = Capacity(ceiling)
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
        trial = self.health.state == "down"
        if trial:
            self.health.try_now(now)
        self.health.heard = now
        return trial

    def go_down(self) -> None:
        self.capacity.restart(self.most_in_flight)
        self.most_in_flight = 0
