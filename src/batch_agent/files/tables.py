"""Tables of results: CSV, TSV, Parquet or Excel, made from lines of results.

A table is in input order, and its columns are known only after the last row. It is made from a finished file of lines,
in two passes, with a few thousand rows in memory. A table file is written under another name and renamed when it is
complete. So a reader never sees a part of it, and a full disk does not destroy the old file.
"""

from __future__ import annotations

import csv
import io
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from batch_agent.errors import SpecError
from batch_agent.files.compression import Codec, extra, format_of
from batch_agent.files.excel import EXCEL, OTHER_SHEETS, check_excel, write_excel
from batch_agent.files.results import from_json, to_json

Record = dict[str, object]  # a result line, parsed
Type = Literal["bool", "int", "float", "text"]
_Path = tuple[str, ...]

_EXACT_IN_FLOAT = 2**53
_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class Column:
    """A column. ``path`` is the path of its cells in a record. A column with cells of several types has type text."""

    name: str
    path: _Path
    type: Type

    def cell(self, record: Record, *, nested: bool = False) -> object:
        """Return the cell of a record, a value of the column's type, or None. With ``nested``, a list or a dict is
        returned unchanged, and not as JSON."""
        value: object = record
        for name in self.path:
            value = value.get(name) if isinstance(value, dict) else None
        if value is None or (self.path in WHOLE and isinstance(value, dict)):  # its fields have their own columns
            return None
        if self.type == "text":
            return value if nested and isinstance(value, list | dict) else as_text(value)
        return float(value) if self.type == "float" and isinstance(value, int) else value


OWN = (
    Column("ok", ("ok",), "bool"),
    Column("error_type", ("error", "type"), "text"),
    Column("error_message", ("error", "message"), "text"),
    Column("index", ("index",), "int"),
    Column("job_id", ("job_id",), "text"),
    Column("attempts", ("attempts",), "int"),
    Column("turns", ("turns",), "int"),
    Column("prompt_tokens", ("usage", "prompt_tokens"), "int"),
    Column("cached_tokens", ("usage", "cached_tokens"), "int"),
    Column("cache_write_tokens", ("usage", "cache_write_tokens"), "int"),
    Column("completion_tokens", ("usage", "completion_tokens"), "int"),
    Column("reasoning_tokens", ("usage", "reasoning_tokens"), "int"),
    Column("cost", ("cost",), "float"),
    Column("seconds", ("timings", "total"), "float"),
)


TRUST = (  # if a row has them
    Column("doubt", ("doubt",), "float"),
    Column("votes", ("votes",), "text"),
    Column("answered_by", ("answered_by",), "text"),
    Column("escalated", ("escalated",), "bool"),
    Column("gold", ("gold",), "text"),
    Column("right", ("right",), "bool"),
)
MODEL = "model"  # a model's answer beside that of people
WHOLE = (("output",), ("input",), (MODEL,))


class Fields:
    """The fields of outputs and inputs, in the order of their first appearance.

    The columns of the input come first and keep their names, or become ``input.field`` if a name is taken. The fields
    of the output follow as ``output.field`` (an output without fields: ``output``). The columns of the result come
    last; their names are fixed. All fields are known only after the last result, so a table needs two passes: first
    ``see`` each record, then read the cells.
    """

    def __init__(self) -> None:
        self._kinds: dict[_Path, set[str]] = {}
        self._more: set[str] = set()  # columns that only some runs have

    def see(self, record: Record) -> None:
        self._more.update(column.name for column in TRUST if column.name in record)
        if "gold" in record:
            self._note(("gold",), record["gold"])
        for part in ("output", "input", MODEL):
            value = record.get(part)
            if isinstance(value, dict):
                for name, item in value.items():
                    self._note((part, name), item)
            elif value is not None:
                self._note((part,), value)

    def columns(self) -> list[Column]:
        outputs = {path: kinds for path, kinds in self._kinds.items() if path[0] == "output"} or {("output",): set()}
        results = [*(Column(".".join(path), path, _type(kinds)) for path, kinds in outputs.items()), *OWN]
        models = {path: kinds for path, kinds in self._kinds.items() if path[0] == MODEL}
        results += [Column(".".join(path), path, _type(kinds)) for path, kinds in models.items()]
        for column in TRUST:
            if column.name in self._more:
                kinds = self._kinds.get(column.path)
                results.append(column if kinds is None else Column(column.name, column.path, _type(kinds)))
        taken = {column.name for column in results}
        inputs = []
        for path, kinds in self._kinds.items():
            if path[0] == "input":
                name = path[-1]
                while name in taken:
                    name = f"input.{name}"
                taken.add(name)
                inputs.append(Column(name, path, _type(kinds)))
        return [*inputs, *results]

    def _note(self, path: _Path, value: object) -> None:
        kinds = self._kinds.setdefault(path, set())
        if value is not None:
            kinds.add(_kind(value))


def _kind(value: object) -> str:
    match value:
        case bool():
            return "bool"
        case int() if abs(value) <= _EXACT_IN_FLOAT:
            return "int"
        case int() if -_INT64 <= value < _INT64:
            return "large int"
        case float():
            return "float"
        case _:
            return "text"


def _type(kinds: set[str]) -> Type:
    if not kinds:
        return "text"
    if kinds == {"bool"}:
        return "bool"
    if kinds <= {"int", "large int"}:
        return "int"
    return "float" if kinds <= {"int", "float"} else "text"


