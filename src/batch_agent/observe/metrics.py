"""Statistics of a run, computed from its events and readable at any time as one frozen Statistics.

Every event of every agent passes here, so an event costs only a few attribute updates. Memory is bounded by the running
agents, not by the rows of the batch. ``Recorder`` collects the timeline from the same events.
Other modules here display the numbers.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import islice
from typing import Any

from batch_agent.blocking import clock_of
from batch_agent.errors import Interrupted
from batch_agent.events import (
    AnswerRejected,
    CacheRead,
    ControlFinished,
    DrainStarted,
    Event,
    HealthChanged,
    JobFinished,
    JobStarted,
    LimitChanged,
    ModelChosen,
    RowTakenOver,
    RunFinished,
    RunStarted,
    SchemaUnsupported,
    Sink,
    Sinks,
    Source,
    ToolFinished,
    ToolStarted,
    TurnFailed,
    TurnFinished,
    TurnStarted,
    TypedSink,
)
from batch_agent.job import AgentResult
from batch_agent.messages import JsonObject, Reply, Usage
from batch_agent.observe.entry_counts import EntryCounts, first_count
from batch_agent.observe.history import History, Limits, Pace
from batch_agent.observe.statistics import Outage, RecentError, Statistics, ToolUse
from batch_agent.record.timeline import Line, Span

WINDOW = 30  # seconds over which the recent rate is computed
RECENT_ERRORS = 5
MESSAGE_CHARACTERS = 500
RARE = (CacheRead, ControlFinished, DrainStarted, ModelChosen, SchemaUnsupported, RunFinished)
NOTHING = Usage()
# Statistics that add up over the processes of a run, in the order of ``Metrics.counts``.
COUNTED = (
    *("turns", "retries", "control_requests", "cache_hits", "rejected", "peak_running"),
    *("tool_runs", "tool_shared", "tool_cached", "tool_errors", "inference_seconds", "tool_wait_seconds"),
    *("voted", "samples", "samples_spared", "samples_identical"),
)
USED, SAVED = "used ", "saved "  # in the names of counts, before the kinds of tokens
TOOL_PARTS = ("calls of ", "failed calls of ", "seconds of ")  # before the name of a tool
USAGES = tuple(each.name for each in fields(Usage))
MOST_TOOLS = 64  # counted by name: a model may invent any number of names

# The state of a running agent. Plain ints: this is the hot path.
_QUEUED, _RUNNING, _WAITING, _BACKING_OFF = range(4)
LIVE_STATES = {_QUEUED: "queued", _RUNNING: "running", _WAITING: "tools", _BACKING_OFF: "backing_off"}


class LiveAgent:
    """A running row. ``ready``: when its agent was ready for the next turn. ``backoff``: the part of the wait since
    then that was a pause after a failure. ``recorder`` gets its spans, if the run has a timeline."""

    __slots__ = (
        "backoff",
        "began",
        "index",
        "job_id",
        "ready",
        "recorder",
        "since",
        "state",
        "tools_open",
        "turn",
        "turns_open",
    )

    def __init__(self, at: float, index: int, job_id: str, recorder: Recorder | None) -> None:
        self.index, self.job_id, self.recorder = index, job_id, recorder
        self.state = _QUEUED
        self.began = self.since = self.ready = at
        self.backoff = 0.0
        self.turn = 0
        self.tools_open = 0
        self.turns_open = 0  # more than one if a row is processed in parts


class Metrics(TypedSink):
    """``clock`` must be the clock of the events' ``at``. A run calls ``job_started`` and the other public methods for
    its own agents (``Emit``). The handlers are for events of runs inside it, and for rare ones."""

    entries: EntryCounts | None = None  # of a cascade
    # Of worker processes: the sum of ``counts``, and their running agents by state, as a status names it.
    elsewhere: Mapping[str, float] = {}
    agents_elsewhere: Mapping[str, int] = {}
    _run: RunStarted | None = None
    _finished: RunFinished | None = None
    _began = _latest_start = _row_seconds = 0.0
    _started = _done = _ok = _resumed = _interrupted = _timed_rows = 0
    _running = _peak_running = 0
    _running_seconds = _waiting_seconds = 0.0  # of all agents
    _turns = _retries = _controls = _cache_hits = _rejected = _tool_errors = 0
    _prompt = _cached = _completion = _reasoning = _cache_writes = 0
    _cost: float | None = None
    _unpriced = False  # the price of an answer was not known
    _saved = Usage()
    _samples = (0, 0, 0, 0)  # rows with a vote, their samples, those not needed, rows with identical samples
    _last_rejected: RecentError | None = None
    _draining = False
    _max_inflight: int | None = None
    _schema_note = ""
    _kv: CacheRead | None = None

    def __init__(self, clock: Callable[[], float] = time.monotonic, recorder: Recorder | None = None) -> None:
        self._clock, self._recorder = clock, recorder
        self._agents: dict[tuple[str, int], LiveAgent] = {}  # by run and row
        self._failures: dict[str, int] = {}
        self._answered_by: dict[str, int] = {}
        self._tool_sources = {"run": 0, "shared": 0, "cache": 0}
        self._tools: dict[str, list[float]] = {}  # calls, failed, seconds
        self._history, self._limits = History(), Limits()
        self._down: dict[str, HealthChanged] = {}
        self._down_seconds: dict[str, float] = {}  # of outages that are over, by endpoint
        self.stages: list[Metrics] = []  # of the runs inside this one
        self._errors: dict[tuple[str, str], RecentError] = {}
        self._rows_by_second: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self.handlers = dict[type, Callable[[Any], None]].fromkeys(RARE, self._rare) | {
            AnswerRejected: self._answer_rejected,
            HealthChanged: self._health_changed,
            JobFinished: self._job_finished,
            JobStarted: self._job_started,
            RowTakenOver: self._job_started,
            LimitChanged: self._limit_changed,
            RunStarted: self._run_started,
            ToolFinished: self._tool_finished,
            ToolStarted: self._tool_started,
            TurnFailed: self._turn_failed,
            TurnFinished: self._turn_finished,
            TurnStarted: self._turn_started,
        }

    def counts(self) -> dict[str, float]:
        """Return the numbers of this process that add up over all processes of a run, by name."""
        sources = self._tool_sources
        numbers = (self._turns, self._retries, self._controls, self._cache_hits, self._rejected, self._peak_running)
        tools = (sources["run"], sources["shared"], sources["cache"], self._tool_errors)
        seconds = (self._running_seconds, self._waiting_seconds)
        counts: dict[str, float] = dict(zip(COUNTED, (*numbers, *tools, *seconds, *self._samples), strict=True))
        usage = Usage(self._prompt, self._cached, self._completion, self._reasoning, self._cache_writes)
        for kind, spent in ((USED, usage), (SAVED, self._saved)):
            counts |= {f"{kind}{name}": amount for name, amount in asdict(spent).items() if amount}
        for name, use in self._tools.items():
            counts |= {f"{part}{name}": amount for part, amount in zip(TOOL_PARTS, use, strict=True)}
        if self._unpriced:
            counts["unpriced"] = 1
        return counts if self._cost is None else {**counts, "cost": self._cost}

    def _done_elsewhere(self) -> Mapping[str, float]:
        """Return the numbers of worker processes. The numbers of stages are committed shortly before their sum."""
        counts, of_stages = dict(self.elsewhere), Counter[str]()
        for stage in self.stages:
            of_stages.update(stage.elsewhere)
        for name in of_stages.keys() - {"peak_running"}:  # the stages reach their peaks at different times
            counts[name] = max(counts.get(name, 0), of_stages[name])
        return counts

    def statistics(self) -> Statistics:
        run, finished = self._run, self._finished
        now = finished.at if finished else self._clock()
        elapsed = now - run.at if run else 0.0
        down = self._down_by_server(now)
        states = Counter(agent.state for agent in self._agents.values())
        for state, name in LIVE_STATES.items() if finished is None else ():
            states[state] += self.agents_elsewhere.get(name, 0)
        counts = self.counts()
        for name, count in self._done_elsewhere().items():
            counts[name] = counts.get(name, 0) + count
        numbers: dict[str, Any] = {name: counts[name] for name in COUNTED}
        return Statistics(
            **numbers,
            backend=run.backend if run else "",
            model=run.model if run else "",
            total=run.total if run else None,
            started=self._started,
            done=self._done,
            ok=self._ok,
            interrupted=self._interrupted,
            resumed=self._resumed,
            failures=dict(self._failures),
            answered_by=dict(self._answered_by),
            running=states[_RUNNING],
            waiting_on_tools=states[_WAITING],
            backing_off=states[_BACKING_OFF],
            queued=states[_QUEUED],
            usage=_usage(counts, USED),
            cost=elapsed * run.cost_per_second if run and run.cost_per_second else counts.get("cost"),
            unpriced=bool(counts.get("unpriced")),
            saved=_usage(counts, SAVED),
            tools=_tools(counts),
            last_rejected=self._last_rejected,
            elapsed=elapsed,
            recent_rate=self._recent_rate(elapsed),
            pace=self._history.pace(elapsed) if run else Pace(),
            row_seconds=self._row_seconds / self._timed_rows if self._timed_rows else None,
            youngest=now - self._latest_start if self._agents else 0.0,
            draining=self._draining,
            max_inflight=self._max_inflight,
            limits=self._limits.steps(),
            recent_errors=tuple(self._errors.values()),
            outages=tuple(_outage(event, now, run) for event in self._down.values()),
            outage_seconds=sum(down.values()),
            down_seconds=down,
            kv=self._kv,
            schema_note=self._schema_note,
            cascade=first_count(each.entries for each in (self, *self.stages)),
            ended=finished.ended if finished else None,
            reason=finished.reason if finished else "",
        )

    def _down_by_server(self, now: float) -> dict[str, float]:
        seconds = dict(self._down_seconds)
        for name, event in self._down.items():
            seconds[name] = seconds.get(name, 0.0) + now - event.since
        return {_server(name, self._run): lasted for name, lasted in seconds.items()}

    def spent(self) -> tuple[int, float | None]:
        """Return tokens and $ of the turns of this process so far; None if no price is known."""
        return self._prompt + self._completion, self._cost

    def _run_started(self, event: RunStarted) -> None:
        """Handle the start of a run. The first one is this run; rows of runs inside it are added to its rows."""
        if self._run is None:
            self._run, self._began = event, event.at
        elif self._run.total is not None:
            total = None if event.total is None else self._run.total + event.total
            self._run = replace(self._run, total=total)

    def _rare(self, event: Event) -> None:
        match event:
            case CacheRead():
                self._kv = event
            case ControlFinished():
                self._controls += 1
                self._pay(event.usage, event.cost)
            case DrainStarted():
                self._draining = True
            case ModelChosen():
                self._run = self._run and replace(self._run, model=event.model)
            case SchemaUnsupported():
                self._schema_note = event.reason
            case RunFinished() if self._run is not None and event.run == self._run.run:
                self._finished = event

    def _limit_changed(self, event: LimitChanged) -> None:
        self._max_inflight = event.max_inflight
        self._limits.add(event)

    def agent(self, run: str, index: int) -> LiveAgent | None:
        """Return the running agent of a row; None if the row has not started, or has ended."""
        return self._agents.get((run, index))

    def _job_started(self, event: JobStarted) -> None:
        self.job_started(event.at, event.run, event.index, event.job_id)

    def job_started(self, at: float, run: str, index: int, job_id: str) -> None:
        self._started += 1
        recorder = self._recorder
        if recorder is not None and run != recorder.run:
            recorder = None
        agent = self._agents[run, index] = LiveAgent(at, index, job_id, recorder)
        self._latest_start = at
        if recorder is not None:
            recorder.begin(agent)

    def _turn_started(self, event: TurnStarted) -> None:
        self.turn_started(self.agent(event.run, event.index), event.at, event.turn)

    def turn_started(self, agent: LiveAgent | None, at: float, turn: int) -> None:
        if agent is None:
            return
        agent.turns_open += 1
        agent.turn = turn
        if agent.state != _RUNNING:
            if agent.state == _WAITING:
                self._waiting_seconds += at - agent.since
            agent.state, agent.since = _RUNNING, at
            self._running = running = self._running + 1
            if running > self._peak_running:
                self._peak_running = running

    def _turn_finished(self, event: TurnFinished) -> None:
        agent = self.agent(event.run, event.index)
        self.turn_finished(agent, event.at, event.turn, event, event.seconds, event.cost, event.endpoint)

    def turn_finished(
        self,
        agent: LiveAgent | None,
        at: float,
        turn: int,
        answer: Reply | TurnFinished,
        seconds: float,
        cost: float | None,
        endpoint: str,
    ) -> None:
        self._turns += 1
        usage = answer.usage
        self._pay(usage, cost)
        if cost is None and usage.prompt_tokens:
            self._unpriced = True
        if answer.saved is not None:
            self._cache_hits += 1
            self._saved += answer.saved
        if agent is None:
            return
        if agent.recorder is not None:
            tokens = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, answer.first_token
            agent.recorder.turn(agent, at, turn, seconds, endpoint, "", "", tokens)
        agent.ready, agent.backoff = at, 0.0
        if agent.turns_open:
            agent.turns_open -= 1
        if not agent.turns_open:  # else another part of its row still has one in flight
            self._move(agent, _WAITING if agent.tools_open else _QUEUED, at)

    def row_left(self, at: float, run: str, index: int) -> None:
        """Note that another process took over a row. Its start is counted again when it ends or comes back."""
        agent = self._agents.pop((run, index), None)
        if agent is not None:
            self._started -= 1
            self._move(agent, _QUEUED, at)
            if agent.recorder is not None:
                agent.recorder.end(agent)

    def row_elsewhere(self, at: float, run: str, result: AgentResult[object]) -> None:
        """Count the start of a row that another process worked on, and show its turns in the timeline. Their spans have
        no length, and the last one has all tokens."""
        self.job_started(at, run, result.index, result.job_id)
        recorder = self._agents[run, result.index].recorder
        if not result.resumed and recorder is not None:  # else an earlier session has shown them
            for turn in range(1, result.turns + 1):
                usage = result.usage if turn == result.turns else NOTHING
                tokens = usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, None
                recorder.add(("turn", at, at, result.index, turn, "", 0.0, 0.0, "", "", *tokens))

    def _pay(self, usage: Usage, cost: float | None) -> None:
        self._prompt += usage.prompt_tokens
        self._completion += usage.completion_tokens
        if usage.cached_tokens:
            self._cached += usage.cached_tokens
        if usage.reasoning_tokens:
            self._reasoning += usage.reasoning_tokens
        if usage.cache_write_tokens:
            self._cache_writes += usage.cache_write_tokens
        if cost is not None:
            self._cost = cost + (self._cost or 0.0)

    def _turn_failed(self, event: TurnFailed) -> None:
        if event.usage is not None:
            self._pay(event.usage, event.cost or None)
        agent = self._agents.get((event.run, event.index))
        if agent is not None:
            if agent.recorder is not None:
                why, nothing = (event.error_type, event.message[:TIMELINE_CHARACTERS]), (0, 0, 0, None)
                agent.recorder.turn(agent, event.at, event.turn, event.seconds, event.endpoint, *why, nothing)
            agent.ready, agent.backoff = event.at, event.retry_in or 0.0
            agent.tools_open = 0  # calls requested by the broken answer are abandoned
            agent.turns_open -= agent.turns_open > 0
            if not agent.turns_open:
                self._move(agent, _QUEUED if event.retry_in is None else _BACKING_OFF, event.at)
        if event.retry_in is not None:
            self._retries += 1
            name = "" if agent is None else agent.job_id
            self._remember(event.index, name, event.error_type, event.message, retried=True)

    def _answer_rejected(self, event: AnswerRejected) -> None:
        self._rejected += 1
        message = event.message[:MESSAGE_CHARACTERS]
        agent = self._agents.get((event.run, event.index))
        name = "" if agent is None else agent.job_id
        if agent is not None and agent.recorder is not None:
            why = event.error_type, event.message[:TIMELINE_CHARACTERS]
            agent.recorder.add(("rejected", event.at, event.at, event.index, event.turn, *why))
        self._last_rejected = RecentError(event.index, event.error_type, message, self._rejected, True, name)

    def _health_changed(self, event: HealthChanged) -> None:
        before = self._down.pop(event.endpoint, None)
        if event.since:
            self._down[event.endpoint] = event
        elif before is not None:
            self._down_seconds[event.endpoint] = self._down_seconds.get(event.endpoint, 0.0) + event.at - before.since

    def _tool_started(self, event: ToolStarted) -> None:
        self.tool_started(self.agent(event.run, event.index), event.at)

    def tool_started(self, agent: LiveAgent | None, at: float) -> None:
        if agent is not None:
            agent.tools_open += 1
            if agent.state != _RUNNING:
                self._move(agent, _WAITING, at)

    def _tool_finished(self, event: ToolFinished) -> None:
        agent, began = self.agent(event.run, event.index), event.at - event.seconds
        self.tool_finished(agent, event.at, began, event.turn, event.tool, event.seconds, event.ok, event.source)

    def tool_finished(
        self,
        agent: LiveAgent | None,
        at: float,
        began: float,
        turn: int,
        tool: str,
        seconds: float,
        ok: bool,
        source: Source,
    ) -> None:
        self._tool_sources[source] += 1
        use = self._tools.get(tool)
        if use is None and len(self._tools) < MOST_TOOLS:
            use = self._tools[tool] = [0, 0, 0.0]
        if use is not None:
            use[0] += 1
            if source == "run":
                use[2] += seconds
        if not ok:
            self._tool_errors += 1
            if use is not None:
                use[1] += 1
        if agent is None:
            return
        if agent.recorder is not None:
            agent.recorder.add(("tool", began, at, agent.index, turn, tool[:100], ok, source))
        if agent.tools_open:
            agent.tools_open -= 1
            if not agent.tools_open and agent.state == _WAITING:
                agent.ready, agent.backoff = at, 0.0
                self._move(agent, _QUEUED, at)

    def _job_finished(self, event: JobFinished) -> None:
        self.job_finished(event, event.at, event.run)

    def job_finished(self, row: JobFinished | AgentResult[object], at: float, run: str) -> None:
        # A row that never became an agent (too long, for example) still has a result.
        agent, error = self._agents.pop((run, row.index), None), row.error
        if agent is not None:
            self._move(agent, _QUEUED, at)
            if agent.recorder is not None:
                agent.recorder.end(agent)
        if error is None:
            self._ok += 1
        elif error.type == Interrupted.type:
            self._interrupted += 1  # not finished, but not failed
            return
        else:
            self._failures[error.type] = self._failures.get(error.type, 0) + 1
            self._remember(row.index, row.job_id, error.type, error.message, retried=False)
        self._done += 1
        if (name := row.answered_by) is not None:
            self._answered_by[name] = self._answered_by.get(name, 0) + 1
        if self.entries is not None and not isinstance(row, JobFinished):
            self.entries.took(row)
        if row.resumed:
            self._resumed += 1
        else:
            self._work_done(None if not row.turns else agent, at)

    def samples_ended(self, asked: int, spared: int, *, identical: bool) -> None:
        """Count a row whose samples have voted."""
        rows, samples, unneeded, same = self._samples
        self._samples = rows + 1, samples + asked, unneeded + spared, same + identical

    def _work_done(self, agent: LiveAgent | None, at: float) -> None:
        """Count a row of this session for rates and remaining time."""
        elapsed = at - self._began
        if agent is not None:
            self._row_seconds += at - agent.began
            self._timed_rows += 1
        self._history.add(elapsed)
        rows, second = self._rows_by_second, int(elapsed)
        if rows and rows[-1][0] == second:
            rows[-1] = (second, rows[-1][1] + 1)
        else:
            rows.append((second, 1))

    def _move(self, agent: LiveAgent, state: int, at: float) -> None:
        """Note the state of an agent that does not run yet, or no longer runs."""
        before = agent.state
        if before == _RUNNING:
            self._running -= 1
            self._running_seconds += at - agent.since
        elif before == _WAITING:
            self._waiting_seconds += at - agent.since
        agent.state, agent.since = state, at

    def _remember(self, index: int, job_id: str, kind: str, message: str, *, retried: bool) -> None:
        message = message[:MESSAGE_CHARACTERS]
        before = self._errors.pop((kind, message), None)
        count = before.count + 1 if before else 1
        self._errors[kind, message] = RecentError(index, kind, message, count, retried, job_id)
        if len(self._errors) > RECENT_ERRORS:
            del self._errors[next(iter(self._errors))]

    def _recent_rate(self, elapsed: float) -> float:
        since = max(int(elapsed) - WINDOW + 1, 0)
        rows = sum(count for second, count in self._rows_by_second if second >= since)
        return rows / (elapsed - since) if elapsed > since else 0.0


class Clock:
    """The clock of a run's events. It stands still until it is started."""

    def __init__(self) -> None:
        self._epoch = time.time()
        self._time: Callable[[], float] = float

    def start(self) -> None:
        self._time = clock_of(asyncio.get_running_loop())
        self._epoch = time.time() - self._time()

    def __call__(self) -> float:
        return self._epoch + self._time()

    def at(self, time: float) -> float:
        """Return the wall-clock time at this time of the event loop."""
        return self._epoch + time


