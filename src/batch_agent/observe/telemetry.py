"""OpenTelemetry: exports the spans and metrics of a run with the SDK, if it is installed and enabled.

The SDK is imported only then. Export happens in the SDK's own threads, from bounded queues: an unreachable collector
loses spans, but slows nothing down. The standard variables (``OTEL_…``) configure it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue
from pydantic_core import to_json

from batch_agent.errors import SpecError
from batch_agent.events import (
    ListSink,
)
from batch_agent.job import AgentResult
from batch_agent.messages import Message, content_text
from batch_agent.observe.counts import DURATION, TOKENS, EventCounts
from batch_agent.observe.exposition import Histogram, Series
from batch_agent.observe.spans import (
    RowSampler,
    RowSpans,
    RowTrace,
    SpanRecord,
    provider_of,
    server_of,
    span_of_call,
    span_of_turn,
)
from batch_agent.tools.context import CallTrace, current_traceparent
from batch_agent.version import __version__

if TYPE_CHECKING:
    import requests
    from opentelemetry.sdk.metrics.export import HistogramDataPoint, MetricExporter, MetricsData
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import BatchSpanProcessor


logger = logging.getLogger("batch_agent")

UNKNOWN = 1.0  # seconds to wait at the end of a run for a collector that has not answered yet
ANSWERS = 5.0  # the same for one that answers, or whose answers cannot be seen (gRPC)
QUEUE = 16_384  # spans that may wait for the collector, unless OTEL_BSP_MAX_QUEUE_SIZE is set

VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
YES = ("1", "true", "yes", "on", "span_only", "span_and_event")


class Traces:
    """What the agents of a run need: ids for their requests and calls, and a receiver for their results."""

    def __init__(self, sampler: RowSampler, spans: RowSpans, *, content: bool) -> None:
        self._row = sampler.row
        self._spans = spans
        self._content = content

    def of_turn(self, run: str, index: int, turn: int) -> str:
        """Return the traceparent of a request."""
        trace, _, head, tail = self._row(run, index)
        return f"{head}{span_of_turn(trace, turn):016x}{tail}"

    def of_call(self, run: str, index: int, turn: int, call_id: str) -> CallTrace:
        return SpanOfCall(self._row(run, index), span_of_call(run, index, turn, call_id))

    def ended(self, run: str, result: AgentResult[object]) -> None:
        """Called when a row has its result, just before JobFinished."""
        if self._content:
            self._spans.describe(run, result.index, {**content_attributes(result)})


class SpanOfCall:
    """The trace context of a tool call."""

    def __init__(self, row: RowTrace, span: int) -> None:
        self._trace, self._sampled, head, tail = row
        self._span = span
        self.traceparent = f"{head}{span:016x}{tail}"

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make the span current, for instrumented libraries too."""
        from opentelemetry.context import attach, detach
        from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

        flags = TraceFlags(int(self._sampled))
        span = SpanContext(self._trace, self._span, is_remote=False, trace_flags=flags)
        token = attach(set_span_in_context(NonRecordingSpan(span)))
        own = current_traceparent.set(self.traceparent)
        try:
            yield
        finally:
            current_traceparent.reset(own)
            detach(token)


class Telemetry:
    """Exports ``counts``, and the spans that its ``sinks`` make of the run's events. ``traces`` are for its agents.
    ``close`` blocks while the collector answers."""

    def __init__(self, counts: EventCounts | None, environ: Mapping[str, str] = os.environ) -> None:
        sampler = RowSampler.from_environment(environ)
        self._collector = CollectorState()
        self._metrics = None if counts is None else _metrics(environ, self._collector, counts)
        traced = sampler.records and environ.get("OTEL_TRACES_EXPORTER", "").lower() != "none"
        self._processor = _processor(environ, self._collector) if traced else None
        export: Callable[[Sequence[SpanRecord]], None] = lambda spans: None  # noqa: E731
        if self._processor is not None:
            export = _exporter(self._processor, environ)
        self._spans = RowSpans(export, sampler, _around())
        self.traces = Traces(sampler, self._spans, content=wants_content(environ)) if traced else None

    @property
    def sinks(self) -> list[ListSink]:
        return [] if self._processor is None else [self._spans]

    def close(self) -> None:
        """Send the remaining spans. A collector that refuses or does not answer is not waited for: the thread that
        sends is then abandoned."""
        threading.Thread(target=self._shut_down, name="batch-agent telemetry", daemon=True).start()
        if reason := self._collector.wait_closed():
            logger.warning("the collector %s: the last spans and metrics are not sent", reason)

    def _shut_down(self) -> None:
        try:
            if self._processor is not None:
                shutdown: Callable[[], object] = self._processor.shutdown
                shutdown()
            if self._metrics is not None:
                self._metrics.close()
        finally:
            self._collector.close()


