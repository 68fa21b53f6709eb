import gzip
import sys
from pathlib import Path

import pytest

from batch_agent.errors import BatchAgentError, SpecError
from batch_agent.files import LazyRows, read_inputs
from batch_agent.files.read import CELL_CHARACTERS
from batch_agent.job import UnreadableRow


def read(path: Path, content: bytes, limit: int | None = None) -> list[object]:
    """What is read at once, having seen that reading row by row gives the same."""
    path.write_bytes(content)
    rows = read_inputs(path, limit)
    assert isinstance(rows, list)
    assert list(read_inputs(path, limit, at_once_bytes=-1)) == rows
    return list(rows)


def test_jsonl_has_an_object_or_a_string_a_line_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"a": 1}\r\n\n  \n"text"\n{"b": "\xe2\x80\xa8"}'
    assert read(tmp_path / "rows.jsonl", content) == [{"a": 1}, "text", {"b": "\u2028"}]
    assert read(tmp_path / "rows.NDJSON", content) == [{"a": 1}, "text", {"b": "\u2028"}]


def test_a_bad_line_is_one_unreadable_row_that_names_it(tmp_path: Path) -> None:
    first, bad, number, broken, last = read(tmp_path / "rows.jsonl", b'"a"\n\n{"a": }\n17\n"\xff"\n"z"\n')
    assert (first, last) == ("a", "z")
    for row, line in ((bad, "rows.jsonl line 3 is not JSON"), (number, "line 4 is a number"), (broken, "line 5")):
        assert isinstance(row, UnreadableRow) and line in row.message


@pytest.mark.parametrize(("name", "form"), [("rows.jsonl", '{"n": %d}\n'), ("rows.json", '[{"n": %d}]')])
@pytest.mark.parametrize("number", [2**64, -(2**70), 10**300])
def test_a_whole_number_of_any_size_stays_what_it_is(tmp_path: Path, name: str, form: str, number: int) -> None:
    assert read(tmp_path / name, (form % number).encode()) == [{"n": number}]


@pytest.mark.parametrize("line", ['{"a": NaN}', '{"a": Infinity}', "[" * 10_000, '{"a": %s}' % ("9" * 5000)])
def test_what_is_no_number_or_too_much_of_one_is_an_unreadable_row(tmp_path: Path, line: str) -> None:
    row, last = read(tmp_path / "rows.jsonl", f'{line}\n"z"\n'.encode())
    assert isinstance(row, UnreadableRow) and "line 1 is not JSON" in row.message
    assert last == "z"


def test_the_limit_takes_the_first_rows(tmp_path: Path) -> None:
    assert read(tmp_path / "rows.jsonl", b'\n"a"\n\n"b"\n"c"\n', limit=2) == ["a", "b"]
    assert read(tmp_path / "rows.json", b'["a", "b", "c"]', limit=2) == ["a", "b"]
    assert read(tmp_path / "rows.csv", b"x\n1\n2\n3\n", limit=2) == [{"x": "1"}, {"x": "2"}]


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
    assert isinstance(latin, UnreadableRow) and "line 4 is not UTF-8; convert the file: iconv" in latin.message
    assert good == {"a": "1", "b": "2"}


def test_a_carriage_return_outside_of_quotes_spoils_its_own_line(tmp_path: Path) -> None:
    bad, good = read(tmp_path / "rows.csv", b"a,b\n1,2\r3,4\n5,6\n")
    assert isinstance(bad, UnreadableRow) and "line 2: a carriage return outside of quotes" in bad.message
    assert good == {"a": "5", "b": "6"}


def test_a_cell_may_be_a_whole_document(tmp_path: Path) -> None:
    (row,) = read(tmp_path / "rows.csv", b"text\n" + b"x" * 300_000 + b"\n")
    assert isinstance(row, dict) and len(row["text"]) == 300_000


