"""The index of rows follows the files of results through everything that happens to them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batch_agent.record.reader import DirectoryReader
from batch_agent.view.record import Query, RowIndex


@pytest.fixture
def index(tmp_path: Path) -> Iterator[RowIndex]:
    found = RowIndex(DirectoryReader(tmp_path))
    yield found
    found.close()


def line(index: int, output: object = "x", **more: object) -> bytes:
    record = {"index": index, "job_id": f"j{index}", "ok": True, "output": output, "turns": 1, "input": {"n": index}}
    return json.dumps({**record, **more}).encode() + b"\n"


def failure(index: int) -> bytes:
    record = {"index": index, "job_id": f"j{index}", "stage": "infer", "type": "Timeout", "message": "late"}
    return json.dumps({**record, "retryable": True, "input": {"n": index}}).encode() + b"\n"


def rows(index: RowIndex, query: Query = Query()) -> list[object]:  # noqa: B008
    while index.step():
        pass
    return [row["index"] for row in index.page(query, "index", False, 0, 100)["rows"]]  # type: ignore[union-attr, index, call-overload]


def test_rows_are_found_as_they_come_and_half_a_line_waits_for_its_end(tmp_path: Path, index: RowIndex) -> None:
    with (tmp_path / "results.jsonl").open("ab", buffering=0) as file:
        file.write(line(1) + line(0)[:20])
        assert rows(index) == [1]
        file.write(line(0)[20:])
        assert rows(index) == [0, 1]
    (tmp_path / "failures.jsonl").write_bytes(failure(2))
    assert rows(index) == [0, 1, 2] and rows(index, Query(state="failed")) == [2]


def test_a_session_that_goes_on_has_the_later_word_and_its_files_take_the_place(
    tmp_path: Path, index: RowIndex
) -> None:
    (tmp_path / "results.jsonl").write_bytes(line(0, "old"))
    (tmp_path / "failures.jsonl").write_bytes(failure(1))
    assert rows(index, Query(state="failed")) == [1]
    (tmp_path / "results.jsonl.new").write_bytes(line(1, "mended"))
    (tmp_path / "failures.jsonl.new").write_bytes(b"")
    assert rows(index) == [0, 1] and rows(index, Query(state="failed")) == []
    (tmp_path / "results.jsonl.new").write_bytes(line(1, "mended") + line(0, "new"))
    (tmp_path / "results.jsonl.new").replace(tmp_path / "results.jsonl")
    (tmp_path / "failures.jsonl.new").replace(tmp_path / "failures.jsonl")
    assert rows(index) == [0, 1]
    record = index.record("j0")
    assert record is not None and record["output"] == "new"


def test_a_line_longer_than_a_block_and_a_number_beyond_64_bits_are_taken(tmp_path: Path, index: RowIndex) -> None:
    (tmp_path / "results.jsonl").write_bytes(
        line(0, "y" * 2_000_000) + line(1, usage={"prompt_tokens": 2**70}) + line(2)
    )
    assert rows(index) == [0, 1, 2] and rows(index, Query(text="yyyyy")) == [0]


def test_a_search_knows_rows_that_came_after_it(tmp_path: Path, index: RowIndex) -> None:
    with (tmp_path / "results.jsonl").open("ab", buffering=0) as file:
        file.write(line(0, "Käse and bread"))
        assert rows(index, Query(text="KÄSE")) == [0]
        file.write(line(1, {"note": "more käse"}))
        assert rows(index, Query(text="KÄSE")) == [0, 1] and rows(index, Query(text="note:käse")) == [1]


def test_rows_are_sorted_and_found_by_doubt_and_those_without_come_last(tmp_path: Path, index: RowIndex) -> None:
    doubts = (line(0, doubt=0.1), line(1), line(2, doubt=0.9), line(3, doubt=None), line(4, doubt=0.4))
    (tmp_path / "results.jsonl").write_bytes(b"".join(doubts))
    assert rows(index, Query(text="doubt:>0.3")) == [2, 4]
    page: Any = index.page(Query(), "doubt", True, 0, 100)
    assert [(row["index"], row["doubt"]) for row in page["rows"]][:3] == [(2, 0.9), (4, 0.4), (0, 0.1)]
    page = index.page(Query(), "doubt", False, 0, 100)
    assert [row["index"] for row in page["rows"]] == [0, 4, 2, 1, 3]