class CollectorState:
    """Whether the collector answers, from the requests of the SDK's exporters."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._answers: bool | None = None  # None: unknown
        self._unseen = self._closed = False

    def session(self) -> requests.Session:
        """Return a session for an exporter, whose answers are noted."""
        import requests

        note = self._note

        class Noted(requests.Session):
            def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
                try:
                    response = super().send(request, **options)
                except BaseException:
                    note(False)
                    raise
                note(response.ok)
                return response

        return Noted()

    def unseen(self) -> None:
        """An exporter has no session: its answers are not noted."""
        self._unseen = True

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_closed(self) -> str:
        """Wait until everything is sent, and return "". If the collector refuses, or does not answer for too long,
        return that reason."""
        with self._changed:
            if refused := self._refuses():  # it may be back
                self._answers = None
            if not (self._answers or self._unseen):
                self._changed.wait_for(lambda: self._closed or self._answers is not None, UNKNOWN)
            if self._answers or self._unseen:
                self._changed.wait_for(lambda: self._closed or self._refuses(), ANSWERS)
            if self._closed:
                return ""
            return "refuses" if self._refuses() or (refused and self._answers is None) else "does not answer"

    def _refuses(self) -> bool:
        return self._answers is False

    def _note(self, answers: bool) -> None:
        with self._changed:
            self._answers = answers
            self._changed.notify_all()


def _around() -> tuple[int, int] | None:
    """Return the caller's current span, as its trace and its id; None if there is none."""
    from opentelemetry.trace import get_current_span

    context = get_current_span().get_span_context()
    return (context.trace_id, context.span_id) if context.is_valid else None


def _processor(environ: Mapping[str, str], collector: CollectorState) -> BatchSpanProcessor:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    size = None if environ.get("OTEL_BSP_MAX_QUEUE_SIZE") else QUEUE
    if _is_grpc(environ, "TRACES"):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        collector.unseen()
        return BatchSpanProcessor(GrpcExporter(), max_queue_size=size)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return BatchSpanProcessor(OTLPSpanExporter(session=collector.session()), max_queue_size=size)


def _metrics(environ: Mapping[str, str], collector: CollectorState, counts: EventCounts) -> OtelMetrics:
    if _is_grpc(environ, "METRICS"):
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

        collector.unseen()
        return OtelMetrics(GrpcExporter(), _resource(environ), environ, counts)
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    exporter = OTLPMetricExporter(session=collector.session())
    return OtelMetrics(exporter, _resource(environ), environ, counts)


def _is_grpc(environ: Mapping[str, str], signal: str) -> bool:
    common = environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")
    if (environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL") or common).strip().lower() != "grpc":
        return False
    if find_spec("grpc") is None:
        raise SpecError(
            "telemetry: OTEL_EXPORTER_OTLP_PROTOCOL=grpc needs the package opentelemetry-exporter-otlp-proto-grpc; "
            "install it, or use http/protobuf"
        )
    return True


def _resource(environ: Mapping[str, str]) -> Resource:
    from opentelemetry.sdk.resources import Resource

    named = environ.get("OTEL_SERVICE_NAME") or "service.name" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return Resource.create({} if named else {"service.name": "batch-agent"})


def _exporter(processor: BatchSpanProcessor, environ: Mapping[str, str]) -> Callable[[Sequence[SpanRecord]], None]:
    from opentelemetry.sdk.trace import Event as SpanEvent
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

    kinds = {"internal": SpanKind.INTERNAL, "client": SpanKind.CLIENT}
    resource = _resource(environ)
    scope = InstrumentationScope("batch_agent", __version__)
    sampled = TraceFlags(1)
    fine = Status(StatusCode.UNSET)

    def context(trace: int, span: int) -> SpanContext:
        return SpanContext(trace, span, is_remote=False, trace_flags=sampled)

    def made(span: SpanRecord) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            context(span.trace, span.span),
            context(span.trace, span.parent) if span.parent else None,
            resource,
            span.attributes,
            [SpanEvent(mark.name, mark.attributes, int(mark.at * 1e9)) for mark in span.marks],
            () if span.link is None else (Link(context(*span.link)),),
            kinds[span.kind],
            status=fine if span.error is None else Status(StatusCode.ERROR, span.error),
            start_time=int(span.began * 1e9),
            end_time=int(span.ended * 1e9),
            instrumentation_scope=scope,
        )

    def export(spans: Sequence[SpanRecord]) -> None:
        for span in spans:
            processor.on_end(made(span))

    return export