def as_text(value: object) -> str:
    """Return text unchanged, and other values as JSON."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    return to_json(value).decode()


CSV = ".csv"
TSV = ".tsv"
PARQUET = ".parquet"
DELIMITERS = {CSV: ",", TSV: "\t"}
ROW_GROUP_ROWS = 5000
INDEX = b'{"index":'  # start of a result line


class InOrderOfInput:
    """The records of files of result lines, in input order. It can be iterated several times.

    In memory it has eight bytes per row, the row's position in a file, and no records. If two lines are about one row,
    the later file or line is used. A missing file has no records. A line that is not a record, such as the last line of
    a killed run, is skipped.
    """

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self.torn = 0  # lines of the latest pass that are not records

    def __iter__(self) -> Iterator[Record]:
        for _, record in self.numbered():
            yield record

    def numbered(self) -> Iterator[tuple[int, Record]]:
        """Yield each record with the number of its file."""
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("rb")) for path in self._paths if path.exists()]
            numbers = [number for number, path in enumerate(self._paths) if path.exists()]
            for place in self._places(files):
                if place >= 0:
                    offset, which = divmod(place, len(files))
                    files[which].seek(offset)
                    if (record := record_of(files[which].readline())) is not None:
                        yield numbers[which], record

    def _places(self, files: Sequence[IO[bytes]]) -> array[int]:
        """Return the position of the line of each index: the offset times the number of files, plus the file's number;
        -1 if there is none."""
        places = array("q")
        self.torn = 0
        for which, file in enumerate(files):
            offset = 0
            for line in file:
                index = index_of(line)
                if index is None:
                    self.torn += 1
                else:
                    places.extend(itertools.repeat(-1, index + 1 - len(places)))
                    places[index] = offset * len(files) + which
                offset += len(line)
        return places


def index_of(line: bytes) -> int | None:
    """Return the index of a result line; None if it is not a result. A line in our own format is not parsed
    completely."""
    if line.startswith(INDEX) and line.endswith(b"}\n"):
        number = line[len(INDEX) : len(INDEX) + 20].partition(b",")[0]
        if number.isdigit():
            return int(number)
    record = record_of(line)
    index = None if record is None else record["index"]
    return index if isinstance(index, int) and index >= 0 else None


def record_of(line: bytes) -> Record | None:
    """Return the record of a result line, or None if the line is not one."""
    try:
        record = from_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("index"), int) else None


def is_table(path: Path) -> bool:
    return format_of(path)[0] in (*DELIMITERS, PARQUET, EXCEL, *OTHER_SHEETS)


def check_table(path: Path, kind: str | None = None) -> None:
    """Raise SpecError if this kind of table cannot be written, before there are results."""
    extension, compression = format_of(path)
    kind = kind or extension
    if kind in (PARQUET, EXCEL) and compression:
        name = "a Parquet" if kind == PARQUET else "an Excel"
        raise SpecError(f"{path}: {name} file is already compressed; omit {compression}")
    if kind in OTHER_SHEETS:
        raise SpecError(f"{path}: results cannot be written as {kind}; use .xlsx, .csv, .tsv, .parquet or .jsonl")
    if kind == EXCEL:
        check_excel(path)
    if kind == PARQUET:
        extra("pyarrow.parquet", f"writing {path}")
    Codec(path)


def write_table(records: Iterable[Record], path: Path) -> None:
    """Write the records as a table, in the format of the extension. ``records`` is iterated twice."""
    columns = columns_of(records)
    with complete_file(path) as stream:
        write_records(records, columns, stream, format_of(path)[0])


@contextmanager
def complete_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that replaces the old one only when it is complete."""
    path = path.resolve()  # a link stays a link
    incomplete = path.with_name(f"{path.name}.incomplete")
    try:
        with incomplete.open("wb") as file, closing(Codec(path).writer(file)) as stream:
            yield stream
        incomplete.replace(path)
    finally:
        incomplete.unlink(missing_ok=True)


def columns_of(records: Iterable[Record]) -> list[Column]:
    fields = Fields()
    for record in records:
        fields.see(record)
    return fields.columns()


def write_records(records: Iterable[Record], columns: Sequence[Column], stream: IO[bytes], kind: str) -> None:
    if kind == PARQUET:
        _write_parquet(records, columns, stream)
    elif kind == EXCEL:
        rows = ([column.cell(record) for column in columns] for record in records)
        write_excel(rows, [column.name for column in columns], stream)
    else:
        _write_text(records, columns, stream, DELIMITERS[kind])


def _write_text(records: Iterable[Record], columns: Sequence[Column], stream: IO[bytes], delimiter: str) -> None:
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    try:
        writer.writerow([column.name for column in columns])
        for record in records:
            cells = (column.cell(record) for column in columns)
            writer.writerow(["" if cell is None else as_text(cell) for cell in cells])
        text.flush()
    finally:
        text.detach()


def _write_parquet(records: Iterable[Record], columns: Sequence[Column], stream: IO[bytes]) -> None:
    pyarrow = extra("pyarrow", "writing Parquet")
    parquet = extra("pyarrow.parquet", "writing Parquet")
    types = {"bool": pyarrow.bool_(), "int": pyarrow.int64(), "float": pyarrow.float64(), "text": pyarrow.string()}
    schema = pyarrow.schema([(column.name, types[column.type]) for column in columns])
    rows = iter(records)
    with parquet.ParquetWriter(stream, schema, compression="zstd") as writer:
        while group := list(itertools.islice(rows, ROW_GROUP_ROWS)):
            cells = [[column.cell(record) for record in group] for column in columns]
            arrays = [pyarrow.array(values, field.type) for values, field in zip(cells, schema, strict=True)]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))
