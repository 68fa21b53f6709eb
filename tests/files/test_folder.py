import os
from pathlib import Path

import pytest

from batch_agent.documents.content import TEXT_BYTES
from batch_agent.errors import SpecError
from batch_agent.files import LazyRows, read_inputs
from batch_agent.job import UnreadableRow


def test_every_file_is_a_row_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/2.md", "a/1.md", ".hidden", ".git/config", "c.txt", "run/run.json", "run/journal.db"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"\ufeffI am {name}")
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    rows = read_inputs(tmp_path)
    assert isinstance(rows, LazyRows)
    assert rows.expected_rows() == 4
    assert list(rows) == [
        {"path": str(tmp_path / name), "name": Path(name).name, "text": f"I am {name}"}
        for name in ("a/1.md", "a/2.md", "b.txt", "c.txt")
    ]


def test_a_file_that_is_not_text_fails_alone_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "b.bin").write_bytes(b"a\0b")
    (tmp_path / "c.txt").write_bytes(b"")
    with (tmp_path / "d.txt").open("wb") as file:
        file.truncate(TEXT_BYTES + 1)
    (tmp_path / "gone.txt").write_bytes(b"x")
    rows = iter(read_inputs(tmp_path))
    latin, binary, empty, large = (next(rows) for _ in range(4))
    (tmp_path / "gone.txt").unlink()
    (gone,) = rows
    assert empty == {"path": str(tmp_path / "c.txt"), "name": "c.txt", "text": ""}
    for row, message in (
        (latin, "a.bin is not UTF-8 text"),
        (binary, "b.bin is not text"),
        (large, "d.txt is larger than 16 MiB"),
        (gone, "cannot read"),
    ):
        assert isinstance(row, UnreadableRow) and message in row.message


def test_the_limit_holds_and_an_empty_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="has no files to read"):
        read_inputs(tmp_path)
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("x")
    assert len(list(read_inputs(tmp_path, 2))) == 2
