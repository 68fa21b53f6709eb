"""Cost and savings: as lines for people, as JSON, and as they are counted from events."""

from __future__ import annotations

from batch_agent.events import RunFinished, RunStarted, TurnFailed, TurnFinished
from batch_agent.messages import Usage
from batch_agent.observe.metrics import Metrics
from batch_agent.observe.statistics import Statistics
from batch_agent.observe.summary import savings, summary_json, summary_lines
from batch_agent.observe.text import dollars

SPENT = Statistics(
    total=10,
    done=4,
    ok=3,
    failures={"Interrupted": 1},
    turns=9,
    usage=Usage(10_000, 4_000, 1_000, 250),
    cost=1.5,
    cache_hits=2,
    saved=Usage(800, 0, 200),
    tool_runs=5,
    tool_shared=3,
    tool_cached=4,
    tool_wait_seconds=75.5,
    elapsed=20.0,
    ended="out of budget",
    reason="max_cost $1.5: $1.5 is spent, and the next call costs about $0.2",
)


def test_the_summary_says_cost_and_savings_and_how_each_was_measured() -> None:
    lines = "\n".join(summary_lines(SPENT))
    for fact in (
        "out of budget, 6 rows not done",
        "budget   max_cost $1.5: $1.5 is spent, and the next call costs about $0.2; resume with a higher limit",
        "tokens   10k in (40 % cached), 1k out (25 % reasoning) in 9 turns",
        "cost     $1.50, $0.38 a row",
        "saved    4k prompt tokens, 40 %, cached (reported by the engine)",
        "7 of 12 tool calls (results shared or cached)",
        "2 of 9 answers, 1k tokens (from the response cache, tokens as first reported)",
    ):
        assert fact in lines, fact


def test_what_was_not_saved_and_what_has_no_price_is_not_mentioned() -> None:
    lines = "\n".join(summary_lines(Statistics(done=1, ok=1, turns=1, usage=Usage(10, 0, 5), ended="complete")))
    assert "saved" not in lines and "cost" not in lines and "budget" not in lines
    assert savings(Statistics()) == []


def test_the_json_summary_has_the_same_numbers() -> None:
    record = summary_json(SPENT)
    assert (record["ended"], record["reason"], record["cost"]) == ("out of budget", SPENT.reason, 1.5)
    saved = record["saved"]
    assert isinstance(saved, dict)
    assert {name: entry["value"] for name, entry in saved.items()} == {  # type: ignore[index,call-overload]
        "cached_prompt_tokens": 4000,
        "coalesced_tool_calls": 7,
        "response_cache_answers": 2,
    }
    assert all(entry["how"] for entry in saved.values())  # type: ignore[index,call-overload]
    assert summary_json(Statistics())["cost"] is None


def test_costs_and_what_the_cache_saved_are_added_up_from_turns() -> None:
    metrics = Metrics(clock=lambda: 110.0)
    metrics(RunStarted(100.0, "run", None, "b", "m"))
    metrics(TurnFinished(101.0, "run", 0, 1, Usage(10), 1.0, None, 0.25))
    metrics(TurnFinished(101.0, "run", 1, 1, Usage(), 1.0, None, 0.0, Usage(10, 0, 3)))
    metrics(TurnFailed(102.0, "run", 2, 1, "Truncated", "cut", None, Usage(7), 0.5))
    metrics(TurnFailed(102.0, "run", 3, 1, "Unavailable", "gone", 1.0))
    now = metrics.statistics()
    assert (now.cost, now.usage, now.cache_hits, now.saved) == (0.75, Usage(17), 1, Usage(10, 0, 3))


def test_what_costs_by_the_clock_costs_until_the_run_is_over() -> None:
    metrics = Metrics(clock=lambda: 110.0)
    metrics(RunStarted(100.0, "run", None, "b", "m", cost_per_second=0.5))
    metrics(TurnFinished(101.0, "run", 0, 1, Usage(10), 1.0, None, 0.1))
    assert metrics.statistics().cost == 5.0
    metrics(RunFinished(130.0, "run", "out of budget", "why"))
    ended = metrics.statistics()
    assert (ended.cost, ended.ended, ended.reason) == (15.0, "out of budget", "why")


def test_dollars_are_short_and_exact_enough() -> None:
    assert [dollars(cost) for cost in (0, 0.000123, 0.0456, 0.5, 1, 12.345, 12345.6)] == [
        "$0",
        "$0.00012",
        "$0.046",
        "$0.5",
        "$1.00",
        "$12.35",
        "$12,345.60",
    ]
