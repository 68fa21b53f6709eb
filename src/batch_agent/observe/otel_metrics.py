"""The two metrics of the GenAI conventions, ``gen_ai.client.token.usage`` and ``….operation.duration``.

They are counted here and passed to the SDK's exporter at intervals: recording each turn with the SDK would cost more
than all other observation together.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

from batch_agent.events import (
    Event,
    JobFinished,
    JobStarted,
    ListSink,
    ModelChosen,
    RunStarted,
    TurnFailed,
    TurnFinished,
)
from batch_agent.observe.spans import provider_of, server_of
from batch_agent.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint, MetricExporter, MetricsData
    from opentelemetry.sdk.resources import Resource

TOKENS, DURATION = "gen_ai.client.token.usage", "gen_ai.client.operation.duration"
BOUNDS = {
    TOKENS: [float(4**power) for power in range(14)],
    DURATION: [0.01 * 2**power for power in range(14)],
}
ABOUT = {
    TOKENS: ("{token}", "Number of input and output tokens used."),
    DURATION: ("s", "GenAI operation duration."),
}
INTERVAL = 60.0  # seconds, unless OTEL_METRIC_EXPORT_INTERVAL is set

Key = tuple[str, str, str]  # the metric, the run, and the type of token or of error


class _Series:
    __slots__ = ("bounds", "counts", "highest", "lowest", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts = bounds, [0] * (len(bounds) + 1)
        self.sum, self.lowest, self.highest = 0.0, inf, -inf

    def add(self, values: Sequence[float]) -> None:
        counts, bounds = self.counts, self.bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.sum += sum(values)
        self.lowest, self.highest = min(self.lowest, *values), max(self.highest, *values)


class OtelMetrics(ListSink):
    """``close`` exports for the last time, and may block as long as the exporter does."""

    def __init__(self, exporter: MetricExporter, resource: Resource, environ: Mapping[str, str]) -> None:
        self._exporter, self._resource = exporter, resource
        self._series: dict[Key, _Series] = {}
        self._common: dict[str, dict[str, str | int]] = {}  # by run
        self._answered: list[TurnFinished] = []  # not yet counted
        self._elsewhere: set[tuple[str, int]] = set()  # rows whose worker exports them
        self.handlers = {
            JobStarted: self._row_started,
            TurnFinished: self._turn_ended,
            JobFinished: self._row_ended,
            TurnFailed: self._turn_failed,
            RunStarted: self._run_started,
            ModelChosen: self._model_chosen,
        }
        self._began = time.time_ns()
        self._over = threading.Event()
        self._interval = _seconds(environ.get("OTEL_METRIC_EXPORT_INTERVAL", ""))
        self._thread = threading.Thread(target=self._export_often, name="batch-agent metrics", daemon=True)
        self._thread.start()

    def take(self, events: Iterable[Event]) -> None:
        super().take(events)
        answered = defaultdict[str, list[TurnFinished]](list)
        for turn in self._answered:
            answered[turn.run].append(turn)
        self._answered.clear()
        for run, turns in answered.items():
            self._one(DURATION, run, "").add([turn.seconds for turn in turns])
            self._one(TOKENS, run, "input").add([turn.usage.prompt_tokens for turn in turns])
            self._one(TOKENS, run, "output").add([turn.usage.completion_tokens for turn in turns])

    def _row_started(self, event: JobStarted) -> None:
        if event.elsewhere:
            self._elsewhere.add((event.run, event.index))

    def _turn_ended(self, event: TurnFinished) -> None:
        if (event.run, event.index) not in self._elsewhere:
            self._answered.append(event)

    def _row_ended(self, event: JobFinished) -> None:
        self._elsewhere.discard((event.run, event.index))

    def _turn_failed(self, event: TurnFailed) -> None:
        self._one(DURATION, event.run, event.error_type).add([event.seconds])

    def _run_started(self, event: RunStarted) -> None:
        self._common[event.run] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": provider_of(event.backend),
            "gen_ai.request.model": event.model,
            **server_of(event.backend),
        }

    def _model_chosen(self, event: ModelChosen) -> None:
        self._common.setdefault(event.run, {})["gen_ai.request.model"] = event.model

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._exporter.shutdown()

    def _one(self, metric: str, run: str, kind: str) -> _Series:
        return self._series.setdefault((metric, run, kind), _Series(BOUNDS[metric]))

    def _export_often(self) -> None:
        while not self._over.wait(self._interval):
            self._exporter.export(self._data())
        self._exporter.export(self._data())

    def _data(self) -> MetricsData:
        from opentelemetry.sdk.metrics.export import (
            AggregationTemporality,
            Histogram,
            Metric,
            MetricsData,
            ResourceMetrics,
            ScopeMetrics,
        )
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        total, known = AggregationTemporality.CUMULATIVE, list(self._series.items())
        metrics = [
            Metric(name, description, unit, Histogram([self._point(*one) for one in known if one[0][0] == name], total))
            for name, (unit, description) in ABOUT.items()
        ]
        scope = ScopeMetrics(InstrumentationScope("batch_agent", __version__), metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def _point(self, key: Key, series: _Series) -> HistogramDataPoint:
        from opentelemetry.sdk.metrics.export import HistogramDataPoint

        metric, run, kind = key
        attributes: dict[str, str | int] = {**self._common.get(run, {})}
        if kind:
            attributes["gen_ai.token.type" if metric == TOKENS else "error.type"] = kind
        counts = list(series.counts)
        return HistogramDataPoint(
            attributes,
            self._began,
            time.time_ns(),
            sum(counts),
            series.sum,
            counts,
            list(series.bounds),
            series.lowest,
            series.highest,
        )


def _seconds(milliseconds: str) -> float:
    try:
        return max(0.1, float(milliseconds) / 1000) if milliseconds else INTERVAL
    except ValueError:
        return INTERVAL