class Emit(Sinks):
    """Passes the events of a run to its metrics and to all other ``sinks``. For the frequent events of an agent the
    caller counts with ``metrics``, and makes an event only if ``sinks`` want it."""

    def __init__(self, metrics: Metrics, sinks: Sequence[Sink]) -> None:
        self.metrics, self.sinks = metrics, Sinks(sinks)
        super().__init__([metrics, self.sinks])
        self._around = [sink for sink in sinks if isinstance(sink, Emit)]  # that of the run around a stage
        for around in self._around:
            around.metrics.stages.append(metrics)

    def elsewhere(self, event: Event) -> None:
        self.sinks.elsewhere(event)

    def row_left(self, at: float, run: str, index: int) -> None:
        """Report that another process took over a row of this one. The sinks get its end from that process."""
        self.metrics.row_left(at, run, index)
        for around in self._around:
            around.row_left(at, run, index)

    def row_elsewhere(self, at: float, run: str, result: AgentResult[object]) -> None:
        """Count the start of a row that another process worked on, just before its end."""
        self.metrics.row_elsewhere(at, run, result)
        for around in self._around:
            around.row_elsewhere(at, run, result)

    def job_finished(self, result: AgentResult[object], at: float, run: str) -> None:
        self.metrics.job_finished(result, at, run)
        if JobFinished in self.sinks.wanted:
            self.sinks(JobFinished.of(result, at, run))