def test_a_quote_that_is_never_closed_does_not_take_the_rest_of_a_large_file(tmp_path: Path) -> None:
    line = b"y" * 2**20 + b"\n"
    path = tmp_path / "rows.csv"
    path.write_bytes(b'text\n"x' + line * (CELL_CHARACTERS // len(line) + 1) + b"last\n")
    rows = list(read_inputs(path))
    assert isinstance(rows[0], UnreadableRow) and "line 17" in rows[0].message
    assert rows[-1] == {"text": "last"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", b"a,a\n1,2\n", "more than one column 'a'"),
        ("rows.csv", b"a,,c\n1,2,3\n", "one has no name"),
        (
            "rows.csv",
            "a,b\n".encode("utf-16"),
            r": iconv -f UTF-16 -t UTF-8 \S*rows.csv > \S*rows.utf8.csv",
        ),
        ("rows.csv", b"caf\xe9,b\n1,2\n", "first line is not UTF-8; convert it: iconv -f WINDOWS-1252 -t UTF-8"),
        ("rows.csv", b"a,b\r1,2\r3,4\r", r"a carriage return outside of quotes; save the file with lines that end"),
        ("rows.tsv", b"a\tb\r1\t2\r", "a carriage return outside of quotes"),
        ("rows.csv", b'"a' + b"x" * (CELL_CHARACTERS + 1) + b"\n", "its first line .*field larger"),
        ("rows.ods", b"PK", r"is a spreadsheet, which is not supported: save it as \.xlsx or CSV\. Supported: \.jsonl"),
        ("rows", b"", "the format of .* is unknown"),
        ("rows.gz", gzip.compress(b"", mtime=0), "the format of .* is unknown"),
        ("rows.parquet.gz", b"", "the format of .* is unknown"),
        ("rows.jsonl.gz", b'"a"\n', r"cannot read the inputs .*rows\.jsonl\.gz: .*[Nn]ot a gzip"),
    ],
)
@pytest.mark.parametrize("at_once_bytes", [2**20, -1])
def test_a_file_that_cannot_be_used_at_all_is_an_error_at_once(
    tmp_path: Path, name: str, content: bytes, message: str, at_once_bytes: int
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SpecError, match=message):
        read_inputs(path, at_once_bytes=at_once_bytes)


@pytest.mark.parametrize("name", ["gone.jsonl", "gone.parquet", "gone.txt"])
def test_a_missing_file_is_a_clear_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match=r"cannot read the inputs .*gone.*: No such file"):
        read_inputs(tmp_path / name)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.json"])
def test_an_empty_file_has_no_rows(tmp_path: Path, name: str) -> None:
    assert read(tmp_path / name, b"[]" if name.endswith("json") else b"") == []


@pytest.mark.parametrize(("name", "content"), [("rows.jsonl", b'{"a": "1"}\n'), ("rows.csv", b"a\n1\n")])
def test_a_compressed_file_holds_the_same_rows(tmp_path: Path, name: str, content: bytes) -> None:
    assert read(tmp_path / f"{name}.gz", gzip.compress(content)) == [{"a": "1"}]
    two_members = gzip.compress(content) + gzip.compress(b'{"a": "2"}\n' if name.endswith("l") else b"2\n")
    assert read(tmp_path / f"{name}.gz", two_members) == [{"a": "1"}, {"a": "2"}]


def test_zstd_is_read_with_its_package(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="zstd files need the package zstandard")
    frame = zstandard.ZstdCompressor().compress
    content = frame(b'{"a": 1}\n{"a"') + frame(b": 2}\n")
    assert read(tmp_path / "rows.jsonl.zst", content) == [{"a": 1}, {"a": 2}]
    with pytest.raises(SpecError, match=r"cannot read the inputs .*bad\.csv\.zst"):
        read(tmp_path / "bad.csv.zst", b"not zstd at all")


def test_a_missing_package_is_named_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "rows.jsonl.zst").write_bytes(b"")
    with pytest.raises(SpecError, match=r"zstd needs the package zstandard; install it with: pip install zstandard"):
        read_inputs(tmp_path / "rows.jsonl.zst")


def test_a_large_file_is_read_as_rows_are_taken_and_guesses_its_length(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n' * 20_000)
    rows = read_inputs(path, at_once_bytes=0)
    assert isinstance(rows, LazyRows)
    taken = [next(rows) for _ in range(5000)]
    assert 10_000 < rows.expected_rows() < 40_000
    taken += rows
    assert len(taken) == rows.expected_rows() == 20_000


def test_a_small_archive_of_much_text_is_not_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 20_000))
    rows = read_inputs(path, at_once_bytes=2 * path.stat().st_size)
    assert isinstance(rows, LazyRows)
    assert sum(1 for _ in rows) == 20_000


def test_an_archive_that_was_cut_off_gives_the_rows_before_the_cut_and_then_fails(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    lines = b"".join(b'{"a": %d}\n' % (number * 7919 % 10_007) for number in range(100_000))
    path.write_bytes(gzip.compress(lines)[:-1000])
    rows = read_inputs(path, at_once_bytes=0)
    assert next(iter(rows)) == {"a": 0}
    with pytest.raises(BatchAgentError, match=r"after [\d,]+ rows: cannot read the inputs .*: .*end") as caught:
        list(rows)
    assert not isinstance(caught.value, SpecError)
    assert isinstance(rows, LazyRows)
    rows.close()


def test_a_large_file_with_a_limit_expects_no_more_than_that_and_can_be_left(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"a\n" + b"1\n" * 1000)
    rows = read_inputs(path, 10, at_once_bytes=0)
    assert isinstance(rows, LazyRows)
    assert next(rows) == {"a": "1"}
    assert rows.expected_rows() <= 10
    assert len(list(rows)) == 9
    rows.close()
