"""The span of a tool call as the tool sees it: in OpenTelemetry's context, and as a traceparent header.

Few tools look at it, so its ids are computed when they are read. The span itself is written elsewhere, after the call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Token

from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from batch_agent.observe.trace_ids import RowTrace, span_of_call
from batch_agent.tools.context import traceparent_of_call

Call = tuple[str, int, int, str]  # run, index, turn and the model's id of the call
Entered = tuple[Token[Context], Token[Callable[[], str]]]


class CallSpan(NonRecordingSpan):
    """``row`` returns the trace of a row, from its run and index."""

    def __init__(self, row: Callable[[str, int], RowTrace], call: Call) -> None:
        self._row, self._call = row, call

    def get_span_context(self) -> SpanContext:
        row = self._row(*self._call[:2])
        return SpanContext(row.trace, span_of_call(*self._call), is_remote=False, trace_flags=TraceFlags(row.sampled))

    def traceparent(self) -> str:
        return self._row(*self._call[:2]).traceparent(span_of_call(*self._call))

    def __repr__(self) -> str:
        return f"CallSpan({self.traceparent()!r})"


def enter(row: Callable[[str, int], RowTrace], call: Call) -> Entered:
    """Make the call's span the current one."""
    span = CallSpan(row, call)
    return attach(set_span_in_context(span)), traceparent_of_call.set(span.traceparent)


def leave(entered: Entered) -> None:
    """Restore what was current before ``enter``."""
    traceparent_of_call.reset(entered[1])
    detach(entered[0])
