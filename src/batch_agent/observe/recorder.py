"""Collects the timeline of a run from its events: spans of turns and tool calls, changes, live rows.

Each event costs a few updates. Spans and changes are collected until ``take`` returns them; docs/view.md documents
their format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batch_agent.events import (
    AnswerRejected,
    DrainStarted,
    HealthChanged,
    JobFinished,
    JobStarted,
    LimitChanged,
    RunFinished,
    ToolFinished,
    ToolStarted,
    TurnFailed,
    TurnFinished,
    TurnStarted,
    TypedSink,
)
from batch_agent.messages import JsonObject
from batch_agent.record.timeline import Line, Span

WAITING = 20_000  # spans that may wait
MESSAGE_CHARACTERS = 300
RowEvent = AnswerRejected | JobFinished | ToolFinished | ToolStarted | TurnFailed | TurnFinished | TurnStarted
QUEUED, RUNNING, TOOLS, BACKING_OFF = "queued", "running", "tools", "backing off"


class LiveRow:
    """A running row. ``ready``: when its agent was ready for the next turn; ``backoff``: the part of the wait since
    then that was a pause after a failure."""

    __slots__ = ("backoff", "began", "job_id", "ready", "sent", "since", "state", "tools", "turn")

    def __init__(self, job_id: str, at: float) -> None:
        self.job_id = job_id
        self.began = self.since = self.ready = at
        self.state = QUEUED
        self.turn = 0
        self.sent: list[float] = []  # requests in flight: more than one if a row is processed in parts
        self.tools: dict[tuple[int, int], float] = {}  # running calls, by turn and position
        self.backoff = 0.0


class Recorder(TypedSink):
    """Rows and spans belong to ``run``; changes of limits and health are those of all observed runs. ``on_event`` is
    called at the next event."""

    def __init__(self, run: str) -> None:
        self._run = run
        self.on_event: Callable[[], None] | None = None
        self.rows: dict[int, LiveRow] = {}
        self._changes: list[Line] = []
        self._spans: list[Span] = []
        self.handlers: dict[type, Callable[[Any], None]] = {
            AnswerRejected: self._answer_rejected,
            DrainStarted: self._drain_started,
            HealthChanged: self._health_changed,
            JobFinished: self._job_finished,
            JobStarted: self._job_started,
            LimitChanged: self._limit_changed,
            RunFinished: self._run_finished,
            ToolFinished: self._tool_finished,
            ToolStarted: self._tool_started,
            TurnFailed: self._turn_failed,
            TurnFinished: self._turn_finished,
            TurnStarted: self._turn_started,
        }

    def take(self) -> tuple[list[Line], list[Span]]:
        """Return the changes and the spans since the last call."""
        changes, self._changes = self._changes, []
        spans, self._spans = self._spans, []
        return changes, spans

    def live(self, limit: int) -> list[JsonObject]:
        """Return the oldest running rows."""
        rows: list[JsonObject] = []
        for index, row in self.rows.items():
            if len(rows) == limit:
                break
            rows.append(
                {
                    "index": index,
                    "job_id": row.job_id,
                    "state": row.state,
                    "since": round(row.since, 3),
                    "began": round(row.began, 3),
                    "turn": row.turn,
                }
            )
        return rows

    def _row(self, event: RowEvent) -> LiveRow | None:
        """Return the row of an event of this run."""
        if self.on_event is not None:
            self.on_event()
        return self.rows.get(event.index) if event.run == self._run else None

    def _limit_changed(self, event: LimitChanged) -> None:
        self._change(["limit", event.at, event.endpoint, event.max_inflight, event.reason])

    def _health_changed(self, event: HealthChanged) -> None:
        reason = event.reason[:MESSAGE_CHARACTERS]
        self._change(["health", event.at, event.endpoint, event.state, reason, event.since])

    def _job_started(self, event: JobStarted) -> None:
        if event.run == self._run:
            self.rows[event.index] = LiveRow(event.job_id, event.at)
            if self.on_event is not None:
                self.on_event()

    def _job_finished(self, event: JobFinished) -> None:
        if self._row(event) is not None:
            del self.rows[event.index]

    def _drain_started(self, event: DrainStarted) -> None:
        if event.run == self._run:
            self._change(["drain", event.at, ""])

    def _run_finished(self, event: RunFinished) -> None:
        if event.run == self._run:
            self._change(["end", event.at, event.ended, event.reason[:MESSAGE_CHARACTERS]])

    def _turn_started(self, event: TurnStarted) -> None:
        row = self._row(event)
        if row is not None:
            row.turn = event.turn
            row.sent.append(event.at)
            row.state, row.since = RUNNING, event.at

    def _turn_finished(self, event: TurnFinished) -> None:
        row = self._row(event)
        if row is not None:
            usage = event.usage
            tokens = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
            self._turn(row, event, "", "", tokens, event.first_token)
            row.ready, row.backoff = event.at, 0.0
            row.state, row.since = TOOLS if row.tools else QUEUED, event.at

    def _turn_failed(self, event: TurnFailed) -> None:
        row = self._row(event)
        if row is not None:
            self._turn(row, event, event.error_type, event.message[:MESSAGE_CHARACTERS], (0, 0, 0), None)
            row.ready, row.backoff = event.at, event.retry_in or 0.0
            row.state, row.since = BACKING_OFF if event.retry_in else QUEUED, event.at

    def _answer_rejected(self, event: AnswerRejected) -> None:
        if self._row(event) is not None:
            message = event.message[:MESSAGE_CHARACTERS]
            self._add(("rejected", event.at, event.at, event.index, event.turn, event.error_type, message))

    def _tool_started(self, event: ToolStarted) -> None:
        row = self._row(event)
        if row is not None:
            row.tools[event.turn, event.call] = event.at
            if not row.sent:
                row.state, row.since = TOOLS, event.at

    def _turn(
        self,
        row: LiveRow,
        event: TurnFinished | TurnFailed,
        error: str,
        message: str,
        tokens: tuple[int, int, int],
        first_token: float | None,
    ) -> None:
        start = row.sent.pop() if row.sent else event.at
        waited = max(0.0, start - row.ready)
        backoff = min(waited, row.backoff)
        place = "turn", start, event.at, event.index, event.turn, event.endpoint
        self._add((*place, round(waited - backoff, 3), round(backoff, 3), error, message, *tokens, first_token))

    def _tool_finished(self, event: ToolFinished) -> None:
        row = self._row(event)
        if row is None:
            return
        start = row.tools.pop((event.turn, event.call), event.at)
        self._add(("tool", start, event.at, event.index, event.turn, event.tool[:100], event.ok, event.source))
        if not row.tools and not row.sent:
            row.ready, row.backoff = event.at, 0.0
            row.state, row.since = QUEUED, event.at

    def _change(self, line: Line) -> None:
        self._changes.append(line)
        if self.on_event is not None:
            self.on_event()

    def _add(self, span: Span) -> None:
        if len(self._spans) < WAITING:
            self._spans.append(span)
