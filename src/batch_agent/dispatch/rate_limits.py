"""Awaitable rate limits (``scheduler.rates``).

A request that holds its slot waits until the limits of its endpoint have room. When it ends, its real usage replaces
the estimate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from batch_agent.dispatch.rate_mark import RateMark
from batch_agent.messages import Quota, Usage
from batch_agent.scheduler.core import Slot
from batch_agent.scheduler.rates import SLACK, Rates
from batch_agent.scheduler.server import Endpoint


class RateLimits:
    """``arm`` sets the alarm of an endpoint; ``serve`` is called when the alarm rings."""

    def __init__(self, arm: Callable[[Endpoint], None]) -> None:
        self._arm = arm
        self._mark: RateMark | None = None
        self.short: dict[asyncio.Future[None], None] = {}  # requests that hold a slot and wait for a rate limit

    def keep(self, mark: RateMark, endpoints: Iterable[Endpoint]) -> None:
        """Keep the user's rate limits across a kill: requests of an earlier session count too."""
        if self._mark is mark:  # runs inside a run share it
            return
        self._mark = mark
        left = mark.seconds_left()
        for endpoint in endpoints if left else ():
            if endpoint.server.rates is not None:
                endpoint.server.rates.fill(_now() + left)
                self._arm(endpoint)

    def begin(self, slot: Slot) -> None:
        """Count a request that got its slot at an endpoint with rate limits."""
        endpoint, rates = slot.endpoint, slot.endpoint.server.rates
        if rates is None:
            return
        if self._mark is not None:
            self._mark.mark()
        slot.reservation = rates.begin(slot.sent_at)
        self._arm(endpoint)

    async def afford(self, slot: Slot, expect: Callable[[], Usage]) -> None:
        """Wait until the endpoint's rate limits have room for the expected usage. ``settle`` must follow."""
        endpoint = slot.endpoint
        rates = endpoint.server.rates
        if rates is None or slot.reservation is None or not rates.counts_tokens:
            return
        counted = slot.reservation = rates.unreserve(slot.reservation)
        reservation = rates.reserve(counted, expect(), _now())
        while reservation is None:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.short[turn] = None
            self._arm(endpoint)
            try:
                await turn
            finally:
                self.short.pop(turn, None)
            reservation = rates.reserve(counted, expect(), _now())  # answers since then may have lowered the estimate
        slot.reservation = reservation

    def leaves(self, slot: Slot) -> None:
        """Note that the request is sent now. It is counted again if it waited after the first count, for a rate limit
        or because the event loop stalled."""
        endpoint, now = slot.endpoint, _now()
        if slot.reservation is not None and endpoint.server.rates is not None and now > slot.sent_at + SLACK:
            endpoint.server.rates.count_again(slot.reservation, now)
            if self._mark is not None:
                self._mark.mark()

    def settle(self, slot: Slot, used: Usage | None = None, *, asked: bool = True) -> None:
        """Replace the reserved amount by what the request used; None: unknown. ``asked``: the endpoint received it."""
        reservation, endpoint = slot.reservation, slot.endpoint
        if reservation is None or endpoint.server.rates is None:
            return
        slot.reservation = None
        if asked:
            endpoint.server.rates.settle(reservation, used, _now())
        else:
            endpoint.server.rates.unsend(reservation, _now())
        self.serve()
        self._arm(endpoint)

    def serve(self) -> None:
        for turn in self.short:
            if not turn.done():
                turn.set_result(None)

    def learn(self, endpoint: Endpoint, slot: Slot, quota: Quota | None, used: Usage) -> None:
        if quota is not None:
            if endpoint.server.rates is None:
                endpoint.server.rates = Rates()
            endpoint.server.rates.learn(quota, slot.reservation, endpoint.server.inflight - 1, used, _now())
            self._arm(endpoint)


def _now() -> float:
    return asyncio.get_running_loop().time()