def wants_content(environ: Mapping[str, str]) -> bool:
    return environ.get(VARIABLE, "").strip().lower() in YES


def content_attributes(result: AgentResult[object]) -> dict[str, str]:
    """Return the attributes of a row's span: the conversation up to the last answer, and that answer."""
    system = [message for message in result.messages if message.role == "system"]
    said = [message for message in result.messages if message.role != "system"]
    answer = [said.pop()] if said and said[-1].role == "assistant" else []
    written = {
        "gen_ai.system_instructions": [part for message in system for part in _parts(message)],
        "gen_ai.input.messages": _written(said),
        "gen_ai.output.messages": _written(answer),
    }
    return {name: to_json(value).decode() for name, value in written.items() if value}


def _written(messages: Iterable[Message]) -> list[JsonValue]:
    return [{"role": message.role, "parts": _parts(message)} for message in messages]


def _parts(message: Message) -> list[JsonValue]:
    text = content_text(message.content)
    if message.role == "tool":
        return [{"type": "tool_call_response", "id": message.tool_call_id, "response": text}]
    parts: list[JsonValue] = [{"type": "text", "content": text}] if text else []
    if message.reasoning:
        parts.insert(0, {"type": "reasoning", "content": message.reasoning})
    for call in message.tool_calls:
        parts.append({"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.arguments})
    return parts


INTERVAL = 60.0  # seconds, unless OTEL_METRIC_EXPORT_INTERVAL is set
UNITS = {TOKENS: "{token}", DURATION: "s"}


class OtelMetrics:
    """Passes the metrics of the GenAI conventions to the SDK's exporter at intervals: recording each turn with the SDK
    would cost more than all other observation together. ``close`` exports for the last time, and may block as long as
    the exporter does."""

    def __init__(
        self, exporter: MetricExporter, resource: Resource, environ: Mapping[str, str], counts: EventCounts
    ) -> None:
        self._exporter = exporter
        self._resource = resource
        self._counts = counts
        self._began = time.time_ns()
        self._over = threading.Event()
        self._interval = _seconds(environ.get("OTEL_METRIC_EXPORT_INTERVAL", ""))
        self._thread = threading.Thread(target=self._export_often, name="batch-agent metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._exporter.shutdown()

    def _export_often(self) -> None:
        while not self._over.wait(self._interval):
            self._exporter.export(self._data())
        self._exporter.export(self._data())

    def _data(self) -> MetricsData:
        from opentelemetry.sdk.metrics.export import (
            AggregationTemporality,
            Metric,
            MetricsData,
            ResourceMetrics,
            ScopeMetrics,
        )
        from opentelemetry.sdk.metrics.export import Histogram as Points
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        total, metrics = AggregationTemporality.CUMULATIVE, []
        for each in (self._counts.tokens, self._counts.durations):
            points = [self._point(each, labels, series) for labels, series in list(each.series.items())]
            metrics.append(Metric(each.name, each.text, UNITS[each.name], Points(points, total)))
        scope = ScopeMetrics(InstrumentationScope("batch_agent", __version__), metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def _point(self, histogram: Histogram, labels: tuple[str, ...], series: Series) -> HistogramDataPoint:
        from opentelemetry.sdk.metrics.export import HistogramDataPoint

        run, kind = labels
        attributes: dict[str, str | int] = {}
        if (backend := self._counts.backends.get(run)) is not None:
            attributes = {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": provider_of(backend),
                "gen_ai.request.model": self._counts.models[run],
                **server_of(backend),
            }
        if kind:
            attributes["gen_ai.token.type" if histogram.name == TOKENS else "error.type"] = kind
        counts = list(series.counts)
        return HistogramDataPoint(
            attributes,
            self._began,
            time.time_ns(),
            sum(counts),
            series.sum,
            counts,
            list(histogram.bounds),
            series.lowest,
            series.highest,
        )


def _seconds(milliseconds: str) -> float:
    try:
        return max(0.1, float(milliseconds) / 1000) if milliseconds else INTERVAL
    except ValueError:
        return INTERVAL
