"""Rows of CSV and TSV files. The first line has the names of the columns."""

from __future__ import annotations

import base64
import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta

from batch_agent.errors import SpecError
from batch_agent.files.rows import GUESSED, Row, converted, is_utf8
from batch_agent.job import UnreadableRow

# A cell may hold a whole document, but an unclosed quote must not read the rest of a large file.
CELL_CHARACTERS = 2**24


def parse_csv(lines: Iterable[bytes], name: str) -> Iterator[Row]:
    return _parse(lines, name, ",")


def parse_tsv(lines: Iterable[bytes], name: str) -> Iterator[Row]:
    return _parse(lines, name, "\t")


@dataclass(frozen=True, slots=True)
class _Header:
    columns: list[str]
    name: str

    def __post_init__(self) -> None:
        if not all(map(is_utf8, self.columns)):
            raise SpecError(f"{self.name}: its first line is not UTF-8; convert it{converted(self.name, GUESSED)}")
        refuse_twice(self.columns, self.name)
        if not all(column.strip() for column in self.columns):
            raise SpecError(f"{self.name}: its first line must name all columns; one has no name")

    def row(self, cells: list[str], line: int) -> Row:
        where = f"{self.name} line {line}"
        if len(cells) != len(self.columns):
            return UnreadableRow(f"{where} has {len(cells)} cells, the first line names {len(self.columns)} columns")
        if not all(map(is_utf8, cells)):
            return UnreadableRow(f"{where} is not UTF-8; convert the file{converted(self.name, GUESSED)}")
        return dict(zip(self.columns, cells, strict=True))


def refuse_twice(columns: list[str], name: str) -> None:
    twice = {column for column in columns if columns.count(column) > 1}
    if twice:
        raise SpecError(f"{name} has more than one column {', '.join(sorted(map(repr, twice)))}")


def _parse(lines: Iterable[bytes], name: str, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(CELL_CHARACTERS)
    source = _Lines(lines)
    reader = csv.reader(source, delimiter=delimiter)
    try:
        first = next(reader, None)
    except csv.Error as error:
        raise SpecError(f"{name}: its first line does not have column names: {_in_words(error)}") from None
    if first is None:
        return
    _refuse_unclosed(source, name, 1)
    _refuse_other_delimiter(first, name, delimiter)
    header = _Header(first, name)
    while True:
        begins = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            yield UnreadableRow(f"{name} line {reader.line_num}: {_in_words(error)}")
            continue
        if cells is None:
            return
        _refuse_unclosed(source, name, begins)
        if cells:
            yield header.row(cells, reader.line_num)


class _Lines(Iterator[str]):
    """Lines of text. ``ended`` is True after a read past the end; inside a row, this means an unclosed quote."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines = iter(lines)
        self.ended = False

    def __next__(self) -> str:
        for line in self._lines:
            return line.decode("utf-8", "surrogateescape")  # a byte that is not UTF-8 must fail its own row only
        self.ended = True
        raise StopIteration


def _refuse_unclosed(source: _Lines, name: str, line: int) -> None:
    if source.ended:
        raise SpecError(f"{name} line {line}: a quote opens in this row and is not closed before the file ends")


def _refuse_other_delimiter(first: list[str], name: str, delimiter: str) -> None:
    """Raise SpecError if the first line is a single name that contains another delimiter."""
    others = {";": "semicolons", "\t": "tabs", ",": "commas"}
    used = next((mark for mark in others if mark != delimiter and len(first) == 1 and mark in first[0]), None)
    if used is not None:
        save = "save it with commas" if used == ";" else "name it .tsv" if used == "\t" else "name it .csv"
        raise SpecError(f"{name} line 1: its columns are separated by {others[used]}, not {others[delimiter]}: {save}")


def _in_words(error: csv.Error) -> str:
    if "new-line character" in str(error):
        return "a carriage return outside of quotes; save the file with lines that end in \\n or \\r\\n"
    return str(error)


def plain(value: object) -> object:
    """Return the value as a JSON value: dates as ISO text, durations as seconds, bytes as text or base64, and missing
    values (NaN, NaT, NA) as None."""
    match value:
        case None | str() | int():
            return value
        case float():
            return None if value != value else float(value)
        case dict():
            return {str(name): plain(item) for name, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return base64.b64encode(value).decode("ascii")
        case datetime() | date() | time():
            return None if type(value).__name__ == "NaTType" else value.isoformat()
        case timedelta():
            return value.total_seconds()
        case _:
            return _of_others(value)


def _of_others(value: object) -> object:
    """Convert values of other packages. They are recognised by their class names, without importing the packages."""
    kind = type(value)
    if kind.__module__.partition(".")[0] == "numpy":
        return plain(value.tolist())  # type: ignore[attr-defined]
    return None if kind.__name__ in ("NAType", "NaTType") else str(value)
