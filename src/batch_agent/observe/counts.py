"""Counts the events of a run by label: one count for Prometheus and for OpenTelemetry.

``metrics`` has the totals of ``Statistics``. It counts them without events, because each run needs them; events are
made only for a run with observers.
"""

from __future__ import annotations

from collections import Counter as Count
from collections import defaultdict
from collections.abc import Iterable

from batch_agent.errors import BackendError, JobError, OutputError, error_types
from batch_agent.events import (
    AnswerRejected,
    CacheRead,
    ContextCompacted,
    ControlFinished,
    Event,
    HealthChanged,
    JobFinished,
    JobStarted,
    ListSink,
    ModelChosen,
    RowTakenOver,
    RunStarted,
    ToolFinished,
    TurnFailed,
    TurnFinished,
)
from batch_agent.observe.exposition import Counter, Histogram

DOWN = ("down", "on trial")
# The two metrics of the GenAI conventions.
TOKENS, DURATION = "gen_ai.client.token.usage", "gen_ai.client.operation.duration"


class EventCounts(ListSink):
    """Counts by label. ``conventions``: the metrics of the GenAI conventions are counted too, by run. They leave out
    the rows of workers in other processes, which export their own."""

    def __init__(self, *, conventions: bool = False) -> None:
        self._answered: list[TurnFinished] = []  # not yet counted
        self._own: list[TurnFinished] = []  # of these, those of this process, if they are counted by the conventions
        self._down: set[str] = set()
        self._elsewhere: set[tuple[str, int]] = set()  # rows whose worker exports them
        self.began: float | None = None
        self.backends: dict[str, str] = {}  # by run
        self.models: dict[str, str] = {}  # by run
        self.caches: dict[str, CacheRead] = {}  # the latest, by run
        self.handlers = {
            TurnFinished: self._answered.append,
            TurnFailed: self._turn_failed,
            ToolFinished: self._tool_finished,
            JobFinished: self._row_ended,
            AnswerRejected: self._rejected,
            ContextCompacted: self._compacted,
            HealthChanged: self._health_changed,
            ControlFinished: self._controlled,
            CacheRead: self._cache_read,
            RunStarted: self._run_started,
        }
        if conventions:
            self.handlers |= {
                JobStarted: self._row_started,
                RowTakenOver: self._row_started,
                TurnFinished: self._turn_finished,
                TurnFailed: self._own_turn_failed,
                ModelChosen: self._model_chosen,
            }
        self.turns = Counter("batch_agent_turns_total", "Complete answers from models.", ("endpoint",))
        self.controls = Counter(
            "batch_agent_control_requests_total", "Requests of no row, to find out whether a server works.", ("state",)
        )
        self.failed_turns = Counter(
            "batch_agent_turn_failures_total", "Turns that failed, by type of error.", ("error_type",)
        )
        self.retries = Counter("batch_agent_retries_total", "Requests sent again, by type of error.", ("error_type",))
        self.rejected = Counter(
            "batch_agent_answers_rejected_total", "Answers that did not fit the output schema.", ("error_type",)
        )
        self.compactions = Counter("batch_agent_contexts_compacted_total", "Conversations that were cut to fit.")
        self.tools = Counter(
            "batch_agent_tool_calls_total",
            "Tool calls by outcome and by how they were served.",
            ("tool", "outcome", "source"),
        )
        self.outages = Counter("batch_agent_outages_total", "Number of times an endpoint went down.", ("endpoint",))
        self.first_token = Histogram(
            "batch_agent_time_to_first_token_seconds", "Time to the first token of streamed answers."
        )
        self.turn_time = Histogram("batch_agent_turn_duration_seconds", "Seconds from sending a request to its answer.")
        self.tool_time = Histogram("batch_agent_tool_duration_seconds", "Time of a tool call.", ("tool",))
        self.row_time = Histogram("batch_agent_row_duration_seconds", "Time of a row from its start to its result.")
        # Of the conventions, by run and type of token, and by run and type of error.
        self.tokens = Histogram(
            TOKENS, "Number of input and output tokens used.", ("run", "type"), tuple(4.0**power for power in range(14))
        )
        self.durations = Histogram(
            DURATION, "GenAI operation duration.", ("run", "error"), tuple(0.01 * 2**power for power in range(14))
        )
        for counter, kind in (
            (self.failed_turns, BackendError),
            (self.retries, BackendError),
            (self.rejected, OutputError),
        ):
            begin_at_zero(counter, kind)

    def take(self, events: Iterable[Event]) -> None:
        super().take(events)
        answered, own = self._answered, defaultdict[str, list[TurnFinished]](list)
        self.turn_time.observe_all([turn.seconds for turn in answered])
        self.first_token.observe_all([turn.first_token for turn in answered if turn.first_token is not None])
        for place, turns in Count(turn.endpoint or self.backends.get(turn.run, "") for turn in answered).items():
            self.turns.add(turns, place)
        for turn in self._own:
            own[turn.run].append(turn)
        for run, here in own.items():
            self.durations.observe_all([turn.seconds for turn in here], run, "")
            self.tokens.observe_all([turn.usage.prompt_tokens for turn in here], run, "input")
            self.tokens.observe_all([turn.usage.completion_tokens for turn in here], run, "output")
        answered.clear()
        self._own.clear()

    def _run_started(self, event: RunStarted) -> None:
        self.backends[event.run], self.models[event.run] = event.backend, event.model
        if self.began is None:
            self.began = event.at

    def _model_chosen(self, event: ModelChosen) -> None:
        self.models[event.run] = event.model

    def _row_started(self, event: JobStarted) -> None:
        (self._elsewhere.add if event.elsewhere else self._elsewhere.discard)((event.run, event.index))

    def _row_ended(self, event: JobFinished) -> None:
        self._elsewhere.discard((event.run, event.index))
        if not event.resumed:
            self.row_time.observe(event.timings.total)

    def _turn_finished(self, event: TurnFinished) -> None:
        self._answered.append(event)
        if (event.run, event.index) not in self._elsewhere:
            self._own.append(event)

    def _turn_failed(self, event: TurnFailed) -> None:
        (self.failed_turns if event.retry_in is None else self.retries).add(1, event.error_type)

    def _own_turn_failed(self, event: TurnFailed) -> None:
        self._turn_failed(event)
        if (event.run, event.index) not in self._elsewhere:
            self.durations.observe(event.seconds, event.run, event.error_type)

    def _tool_finished(self, event: ToolFinished) -> None:
        self.tools.add(1, event.tool, "ok" if event.ok else "failed", event.source)
        self.tool_time.observe(event.seconds, event.tool)

    def _rejected(self, event: AnswerRejected) -> None:
        self.rejected.add(1, event.error_type)

    def _compacted(self, event: ContextCompacted) -> None:
        self.compactions.add()

    def _controlled(self, event: ControlFinished) -> None:
        self.controls.add(1, "failed" if event.error else "ok")

    def _cache_read(self, event: CacheRead) -> None:
        self.caches[event.run] = event

    def _health_changed(self, event: HealthChanged) -> None:
        place = event.endpoint or self.backends.get(event.run, "")
        if event.state not in DOWN:
            self._down.discard(place)
        elif place not in self._down:
            self._down.add(place)
            self.outages.add(1, place)


def begin_at_zero(counter: Counter, kind: type[JobError]) -> None:
    """Set the series of all errors of a kind to 0: a rate needs the value before the first event."""
    for error_type in sorted(error_types(kind)):
        counter.add(0, error_type)
