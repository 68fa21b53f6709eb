"""What the live view shows, and that it fits."""

import dataclasses
import io

import pytest
from tests.observe.drawing import BUSY, drawn, tool

from batch_agent.observe.history import PIECES, History, Pace, sparkline
from batch_agent.observe.stage_counts import StageCount
from batch_agent.observe.statistics import Outage, RecentError, RecentResult, Statistics, ToolUse
from batch_agent.observe.summary import summary_json, summary_lines
from batch_agent.observe.terminal import PlainDisplay, progress_line
from batch_agent.observe.text import counted, cut, wrapped

FULL = dataclasses.replace(
    BUSY,
    tools={"look_up": ToolUse(40, 40, 81.0), "fetch": ToolUse(1, 0, 2.0)},
    rejected=7,
    last_rejected=RecentError(9, "Invalid", "label: should be 'a', 'b' or 'c'", 7, True),
    pace=Pace((0, 4, 8, 2), 1.0),
    recent_results=tuple(RecentResult(n, n != 3, f"answer number {n}", 1.5) for n in range(30)),
)


def test_a_large_terminal_has_room_for_results_failures_tools_and_the_pace() -> None:
    text = drawn(FULL, 200, 50)
    for fact in (
        "rows per second, each mark 1.0 s",
        "▄█▂",
        "recent results",
        "29   1.5 s  answer number 29",
        "failures by type",
        "2  RateLimited",
        "tools by time",
        "1:21  look_up  40 calls, 40 failed",
        "2.0 s  fetch  1 call",
        "recent errors",
    ):
        assert fact in text, fact
    assert len(text.splitlines()) <= 48
    assert all(len(line) <= 200 for line in text.splitlines())


def test_a_small_terminal_gets_the_few_lines_that_fit() -> None:
    text = drawn(FULL, 80, 24)
    assert "recent results" not in text
    assert len(text.splitlines()) <= 14
    assert "answer rejected (7 so far), asked again: row 9 label: should be 'a', 'b' or…" in text
    assert "every call of look_up failed, 40 so far" in text


def test_at_80_columns_no_word_is_torn() -> None:
    words = {word for line in drawn(FULL, 400, 24).splitlines() for word in line.split()}
    narrow = [line for line in drawn(FULL, 80, 24).splitlines() if "━" not in line]
    torn = [word for line in narrow for word in line.split() if word.rstrip("…") and word.rstrip("…") not in words]
    assert torn == []


def test_a_model_that_loads_and_a_server_that_is_silent_are_named() -> None:
    loading = Statistics(backend="local://smollm2", total=3, elapsed=4.0)
    assert "loading the model (0:04)" in drawn(loading, 80)
    assert "loading the model" in progress_line(loading)
    silent = dataclasses.replace(loading, backend="vllm://gpu", started=3, running=3, elapsed=9.0)
    assert "no answer yet; the server may be loading the model" in drawn(silent, 80)
    assert "waiting for the first answer" in drawn(dataclasses.replace(loading, backend="vllm://gpu"), 80)
    assert "loading" not in drawn(dataclasses.replace(silent, turns=1), 80)


def test_a_server_that_is_down_is_shown_and_no_time_is_promised() -> None:
    down = dataclasses.replace(BUSY, outages=(Outage("gpu-1", 42.0, 5.0, "refused"),))
    assert "server gpu-1 down for 0:42, trying again in 5.0 s: refused" in drawn(down, 80)
    assert "left" not in drawn(down, 80)


def test_a_run_that_drains_counts_what_is_under_way() -> None:
    draining = dataclasses.replace(BUSY, draining=True, row_seconds=6.0, youngest=2.0)
    assert "stopping: 78 rows still running" in drawn(draining, 80)
    assert "4.0 s left" in drawn(draining, 80)


@pytest.mark.parametrize(
    ("youngest", "says"),
    [(1.0, "4.0 s left"), (4.5, "last 2 rows"), (60.0, "last 2 rows")],
)
def test_the_last_rows_take_no_longer_than_rows_take(youngest: float, says: str) -> None:
    end = Statistics(
        total=1000,
        done=998,
        ok=998,
        running=2,
        elapsed=600.0,
        recent_rate=0.0154,  # by which two rows would take 2:10
        row_seconds=5.0,
        youngest=youngest,
    )
    assert says in progress_line(end)


