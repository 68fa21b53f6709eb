"""Parquet files, and Hugging Face datasets saved with ``save_to_disk``, read with pyarrow.

A dataset on disk is a directory of Arrow files and two JSON files that describe them. pyarrow reads it without the
``datasets`` package. Cells are converted to JSON values, because rows are written to prompts, journals and results.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Protocol, Self

import orjson

from batch_agent.errors import SpecError
from batch_agent.files.extras import extra
from batch_agent.files.rows import Reading, Row
from batch_agent.files.table import plain, refuse_twice

BATCH_ROWS = 256  # converted to Python at a time: few enough not to block the event loop
STATE, DICT = "state.json", "dataset_dict.json"


class _Batch(Protocol):
    """The part of pyarrow.RecordBatch that is used here."""

    num_rows: int

    def slice(self, offset: int, length: int) -> Self: ...

    def to_pylist(self) -> list[dict[str, object]]: ...


def open_parquet(path: Path) -> Reading:
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


def is_dataset(directory: Path) -> bool:
    return (directory / STATE).is_file() or (directory / DICT).is_file()


def open_dataset(directory: Path) -> Reading:
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
        value = orjson.loads(path.read_bytes())
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None
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
