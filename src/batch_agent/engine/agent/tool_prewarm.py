"""Tool calls begun before the model asks for them, because their row made them in an earlier run.

One answer ahead: when an agent starts, the calls of its first answer then; when it asks for those of an answer, the
calls of the next one, which run while the model thinks. An agent that goes another way than then is left alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from batch_agent.job import Job
from batch_agent.messages import ToolCall
from batch_agent.observe.metrics import Prewarm
from batch_agent.spec import BatchSpec
from batch_agent.store.earlier import EarlierCalls
from batch_agent.store.keys import row_of
from batch_agent.tools.pool import PendingCall, ToolPool


@dataclass(slots=True)
class _Forecast:
    """What one agent is expected to call. ``begun`` are held until it ends, so that they go on while it may ask."""

    answers: list[tuple[ToolCall, ...]]  # the next one last
    expected: frozenset[tuple[str, str]] = frozenset()
    begun: list[PendingCall] = field(default_factory=list)


class ToolPrewarm:
    def __init__(self, pool: ToolPool, earlier: EarlierCalls) -> None:
        self._pool = pool
        self._earlier = earlier
        self._forecasts: dict[int, _Forecast] = {}

    async def begin(self, job: Job, question: str) -> None:
        answers = await self._earlier.of(row_of(job.input, question))
        if answers:
            self._forecasts[job.index] = forecast = _Forecast(answers[::-1])
            self._look_ahead(forecast)

    def asked(self, index: int, calls: Collection[ToolCall]) -> None:
        """An agent's model asks for these."""
        forecast = self._forecasts.get(index)
        if forecast is not None:
            if forecast.expected.isdisjoint((call.name, call.arguments) for call in calls):
                forecast.answers.clear()
            self._look_ahead(forecast)

    def end(self, index: int) -> None:
        forecast = self._forecasts.pop(index, None)
        for pending in forecast.begun if forecast is not None else ():
            pending.abandon()

    def statistics(self) -> Prewarm:
        tools = self._pool.statistics().values()
        return Prewarm(
            sum(tool.prewarmed for tool in tools),
            sum(tool.prewarm_hits for tool in tools),
            sum(tool.prewarm_misses for tool in tools),
        )

    def _look_ahead(self, forecast: _Forecast) -> None:
        calls = forecast.answers.pop() if forecast.answers else ()
        forecast.expected = frozenset((call.name, call.arguments) for call in calls)
        forecast.begun += filter(None, map(self._pool.prewarm, calls))


@asynccontextmanager
async def open_tool_prewarm(spec: BatchSpec, pool: ToolPool) -> AsyncIterator[ToolPrewarm | None]:
    """None where none is asked for."""
    path = spec.run_dir if spec.predictive_prewarm is True else spec.predictive_prewarm
    if not path:
        yield None
        return
    async with EarlierCalls(Path(path)) as earlier:
        yield ToolPrewarm(pool, earlier)
