"""Calibration: five bins from certain to doubted, and how often each was right."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from batch_agent import BatchAgent
from batch_agent.backends.base import Capabilities
from batch_agent.errors import SpecError
from batch_agent.messages import TokenChance
from batch_agent.testing import Request, Say, ScriptedBackend
from batch_agent.trust.calibration import calibration
from batch_agent.trust.intervals import clopper_pearson

MOODS = {"mood": "good|bad"}


def say(request: Request) -> Say:
    """Row n of 50 is answered with the doubt n / 100, and rows above 40 are wrong."""
    number = int(request.text)
    mood = "good" if number < 40 else "bad"
    tokens = [
        TokenChance(b'{"mood": "', 0.0),
        TokenChance(mood.encode(), math.log(1 - number / 100)),
        TokenChance(b'"}', 0.0),
    ]
    return Say(json.dumps({"mood": mood}), tokens=tokens)


async def run(tmp_path: Path, **options: Any) -> Any:
    rows = [{"n": str(n), "label": "good", "id": f"r{n}"} for n in range(50)]
    backend = ScriptedBackend(say, capabilities=Capabilities(native_schema=True, logprobs=True))
    known = {"task": "{n}", "inputs": rows, "output_schema": MOODS, "gold": "label", "doubt": True}
    return await BatchAgent.run(**{**known, "backend": backend, **options})


pytestmark = pytest.mark.usefixtures("state")


async def test_results_with_gold_have_a_table_of_five_bins(tmp_path: Path) -> None:
    table = (await run(tmp_path)).calibration()
    bins = table["mood"]
    assert [(each.rows, each.right) for each in bins] == [(10, 10)] * 4 + [(10, 0)]
    assert [round(each.high or 0, 2) for each in bins] == [0.09, 0.19, 0.29, 0.39, 0.49]
    assert bins[0].interval == clopper_pearson(10, 10)
    assert table.to_json()["fields"]["mood"][4]["accuracy"] == 0.0
    assert "doubt 0.40 to 0.49: 0 of 10 right, 0.00 (0.00 to 0.31)" in str(table)


async def test_without_doubts_or_without_gold_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no row with gold has a doubt"):
        (await run(tmp_path, doubt=False)).calibration()
    with pytest.raises(SpecError, match="there is no gold"):
        (await run(tmp_path, gold=None)).calibration()


def test_equal_doubts_are_in_one_bin_and_there_are_always_five() -> None:
    table = calibration({"a": [(0.0, True)] * 7 + [(0.5, False)] * 3, "all": [(None, True), (0.5, False)]})
    assert [each.rows for each in table["a"]] == [0, 0, 0, 7, 3]
    assert [each.rows for each in table.all] == [0, 0, 0, 0, 1]
    assert table.unknown == 1
