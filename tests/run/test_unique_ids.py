"""Ids of rows are unique, however many there are."""

from __future__ import annotations

import pytest

from batch_agent.run.rows import BUCKET_IDS, UniqueIds


def test_repeated_ids_are_found_before_and_after_the_table_of_ids_has_grown(caplog: pytest.LogCaptureFixture) -> None:
    ids, count = UniqueIds(), BUCKET_IDS * 16 + 1
    names = [f"row-{number}" for number in range(count)]
    assert [ids.unique(name) for name in names] == names
    assert [ids.unique(name) for name in names] == [f"{name}~2" for name in names]
    assert ids.unique("row-0") == "row-0~3"
    assert "more than one row has the id 'row-0'" in caplog.text
