"""Lines of results as a table: CSV, TSV or Parquet.

A table is in input order, and its columns are known when its last row is. It is made from a finished file of lines, in
two passes over it and a few thousand rows of memory; lines that come too early wait in a temporary file. A table file
appears when it is complete: a reader never sees half of one, and a full disk does not cost the one that was there.
"""

from __future__ import annotations

import csv
import io
import itertools
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

from batch_agent.errors import SpecError
from batch_agent.files.columns import Column, Fields, Record, as_text
from batch_agent.files.compression import Codec, format_of
from batch_agent.files.extras import extra
from batch_agent.files.order import InputOrder
from batch_agent.files.results import from_json, to_json

CSV, TSV, PARQUET = ".csv", ".tsv", ".parquet"
DELIMITERS = {CSV: ",", TSV: "\t"}
ROW_GROUP_ROWS = 5000


class ResultFile:
    """The records of a file of result lines, as often as they are asked for.

    A line that is no record, such as the last one of a run that was killed, is left out; ``torn`` counts these over the
    latest pass. A file that is not there has none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.torn = 0

    def __iter__(self) -> Iterator[Record]:
        self.torn = 0
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            for line in file:
                record = record_of(line)
                if record is None:
                    self.torn += 1
                else:
                    yield record


class InOrderOfInput:
    """The records in input order, as often as they are asked for, in constant memory: those that come too early wait in
    a file in ``directory``, or where temporary files go."""

    def __init__(self, records: Iterable[Record], directory: Path | None = None) -> None:
        self._records, self._directory = records, directory

    def __iter__(self) -> Iterator[Record]:
        with self._temporary() as waiting, self._temporary() as places:
            order = InputOrder(waiting, places)
            for record in self._records:
                index = record["index"]
                assert isinstance(index, int)
                yield from _parsed(order.put(index, to_json(record)))
            yield from _parsed(order.rest())

    def _temporary(self) -> IO[bytes]:
        return tempfile.TemporaryFile(buffering=0, dir=self._directory)


def _parsed(lines: Iterable[bytes]) -> Iterator[Record]:
    return (record for line in lines if (record := record_of(line)) is not None)


def record_of(line: bytes) -> Record | None:
    """None for what is no result line."""
    try:
        record = from_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("index"), int) else None


def is_table(path: Path) -> bool:
    return format_of(path)[0] in (*DELIMITERS, PARQUET)


def check_table(path: Path, kind: str | None = None) -> None:
    """SpecError when a table like this cannot be written here, said before there is anything to write."""
    extension, compression = format_of(path)
    kind = kind or extension
    if kind == PARQUET and compression:
        raise SpecError(f"{path}: a Parquet file is compressed inside; leave {compression} off")
    if kind == PARQUET:
        extra("pyarrow.parquet", f"writing {path}")
    Codec(path)


def write_table(records: Iterable[Record], path: Path, kind: str | None = None) -> None:
    """``records`` is gone through twice. Without a ``kind``, the path's extension says which."""
    columns = columns_of(records)
    with complete_file(path) as stream:
        write_records(records, columns, stream, kind or format_of(path)[0])


@contextmanager
def complete_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of what was there when it is complete, and not before."""
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
