"""Rows from a path: chooses the format, and reads the file at once or row by row.

A small file is read at once, so that its length is known and values shared by all rows can be hoisted. A larger file is
read as its rows are needed. A bad row becomes an UnreadableRow, which fails alone. An error of the whole file is a
SpecError before the run starts.
"""

from __future__ import annotations

import base64
import csv
import glob
import importlib.util
import itertools
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Protocol, Self, TypeAlias

import orjson

from batch_agent.documents import DocumentError, format_of_document
from batch_agent.documents.content import plain_text
from batch_agent.errors import BatchAgentError, SpecError, explained
from batch_agent.files.compression import Codec, extra, format_of
from batch_agent.files.excel import EXCEL, OTHER_SHEETS, open_excel
from batch_agent.files.json_array import parse_json
from batch_agent.files.rows import BOM, GUESSED, Reading, Row, converted, is_utf8, parse_jsonl, parse_text
from batch_agent.job import UnreadableRow
from batch_agent.messages import Document

RUN_FILES = {"run.json", "journal.db"}  # a directory with these is a run directory
PDF_PACKAGES = "pypdfium2 pillow"


def open_pattern(pattern: str) -> Reading:
    """Return the files that match a pattern such as ``papers/**/*.pdf``, in sorted order, without hidden files. Files
    that hold many rows are refused: each would become one row."""
    kind = format_of(Path(pattern))[0]
    if kind in KNOWN and kind != ".txt":
        raise SpecError(f"inputs: with a pattern, each file is one row, but {kind} files hold many rows: give one file")
    found = sorted(Path(name) for name in glob.iglob(pattern, recursive=True))  # noqa: PTH207
    return open_files(lambda: (path for path in found if path.is_file()), f"no file matches {pattern}")


def is_pattern(text: str) -> bool:
    return glob.has_magic(text)


def open_files(files: Callable[[], Iterator[Path]], nothing: str) -> Reading:
    """Return each file as a row with ``path``, ``name`` and ``text``. Raises SpecError with the message ``nothing`` if
    there is none. PDF, Word and HTML files also have ``pages``; ``documents`` reads them when their row starts. The row
    of any other file that is not text fails."""
    total = 0
    formats = set[str | None]()
    base = Path.cwd()  # a tool may change the working directory meanwhile
    for path in files():
        total += 1
        formats.add(format_of_document(path))
    if not total:
        raise SpecError(nothing)
    if "pdf" in formats and importlib.util.find_spec("pypdfium2") is None:
        raise SpecError(f"reading PDF files needs the package pypdfium2; install it with: pip install {PDF_PACKAGES}")
    paged = formats != {None}  # all rows have the same fields

    def rows() -> Iterator[Row]:
        return (_row(path, base, paged=paged) for path in files())

    # A large memory_bytes makes the rows lazy: they share no values, so reading all of them at once gains nothing.
    return Reading(rows(), lambda: None, lambda taken: max(total, taken), memory_bytes=2**63)


def _files(directory: Path, base: Path) -> Iterator[Path]:
    """Yield the files of a directory and of those below it, in sorted order, without hidden files, hidden directories
    and run directories. Symlinks to directories are not followed."""
    with explained(f"cannot read the directory {directory}"), os.scandir(base / directory) as listing:
        entries = sorted((entry for entry in listing if not entry.name.startswith(".")), key=lambda e: e.name)
    if {entry.name for entry in entries} >= RUN_FILES:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(directory / entry.name, base)
        elif entry.is_file():  # not a pipe or socket: opening one would block
            yield directory / entry.name


def _row(path: Path, base: Path, *, paged: bool) -> Row:
    row: dict[str, object] = {"path": str(path), "name": path.name}
    if format_of_document(path) is not None:
        return {**row, "text": Document(base / path), "pages": None}
    try:
        text = plain_text(base / path)
    except DocumentError as error:
        return UnreadableRow(f"{path} {error}")
    except OSError as error:
        return UnreadableRow(f"cannot read {path}: {error.strerror}")
    return {**row, "text": text, **({"pages": 1} if paged else {})}


# A cell may hold a whole document, but an unclosed quote must not read the rest of a large file.
CELL_CHARACTERS = 2**24


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


