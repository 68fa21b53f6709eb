import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from batch_agent.cli.rows import LargeFile, read_pipe, read_rows
from batch_agent.errors import SpecError
from batch_agent.job import UnreadableRow


def read(path: Path, content: bytes, limit: int | None = None) -> list[object]:
    path.write_bytes(content)
    rows = read_rows(str(path), limit)
    assert isinstance(rows, list)
    return list(rows)


def test_jsonl_has_an_object_or_a_string_a_line_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"a": 1}\r\n\n  \n"text"\n{"b": "\xe2\x80\xa8"}'
    assert read(tmp_path / "rows.jsonl", content) == [{"a": 1}, "text", {"b": "\u2028"}]


def test_a_bad_line_is_one_unreadable_row_that_names_it(tmp_path: Path) -> None:
    first, bad, number, broken, last = read(tmp_path / "rows.jsonl", b'"a"\n\n{"a": }\n17\n"\xff"\n"z"\n')
    assert (first, last) == ("a", "z")
    for row, line in ((bad, "rows.jsonl line 3 is not JSON"), (number, "line 4 is a number"), (broken, "line 5")):
        assert isinstance(row, UnreadableRow) and line in row.message


def test_the_limit_takes_the_first_rows(tmp_path: Path) -> None:
    assert read(tmp_path / "rows.jsonl", b'\n"a"\n\n"b"\n"c"\n', limit=2) == ["a", "b"]
    assert read(tmp_path / "rows.json", b'["a", "b", "c"]', limit=2) == ["a", "b"]
    assert read(tmp_path / "rows.csv", b"x\n1\n2\n3\n", limit=2) == [{"x": "1"}, {"x": "2"}]


def test_a_json_file_is_a_list_of_rows(tmp_path: Path) -> None:
    row, null = read(tmp_path / "rows.json", b'\xef\xbb\xbf[{"a": 1}, null]')
    assert row == {"a": 1}
    assert isinstance(null, UnreadableRow) and "item 2 is null" in null.message
    with pytest.raises(SpecError, match=r"rows\.json must hold a list"):
        read(tmp_path / "rows.json", b'{"a": 1}')
    with pytest.raises(SpecError, match=r"rows\.json line 2: not JSON"):
        read(tmp_path / "rows.json", b"[1,\n 2,]")


def test_csv_rows_are_named_by_the_first_line(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbfname,text\r\nann,"two\r\nlines, ""quoted"""\r\n\r\nbob,\r\n'
    assert read(tmp_path / "rows.csv", content) == [
        {"name": "ann", "text": 'two\r\nlines, "quoted"'},
        {"name": "bob", "text": ""},
    ]
    assert read(tmp_path / "rows.tsv", b"a\tb\n1\t2,3\n") == [{"a": "1", "b": "2,3"}]


def test_a_csv_row_that_does_not_fit_the_header_or_is_not_utf8_fails_alone(tmp_path: Path) -> None:
    short, long, latin, good = read(tmp_path / "rows.csv", b"a,b\n1\n1,2,3\n\xe9,2\n1,2\n")
    assert isinstance(short, UnreadableRow) and "line 2 has 1 cells" in short.message
    assert isinstance(long, UnreadableRow) and "line 3 has 3 cells" in long.message
    assert isinstance(latin, UnreadableRow) and "line 4 is not UTF-8" in latin.message
    assert good == {"a": "1", "b": "2"}


def test_a_cell_may_be_a_whole_document(tmp_path: Path) -> None:
    (row,) = read(tmp_path / "rows.csv", b"text\n" + b"x" * 300_000 + b"\n")
    assert isinstance(row, dict) and len(row["text"]) == 300_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", b"a,a\n1,2\n", "more than one column 'a'"),
        ("rows.csv", b"a,,c\n1,2,3\n", "one has no name"),
        ("rows.csv", "a,b\n".encode("utf-16"), "UTF-16"),
        ("rows.parquet", b"PAR1", "cannot tell what kind of rows"),
    ],
)
def test_a_file_that_cannot_be_used_at_all_is_an_error_at_once(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        read(tmp_path / name, content)


def test_a_missing_file_or_a_directory_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cannot read the inputs .*gone\.jsonl: No such file"):
        read_rows(str(tmp_path / "gone.jsonl"))
    with pytest.raises(SpecError, match="directory"):
        read_rows(str(tmp_path))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.json"])
def test_an_empty_file_has_no_rows(tmp_path: Path, name: str) -> None:
    assert read(tmp_path / name, b"[]" if name.endswith("json") else b"") == []


def test_a_large_file_is_read_as_rows_are_taken_and_guesses_its_length(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n' * 20_000)
    rows = read_rows(str(path), at_once_bytes=0)
    assert isinstance(rows, LargeFile)
    taken = [next(rows) for _ in range(5000)]
    assert 10_000 < rows.expected_rows() < 40_000
    taken += rows
    assert len(taken) == rows.expected_rows() == 20_000


def test_a_large_file_with_a_limit_expects_no_more_than_that_and_can_be_left(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"a\n" + b"1\n" * 1000)
    rows = read_rows(str(path), 10, at_once_bytes=0)
    assert isinstance(rows, LargeFile)
    assert next(rows) == {"a": "1"}
    assert rows.expected_rows() <= 10
    assert len(list(rows)) == 9
    rows.close()


def test_what_is_wrong_with_a_large_file_shows_before_the_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"a,a\n1,2\n")
    with pytest.raises(SpecError, match="more than one column"):
        read_rows(str(path), at_once_bytes=0)


async def test_a_pipe_is_read_line_by_line_while_the_loop_goes_on(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)  # so that neither end waits for the other
    rows = read_rows(str(pipe))
    assert isinstance(rows, AsyncGenerator)
    os.write(writer, b'\xef\xbb\xbf"a"\n\n{"b":')
    assert await anext(rows) == "a"
    waiting = asyncio.ensure_future(anext(rows))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert not waiting.done()
    os.write(writer, b" 2}\n17\n")
    assert await waiting == {"b": 2}
    unreadable = await anext(rows)
    assert isinstance(unreadable, UnreadableRow) and "line 4" in unreadable.message
    await rows.aclose()
    os.close(writer)


async def test_the_last_line_of_a_pipe_needs_no_newline_and_a_limit_ends_it_early() -> None:
    reader, writer = os.pipe()
    os.write(writer, b'"a"\n"b"')
    os.close(writer)
    assert [row async for row in read_pipe(reader, "pipe", None)] == ["a", "b"]
    reader, writer = os.pipe()
    os.write(writer, b'\n"a"\n\n"b"\n"c"\n')
    assert [row async for row in read_pipe(reader, "pipe", 2)] == ["a", "b"]
    os.close(writer)
