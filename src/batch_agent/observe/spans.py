"""A sink that converts events to spans, following the GenAI conventions.

``invoke_workflow`` is the run, ``invoke_agent`` a row, ``chat MODEL`` a turn with all its attempts, ``execute_tool
NAME`` a tool call. Events of a row are kept until the row ends, because a failed row is exported even if it was not
sampled. Exporting is done elsewhere.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from secrets import randbits
from typing import Literal
from urllib.parse import urlsplit

from batch_agent.events import (
    AnswerRejected,
    JobFinished,
    JobStarted,
    ListSink,
    ModelChosen,
    RowTakenOver,
    RunFinished,
    RunStarted,
    ToolFinished,
    TurnFailed,
    TurnFinished,
)

MOST_EVENTS = 2000  # kept of one row
MOST_MESSAGE_CHARACTERS = 1000
# Provider names of the conventions, by the scheme of the backend, if they differ.
PROVIDERS = {
    "azure": "azure.ai.openai",
    "bedrock": "aws.bedrock",
    "google": "gcp.gemini",
    "gemini": "gcp.gemini",
    "vertex": "gcp.vertex_ai",
    "mistral": "mistral_ai",
    "xai": "x_ai",
}

Value = str | int | float | bool | Sequence[str]
Attributes = dict[str, Value]

logger = logging.getLogger("batch_agent")

FIRST_ROWS = 100  # kept if no sampler is set
LATER_SHARE = 0.01  # ... and the fraction of later ones
ROWS_REMEMBERED = 4096  # rows in flight whose ids are computed only once
_LOW, _STEP = 2**64 - 1, 0x9E3779B97F4A7C15


@dataclass(slots=True)
class Marked:
    """An event inside a span."""

    name: str
    at: float
    attributes: Attributes


@dataclass(slots=True)
class SpanRecord:
    """A finished span. Times are seconds since 1970; ``parent`` is a span of the same trace, 0 for none."""

    name: str
    trace: int
    span: int
    parent: int
    began: float
    ended: float
    attributes: Attributes
    kind: Literal["internal", "client"] = "internal"
    error: str | None = None  # error message of a failed span
    marks: list[Marked] = field(default_factory=list)
    link: tuple[int, int] | None = None  # a span of another trace


Told = TurnFinished | TurnFailed | ToolFinished | AnswerRejected


class _Workflow:
    """A running run."""

    __slots__ = ("began", "common", "failed", "model", "ok", "parent", "trace")

    def __init__(self, event: RunStarted, trace: int, parent: int) -> None:
        self.began = event.at
        self.model = event.model
        self.trace = trace
        self.parent = parent
        self.ok = self.failed = 0
        self.common: Attributes = {"gen_ai.provider.name": provider_of(event.backend), **server_of(event.backend)}


class RowSpans(ListSink):
    """Makes the spans of rows. ``export`` is called with the spans of a row, or of a run. ``around`` is the caller's
    span that contains the run: its trace and its id."""

    def __init__(
        self,
        export: Callable[[Sequence[SpanRecord]], None],
        sampler: RowSampler,
        around: tuple[int, int] | None = None,
    ) -> None:
        self._export = export
        self._sampler = sampler
        self._around = around
        self._runs: dict[str, _Workflow] = {}
        self._rows = defaultdict[tuple[str, int], list[Told]](list)  # events of running rows
        self._outermost: tuple[int, int] | None = None  # trace and span of the first run
        self._contents: dict[tuple[str, int], Attributes] = {}
        self._elsewhere: set[tuple[str, int]] = set()  # rows whose worker exports them
        self.handlers = {
            TurnFinished: self._keep,
            TurnFailed: self._keep,
            ToolFinished: self._keep,
            AnswerRejected: self._keep,
            JobStarted: self._row_started,
            RowTakenOver: self._row_started,
            JobFinished: self._row_ended,
            RunStarted: self._run_started,
            ModelChosen: self._model_chosen,
            RunFinished: self._run_ended,
        }

    def describe(self, run: str, index: int, attributes: Attributes) -> None:
        """Set further attributes of a row that is about to end."""
        self._contents[run, index] = attributes

    def _row_started(self, event: JobStarted) -> None:
        (self._elsewhere.add if event.elsewhere else self._elsewhere.discard)((event.run, event.index))

    def _keep(self, event: Told) -> None:
        if self._elsewhere and (event.run, event.index) in self._elsewhere:
            return
        events = self._rows[event.run, event.index]
        if len(events) < MOST_EVENTS:
            events.append(event)

    def _model_chosen(self, event: ModelChosen) -> None:
        if event.run in self._runs:
            self._runs[event.run].model = event.model

    def _run_started(self, event: RunStarted) -> None:
        around = self._outermost or self._around
        trace, parent = around or (trace_of_run(event.run), 0)
        self._runs[event.run] = _Workflow(event, trace, parent)
        if self._outermost is None:
            self._outermost = trace, span_of_run(event.run)

    def _row_ended(self, event: JobFinished) -> None:
        told, run = self._rows.pop((event.run, event.index), []), self._runs.get(event.run)
        content = self._contents.pop((event.run, event.index), {}) if self._contents else {}
        if run is None or event.resumed:
            return
        run.ok += event.error is None
        run.failed += event.error is not None
        if (event.run, event.index) in self._elsewhere:
            self._elsewhere.discard((event.run, event.index))
            return
        trace, sampled, *_ = self._sampler.row(event.run, event.index)
        if event.error is None and not sampled:
            return
        attributes: Attributes = {
            "gen_ai.operation.name": "invoke_agent",
            **run.common,
            "gen_ai.request.model": run.model,
            "gen_ai.conversation.id": event.job_id,
            "gen_ai.usage.input_tokens": event.usage.prompt_tokens,
            "gen_ai.usage.output_tokens": event.usage.completion_tokens,
            "batch_agent.row.index": event.index,
            "batch_agent.row.turns": event.turns,
            **content,
        }
        if event.error is not None:
            attributes["error.type"] = event.error.type
        error = None if event.error is None else event.error.message
        span = span_of_row(trace)
        link = run.trace, span_of_run(event.run)
        inner = _RowMaker(run, event, told).spans
        began = min([event.at - event.timings.total, *(each.began for each in inner)])
        whole = SpanRecord("invoke_agent", trace, span, 0, began, event.at, attributes, error=error, link=link)
        self._export([whole, *inner])

    def _run_ended(self, event: RunFinished) -> None:
        run = self._runs.pop(event.run, None)
        for key in [key for key in self._rows if key[0] == event.run]:
            del self._rows[key]
        if run is None:
            return
        attributes: Attributes = {
            "gen_ai.operation.name": "invoke_workflow",
            **run.common,
            "gen_ai.request.model": run.model,
            "batch_agent.run.id": event.run,
            "batch_agent.run.ended": event.ended,
            "batch_agent.rows.ok": run.ok,
            "batch_agent.rows.failed": run.failed,
        }
        error = None
        if event.ended in ("failed", "unreachable"):
            attributes["error.type"] = event.ended
            error = event.reason or event.ended
        span = span_of_run(event.run)
        self._export(
            [SpanRecord("invoke_workflow", run.trace, span, run.parent, run.began, event.at, attributes, error=error)]
        )


class _RowMaker:
    """Builds the spans of a row's turns and tool calls."""

    def __init__(self, run: _Workflow, ended: JobFinished, told: Sequence[Told]) -> None:
        self.spans: list[SpanRecord] = []
        self._run, self._job_id = run, ended.job_id
        self._id, self._index = ended.run, ended.index
        trace = trace_of(ended.run, ended.index)
        self._place = trace, span_of_row(trace)
        self._turns: dict[int, tuple[float, list[Marked]]] = {}  # turns whose first attempt failed
        self._used: set[int] = set()
        for event in told:
            match event:
                case TurnFinished() | TurnFailed():
                    self._turn_ended(event)
                case ToolFinished():
                    self._tool_ended(event)
                case AnswerRejected() if self.spans:
                    mark = Marked("answer rejected", event.at, _exception(event.error_type, event.message))
                    self.spans[-1].marks.append(mark)

    def _turn_ended(self, event: TurnFinished | TurnFailed) -> None:
        began, marks = self._turns.setdefault(event.turn, (event.at - event.seconds, []))
        error = None
        if isinstance(event, TurnFailed):
            if event.retry_in is not None:
                marks.append(Marked("retry", event.at, _exception(event.error_type, event.message)))
                return
            error = event.message
        del self._turns[event.turn]
        run = self._run
        attributes: Attributes = {
            "gen_ai.operation.name": "chat",
            **run.common,
            "gen_ai.request.model": run.model,
            "gen_ai.conversation.id": self._job_id,
            "batch_agent.turn": event.turn,
            **(server_of(event.endpoint) if event.endpoint else {}),
        }
        if isinstance(event, TurnFinished):
            _add_usage(attributes, event)
        else:
            attributes["error.type"] = event.error_type
        span = self._new(span_of_turn(self._place[0], event.turn))
        name = f"chat {run.model}".rstrip()
        trace, row = self._place
        self.spans.append(SpanRecord(name, trace, span, row, began, event.at, attributes, "client", error, marks))

    def _tool_ended(self, event: ToolFinished) -> None:
        began = event.at - event.seconds
        attributes: Attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": event.tool,
            "gen_ai.tool.call.id": event.call_id,
            "gen_ai.tool.type": "function",
            "gen_ai.conversation.id": self._job_id,
            "batch_agent.tool.source": event.source,
        }
        error = None
        if not event.ok:
            attributes["error.type"], error = "tool_error", "the tool call failed"
        span = self._new(span_of_call(self._id, self._index, event.turn, event.call_id))
        name = f"execute_tool {event.tool}"
        trace, row = self._place
        self.spans.append(SpanRecord(name, trace, span, row, began, event.at, attributes, error=error))

    def _new(self, span: int) -> int:
        """Return the id of a new span. Agents that work on parts of one row have equal turn numbers: only the first
        span keeps its id."""
        span = (randbits(64) or 1) if span in self._used else span
        self._used.add(span)
        return span