def parse_delimited(lines: Iterable[bytes], name: str, *, delimiter: str) -> Iterator[Row]:
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
    """Convert a value of another package. It is recognised by its class name, without importing the package."""
    kind = type(value)
    if kind.__module__.partition(".")[0] == "numpy":
        return plain(value.tolist())  # type: ignore[attr-defined]
    return None if kind.__name__ in ("NAType", "NaTType") else str(value)


AT_ONCE_BYTES = 16 * 2**20
COMPRESSION = 8  # text may be this much larger than its compressed file

_Parser: TypeAlias = Callable[[Iterable[bytes], str], Iterator[Row]]
LINE_PARSERS: dict[str, _Parser] = {
    ".jsonl": parse_jsonl,
    ".ndjson": parse_jsonl,
    ".csv": partial(parse_delimited, delimiter=","),
    ".tsv": partial(parse_delimited, delimiter="\t"),
    ".txt": parse_text,
}
KNOWN = (*LINE_PARSERS, ".json", ".parquet", EXCEL)
PARSERS = {**LINE_PARSERS, ".text": parse_text}  # the last one only if the user gives the format

CHUNK_BYTES = 256 * 2**10
UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


def read_inputs(
    path: str | Path, limit: int | None = None, *, kind: str | None = None, at_once_bytes: int = AT_ONCE_BYTES
) -> list[Row] | LazyRows:
    """Return the first ``limit`` rows of a file, a directory or a pattern (``papers/**/*.pdf``), for
    ``BatchAgent.run(inputs=…)``. ``kind`` is a key of PARSERS and overrides the extension of the file."""
    reading = _open(Path(path), kind)
    if reading.memory_bytes > at_once_bytes:
        named = Path.cwd() / path  # a tool may change the working directory
        return LazyRows(reading, limit, again=lambda: _open(named, kind))
    try:
        return list(itertools.islice(reading.rows, limit))
    finally:
        reading.close()


def _open(path: Path, asked: str | None) -> Reading:
    try:
        status = path.stat()
    except OSError as error:
        if is_pattern(str(path)):
            return open_pattern(str(path))
        raise SpecError(f"cannot read the inputs {path}: {error.strerror}") from None
    if stat.S_ISDIR(status.st_mode):
        if (path / STATE).is_file() or (path / DICT).is_file():
            return open_dataset(path)
        nothing = f"the directory {path} has no files to read (hidden files are skipped)"
        return open_files(partial(_files, path, Path.cwd()), nothing)
    kind, compression = format_of(path)
    kind = asked or kind
    if asked is None and format_of_document(path) is not None:
        return open_files(lambda: iter((path,)), "")
    if kind == ".parquet" and not compression:
        return open_parquet(path)
    if kind == EXCEL and not compression:
        return open_excel(path, plain)
    if kind in OTHER_SHEETS:
        raise SpecError(
            f"{path} is a spreadsheet, which is not supported: save it as .xlsx or CSV. Supported: {' '.join(KNOWN)}"
        )
    if kind != ".json" and kind not in PARSERS:
        raise SpecError(f"the format of {path} is unknown; rename it to one of {' '.join(KNOWN)}")
    source = Source(path)
    parts, parse = (source.chunks(), parse_json) if kind == ".json" else (source.lines(), PARSERS[kind])

    def expected(taken: int) -> int:
        return max(taken, round(taken / max(source.fraction_read(), 1e-9)))

    memory = source.size * (COMPRESSION if compression else 1)
    return Reading(parse(parts, str(path)), source.close, expected, memory)


class LazyRows(Iterator[Row]):
    """The rows of a file, read as they are taken. Close it if not all rows are taken."""

    def __init__(
        self, reading: Reading, limit: int | None = None, *, again: Callable[[], Reading] | None = None
    ) -> None:
        """``again`` opens the same file for another reading."""
        self._reading = reading
        self._limit = limit
        self._again = again
        self._change: Callable[[Row], Row] | None = None
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
        return row if self._change is None else self._change(row)

    def again(self) -> LazyRows:
        """Return the same rows, to be read from the beginning."""
        assert self._again is not None, "only rows of a file can be read again"
        rows = LazyRows(self._again(), self._limit, again=self._again)
        if self._change is not None:
            rows.change(self._change)
        return rows

    def change(self, change: Callable[[Row], Row]) -> None:
        """Pass each row through ``change``."""
        self._change = change
        self.first = [*map(change, self.first)]

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


BATCH_ROWS = 256  # converted to Python at a time: few enough not to block the event loop
STATE, DICT = "state.json", "dataset_dict.json"


