"""How the number of concurrent requests changed and why, in a few steps: changes with one reason are one step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from batch_agent.events import LimitChanged

KEPT = 16  # steps; the first ones of a long run are dropped


@dataclass(frozen=True, slots=True)
class LimitStep:
    """A change of the concurrency limit; None is no limit."""

    before: int | None
    after: int | None
    reason: str
    endpoint: str = ""

    def __str__(self) -> str:
        where = f"{self.endpoint}: " if self.endpoint else ""
        return f"{where}{_number(self.before)} -> {_number(self.after)}: {self.reason}"


class Limits:
    def __init__(self) -> None:
        self._start: int | None = None
        self._latest: dict[str, int | None] = {}  # by endpoint
        self._steps: deque[LimitStep] = deque(maxlen=KEPT)

    def add(self, event: LimitChanged) -> None:
        if event.reason == "start":
            self._start = event.max_inflight
            return
        before = self._latest.get(event.endpoint, self._start)
        self._latest[event.endpoint] = event.max_inflight
        last = self._steps[-1] if self._steps else None
        if last is not None and (last.endpoint, last.reason) == (event.endpoint, event.reason):
            self._steps[-1] = replace(last, after=event.max_inflight)
        elif before != event.max_inflight:
            self._steps.append(LimitStep(before, event.max_inflight, event.reason, event.endpoint))

    def steps(self) -> tuple[LimitStep, ...]:
        return tuple(self._steps)


def _number(limit: int | None) -> str:
    return "no limit" if limit is None else f"{limit:,}"
