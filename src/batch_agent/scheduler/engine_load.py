"""Adjusts the limit from the engine's own metrics, above all the length of its queue.

An engine is full when it has a queue. A request gains nothing by waiting there, and takes cache from running agents.
While the queue is short, at most an eighth of the running requests, the limit doubles with each reading. Once the queue
has been long, the limit grows by equal steps, so that runs that share an engine converge to equal shares. A queue that
is longer than the running requests at two readings in a row is cut to about half of them, by each run in proportion to
its requests in flight. It is never cut further: requests often end together, and others must be ready to replace them.
The limit also falls when the engine preempts many requests because memory is short.
"""

from __future__ import annotations

from dataclasses import dataclass

from batch_agent.scheduler.numbers import N

KEPT = 1 / 2  # of the running requests: what is left of a long queue
LEAST = 4  # a queue of this many requests is short at any engine
STEP = 16  # slots by which the limit grows once the queue was long
CALM = 10  # readings without growth after many requests were preempted


@dataclass(frozen=True, slots=True)
class Load:
    """The load that a server reports. None: not reported."""

    running: int = 0  # requests being computed
    waiting: int = 0  # requests in its queue
    kv_usage: float | None = None  # 0 to 1
    kv_tokens: int | None = None  # tokens that its cache can hold
    preemptions: int | None = None  # since it started
    prefix_queries: int | None = None  # prompt tokens looked up in its cache, since it started
    prefix_hits: int | None = None  # ... and found there
    finished: int | None = None  # requests that have ended since it started
    offloads: bool = False  # evicted blocks are kept in a larger memory of unknown size
    generated: int | None = None  # tokens since it started


class LoadGuide:
    def __init__(self) -> None:
        self._long = False  # the queue was long at the last reading
        self._grown = False  # it was long once: from then on the limit grows by steps
        self._calm = 0  # readings left without growth
        self._preemptions: int | None = None

    def read(self, load: Load, inflight: int, limit: int, most: int | None) -> tuple[int, str] | None:
        """Return a new limit, at most ``most``, and the reason; or None if it does not change."""
        running, waiting = load.running, load.waiting
        long = waiting > max(LEAST, running) and running > 0
        was_long, self._long = self._long, long
        thrashes = self._thrashes(load)
        if thrashes and self._calm <= CALM - N.several:
            self._calm, self._grown = CALM, True
            return _down(limit, int(min(limit, inflight) * (1 - N.small)), "the engine is short of memory")
        if long and was_long:
            self._grown = True
            share = (running * (1 + KEPT) + LEAST) / (running + waiting)
            return _down(limit, round(inflight * share), "the engine's queue is long")
        self._calm = max(0, self._calm - 1)
        short = waiting <= max(LEAST, running * N.small)
        # If other runs have the larger part, grow until the queue is long: then they give up more than this run.
        room = short or (not long and inflight < N.mostly * (running + waiting))
        if self._calm or not room or 10 * inflight < 9 * limit or (load.kv_usage or 0.0) > N.full:
            return None
        more = limit + STEP if self._grown or not short else 2 * limit
        more = more if most is None else min(more, most)
        if more <= limit:
            return None
        return more, "the queue stays short" if short else "others have more of the engine"

    def _thrashes(self, load: Load) -> bool:
        before, now = self._preemptions, load.preemptions
        self._preemptions = now
        return before is not None and now is not None and now - before > load.running * N.small


def _down(limit: int, fewer: int, reason: str) -> tuple[int, str] | None:
    fewer = max(1, fewer)
    return (fewer, reason) if fewer < limit else None
