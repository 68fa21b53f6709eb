"""Rows from files and pipes: JSONL, JSON, CSV, TSV.

A small file is read at once, so that its length is known and values shared by all rows can be hoisted. A larger one is
read as the run needs it, and a pipe is read without making the agents wait. A row that cannot be read becomes an
UnreadableRow, which fails alone; a file that cannot be read at all is a SpecError before anything starts.
"""

from __future__ import annotations

import csv
import itertools
import os
import stat
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import orjson

from batch_agent.cli.blocking import in_thread
from batch_agent.errors import BatchAgentError, SpecError
from batch_agent.job import UnreadableRow

STDIN = "-"
STDIN_DESCRIPTOR = 0
READ_AT_ONCE_BYTES = 16 * 2**20
CHUNK_BYTES = 64 * 2**10
BOM = b"\xef\xbb\xbf"
UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")

Row: TypeAlias = "dict[str, object] | str | UnreadableRow"
LineParser: TypeAlias = Callable[[Iterable[bytes], str], Iterator[Row]]


def read_rows(
    source: str, limit: int | None = None, at_once_bytes: int = READ_AT_ONCE_BYTES
) -> list[Row] | LargeFile | AsyncIterator[Row]:
    """The rows of a path, or of standard input for ``-``; the first ``limit`` of them."""
    if source == STDIN:
        return read_pipe(STDIN_DESCRIPTOR, "standard input", limit)
    path = Path(source)
    try:
        status = path.stat()
    except OSError as error:
        raise SpecError(f"cannot read the inputs {source}: {error.strerror}") from None
    if stat.S_ISDIR(status.st_mode):
        raise SpecError(f"the inputs {source} are a directory; give a file of rows")
    suffix = path.suffix.lower()
    if stat.S_ISREG(status.st_mode):
        return _read_file(path, suffix, limit, lazily=status.st_size > at_once_bytes)
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise SpecError(f"cannot read the inputs {source}: {error.strerror}") from None
    return read_pipe(descriptor, source, limit)


def _read_file(path: Path, suffix: str, limit: int | None, *, lazily: bool) -> list[Row] | LargeFile:
    parsers: dict[str, LineParser] = {
        ".jsonl": parse_jsonl,
        ".ndjson": parse_jsonl,
        ".csv": parse_csv,
        ".tsv": parse_tsv,
    }
    if suffix not in parsers and suffix != ".json":
        known = " ".join([*parsers, ".json"])
        raise SpecError(f"cannot tell what kind of rows {path} holds; rename it to one of {known}")
    try:
        file = path.open("rb")
    except OSError as error:
        raise SpecError(f"cannot read the inputs {path}: {error.strerror}") from None
    if file.peek(2)[:2] in UTF16_BOMS:
        file.close()
        raise SpecError(f"{path} is UTF-16; save it as UTF-8")
    if suffix == ".json":
        with file:
            return parse_json(file.read(), str(path))[:limit]
    rows = parsers[suffix](_without_bom(file), str(path))
    if lazily:
        return LargeFile(file, rows, limit)
    with file:
        return list(itertools.islice(rows, limit))