def provider_of(backend: str) -> str:
    """Return the name that the conventions have for the provider of the model, from the name of the backend."""
    scheme = backend.partition("://")[0]
    return PROVIDERS.get(scheme, scheme) or "unknown"


def server_of(place: str) -> Mapping[str, str | int]:
    """Return ``server.address`` and ``server.port`` of an endpoint; empty if it has no address."""
    try:
        url = urlsplit(place if "://" in place else f"//{place}")
        host, port = url.hostname, url.port
    except ValueError:
        return {}
    if not host or ("://" not in place and port is None):
        return {}
    return {"server.address": host} if port is None else {"server.address": host, "server.port": port}


def _add_usage(attributes: Attributes, event: TurnFinished) -> None:
    attributes["gen_ai.usage.input_tokens"] = event.usage.prompt_tokens
    attributes["gen_ai.usage.output_tokens"] = event.usage.completion_tokens
    if event.usage.cached_tokens:
        attributes["gen_ai.usage.cache_read.input_tokens"] = event.usage.cached_tokens
    if event.model:
        attributes["gen_ai.response.model"] = event.model
    if event.first_token is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = event.first_token


def _exception(error_type: str, message: str) -> Attributes:
    return {"error.type": error_type, "exception.message": message[:MOST_MESSAGE_CHARACTERS]}


