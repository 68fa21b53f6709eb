import io

import pytest
from tests.observe.drawing import BUSY, drawn, tool

from batch_agent.observe.statistics import RecentError, Statistics
from batch_agent.observe.summary import error_line, summary_json, summary_lines
from batch_agent.observe.terminal import LiveDisplay, PlainDisplay, progress_line
from batch_agent.observe.text import amount, duration, harmless, harmless_lines, rate


def test_the_live_view_says_what_a_person_wants_to_know() -> None:
    text = drawn(BUSY, 160)
    for fact in (
        "412/1,000 (41 %)",
        "12.3 rows/s",
        "0:48 left",
        "failed 3",
        "running 64/64",
        "waiting on tools 12",
        "1.2M in (83 % cached), 88.1k out",
        "1,204 calls, 402 shared, 492 cached",
        "row 18 OVERSIZED: too long",
    ):
        assert fact in text


def test_foreign_text_is_shown_and_never_obeyed() -> None:
    text = drawn(BUSY, 200)
    assert "[link=x]some/model" in text
    assert r"\x1b[31mred\x1b[0m [bold]x[/bold] [/nonsense] :smile:" in text
    assert not {"\x1b", "\x07", "\u202e", "\r"} & set(text)
    text.encode()


@pytest.mark.parametrize("width", [1, 8, 20, 40, 80, 300])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for statistics in (BUSY, Statistics()):
        assert all(len(line) <= width for line in drawn(statistics, width).splitlines())


def test_the_live_view_draws_in_place_and_cleans_up() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with LiveDisplay(stream) as view:
        view.show(BUSY)
        view.show(BUSY)
    assert "412" in stream.getvalue()


def test_plain_lines_come_at_each_tenth_and_otherwise_seldom() -> None:
    stream = io.StringIO()
    view = PlainDisplay(stream)
    for second in range(1, 101):
        view.show(Statistics(total=1000, done=second * 2, ok=second * 2, elapsed=float(second)))
    lines = stream.getvalue().splitlines()
    tenths = [line for line in lines if "100/1,000" in line or "200/1,000" in line]
    assert len(tenths) == 2
    assert 10 <= len(lines) <= 20


def test_a_plain_line_is_followed_by_a_new_error_once() -> None:
    stream = io.StringIO()
    view = PlainDisplay(stream)
    error = RecentError(3, "Unavailable", "refused\nby peer", 7, True)
    for elapsed in (10.0, 20.0, 30.0):
        view.show(Statistics(elapsed=elapsed, recent_errors=(error,)))
    assert stream.getvalue().count("row 3 Unavailable (7 times), trying again: refused by peer\n") == 1
    assert stream.getvalue().count("\n") == 4


def test_a_progress_line_without_a_total_counts_rows() -> None:
    assert progress_line(Statistics(done=1, ok=1, elapsed=2.0)) == "[2.0 s] 1 row done, 30 rows/min, tokens 0 in, 0 out"


def test_the_summary_names_failures_tokens_tools_advice_and_the_file() -> None:
    tools = {"look_up": tool("look_up", saveable=2)}
    lines = "\n".join(summary_lines(BUSY, output="out\x1b.jsonl", tools=tools))
    for fact in (
        "412 rows in 0:33: 409 ok, 3 failed",
        "2 RateLimited, 1 OVERSIZED",
        "OVERSIZED, for example row 18: too long",
        "3 requests sent again",
        "1,204 calls: 310 run, 402 shared, 492 cached",
        "look_up ran 2 times with arguments that it had run with before",
        "results  out\\x1b.jsonl",
    ):
        assert fact in lines
    assert "\x1b" not in lines
    assert "trying again" not in lines and "row 17" not in lines  # it did not fail in the end


def test_the_summary_of_a_drained_run_says_how_many_rows_are_left() -> None:
    stopped = Statistics(total=10, done=4, ok=4, elapsed=1.0, ended="drained")
    assert summary_lines(stopped)[0].endswith("stopped early, 6 rows not done")


def test_the_json_summary_carries_the_same_facts() -> None:
    record = summary_json(BUSY, output="out.jsonl")
    assert record["rows"] == {
        "total": 1000,
        "done": 412,
        "ok": 409,
        "failed": 3,
        "failures": {"RateLimited": 2, "OVERSIZED": 1},
        "resumed": 0,
    }
    tokens = {"prompt": 1_203_442, "cached": 1_010_221, "cache_write": 0, "completion": 88_120, "reasoning": 0}
    assert record["tokens"] == tokens
    assert record["output"] == "out.jsonl"


def test_harmless_text_stays_as_it_is_and_the_rest_is_written_out() -> None:
    assert harmless("Grüße, 世界 🙂") == "Grüße, 世界 🙂"
    assert harmless("a\tb\nc\u2028d") == "a b c d"
    assert harmless("\x00\x1b\x9b\ud800\u200f") == r"\x00\x1b\x9b\ud800\u200f"
    assert harmless("abcdef", 4) == "abc…"
    assert harmless_lines("a\n\tb\x1b") == "a\n    b\\x1b"


def test_long_error_messages_are_cut() -> None:
    assert len(error_line(RecentError(0, "X", "y" * 5000, 1, False))) < 400


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (duration(0.84), "0.8 s"),
        (duration(9.99), "10.0 s"),
        (duration(65), "1:05"),
        (duration(7265), "2:01:05"),
        (amount(999), "999"),
        (amount(999_999), "1M"),
        (amount(12_345), "12.3k"),
        (amount(5 * 10**12), "5e+03G"),
        (rate(0), "- rows/s"),
        (rate(0.5), "30 rows/min"),
        (rate(12_345.6), "12,346 rows/s"),
    ],
)
def test_numbers_are_written_for_people(written: str, expected: str) -> None:
    assert written == expected
