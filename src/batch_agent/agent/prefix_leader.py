"""Sends the first agent's request ahead of the others, so that the shared prefix is computed once.

Requests that reach an engine together each compute the shared prefix, because it is cached only after one of them has
computed it. So the feed starts one agent and waits until its answer begins. If that fails, the others start too. No
extra request is sent. The leader's answer is streamed, because only a stream shows its beginning.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from batch_agent.backends.base import Capabilities
from batch_agent.compiler.plan import Plan

LEAST_TOKENS = 512  # a shorter prefix is computed in less time than waiting for the leader costs
LEAST_TOGETHER = 16  # requests that would reach the engine at once; with fewer, few compute the prefix twice
# While no answer is known: the request may be lost, and if the others go too soon, they compute the prefix too.
SLOWEST = 1_000  # tokens per second at which a prefix is expected to be computed
PATIENCE = 1.0  # seconds in addition
LONGEST = 5.0  # seconds at most


class PrefixLeader:
    """Decides which request goes first. ``usual``: seconds of the slowest answer of the server so far; 0 if none is
    known."""

    def __init__(self, prefix_tokens: int, usual: float = 0.0) -> None:
        self._seconds = min(usual or LONGEST, LONGEST, PATIENCE + prefix_tokens / SLOWEST)
        self._taken = False
        self._over = asyncio.Event()

    def take(self) -> bool:
        """Return whether the request that is about to be sent is the leader."""
        leads, self._taken = not self._taken, True
        return leads

    def end(self) -> None:
        """Record that the leader's answer has begun, or will not come."""
        self._over.set()

    async def wait(self) -> None:
        """Wait until the others may start. A slow leader does not block them beyond a time limit."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._seconds):
                await self._over.wait()


def lead_of(plan: Plan, able: Capabilities, max_inflight: int | None, usual: float) -> PrefixLeader | None:
    """Return the leader of a run, or None if none is needed."""
    together = min((count for count in (plan.total, max_inflight) if count is not None), default=LEAST_TOGETHER)
    if not able.prefix_leader or together < LEAST_TOGETHER or plan.prefix_tokens < LEAST_TOKENS:
        return None
    return PrefixLeader(plan.prefix_tokens, usual)
