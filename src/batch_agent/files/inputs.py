"""Conversion of ``inputs`` to rows: a path, a table in memory, an open text file, or rows, which stay unchanged."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from batch_agent.errors import SpecError
from batch_agent.files.read import KNOWN, LazyRows, is_pattern, plain, read_inputs, refuse_twice
from batch_agent.files.rows import Row
from batch_agent.job import cut

AT_ONCE_CELLS = 500_000
SLICE_ROWS = 256  # converted to Python at a time: few enough not to block the event loop

# Returns the rows of a table from one position to another. The type of the table is known only to its package.
_Slice: TypeAlias = Callable[[Any, int, int], Iterable[dict[object, object]]]


def rows_from(inputs: object) -> object:
    """Return an iterable of rows. The plan checks the rows themselves."""
    match inputs:
        case str():
            return _of_path(_existing(inputs))
        case Path():
            return _of_path(inputs)
        case io.TextIOBase():
            return (line.rstrip("\r\n") for line in inputs if line.strip())
        case _:
            rows = rows_of_frame(inputs)
            return inputs if rows is None else rows


def refuse_uncountable(inputs: object, option: str) -> None:
    """Raise SpecError for inputs that can be read only once, which ``option`` would have to read twice."""
    if isinstance(inputs, LazyRows) or (isinstance(inputs, Iterable) and not isinstance(inputs, Iterator)):
        return
    kind = "an iterator" if isinstance(inputs, Iterator) else "an async iterator"
    raise SpecError(
        f"{option} needs inputs that can be counted before the run, and these are {kind} "
        f"({type(inputs).__name__}), which can be read only once: give a list, a table, or the path of a file (save "
        "standard input to a file first)"
    )


def rows_again(inputs: Iterable[object]) -> Iterable[object]:
    """Return the same rows for another reading. Rows of a file are read from the beginning, and the given object stays
    unread."""
    return inputs.again() if isinstance(inputs, LazyRows) else inputs


def _existing(text: str) -> Path:
    """Return the path of an existing file or of a pattern. Raises SpecError for other text."""
    path = Path(text)
    try:
        if text.strip() and (path.exists() or (is_pattern(text) and "\n" not in text and " " not in text)):
            return path
    except (OSError, ValueError):  # too long for a file name, or with invalid characters
        pass
    what = f"there is no file {text}" if path.suffix in KNOWN else f"it is one text, {cut(text, 60)!r}, and not a file"
    raise SpecError(
        f"inputs: {what}. Give rows: a list of dicts or of texts (text.splitlines()), the path of a file, a DataFrame"
    )


def _of_path(path: Path) -> object:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise SpecError(f"cannot read the inputs {path}: it is neither a file nor a directory")
    return read_inputs(path)


def _from_columns(columns: Mapping[object, Sequence[object]]) -> Iterator[dict[object, object]]:
    return (dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True))


_SLICES: dict[tuple[str, str], _Slice] = {
    ("pandas", "DataFrame"): lambda frame, start, end: frame.iloc[start:end].to_dict("records"),
    ("polars", "DataFrame"): lambda frame, start, end: frame[start:end].to_dicts(),
    ("pyarrow", "Table"): lambda table, start, end: table.slice(start, end - start).to_pylist(),
    ("pyarrow", "RecordBatch"): lambda batch, start, end: batch.slice(start, end - start).to_pylist(),
    ("datasets", "Dataset"): lambda dataset, start, end: _from_columns(dataset.with_format(None)[start:end]),
}
_COLUMNS: dict[str, Callable[[Any], Iterable[object]]] = {
    "pandas": lambda frame: frame.columns,
    "polars": lambda frame: frame.columns,
    "pyarrow": lambda table: table.schema.names,
    "datasets": lambda dataset: dataset.column_names,
}
_INSTEAD = {
    ("polars", "LazyFrame"): "inputs is a polars LazyFrame: collect() it first",
    ("datasets", "DatasetDict"): "inputs is a DatasetDict: give one of its splits, such as inputs=dataset['train']",
    ("datasets", "IterableDatasetDict"): "inputs is a dict of datasets: give one of its splits",
}


@dataclass(frozen=True, slots=True)
class FrameRows:
    """The rows of a table in memory, as dicts of JSON values. It can be iterated several times. Tables are recognised
    by their class names, without importing their packages. A small one is converted at once, so that values shared by
    all rows can be hoisted; a larger one in slices."""

    table: Any
    slice: _Slice

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self), SLICE_ROWS):
            for row in self.slice(self.table, start, min(start + SLICE_ROWS, len(self))):
                yield {str(name): plain(value) for name, value in row.items()}


def rows_of_frame(value: object) -> list[Row] | FrameRows | None:
    """Return the rows of a table, or None if the value is not a table. Raises SpecError for an unusable table."""
    for base in type(value).__mro__:
        name = (base.__module__.partition(".")[0], base.__name__)
        if name in _INSTEAD:
            raise SpecError(_INSTEAD[name])
        if name in _SLICES:
            return _rows(value, name)
    return None


def _rows(table: Any, name: tuple[str, str]) -> list[Row] | FrameRows:
    columns = [str(column) for column in _COLUMNS[name[0]](table)]
    refuse_twice(columns, f"the {name[0]} {name[1]}")
    if not columns:
        raise SpecError(f"the {name[0]} {name[1]} given as inputs has no columns")
    rows = FrameRows(table, _SLICES[name])
    return list(rows) if len(rows) * len(columns) <= AT_ONCE_CELLS else rows
