"""The gold of many rows: found by position or id, and kept in few bytes."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_agent.trust.table import GoldTable

ROWS = 20_000
Rows = list[tuple[str, int | None, str]]


def table_of(rows: Iterable[tuple[str, int | None, str]], *, by_name: bool = False) -> GoldTable:
    table = GoldTable(by_name=by_name)
    for name, index, mood in rows:
        table.add(name, index, {"mood": mood})
    return table


def read(table: GoldTable) -> Rows:
    return [(row.name, row.index, str(row.values["mood"])) for row in table]


@st.composite
def tables(draw: st.DrawFn) -> Rows:
    """Rows with gold in the order of their positions, with gaps; ids may be long, empty or the position."""
    steps = draw(st.lists(st.sampled_from([1, 1, 1, 2, 70]), max_size=80))
    ids = st.one_of(st.none(), st.text(max_size=3), st.integers(250, 260).map("x".__mul__))
    rows, index = [], -1
    for step in steps:
        index += step
        own = draw(ids)
        rows.append((str(index) if own is None else own, index, draw(st.sampled_from(["calm", "angry"]))))
    return rows


@given(tables())
def test_each_row_is_found_by_its_position_and_written_as_it_came(rows: Rows) -> None:
    table = table_of(rows)
    assert read(table) == rows
    assert read(GoldTable.of_lines(table.lines(), by_name=False)) == rows
    places = {index: place for place, (_, index, _) in enumerate(rows)}
    for index in range(-1, 100):
        assert table.place(index, "") == places.get(index)


def test_rows_of_a_gold_file_are_found_by_their_ids() -> None:
    rows: Rows = [("b", None, "calm"), ("a", 7, "angry"), ("None", None, "calm"), ("", None, "calm")]
    table = table_of(rows, by_name=True)
    assert read(table) == rows
    assert [table.place(7, name) for name in ("a", "b", "None", "", "c")] == [1, 0, 2, 3, None]


def test_more_different_values_than_a_byte_can_count_are_kept() -> None:
    rows: Rows = [(f"r{number}", number, f"mood {number % 300}") for number in range(1000)]
    assert read(table_of(rows)) == rows


@pytest.mark.parametrize("every", [1, 3])
def test_a_row_takes_few_bytes_beside_its_id(every: int) -> None:
    rows = [(f"r{number}", number, "calm" if number % 7 else "angry") for number in range(0, ROWS * every, every)]
    table = table_of(rows)
    parts = [value for value in vars(table).values() if not isinstance(value, dict | list)]
    ids = sum(len(name) for name, _, _ in rows)
    assert sum(map(sys.getsizeof, parts)) - ids <= ROWS * (3 if every == 1 else 25)
