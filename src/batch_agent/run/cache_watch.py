"""Handles each reading of an engine's KV cache: reports it, and keeps the shared prefix cached.

While agents run, each of their turns uses the prefix, so the engine keeps it. In a gap, when all agents wait for tools,
only other clients' requests run. The prefix is touched before they have computed enough tokens to evict it. Without
other clients nothing is computed in a gap, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from batch_agent.agent.prepare import Prepared
from batch_agent.agent.touches import Touches
from batch_agent.backends.base import Load
from batch_agent.compiler.plan import Plan
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.events import CacheRead, Sink
from batch_agent.messages import Conversation
from batch_agent.scheduler.core import Scheduler
from batch_agent.scheduler.server import Endpoint

LEAST_TOKENS = 512  # a shorter prefix is cheap to compute again
PART = 0.5  # part of the cache's free memory: when others have computed this much, the prefix is touched
EVERY_SECONDS = 0.9  # between two events


class PrefixWatch:
    """Measures how much other clients compute at one endpoint since the prefix was last used."""

    def __init__(self) -> None:
        self._used_at: int | None = None  # tokens that the engine had computed when the prefix was last used

    def is_due(self, load: Load, inflight: int) -> bool:
        """Return whether the prefix must be used again before it is evicted."""
        if load.kv_tokens is None or load.prefix_queries is None:
            return False
        computed = load.prefix_queries - (load.prefix_hits or 0) + (load.generated or 0)
        if inflight or self._used_at is None:
            self._used_at = computed
            return False
        due = computed - self._used_at >= PART * load.kv_tokens * (1.0 - (load.kv_usage or 0.0))
        if due:
            self._used_at = computed
        return due


@dataclass(slots=True)
class CacheWatch:
    scheduler: Scheduler
    emit: Sink
    run: str
    clock: Callable[[], float]
    shared: Conversation  # the prefix
    keeper: Touches | None = None  # keeps the prefix in the cache; None: off
    _prefixes: dict[Endpoint, PrefixWatch] = field(default_factory=dict)
    _usage: dict[Endpoint, float] = field(default_factory=dict)
    _told: CacheRead | None = None

    @property
    def in_gaps(self) -> bool:
        """Whether engines are also read while no request of this run is in flight."""
        return self.keeper is not None

    async def read(self, endpoint: Endpoint, load: Load) -> None:
        if load.kv_usage is not None:
            self._usage[endpoint] = load.kv_usage
        if self._told is None or self.clock() - self._told.at >= EVERY_SECONDS:
            self.tell()
        if self.keeper is not None:
            watch = self._prefixes.setdefault(endpoint, PrefixWatch())
            if watch.is_due(load, endpoint.inflight):
                await self.keeper.keep_prefix(endpoint, self.shared)

    def tell(self) -> None:
        """Report the state of the caches, if there is any."""
        admission = self.scheduler.admission
        counts, usage = admission.counts, list(self._usage.values())
        if not admission.enabled or not (usage or counts.recomputed):
            return
        self._told = CacheRead(
            self.clock(),
            self.run,
            tokens=admission.capacity,
            usage=sum(usage) / len(usage) if usage else None,
            contexts=admission.contexts,
            held=len(admission.held),
            held_seconds=round(counts.held_seconds, 3),
            recomputed=counts.recomputed,
            recompute_seconds=round(counts.recompute_seconds, 3),
            touches=counts.touches,
            touched_tokens=counts.touched_tokens,
            kept_alive=counts.kept_alive,
        )
        self.emit(self._told)


def touches_for(prepared: Prepared, dispatcher: Dispatcher) -> Touches | None:
    """Return the touches of a run; None if they are off, or if the engine prefetches by itself."""
    parts, able = dispatcher.scheduler.parts, prepared.backend.capabilities
    if not (parts.touch or parts.keep_alive) or (able.prefills_ahead and prepared.spec.nvext_agent_hints):
        return None
    return Touches(prepared.backend, dispatcher, prepared.shapes.later)


def cache_watch(
    plan: Plan, scheduler: Scheduler, emit: Sink, run: str, clock: Callable[[], float], touches: Touches | None
) -> CacheWatch:
    keeps = scheduler.parts.keep_alive and plan.prefix_tokens >= LEAST_TOKENS
    return CacheWatch(scheduler, emit, run, clock, plan.shared, touches if keeps else None)