def _usage(counts: Mapping[str, float], kind: str) -> Usage:
    return Usage(**{name: int(counts.get(f"{kind}{name}", 0)) for name in USAGES})


def _tools(counts: Mapping[str, float]) -> dict[str, ToolUse]:
    names = [name.removeprefix(TOOL_PARTS[0]) for name in counts if name.startswith(TOOL_PARTS[0])]
    uses = ((name, [counts.get(f"{part}{name}", 0.0) for part in TOOL_PARTS]) for name in names)
    return {name: ToolUse(int(calls), int(failed), seconds) for name, (calls, failed, seconds) in uses}


def _outage(event: HealthChanged, now: float, run: RunStarted | None) -> Outage:
    wait = 0.0 if event.state == "on trial" else max(0.0, event.next_trial - now)
    return Outage(_server(event.endpoint, run), now - event.since, wait, event.reason)


def _server(endpoint: str, run: RunStarted | None) -> str:
    """Return the name for an endpoint: the endpoint's own; that of the backend if it has only this endpoint."""
    return endpoint or (run.backend if run else "")


WAITING = 20_000  # spans that may wait
TIMELINE_CHARACTERS = 300


class Recorder(TypedSink):
    """The timeline of ``run``: live rows and spans, which ``Metrics`` passes, and changes of limits and health of all
    observed runs. ``take`` returns what was collected; docs/view.md documents it. ``on_event`` is called at the next
    event."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.on_event: Callable[[], None] | None = None
        self._rows: dict[int, LiveAgent] = {}
        self._changes: list[Line] = []
        self._spans: list[Span] = []
        self.handlers: dict[type, Callable[[Any], None]] = {
            DrainStarted: self._drain_started,
            HealthChanged: self._health_changed,
            LimitChanged: self._limit_changed,
            RunFinished: self._run_finished,
        }

    def take(self) -> tuple[list[Line], list[Span]]:
        """Return the changes and the spans since the last call."""
        changes, self._changes = self._changes, []
        spans, self._spans = self._spans, []
        return changes, spans

    def live(self, limit: int) -> list[JsonObject]:
        """Return the oldest running rows."""
        return [
            {
                "index": row.index,
                "job_id": row.job_id,
                "state": LIVE_STATES[row.state].replace("_", " "),
                "since": round(row.since, 3),
                "began": round(row.began, 3),
                "turn": row.turn,
            }
            for row in islice(self._rows.values(), limit)
        ]

    def begin(self, row: LiveAgent) -> None:
        self._rows[row.index] = row
        self._notice()

    def end(self, row: LiveAgent) -> None:
        self._rows.pop(row.index, None)
        self._notice()

    def turn(
        self,
        row: LiveAgent,
        at: float,
        turn: int,
        seconds: float,
        endpoint: str,
        error: str,
        message: str,
        tokens: tuple[int, int, int, float | None],
    ) -> None:
        """Add a turn that ended at ``at`` after ``seconds``. ``tokens`` has four numbers: tokens of the prompt, of its
        cached part and of the answer, and the seconds until the first token."""
        start = at - seconds
        waited, backoff = start - row.ready, row.backoff
        if waited < 0.0:
            waited = 0.0
        if backoff:
            backoff = min(waited, backoff)
            waited, backoff = waited - backoff, round(backoff, 3)
        self.add(("turn", start, at, row.index, turn, endpoint, round(waited, 3), backoff, error, message, *tokens))

    def add(self, span: Span) -> None:
        if len(self._spans) < WAITING:
            self._spans.append(span)
        if self.on_event is not None:
            self.on_event()

    def _notice(self) -> None:
        if self.on_event is not None:
            self.on_event()

    def _limit_changed(self, event: LimitChanged) -> None:
        self._change(["limit", event.at, event.endpoint, event.max_inflight, event.reason])

    def _health_changed(self, event: HealthChanged) -> None:
        reason = event.reason[:TIMELINE_CHARACTERS]
        self._change(["health", event.at, event.endpoint, event.state, reason, event.since])

    def _drain_started(self, event: DrainStarted) -> None:
        if event.run == self.run:
            self._change(["drain", event.at, ""])

    def _run_finished(self, event: RunFinished) -> None:
        if event.run == self.run:
            self._change(["end", event.at, event.ended, event.reason[:TIMELINE_CHARACTERS]])

    def _change(self, line: Line) -> None:
        self._changes.append(line)
        self._notice()
