"""Prices: those given, those of the table, and what a call costs by them."""

from __future__ import annotations

import sys

import pytest

from batch_agent.compiler.prices import Prices, TokenPrices, find_prices
from batch_agent.errors import SpecError
from batch_agent.messages import Usage


def given_prices(**prices: float) -> Prices:
    found = find_prices(prices, model="m", backend="vllm://gpu-1")
    assert found is not None
    return found


def test_fresh_cached_and_output_tokens_have_their_own_prices() -> None:
    prices = given_prices(input=1.0, cached=0.1, output=10.0)
    usage = Usage(prompt_tokens=1_000_000, cached_tokens=400_000, completion_tokens=50_000, reasoning_tokens=40_000)
    assert prices.cost(usage) == pytest.approx(0.6 + 0.04 + 0.5)


def test_cached_tokens_cost_as_much_as_fresh_ones_unless_said_otherwise() -> None:
    assert given_prices(input=2.0, output=0.0).cost(Usage(1_000_000, 1_000_000)) == 2.0


def test_cache_writes_have_a_price_of_their_own_and_else_that_of_fresh_tokens() -> None:
    usage = Usage(prompt_tokens=1_000_000, cached_tokens=400_000, cache_write_tokens=200_000)
    assert given_prices(input=1.0, cached=0.1, cache_write=1.25, output=1.0).cost(usage) == pytest.approx(0.69)
    assert given_prices(input=1.0, cached=0.1, output=1.0).cost(usage) == pytest.approx(0.64)


def test_gpu_hours_cost_by_the_clock_and_tokens_nothing() -> None:
    prices = given_prices(gpu_hour=3.6, gpus=2)
    assert prices.per_second == pytest.approx(0.002)
    assert prices.cost(Usage(10**9, completion_tokens=10**9)) == 0.0


def test_the_size_of_the_prompt_decides_the_tier() -> None:
    prices = Prices("test", (TokenPrices(1.0, 1.0, 1.0, 1.0), TokenPrices(2.0, 2.0, 2.0, 2.0, above=1000)))
    assert prices.cost(Usage(1000)) == pytest.approx(0.001)
    assert prices.cost(Usage(1001)) == pytest.approx(0.002002)


@pytest.mark.parametrize(
    ("prices", "says"),
    [
        ({"inputs": 1.0}, "there is no 'inputs'"),
        ({"input": 1.0}, "give {'input'"),
        ({"input": -1.0, "output": 1.0}, "a price is a number from 0 up"),
        ({"input": float("nan"), "output": 1.0}, "a price is a number from 0 up"),
        ({"gpu_hour": 1.0, "input": 1.0}, "exclude each other"),
        ({"gpus": 2.0}, "gpu_hour"),
        ({}, "give {'input'"),
    ],
)
def test_wrong_prices_are_spec_errors_that_say_what_is_allowed(prices: dict[str, float], says: str) -> None:
    with pytest.raises(SpecError, match=f"prices: .*{says}"):
        find_prices(prices, model="m", backend="vllm://gpu-1")


def test_without_the_table_no_price_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "genai_prices.data_snapshot", None)
    assert find_prices(None, model="gpt-4o-mini", backend="openai://api.openai.com") is None


def test_the_table_knows_public_providers_by_their_address_and_nobody_else() -> None:
    pytest.importorskip("genai_prices")
    prices = find_prices(None, model="gpt-4o-mini", backend="openai://api.openai.com")
    assert prices is not None and prices.source == "genai-prices, openai gpt-4o-mini"
    assert find_prices(None, model="gpt-4o-mini", backend="vllm://gpu-1:8000") is None
    assert find_prices(None, model="no-such-model", backend="openai://api.openai.com") is None
    assert find_prices(None, model=None, backend="openai://api.openai.com") is None


@pytest.mark.parametrize(
    ("model", "address"),
    [
        ("gpt-4o-mini", "https://api.openai.com/v1"),
        ("claude-sonnet-4-5", "https://api.anthropic.com"),
        ("gemini-2.5-pro", "https://generativelanguage.googleapis.com"),
        ("openai/gpt-4o-mini", "https://openrouter.ai/api/v1"),
    ],
)
def test_our_arithmetic_is_that_of_the_table(model: str, address: str) -> None:
    table = pytest.importorskip("genai_prices")
    for prompt in (1000, 199_999, 200_000, 200_001, 300_000):
        usage = table.Usage(
            input_tokens=prompt, cache_read_tokens=prompt // 3, cache_write_tokens=prompt // 4, output_tokens=777
        )
        expected = table.calc_price(usage, model, provider_api_url=address).total_price
        prices = find_prices(None, model=model, backend=address)
        assert prices is not None
        ours = prices.cost(Usage(prompt, prompt // 3, 777, cache_write_tokens=prompt // 4))
        assert ours == pytest.approx(float(expected)), prompt