# Ids are derived from names, so that the sender of a request and the writer of its span need not communicate: the same
# run, row and turn have the same ids everywhere. Every row is a separate trace, linked to the run's trace: a trace with
# a million rows cannot be displayed, and a row that is not sampled costs nothing.
def trace_of_run(run: str) -> int:
    return _parts(run)[0] | _parts(run)[1]


def span_of_run(run: str) -> int:
    return _parts(run)[1]


def trace_of(run: str, index: int) -> int:
    """Return the trace id of a row. Its lower half is well mixed (splitmix64), because samplers use it."""
    upper, lower = _parts(run)
    lower = (lower + index * _STEP) & _LOW
    lower = ((lower ^ (lower >> 30)) * 0xBF58476D1CE4E5B9) & _LOW
    lower = ((lower ^ (lower >> 27)) * 0x94D049BB133111EB) & _LOW
    return upper | (lower ^ (lower >> 31))


def span_of_row(trace: int) -> int:
    """Return the span id of a row with this ``trace``."""
    return trace & _LOW or 1


def span_of_turn(trace: int, turn: int) -> int:
    """Return the span id of a turn of a row. The step is odd, so no two turns have the same."""
    return (trace + turn * _STEP) & _LOW or 1


def span_of_call(run: str, index: int, turn: int, call_id: str) -> int:
    return _id(8, f"{run} {index} call {turn} {call_id}")


# The trace id of a row, whether it is sampled, and its traceparent headers (W3C) before and after the id of the span.
RowTrace = tuple[int, bool, str, str]


@lru_cache(maxsize=64)
def _parts(run: str) -> tuple[int, int]:
    """Return the upper half of the trace ids of a run, and a number that identifies the run."""
    return _id(8, f"{run} trace") << 64, _id(8, run)


def _id(size: int, name: str) -> int:
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=size).digest(), "big") or 1


class RowSampler:
    """Decides which rows are exported, from the standard variables. A failed row is always exported, unless ``records``
    is False: then no row is."""

    def __init__(self, share: float | None = None, *, records: bool = True) -> None:
        """``share`` of all rows; None: the first ones, and then a few."""
        self.records = records
        self._bound = None if share is None else round(share * 2**64)
        self._later = round(LATER_SHARE * 2**64)
        self.row = lru_cache(maxsize=ROWS_REMEMBERED)(self._row)  # a row's trace, from its run and index

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> RowSampler:
        """Create the sampler. A row has no parent, so parent-based samplers use their root sampler."""
        name = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower().removeprefix("parentbased_")
        match name:
            case "":
                return cls()
            case "always_on":
                return cls(1.0)
            case "always_off":
                return cls(0.0, records=False)
            case "traceidratio":
                return cls(_share(environ.get("OTEL_TRACES_SAMPLER_ARG", "")))
        logger.warning("OTEL_TRACES_SAMPLER=%s is not known here: the first %d rows are traced", name, FIRST_ROWS)
        return cls()

    def keeps(self, trace: int, index: int) -> bool:
        """Return whether to keep a row whose outcome is unknown. The rule is that of the SDK's TraceIdRatioBased, so
        that downstream services keep the same traces."""
        if self._bound is None:
            return index < FIRST_ROWS or trace % 2**64 < self._later
        return trace % 2**64 < self._bound

    def _row(self, run: str, index: int) -> RowTrace:
        trace = trace_of(run, index)
        sampled = self.keeps(trace, index)
        return trace, sampled, f"00-{trace:032x}-", "-01" if sampled else "-00"


def _share(text: str) -> float:
    try:
        share = float(text or 1.0)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        logger.warning("OTEL_TRACES_SAMPLER_ARG=%s is not a number from 0 to 1: every row is traced", text)
        return 1.0
    return share
