"""Rows from a path: chooses the format, and reads the file at once or row by row.

A small file is read at once, so that its length is known and values shared by all rows can be hoisted. A larger file is
read as its rows are needed. A bad row becomes an UnreadableRow, which fails alone. An error of the whole file is a
SpecError before the run starts.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from batch_agent.documents import format_of_document
from batch_agent.errors import BatchAgentError, SpecError
from batch_agent.files.arrow import is_dataset, open_dataset, open_parquet
from batch_agent.files.compression import Codec, format_of
from batch_agent.files.folder import is_pattern, open_document_file, open_folder, open_pattern
from batch_agent.files.json_array import parse_json
from batch_agent.files.rows import BOM, Reading, Row, converted, parse_jsonl, parse_text
from batch_agent.files.table import parse_csv, parse_tsv

AT_ONCE_BYTES = 16 * 2**20
COMPRESSION = 8  # text may be this much larger than its compressed file

_Parser: TypeAlias = Callable[[Iterable[bytes], str], Iterator[Row]]
LINE_PARSERS: dict[str, _Parser] = {
    ".jsonl": parse_jsonl,
    ".ndjson": parse_jsonl,
    ".csv": parse_csv,
    ".tsv": parse_tsv,
    ".txt": parse_text,
}
KNOWN = (*LINE_PARSERS, ".json", ".parquet")
PARSERS = {**LINE_PARSERS, ".text": parse_text}  # the last one only if the user gives the format
SPREADSHEETS = (".xlsx", ".xls", ".ods")

CHUNK_BYTES = 256 * 2**10
UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


def read_inputs(
    path: str | Path, limit: int | None = None, *, kind: str | None = None, at_once_bytes: int = AT_ONCE_BYTES
) -> list[Row] | LazyRows:
    """Return the first ``limit`` rows of a file, a directory or a pattern (``papers/**/*.pdf``), for
    ``BatchAgent.run(inputs=…)``. ``kind`` is one of PARSERS and overrides the extension."""
    reading = _open(Path(path), kind)
    if reading.memory_bytes > at_once_bytes:
        return LazyRows(reading, limit)
    try:
        return list(itertools.islice(reading.rows, limit))
    finally:
        reading.close()


def _open(path: Path, asked: str | None) -> Reading:
    try:
        status = path.stat()
    except OSError as error:
        if is_pattern(str(path)):
            return _open_pattern(path)
        raise SpecError(f"cannot read the inputs {path}: {error.strerror}") from None
    if stat.S_ISDIR(status.st_mode):
        return open_dataset(path) if is_dataset(path) else open_folder(path)
    kind, compression = format_of(path)
    kind = asked or kind
    if asked is None and format_of_document(path) is not None:
        return open_document_file(path)
    if kind == ".parquet" and not compression:
        return open_parquet(path)
    if kind in SPREADSHEETS:
        raise SpecError(
            f"{path} is a spreadsheet, which is not supported: save it as CSV. Supported: {' '.join(KNOWN)}"
        )
    if kind != ".json" and kind not in PARSERS:
        raise SpecError(f"the format of {path} is unknown; rename it to one of {' '.join(KNOWN)}")
    source = Source(path)
    parts, parse = (source.chunks(), parse_json) if kind == ".json" else (source.lines(), PARSERS[kind])

    def expected(taken: int) -> int:
        return max(taken, round(taken / max(source.fraction_read(), 1e-9)))

    memory = source.size * (COMPRESSION if compression else 1)
    return Reading(parse(parts, str(path)), source.close, expected, memory)


def _open_pattern(pattern: Path) -> Reading:
    """Open a pattern. A pattern of files of rows is refused: each file would become one row."""
    kind = format_of(pattern)[0]
    if kind in KNOWN and kind != ".txt":
        raise SpecError(f"inputs: with a pattern, each file is one row, but {kind} files hold many rows: give one file")
    return open_pattern(str(pattern))


class LazyRows(Iterator[Row]):
    """The rows of a file, read as they are taken. Close it if not all rows are taken."""

    def __init__(self, reading: Reading, limit: int | None = None) -> None:
        self._reading, self._limit = reading, limit
        self._taken = 0
        self._expected: int | None = 0  # total, when reading has ended
        try:
            # Errors of the whole file, such as in its header, appear with the first row: read it now.
            self.first = list(itertools.islice(reading.rows, 1))[:limit]  # for callers that only need an example
        except SpecError:
            reading.close()
            raise
        self._expected = None
        self._rows = itertools.islice(itertools.chain(self.first, reading.rows), limit)

    def __next__(self) -> Row:
        try:
            row = next(self._rows, None)
        except SpecError as error:  # jobs have already started
            raise BatchAgentError(f"after {self._taken:,} rows: {error}") from None
        if row is None:
            self._end(self._taken)
            raise StopIteration
        self._taken += 1
        return row

    def close(self) -> None:
        if self._expected is None:
            self._end(self.expected_rows())

    __del__ = close

    def expected_rows(self) -> int:
        """Return the estimated number of rows, from the part read so far; exact at the end."""
        if self._expected is not None:
            return self._expected
        expected = self._reading.expected(self._taken)
        return expected if self._limit is None else min(expected, self._limit)

    def _end(self, expected: int) -> None:
        self._expected = expected
        self._reading.close()


class Source:
    """An open file. ``size`` is its size on disk, in bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        codec = Codec(path)
        self._errors = codec.errors
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise self._error(error) from None
        self.size = os.fstat(self._file.fileno()).st_size
        self._stream = codec.reader(self._file)
        try:
            self._check_start()
        except SpecError:
            self.close()
            raise

    def lines(self) -> Iterator[bytes]:
        """Yield the lines, each with its newline, the first without a byte order mark."""
        return _without_bom(self._reading(iter(self._stream)))

    def chunks(self) -> Iterator[bytes]:
        return _without_bom(self._reading(iter(lambda: self._stream.read(CHUNK_BYTES), b"")))

    def fraction_read(self) -> float:
        return self._file.tell() / self.size if self.size else 1.0

    def close(self) -> None:
        self._stream.close()
        self._file.close()

    def _check_start(self) -> None:
        try:
            start = self._stream.peek(2)[:2]
        except self._errors as error:
            raise self._error(error) from None
        if start in UTF16_BOMS:
            raise SpecError(f"{self._path} is UTF-16; convert it to UTF-8{converted(str(self._path), 'UTF-16')}")

    def _reading(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        try:
            yield from parts
        except self._errors as error:
            raise self._error(error) from None

    def _error(self, error: Exception) -> SpecError:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return SpecError(f"cannot read the inputs {self._path}: {reason}")


def _without_bom(parts: Iterator[bytes]) -> Iterator[bytes]:
    for first in parts:
        yield first.removeprefix(BOM)
        break
    yield from parts
