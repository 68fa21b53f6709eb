"""What a batch would cost elsewhere: sums over a table of prices that is made up here."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from batch_agent import BatchAgent, Pipeline, SpecError
from batch_agent.agent.comparison import measured_speed
from batch_agent.testing import ScriptedBackend


@dataclass(frozen=True, slots=True)
class PricedModel:
    id: str
    input_mtok: float | None
    output_mtok: float | None
    cache_read_mtok: float | None = None
    deprecated: bool | None = None

    def get_prices(self, at: object) -> PricedModel:
        return self


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    openai = [
        PricedModel("small", 1, 2, 0.1),
        PricedModel("large", 10, 20),
        PricedModel("old", 0.1, 0.1, deprecated=True),
        PricedModel("text-embedding", 0.1, 0.1),
        PricedModel("unpriced", None, None),
    ]
    providers = [
        SimpleNamespace(id="openai", models=openai),
        SimpleNamespace(id="groq", models=[PricedModel("small", 3, 3)]),
        SimpleNamespace(id="nowhere", models=[PricedModel("small", 0.1, 0.1)]),
    ]
    module = SimpleNamespace(get_snapshot=lambda: SimpleNamespace(providers=providers))
    monkeypatch.setitem(sys.modules, "genai_prices", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "genai_prices.data_snapshot", module)


OPTIONS = {
    "task": "x" * 400 + "{input}",  # a shared prefix of 100 tokens
    "inputs": ["a" * 40] * 1000,
    "max_tokens": 50,
    "no_hoist": True,
}


@pytest.mark.usefixtures("table")
def test_each_model_with_a_price_is_an_offer_the_cheapest_first_with_the_prefix_cached_and_in_batches() -> None:
    backend = ScriptedBackend([])
    compared = BatchAgent.plan(**OPTIONS, backend=backend, prices={"input": 1.0, "output": 1.0}).compare()
    offers = {f"{offer.provider}/{offer.model}": offer for offer in compared.offers}
    assert list(offers) == ["openai/small", "given/prices", "groq/small", "openai/large"]
    small = offers["openai/small"]
    # 100 tokens cached or not and 10 of its own at $1, 50 of the answer at $2, a thousand times.
    assert small.prefix_cached < small.nothing_cached == pytest.approx(0.210, rel=0.1)
    assert small.batch == small.nothing_cached / 2 and offers["groq/small"].batch is None
    assert "estimates" in str(compared) and "openai/small" in str(compared)
    assert not backend.requests


@pytest.mark.usefixtures("table")
def test_a_gpu_by_the_hour_stands_beside_them_with_a_speed_or_with_the_one_from_which_it_is_cheaper() -> None:
    plan = BatchAgent.plan(**OPTIONS, backend=ScriptedBackend([]))
    fast = plan.compare(only="LARGE", gpu_price=3.6, tokens_per_second=1000.0)
    assert [offer.model for offer in fast.offers] == ["large"]
    assert fast.gpu is not None and fast.gpu.cost == pytest.approx(fast.gpu.tokens / 1000 * 0.001)
    unknown = plan.compare(gpu_price=3.6)
    assert unknown.gpu is not None and unknown.gpu.cost is None
    assert "cheaper than openai/small from" in str(unknown)


@pytest.mark.usefixtures("table")
def test_the_stages_of_a_pipeline_are_added() -> None:
    one = Pipeline(["a"] * 100).map(name="read", task="Read {input}")
    two = one.map(name="again", task="Again {input}")
    costs = [pipeline.plan(backend=ScriptedBackend([])).compare().offers[0].nothing_cached for pipeline in (one, two)]
    assert costs[1] > 2 * costs[0]


def test_without_a_table_or_without_a_number_of_rows_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "genai_prices.data_snapshot", None)
    known = {**OPTIONS, "backend": ScriptedBackend([])}
    assert "pip install genai-prices" in str(BatchAgent.plan(**known).compare())
    with pytest.raises(SpecError, match="the number of rows is unknown"):
        BatchAgent.plan(**known | {"inputs": iter(["a"])}).compare()


def test_the_speed_of_a_recorded_run_is_its_tokens_that_were_not_cached_per_second(tmp_path: Path) -> None:
    tokens = {"prompt": 900, "cached": 400, "completion": 500}
    (tmp_path / "summary.json").write_text(json.dumps({"seconds": 2.0, "tokens": tokens}))
    assert measured_speed(tmp_path) == 500.0
    with pytest.raises(SpecError, match="neither a number nor the directory of a run that has ended"):
        measured_speed(tmp_path / "nothing")
