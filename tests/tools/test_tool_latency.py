import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_agent.tools.execution import REASON_CHARACTERS, REASONS, Latency, ToolTally


def test_quantiles_are_right_within_a_percent() -> None:
    latency = Latency()
    for milliseconds in range(1, 1001):
        latency.add(milliseconds / 1000)
    assert latency.quantile(0.50) == pytest.approx(0.500, rel=0.011)
    assert latency.quantile(0.75) == pytest.approx(0.750, rel=0.011)
    assert latency.quantile(0.99) == pytest.approx(0.990, rel=0.011)


def test_without_calls_there_is_no_latency() -> None:
    assert Latency().quantile(0.5) is None


@given(st.lists(st.floats(0, 1e5), min_size=1), st.floats(0, 1))
def test_a_quantile_lies_between_the_fastest_and_the_slowest(seconds: list[float], share: float) -> None:
    latency = Latency()
    for value in seconds:
        latency.add(value)
    quantile = latency.quantile(share)
    assert quantile is not None
    assert max(min(seconds), 1e-6) * 0.98 <= quantile <= max(max(seconds), 1e-6) * 1.02


def test_repeated_calls_of_an_undeclared_tool_become_advice() -> None:
    tally = ToolTally()
    for key in "abaa":
        tally.compare(key)
    statistics = tally.statistics("look")
    assert statistics.saveable == 2
    assert "look" in statistics.advice and "cacheable=True" in statistics.advice
    assert ToolTally().statistics("look").advice == ""


def test_the_most_frequent_reasons_of_failures_come_first() -> None:
    tally = ToolTally()
    for reason in ("KeyError: 'sku'", "no such\n  city", "KeyError: 'sku'"):
        tally.fail(reason)
    statistics = tally.statistics("look")
    assert (statistics.failures, statistics.failure_reasons) == (3, (("KeyError: 'sku'", 2), ("no such city", 1)))
    assert ToolTally().statistics("look").failure_reasons == ()


def test_reasons_that_are_all_different_displace_neither_the_frequent_one_nor_memory() -> None:
    tally = ToolTally()
    for number in range(1000):
        tally.fail("timed out")
        tally.fail(f"no row {number} " + "x" * 10_000)
    (first, count), *others = tally.statistics("look").failure_reasons
    assert (first, count, len(others)) == ("timed out", 1000, REASONS - 1)
    assert all(len(reason) <= REASON_CHARACTERS for reason, _ in others)


@given(st.lists(st.sampled_from("abcdefghijklmnopqrstuvwxyz"), max_size=200))
def test_reasons_never_add_up_to_more_than_the_failures(reasons: list[str]) -> None:
    tally = ToolTally()
    for reason in reasons:
        tally.fail(reason)
    statistics = tally.statistics("look")
    counts = [count for _, count in statistics.failure_reasons]
    assert sum(counts) <= statistics.failures == len(reasons)
    assert counts == sorted(counts, reverse=True)
    assert len(counts) <= REASONS
