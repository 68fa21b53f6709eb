"""What is known of a run at one moment, as its views and its summary show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from batch_agent.events import CacheRead, Ended
from batch_agent.messages import Usage
from batch_agent.observe.entry_counts import CascadeCount
from batch_agent.observe.history import LimitStep, Pace
from batch_agent.observe.stage_counts import StageCount


@dataclass(frozen=True, slots=True)
class RecentError:
    """An error and how often it occurred with this text. ``index`` is the latest row with it; ``retried``: the request
    will be sent again."""

    index: int
    type: str
    message: str
    count: int
    retried: bool
    job_id: str = ""


@dataclass(frozen=True, slots=True)
class RecentResult:
    """A finished row in a few words: its output, or its error."""

    index: int
    ok: bool
    text: str
    seconds: float
    job_id: str = ""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The finished calls of a tool. ``seconds`` is the sum over calls that ran."""

    calls: int = 0
    failed: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Outage:
    """A server that does not answer. Times in seconds."""

    endpoint: str
    lasted: float
    next_trial: float  # from now; 0 during a trial
    reason: str  # its latest failure


@dataclass(frozen=True, slots=True)
class Prewarm:
    """Tool calls that were ``begun`` before a model requested them, those that were then requested (``hits``), and
    calls that could have been started early but were not (``misses``)."""

    begun: int
    hits: int
    misses: int

    @property
    def wasted(self) -> int:
        return self.begun - self.hits


@dataclass(frozen=True, slots=True)
class Statistics:
    """A run at one moment. Every running agent is in exactly one of ``running`` (holds an inference slot),
    ``waiting_on_tools``, ``backing_off`` (will repeat a failed request) and ``queued``."""

    backend: str = ""
    model: str = ""
    total: int | None = None  # None: the inputs are an iterator of unknown length
    started: int = 0
    done: int = 0
    ok: int = 0
    interrupted: int = 0  # started, but unfinished when the run ended: they have not failed
    resumed: int = 0  # part of the finished rows: from the record of an earlier session
    failures: Mapping[str, int] = field(default_factory=dict)  # by AgentError.type
    answered_by: Mapping[str, int] = field(default_factory=dict)  # finished rows by the model that answered them
    running: int = 0
    waiting_on_tools: int = 0
    backing_off: int = 0
    queued: int = 0
    turns: int = 0
    retries: int = 0
    control_requests: int = 0  # requests of no row, to find out whether rows or a server are bad
    usage: Usage = field(default_factory=Usage)
    cost: float | None = None  # $; None if no price is known
    unpriced: bool = False  # the price of a part of the turns is not known
    earlier_tokens: int = 0  # of earlier sessions of the run
    earlier_cost: float | None = None
    cache_hits: int = 0  # turns that the response cache answered
    saved: Usage = field(default_factory=Usage)  # their usage when they were first answered
    tool_runs: int = 0
    tool_shared: int = 0
    tool_cached: int = 0
    tool_errors: int = 0
    prewarm: Prewarm | None = None  # set if calls are started before a model requests them
    tools: Mapping[str, ToolUse] = field(default_factory=dict)
    cascade: CascadeCount | None = None  # the entries of a cascade
    voted: int = 0  # rows whose samples have voted
    samples: int = 0  # of these rows
    samples_spared: int = 0  # that were not asked, because the vote was decided
    samples_identical: int = 0  # rows with several samples whose answers were equal
    rejected: int = 0  # answers that failed validation and were requested again
    last_rejected: RecentError | None = None
    inference_seconds: float = 0.0  # slot-seconds of finished turns
    tool_wait_seconds: float = 0.0  # agent-seconds without a slot while a tool was running
    elapsed: float = 0.0
    recent_rate: float = 0.0  # rows of this session per second
    pace: Pace = field(default_factory=Pace)
    row_seconds: float | None = None  # average seconds per row in this session
    youngest: float = 0.0  # seconds since the latest row started
    draining: bool = False  # no new row starts
    peak_running: int = 0
    max_inflight: int | None = None
    limits: tuple[LimitStep, ...] = ()  # how the limit changed, and why
    recent_errors: tuple[RecentError, ...] = ()  # latest last
    recent_results: tuple[RecentResult, ...] = ()  # latest last; filled in by the code that sees results
    outages: tuple[Outage, ...] = ()  # current outages
    outage_seconds: float = 0.0  # total downtime of servers
    down_seconds: Mapping[str, float] = field(default_factory=dict)  # downtime by server
    kv: CacheRead | None = None  # the engines' KV caches, if they report them
    schema_note: str = ""  # why the output schema is no longer sent
    stages: tuple[StageCount, ...] = ()  # of a pipeline; the other numbers are sums over them
    ended: Ended | None = None
    reason: str = ""  # which limit ended the run, or why it could not continue

    @property
    def failed(self) -> int:
        return self.done - self.ok

    @property
    def tool_calls(self) -> int:
        return self.tool_runs + self.tool_shared + self.tool_cached

    @property
    def samples_are_identical(self) -> bool:
        """Whether in several rows all samples had the same answer, so that sampling may be useless."""
        return self.voted > 1 and self.samples_identical == self.voted

    @property
    def fresh(self) -> int:
        """Return the rows finished in this session."""
        return self.done - self.resumed

    @property
    def alive(self) -> int:
        return self.running + self.waiting_on_tools + self.backing_off + self.queued

    @property
    def left(self) -> int | None:
        """Return the rows that this session still has to do; None if unknown."""
        if self.draining:
            return self.alive
        return None if self.total is None else max(0, self.total - self.done)

    @property
    def overall_rate(self) -> float:
        return self.fresh / self.elapsed if self.elapsed > 0 else 0.0

    @property
    def eta(self) -> float | None:
        """Return the seconds left at the recent rate; None if unknown."""
        rate = self.recent_rate or self.overall_rate
        left = self.left
        if left is None or not rate or self.ended or self.outages:
            return None
        by_rate = left / rate
        if left > self.alive or self.row_seconds is None:
            return by_rate
        # All remaining rows have started, so they need at most the time of one row.
        return min(by_rate, max(0.0, self.row_seconds - self.youngest))
