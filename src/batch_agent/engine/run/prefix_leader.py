"""The first agent's request ahead of the others', so that what all of them begin with is computed once.

Requests that reach an engine together and cold each compute the shared prefix: it is in the cache only once somebody
has computed it. So the feed starts one agent and waits until that one's answer begins; whatever becomes of it, the
others go. Nothing extra is sent. The leader's answer is streamed, because only a stream shows its beginning.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from batch_agent.backends.base import Capabilities
from batch_agent.compiler.plan import Plan

LEAST_TOKENS = 512  # of a prefix; one that is shorter is computed in less time than is lost by going ahead
LEAST_TOGETHER = 16  # requests that would reach the engine at once; of few, few compute the prefix twice
SLOWEST = 200  # tokens a second at which a prefix is expected to be computed
PATIENCE = 1.0  # seconds beside that


class PrefixLeader:
    def __init__(self, prefix_tokens: int) -> None:
        self._seconds = PATIENCE + prefix_tokens / SLOWEST
        self._taken = False
        self._over = asyncio.Event()

    def take(self) -> bool:
        """Whether the request that is about to leave is the one that goes ahead."""
        leads, self._taken = not self._taken, True
        return leads

    def end(self) -> None:
        """The leader's answer has begun, or will not come."""
        self._over.set()

    async def wait(self) -> None:
        """Until the others may go. A leader that takes too long holds nobody."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._seconds):
                await self._over.wait()


def lead_of(plan: Plan, able: Capabilities, max_inflight: int | None) -> PrefixLeader | None:
    """None where nobody needs to go ahead."""
    together = min((count for count in (plan.total, max_inflight) if count is not None), default=LEAST_TOGETHER)
    if not able.prefix_leader or together < LEAST_TOGETHER or plan.prefix_tokens < LEAST_TOKENS:
        return None
    return PrefixLeader(plan.prefix_tokens)
