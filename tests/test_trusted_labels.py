"""The labelled messages: what the page says of them, and that the three prompts can be planned with their gold."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

from batch_agent import BatchAgent
from batch_agent.cli.spec.specfile import read_specfile

FOLDER = Path(__file__).parents[1] / "examples" / "trusted_labels"


def test_the_messages_are_as_the_page_says() -> None:
    with (FOLDER / "messages.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 420
    assert len({row["id"] for row in rows}) == len({row["text"] for row in rows}) == 420
    assert Counter(row["topic"] for row in rows) == dict.fromkeys(
        ("delivery", "payment", "product", "account", "other"), 84
    )
    assert Counter(row["angry"] for row in rows) == {"no": 354, "yes": 66}
    assert len({row["customer"] for row in rows}) <= 180


@pytest.mark.parametrize("name", ["first", "second", "third"])
def test_each_prompt_takes_the_gold_out_of_the_rows(name: str) -> None:
    file = read_specfile(FOLDER / f"{name}.yaml")
    spec = file.resolve({"inputs": str(FOLDER / "messages.csv"), "backend": "simulated://instant", "doubt": False})
    prepared = BatchAgent.plan(spec)
    assert prepared.gold is not None
    assert len(prepared.gold.table) == 420
    rows = prepared.spec.inputs
    assert all(row.keys() == {"id", "customer", "channel", "text"} for row in rows)
