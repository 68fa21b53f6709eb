import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from batch_agent.errors import SpecError
from batch_agent.files import read_inputs
from batch_agent.files.json_array import parse_json
from batch_agent.job import UnreadableRow

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
ROWS = st.lists(st.text() | st.dictionaries(st.text(), JSON), max_size=5)


@settings(max_examples=examples(50))
@given(ROWS, st.sampled_from([None, 1, "\t"]), st.booleans(), st.integers(1, 7))
def test_rows_are_the_same_wherever_the_file_is_cut_into_chunks(
    rows: list[object], indent: int | str | None, ascii_only: bool, size: int
) -> None:
    content = json.dumps(rows, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    chunks = [content[start : start + size] for start in range(0, len(content), size)]
    assert list(parse_json(chunks, "rows.json")) == rows


def test_only_as_much_is_read_as_the_next_row_needs() -> None:
    def chunks() -> object:
        yield b'["a", {"b": '
        yield b'1}, "c'
        raise AssertionError("read too far")

    rows = parse_json(chunks(), "rows.json")  # type: ignore[arg-type]
    assert (next(rows), next(rows)) == ("a", {"b": 1})


def test_an_item_that_is_no_row_fails_alone() -> None:
    row, null, number, latin, last = parse_json([b'\n[{"a": 1}, null, 12', b'34, "\xe9", "z"]\n'], "rows.json")
    assert (row, last) == ({"a": 1}, "z")
    for bad, message in ((null, "item 2 is null"), (number, "item 3 is a number"), (latin, "item 4 is not UTF-8")):
        assert isinstance(bad, UnreadableRow) and message in bad.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}', r"rows\.json must hold a list"),
        (b"", r"rows\.json must hold a list"),
        (b"[1,\n 2,]", r"rows\.json line 2: not JSON"),
        (b'["a",\n\n"b"', r"rows\.json line 3: not JSON: expecting ',' or '\]'"),
        (b'["a"\n"b"]', r"rows\.json line 2: not JSON: expecting"),
        (b'["a"]\n["b"]', r"rows\.json line 2: not JSON: text after"),
        (b'["a', r"line 1: not JSON"),
        (b"[\n" + b"9" * 5000 + b"]", r"line 2: not JSON: .*digits"),
        (b"[" * 200_000, r"nested too deeply"),
    ],
)
def test_a_file_that_is_no_list_is_an_error_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=message):
        read_inputs(path)


def test_a_byte_order_mark_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b'\xef\xbb\xbf[{"a": 1}]')
    assert read_inputs(path) == [{"a": 1}]
