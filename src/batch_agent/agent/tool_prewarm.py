"""Starts tool calls before the model requests them, because the row made them in an earlier run.

It looks one answer ahead. When an agent starts, the calls of its recorded first answer start. When the agent makes the
calls of an answer, the calls of the next one start and run while the model generates. An agent that makes other calls
than recorded gets no more predictions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from batch_agent.job import Job
from batch_agent.messages import ToolCall
from batch_agent.observe.statistics import Prewarm
from batch_agent.record.earlier import EarlierCalls
from batch_agent.record.keys import row_of
from batch_agent.spec import BatchSpec
from batch_agent.tools.pool import PendingCall, ToolPool


@dataclass(slots=True)
class _Forecast:
    """The expected calls of one agent. ``begun``: calls that were started for it; they are held until the agent ends,
    so that they are not cancelled."""

    answers: list[tuple[ToolCall, ...]]  # the next one is last
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
        """Record the calls of an agent's answer, and start the predicted next ones."""
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
    """Yield the prewarm of a run; None if the option is off."""
    path = spec.run_dir if spec.predictive_prewarm is True else spec.predictive_prewarm
    if not path:
        yield None
        return
    async with EarlierCalls(Path(path)) as earlier:
        yield ToolPrewarm(pool, earlier)
