"""The two files of results: what a session delivered is in them, and what it did not reach stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batch_agent.record.rundir import ResultFiles


def line(index: int, text: str) -> bytes:
    return json.dumps({"index": index, "output": text}).encode() + b"\n"


def session(directory: Path, good: list[bytes], bad: list[bytes], *, every: bool | None) -> None:
    """``every`` None: killed before its end."""
    files = ResultFiles(directory / "good", directory / "bad")
    files.begin()
    files.write(b"".join(good), b"".join(bad))
    if every is None:
        for file in files._open:
            file.close()
    else:
        files.end(every=every)
        assert not list(directory.glob("*.new"))


def content(path: Path) -> dict[int, str]:
    records = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({record["index"] for record in records}) == len(records)
    return {record["index"]: record["output"] for record in records}


def test_a_first_session_writes_the_files_as_it_goes(tmp_path: Path) -> None:
    files = ResultFiles(tmp_path / "good", tmp_path / "bad")
    files.begin()
    files.write(line(0, "a"), b"")
    assert content(tmp_path / "good") == {0: "a"}
    files.end(every=False)


def test_a_session_that_reached_its_end_replaces_what_was_there(tmp_path: Path) -> None:
    session(tmp_path, [line(0, "a"), line(1, "b")], [line(2, "c")], every=True)
    session(tmp_path, [line(2, "mended")], [], every=True)
    assert (content(tmp_path / "good"), content(tmp_path / "bad")) == ({2: "mended"}, {})


def test_a_session_that_stopped_early_keeps_the_rows_it_did_not_reach(tmp_path: Path) -> None:
    session(tmp_path, [line(0, "a"), line(1, "b")], [line(2, "c"), line(3, "d")], every=True)
    session(tmp_path, [line(2, "mended"), line(0, "again")], [line(1, "worse")], every=False)
    assert content(tmp_path / "good") == {2: "mended", 0: "again"}
    assert content(tmp_path / "bad") == {1: "worse", 3: "d"}


def test_the_old_files_are_whole_while_a_later_session_is_under_way(tmp_path: Path) -> None:
    session(tmp_path, [line(0, "a")], [], every=True)
    session(tmp_path, [], [], every=None)
    assert content(tmp_path / "good") == {0: "a"}


@pytest.mark.parametrize("torn", [b"", b'{"index": 5, "out', b"x" * 10_000])
def test_what_a_killed_session_wrote_is_put_in_place_by_the_next_one_without_its_torn_line(
    tmp_path: Path, torn: bytes
) -> None:
    session(tmp_path, [line(0, "a"), line(1, "b")], [], every=True)
    session(tmp_path, [line(1, "new"), line(2, "c"), torn], [], every=None)
    session(tmp_path, [], [], every=False)
    assert content(tmp_path / "good") == {0: "a", 1: "new", 2: "c"}
