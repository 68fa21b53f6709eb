import random

import pytest

from batch_agent.events import (
    Event,
    JobFinished,
    JobStarted,
    LimitChanged,
    RunFinished,
    RunStarted,
    ToolFinished,
    ToolStarted,
    TurnFailed,
    TurnFinished,
    TurnStarted,
)
from batch_agent.job import AgentError, Timings
from batch_agent.messages import Usage
from batch_agent.observe.metrics import MESSAGE_CHARACTERS, MOST_TOOLS, RECENT_ERRORS, Metrics
from batch_agent.observe.statistics import Statistics, ToolUse


class Recorder:
    """Metrics on a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.metrics = Metrics(clock=lambda: self.now)

    def __call__(self, *events: Event) -> Statistics:
        for event in events:
            self.metrics(event)
        return self.metrics.statistics()


@pytest.fixture
def record() -> Recorder:
    recorder = Recorder()
    recorder(RunStarted(100.0, "run", 10, "vllm://gpu", "m"))
    return recorder


def finished(at: float, index: int, error: AgentError | None = None, *, resumed: bool = False) -> JobFinished:
    return JobFinished(at, "run", index, f"job-{index}", error, 1, 1, Usage(), None, Timings(), resumed=resumed)


def test_nothing_has_happened_yet() -> None:
    assert Metrics().statistics() == Statistics()


def test_an_agent_is_queued_then_running_then_waiting_on_tools_then_done(record: Recorder) -> None:
    assert record(JobStarted(100.0, "run", 0, "a")).queued == 1
    running = record(TurnStarted(101.0, "run", 0, 1))
    assert (running.queued, running.running, running.peak_running) == (0, 1, 1)
    record(TurnFinished(103.0, "run", 0, 1, Usage(10, 4, 5, 2), 2.0, None))
    waiting = record(ToolStarted(103.0, "run", 0, 1, 0, "id", "look"))
    assert (waiting.running, waiting.waiting_on_tools, waiting.queued) == (0, 1, 0)
    after = record(ToolFinished(106.0, "run", 0, 1, 0, "id", "look", 3.0, True, "run"))
    assert (after.waiting_on_tools, after.queued, after.tool_wait_seconds) == (0, 1, 3.0)
    record(TurnStarted(106.0, "run", 0, 2), TurnFinished(107.0, "run", 0, 2, Usage(20, 14, 5), 1.0, None))
    done = record(finished(107.0, 0))
    assert (done.done, done.ok, done.failed, done.queued, done.turns) == (1, 1, 0, 0, 2)
    assert done.usage == Usage(30, 18, 10, 2)
    assert done.inference_seconds == 3.0


def test_a_tool_that_starts_while_the_model_talks_does_not_make_the_agent_wait_yet(record: Recorder) -> None:
    during = record(
        JobStarted(100.0, "run", 0, "a"),
        TurnStarted(100.0, "run", 0, 1),
        ToolStarted(101.0, "run", 0, 1, 0, "id", "look"),
    )
    assert (during.running, during.waiting_on_tools) == (1, 0)
    after = record(TurnFinished(104.0, "run", 0, 1, Usage(), 4.0, 0.5))
    assert (after.running, after.waiting_on_tools) == (0, 1)
    assert record(ToolFinished(106.0, "run", 0, 1, 0, "id", "look", 5.0, True, "run")).tool_wait_seconds == 2.0


def test_an_agent_with_two_tools_waits_once_until_both_are_done(record: Recorder) -> None:
    both = record(
        JobStarted(100.0, "run", 0, "a"),
        ToolStarted(100.0, "run", 0, 1, 0, "id", "x"),
        ToolStarted(100.0, "run", 0, 1, 0, "id", "y"),
    )
    assert both.waiting_on_tools == 1
    assert record(ToolFinished(101.0, "run", 0, 1, 0, "id", "x", 1.0, True, "shared")).waiting_on_tools == 1
    last = record(ToolFinished(104.0, "run", 0, 1, 0, "id", "y", 4.0, False, "cache"))
    assert (last.waiting_on_tools, last.tool_wait_seconds) == (0, 4.0)
    assert (last.tool_runs, last.tool_shared, last.tool_cached, last.tool_calls, last.tool_errors) == (0, 1, 1, 2, 1)


def test_a_failed_request_backs_off_until_it_is_sent_again(record: Recorder) -> None:
    record(
        JobStarted(100.0, "run", 0, "a"),
        TurnStarted(100.0, "run", 0, 1),
        ToolStarted(100.5, "run", 0, 1, 0, "id", "look"),
    )
    failed = record(TurnFailed(101.0, "run", 0, 1, "RateLimited", "429", 3.0))
    assert (failed.running, failed.waiting_on_tools, failed.backing_off, failed.retries) == (0, 0, 1, 1)
    again = record(TurnStarted(104.0, "run", 0, 1))
    assert (again.running, again.backing_off) == (1, 0)
    # The tool of the broken answer was abandoned: it does not count as one the agent waits for.
    assert record(TurnFinished(105.0, "run", 0, 1, Usage(), 1.0, None)).waiting_on_tools == 0


@pytest.mark.parametrize(
    "events",
    [
        [TurnStarted(100.0, "run", 0, 1)],
        [ToolStarted(100.0, "run", 0, 1, 0, "id", "look")],
        [TurnStarted(100.0, "run", 0, 1), TurnFailed(101.0, "run", 0, 1, "Unavailable", "gone", 1.0)],
    ],
)
def test_an_agent_that_ends_in_any_state_leaves_nothing_behind(record: Recorder, events: list[Event]) -> None:
    last = record(
        JobStarted(100.0, "run", 0, "a"), *events, finished(102.0, 0, AgentError("run", "TimeoutError", "late"))
    )
    assert (last.running, last.waiting_on_tools, last.backing_off, last.queued) == (0, 0, 0, 0)
    assert last.failures == {"TimeoutError": 1}


def test_the_states_of_live_agents_always_add_up() -> None:
    chance = random.Random(7)
    record = Recorder()
    live: set[int] = set()
    for step in range(3000):
        at, index = float(step), chance.randrange(20)
        if index not in live:
            live.add(index)
            statistics = record(JobStarted(at, "run", index, "x"))
        else:
            event = chance.choice(
                [
                    TurnStarted(at, "run", index, 1),
                    TurnFinished(at, "run", index, 1, Usage(), 1.0, None),
                    TurnFailed(at, "run", index, 1, "Unavailable", "x", chance.choice([None, 1.0])),
                    ToolStarted(at, "run", index, 1, 0, "id", "t"),
                    ToolFinished(at, "run", index, 1, 0, "id", "t", 1.0, True, "run"),
                    finished(at, index),
                ]
            )
            if isinstance(event, JobFinished):
                live.discard(index)
            statistics = record(event)
        states = (statistics.running, statistics.waiting_on_tools, statistics.backing_off, statistics.queued)
        assert sum(states) == len(live) and min(states) >= 0


def test_a_row_that_never_became_an_agent_still_counts(record: Recorder) -> None:
    done = record(finished(100.0, 3, AgentError("compile", "OVERSIZED", "too long")))
    assert (done.done, done.failed, done.queued) == (1, 1, 0)


def test_the_same_error_is_remembered_once_with_its_count_and_the_oldest_goes(record: Recorder) -> None:
    for index in range(3):
        record(TurnFailed(100.0, "run", index, 1, "Unavailable", "connection refused", 1.0))
    statistics = record(finished(101.0, 9, AgentError("infer", "Rejected", "x" * 10_000)))
    refused, rejected = statistics.recent_errors
    assert (refused.index, refused.count, refused.retried) == (2, 3, True)
    assert (len(rejected.message), rejected.retried) == (MESSAGE_CHARACTERS, False)
    for index in range(100):
        statistics = record(finished(102.0, index, AgentError("infer", "Rejected", f"no {index}")))
    assert [error.message for error in statistics.recent_errors] == [f"no {i}" for i in range(100 - RECENT_ERRORS, 100)]


def test_the_recent_rate_forgets_what_is_long_ago_and_the_eta_follows_it(record: Recorder) -> None:
    for index in range(5):
        record(finished(100.5, index))
    record.now = 110.0
    early = record()
    assert early.recent_rate == early.overall_rate == pytest.approx(0.5)
    assert early.eta == pytest.approx(10.0)
    record.now = 200.0
    late = record()
    assert late.recent_rate == 0.0
    assert late.eta == pytest.approx(100.0)  # from the overall rate, as nothing happened lately


def test_there_is_no_eta_without_a_total_or_a_first_result() -> None:
    assert Statistics(total=None, done=5, elapsed=10.0, recent_rate=1.0).eta is None
    assert Statistics(total=9, done=0, elapsed=10.0).eta is None
    assert Statistics(total=9, done=9, elapsed=10.0, recent_rate=1.0).eta == 0.0


def test_the_clock_stops_with_the_run(record: Recorder) -> None:
    record(LimitChanged(101.0, "run", 32, "429"), RunFinished(105.0, "run", "drained"))
    record.now = 500.0
    last = record()
    assert (last.elapsed, last.ended, last.max_inflight, last.eta) == (5.0, "drained", 32, None)


def test_rows_from_the_record_have_no_part_in_rates_and_times(record: Recorder) -> None:
    for index in range(8):
        record(finished(100.5, index, resumed=True))
    record(JobStarted(101.0, "run", 8, "i"), JobStarted(104.0, "run", 9, "j"), finished(109.0, 8))
    record.now = 110.0
    now = record()
    assert (now.done, now.resumed, now.fresh) == (9, 8, 1)
    assert now.recent_rate == now.overall_rate == pytest.approx(0.1)
    assert (now.row_seconds, now.youngest, now.alive) == (8.0, 6.0, 1)
    assert now.eta == pytest.approx(2.0)
    assert sum(now.pace.rows) == 1


def test_tools_are_counted_by_name_and_not_without_bound(record: Recorder) -> None:
    record(ToolFinished(101.0, "run", 0, 1, 0, "id", "look", 3.0, True, "run"))
    record(ToolFinished(101.0, "run", 0, 1, 0, "id", "look", 3.0, False, "shared"))
    for number in range(2 * MOST_TOOLS):
        record(ToolFinished(102.0, "run", 0, 1, 0, "id", f"invented-{number}", 0.0, False, "run"))
    tools = record().tools
    assert tools["look"] == ToolUse(2, 1, 3.0)
    assert len(tools) == MOST_TOOLS