class LargeFile(Iterator[Row]):
    """The rows of a file, read as they are taken."""

    def __init__(self, file: BinaryIO, rows: Iterator[Row], limit: int | None) -> None:
        self._file, self._limit = file, limit
        self._size = os.fstat(file.fileno()).st_size
        self._taken = 0
        try:
            # What is wrong with the whole file (its header, say) shows at its first row: take it now.
            first = list(itertools.islice(rows, 1))
        except SpecError:
            file.close()
            raise
        self._rows = itertools.islice(itertools.chain(first, rows), limit)

    def __next__(self) -> Row:
        try:
            row = next(self._rows, None)
        except OSError as error:
            raise BatchAgentError(f"cannot read on in {self._file.name}: {error.strerror}") from None
        if row is None:
            self.close()
            raise StopIteration
        self._taken += 1
        return row

    def close(self) -> None:
        self._file.close()

    def expected_rows(self) -> int:
        """How many there are, judged by those read so far; exact at the end."""
        if self._file.closed:
            return self._taken
        expected = max(self._taken, self._taken * self._size // max(1, self._file.tell()))
        return expected if self._limit is None else min(expected, self._limit)


async def read_pipe(descriptor: int, name: str, limit: int | None) -> AsyncIterator[Row]:
    """JSONL from something that has no end in sight."""
    taken = number = 0
    rest = b""
    try:
        while taken != limit:
            chunk = await _read_chunk(descriptor, name)
            *lines, rest = (rest + chunk).split(b"\n") if chunk else (rest, b"")
            for line in lines:
                number += 1
                row = _parse_line(line.removeprefix(BOM) if number == 1 else line, f"{name} line {number}")
                if row is not None and taken != limit:
                    taken += 1
                    yield row
            if not chunk:
                return
    finally:
        if descriptor != STDIN_DESCRIPTOR:
            os.close(descriptor)


async def _read_chunk(descriptor: int, name: str) -> bytes:
    try:
        return await in_thread(lambda: os.read(descriptor, CHUNK_BYTES))
    except OSError as error:
        raise BatchAgentError(f"cannot read {name}: {error.strerror}") from None


def _without_bom(lines: Iterable[bytes]) -> Iterator[bytes]:
    iterator = iter(lines)
    for first in iterator:
        yield first.removeprefix(BOM)
        break
    yield from iterator


def parse_jsonl(lines: Iterable[bytes], name: str) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        row = _parse_line(line, f"{name} line {number}")
        if row is not None:
            yield row


def _parse_line(line: bytes, where: str) -> Row | None:
    """None for a blank line."""
    if not line.strip():
        return None
    try:
        return as_row(orjson.loads(line), where)
    except orjson.JSONDecodeError as error:
        return UnreadableRow(f"{where} is not JSON: {error.msg} at column {error.colno}")


def parse_json(content: bytes, name: str) -> list[Row]:
    try:
        items = orjson.loads(content.removeprefix(BOM))
    except orjson.JSONDecodeError as error:
        raise SpecError(f"{name} line {error.lineno}: not JSON: {error.msg}") from None
    if not isinstance(items, list):
        raise SpecError(f"{name} must hold a list of rows")
    return [as_row(item, f"{name} item {number}") for number, item in enumerate(items, start=1)]


def as_row(value: object, where: str) -> Row:
    if isinstance(value, dict | str):
        return value
    kinds = {bool: "true or false", type(None): "null", list: "a list", int: "a number", float: "a number"}
    name = kinds.get(type(value), type(value).__name__)
    return UnreadableRow(f"{where} is {name}; a row is an object or a string")


def parse_csv(lines: Iterable[bytes], name: str) -> Iterator[Row]:
    return _parse_table(lines, name, ",")


def parse_tsv(lines: Iterable[bytes], name: str) -> Iterator[Row]:
    return _parse_table(lines, name, "\t")


@dataclass(frozen=True, slots=True)
class _Header:
    columns: list[str]
    name: str

    def __post_init__(self) -> None:
        twice = {column for column in self.columns if self.columns.count(column) > 1}
        if twice:
            raise SpecError(f"{self.name} has more than one column {', '.join(sorted(map(repr, twice)))}")
        if not all(column.strip() for column in self.columns):
            raise SpecError(f"{self.name}: its first line must name every column; one has no name")

    def row(self, cells: list[str], line: int) -> Row:
        where = f"{self.name} line {line}"
        if len(cells) != len(self.columns):
            return UnreadableRow(f"{where} has {len(cells)} cells, the first line names {len(self.columns)} columns")
        if not all(map(_is_utf8, cells)):
            return UnreadableRow(f"{where} is not UTF-8")
        return dict(zip(self.columns, cells, strict=True))


def _parse_table(lines: Iterable[bytes], name: str, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # a cell may be a whole document
    # A byte that is not UTF-8 must spoil its own row only.
    reader = csv.reader((line.decode("utf-8", "surrogateescape") for line in lines), delimiter=delimiter)
    first = next(reader, None)
    if first is None:
        return
    header = _Header(first, name)
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            yield UnreadableRow(f"{name} line {reader.line_num}: {error}")
            continue
        if cells is None:
            return
        if cells:
            yield header.row(cells, reader.line_num)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
