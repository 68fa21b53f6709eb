"""Inputs from a path: which format, and whether at once or row by row.

A small file is read at once, so that its length is known and values shared by all rows can be hoisted; a larger one as
its rows are needed. A row that cannot be read becomes an UnreadableRow, which fails alone; what is wrong with a whole
file is a SpecError before anything starts.
"""

from __future__ import annotations

import itertools
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from batch_agent.documents import format_of_document
from batch_agent.errors import BatchAgentError, SpecError
from batch_agent.files.arrow import is_dataset, open_dataset, open_parquet
from batch_agent.files.compression import format_of
from batch_agent.files.folder import is_pattern, open_document_file, open_folder, open_pattern
from batch_agent.files.json_array import parse_json
from batch_agent.files.reading import Reading
from batch_agent.files.rows import Row, parse_jsonl, parse_text
from batch_agent.files.source import Source
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
PARSERS = {**LINE_PARSERS, ".text": parse_text}  # the last where somebody says that it is text
SPREADSHEETS = (".xlsx", ".xls", ".ods")


def read_inputs(
    path: str | Path, limit: int | None = None, *, kind: str | None = None, at_once_bytes: int = AT_ONCE_BYTES
) -> list[Row] | LazyRows:
    """The rows of a file, a directory or a pattern (``papers/**/*.pdf``), the first ``limit`` of them, for
    ``BatchAgent.run(inputs=…)``. ``kind`` is one of PARSERS, in place of the path's extension."""
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
        raise SpecError(f"{path} is a spreadsheet, which is not read: save it as CSV. There are {' '.join(KNOWN)}")
    if kind != ".json" and kind not in PARSERS:
        raise SpecError(f"cannot tell what kind of rows {path} holds; rename it to one of {' '.join(KNOWN)}")
    source = Source(path)
    parts, parse = (source.chunks(), parse_json) if kind == ".json" else (source.lines(), PARSERS[kind])

    def expected(taken: int) -> int:
        return max(taken, round(taken / max(source.fraction_read(), 1e-9)))

    memory = source.size * (COMPRESSION if compression else 1)
    return Reading(parse(parts, str(path)), source.close, expected, memory)


def _open_pattern(pattern: Path) -> Reading:
    """A file of rows among those that match would be taken for one text: it is refused."""
    kind = format_of(pattern)[0]
    if kind in KNOWN and kind != ".txt":
        raise SpecError(f"inputs: a pattern names files that are a row each, and {kind} files hold rows: give one file")
    return open_pattern(str(pattern))


class LazyRows(Iterator[Row]):
    """The rows of a file, read as they are taken. Close it when they are not all taken."""

    def __init__(self, reading: Reading, limit: int | None = None) -> None:
        self._reading, self._limit = reading, limit
        self._taken = 0
        self._expected: int | None = 0  # how many there are, once nothing more is read
        try:
            # What is wrong with the whole file (its header, say) shows at its first row: take it now.
            self.first = list(itertools.islice(reading.rows, 1))[:limit]  # for those who only look
        except SpecError:
            reading.close()
            raise
        self._expected = None
        self._rows = itertools.islice(itertools.chain(self.first, reading.rows), limit)

    def __next__(self) -> Row:
        try:
            row = next(self._rows, None)
        except SpecError as error:  # too late for one: jobs have started
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
        """How many there are, judged by those read so far; exact at the end."""
        if self._expected is not None:
            return self._expected
        expected = self._reading.expected(self._taken)
        return expected if self._limit is None else min(expected, self._limit)

    def _end(self, expected: int) -> None:
        self._expected = expected
        self._reading.close()