class _Batch(Protocol):
    """The part of pyarrow.RecordBatch that is used here."""

    num_rows: int

    def slice(self, offset: int, length: int) -> Self: ...

    def to_pylist(self) -> list[dict[str, object]]: ...


def open_parquet(path: Path) -> Reading:
    """Return the rows of a Parquet file, with their cells as JSON values: rows are written to prompts, journals and
    results."""
    pyarrow = extra("pyarrow", f"reading {path}")
    parquet = extra("pyarrow.parquet", f"reading {path}")
    try:
        file = parquet.ParquetFile(path, pre_buffer=False)  # pre_buffer keeps the data in memory
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from None
    try:
        refuse_twice(list(file.schema_arrow.names), str(path))
    except SpecError:
        file.close()
        raise
    total, groups = file.metadata.num_rows, range(file.metadata.num_row_groups)
    # One row group at a time, in one thread. Otherwise more is read ahead, although models are slower than files.
    batches = (file.iter_batches(BATCH_ROWS, row_groups=[group], use_threads=False) for group in groups)
    memory = sum(file.metadata.row_group(group).total_byte_size for group in groups)
    rows = _rows(path, itertools.chain.from_iterable(batches), pyarrow)
    return Reading(rows, file.close, lambda taken: max(total, taken), memory)


def open_dataset(directory: Path) -> Reading:
    """Return the rows of a Hugging Face dataset that was saved with ``save_to_disk``: a directory of Arrow files and
    two JSON files that describe them. pyarrow reads it without the ``datasets`` package."""
    pyarrow = extra("pyarrow", f"reading the dataset {directory}")
    extra("pyarrow.ipc", f"reading the dataset {directory}")
    if not (directory / STATE).is_file():
        directory = _only_split(directory)
    paths = _arrow_files(directory)
    maps = ExitStack()
    try:
        files = [maps.enter_context(pyarrow.memory_map(str(path))) for path in paths]
        readers = [pyarrow.ipc.open_stream(file) for file in files]
        for reader in readers[:1]:
            refuse_twice(list(reader.schema.names), str(directory))
        total = sum(_count(pyarrow, path) for path in paths)
    except (OSError, pyarrow.ArrowException) as error:
        maps.close()
        raise _unreadable(directory, error) from None
    except SpecError:
        maps.close()
        raise
    rows = _rows(directory, _slices(readers), pyarrow)
    return Reading(rows, maps.close, lambda taken: max(total, taken), sum(file.size() for file in files))


def _only_split(directory: Path) -> Path:
    splits = _described(directory / DICT).get("splits")
    if not isinstance(splits, list) or not splits:
        raise SpecError(f"{directory / DICT} lists no splits")
    if len(splits) > 1:
        names = ", ".join(map(str, splits))
        raise SpecError(f"{directory} holds the splits {names}; give one of them: {directory / str(splits[0])}")
    return directory / str(splits[0])


def _arrow_files(directory: Path) -> list[Path]:
    state = _described(directory / STATE)
    files = state.get("_data_files")
    if not isinstance(files, list) or not all(isinstance(file, dict) and "filename" in file for file in files):
        raise SpecError(f"{directory / STATE} does not list the files of the dataset")
    if state.get("_indices_data_files"):
        raise SpecError(
            f"{directory} stores a selection of rows separately; save it again with a current version of datasets"
        )
    return [directory / str(file["filename"]) for file in files]


def _described(path: Path) -> dict[str, object]:
    try:
        with explained(f"cannot read {path}"):
            value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise SpecError(f"{path} is not JSON: {error.msg}") from None
    if not isinstance(value, dict):
        raise SpecError(f"{path} must hold an object")
    return value


def _count(pyarrow: ModuleType, path: Path) -> int:
    """Return the number of rows of an Arrow file, from the counts of its batches: no cells are read."""
    with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as reader:
        return sum(batch.num_rows for batch in reader)


def _slices(readers: Iterable[Iterable[_Batch]]) -> Iterator[_Batch]:
    for batch in itertools.chain.from_iterable(readers):
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS)


def _rows(path: Path, batches: Iterable[_Batch], pyarrow: ModuleType) -> Iterator[Row]:
    try:
        for batch in batches:
            for row in batch.to_pylist():
                yield {name: plain(value) for name, value in row.items()}
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> SpecError:
    return SpecError(f"cannot read the inputs {path}: {' '.join(str(error).split())}")
