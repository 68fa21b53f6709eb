"""Waits until enough servers of a fleet are up.

All are probed at once, and again until they are ready: each has a task that ends when it is up.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from batch_agent.errors import SpecError
from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.fleet.probe import Prober

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 2.0  # seconds between two probes of one endpoint
PROBES_PER_SECOND = 500  # at most: in a large fleet each is probed less often
SETTLE_SECONDS = 1.0  # for running probes once enough are up, so that other servers that are up count too


@dataclass(slots=True)
class Waited:
    """Which endpoints are up, by position in the list: an endpoint may be listed twice."""

    endpoints: Sequence[AgentEndpoint]
    needed: int
    up: set[int] = field(default_factory=set)
    reasons: dict[int, str] = field(default_factory=dict)  # why others are not up, once probed

    @property
    def enough(self) -> bool:
        return len(self.up) >= self.needed

    @property
    def asked(self) -> bool:
        """Return whether every endpoint was probed at least once."""
        return len(self.up) + len(self.reasons) == len(self.endpoints)

    @property
    def ready(self) -> list[AgentEndpoint]:
        return [self.endpoints[place] for place in sorted(self.up)]

    @property
    def missing(self) -> list[tuple[AgentEndpoint, str]]:
        return [
            (endpoint, self.reasons.get(place, "it has not answered yet"))
            for place, endpoint in enumerate(self.endpoints)
            if place not in self.up
        ]


def needed(total: int, min_hosts: int | None = None, min_fraction: float | None = None) -> int:
    """Return how many of ``total`` must be up, by default all. Raises SpecError if it is impossible."""
    if not total:
        raise SpecError("there is no endpoint to wait for: the hostfile lists none")
    if min_hosts is not None and min_hosts > total:
        raise SpecError(f"{min_hosts} endpoints can never be up: the hostfile lists {total}")
    if min_hosts is None and min_fraction is None:
        return total
    part = 1 if min_fraction is None else math.ceil(min_fraction * total - 1e-9)
    return max(1, min_hosts or 1, part)


async def wait_until_ready(
    waited: Waited, prober: Prober, timeout: float, changed: Callable[[Waited], None] = lambda waited: None
) -> None:
    """Return when enough are up or the time is over. ``waited`` is kept up to date and passed to ``changed``."""
    news = asyncio.Event()

    async def watch(place: int) -> None:
        endpoint, pause = waited.endpoints[place], FIRST_PAUSE
        while True:
            probe, _ = await prober.probe(endpoint)
            news.set()
            if probe.state == "up":
                waited.reasons.pop(place, None)
                waited.up.add(place)
                return
            waited.reasons[place] = probe.reason
            await asyncio.sleep(pause)
            pause = min(2 * pause, max(LONGEST_PAUSE, len(waited.endpoints) / PROBES_PER_SECOND))

    async def until(done: Callable[[], bool], seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not done():
                    await news.wait()
                    news.clear()
                    changed(waited)

    tasks = [asyncio.create_task(watch(place)) for place in range(len(waited.endpoints))]
    try:
        await until(lambda: waited.enough, timeout)
        if waited.enough:
            await until(lambda: waited.asked, SETTLE_SECONDS)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error
