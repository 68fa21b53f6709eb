"""kill -9 at any moment. The long form is ``python -m tests.record.crash --kills 100``."""

from __future__ import annotations

import json
from pathlib import Path

from tests.record.crash import DELIVERED, crash


async def test_a_run_killed_again_and_again_completes_and_asks_nothing_twice_that_was_recorded(tmp_path: Path) -> None:
    report = await crash(tmp_path, rows=30, kills=2, seed=7)
    assert report.problems == []
    assert report.kills == 2
    results = (tmp_path / "run" / "results.jsonl").read_text().splitlines()
    assert {str(json.loads(line)["index"]) for line in results} == set((tmp_path / DELIVERED).read_text().split())