def test_rows_are_not_the_last_ones_at_the_beginning() -> None:
    begun = Statistics(total=1000, done=1, ok=1, running=999, elapsed=2.0, row_seconds=1.0, youngest=1.5)
    assert "last" not in progress_line(begun) and "left" not in progress_line(begun)
    assert "last 400 rows" in progress_line(dataclasses.replace(begun, done=600, ok=600, running=400))


def test_rates_and_times_left_are_those_of_this_session() -> None:
    resumed = Statistics(total=1000, done=910, ok=910, resumed=900, elapsed=10.0)
    assert resumed.overall_rate == 1.0
    assert resumed.eta == 90.0
    assert "(1 rows/s)" in summary_lines(resumed)[0]
    nothing_new = dataclasses.replace(resumed, done=900, ok=900)
    assert nothing_new.eta is None and "rows/s" not in summary_lines(nothing_new)[0]


def test_the_summary_says_why_tools_failed_and_loudly_when_one_never_worked() -> None:
    tools = {
        "look_up": tool("look_up", (("KeyError: 'sku'", 40),)),
        "fetch": tool("fetch", (("TimeoutError", 2), ("OSError", 1))),
    }
    statistics = dataclasses.replace(BUSY, tools={"look_up": ToolUse(40, 40, 1.0), "fetch": ToolUse(40, 3, 1.0)})
    lines = summary_lines(statistics, tools=tools)
    assert lines[1] == "  WARNING  not one of 40 calls of look_up worked: KeyError: 'sku'"
    assert any("3 calls of fetch failed: TimeoutError (2 times)" in line for line in lines)
    failing = summary_json(statistics, tools=tools)["failing_tools"]
    assert isinstance(failing, list) and len(failing) == 2


def test_one_turn_is_a_turn() -> None:
    text = "\n".join(summary_lines(Statistics(done=1, ok=1, turns=1, retries=1, rejected=1, elapsed=1.0)))
    assert "in 1 turn, 1 request sent again, 1 answer rejected and asked for again" in text
    assert counted(2, "retry", "retries") == "2 retries"


def test_texts_are_cut_and_wrapped_between_words() -> None:
    assert cut("one two three", 9) == "one two…"
    assert cut("one two", 7) == "one two"
    assert cut("unbreakable", 5) == "unbr…"
    assert (
        wrapped("  failed   some words that go on and on", 31) == "  failed   some words that go\n           on and on"
    )
    assert wrapped("a b", None) == "a b"
    assert "/a/very/long/path/to/copy" in wrapped("see /a/very/long/path/to/copy now", 10)


def test_plain_lines_tell_of_rejected_answers_once() -> None:
    stream = io.StringIO()
    view = PlainDisplay(stream)
    for elapsed in (10.0, 20.0):
        view.show(dataclasses.replace(FULL, elapsed=elapsed, recent_errors=()))
    assert stream.getvalue().count("asked again: row 9") == 1


def test_the_pace_of_a_long_run_is_kept_in_few_pieces() -> None:
    history = History()
    for second in range(1000):
        history.add(float(second))
    pace = history.pace(1000.0)
    assert sum(pace.rows) == 1000
    assert (pace.seconds, len(pace.rows)) == (16.0, 63) and len(pace.rows) <= PIECES
    assert sparkline(Pace((0, 1, 8)), 10) == " ▁█"
    assert sparkline(pace, 0) == ""


def test_every_view_names_the_stages_of_a_pipeline() -> None:
    stages = (StageCount("read", 50, 12, 1, 4), StageCount("check", None, 8, 0, 0))
    busy = dataclasses.replace(BUSY, stages=stages)
    assert "read   12/50, 1 failed, 4 running" in drawn(busy, 100, 24)
    assert "(read 12/50, 1 failed, 4 running; check 8)" in progress_line(busy)
    assert "  stages   read: 12/50, 1 failed, 4 running\n           check: 8" in "\n".join(summary_lines(busy))
