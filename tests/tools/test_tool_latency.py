import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_agent.tools.latency import Latency, Tally


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
    tally = Tally()
    for key in "abaa":
        tally.compare(key)
    statistics = tally.statistics("look")
    assert statistics.saveable == 2
    assert "look" in statistics.advice and "cacheable=True" in statistics.advice
    assert Tally().statistics("look").advice == ""
