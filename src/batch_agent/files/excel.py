"""Excel files (.xlsx) as rows and as tables of results, with the package openpyxl.

The first sheet is read, row by row: its first row names the columns. Results are written as text, numbers and truth
values, never as formulas, whatever a model has answered.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile

from batch_agent.errors import SpecError
from batch_agent.files.compression import extra
from batch_agent.files.rows import Reading, Row
from batch_agent.job import UnreadableRow, cut

logger = logging.getLogger("batch_agent")

EXCEL = ".xlsx"
OTHER_SHEETS = (".xls", ".xlsm", ".xlsb", ".ods")  # spreadsheets that are neither read nor written
COMPRESSION = 8  # rows may take this much more memory than their file
MOST_ROWS = 1_048_576  # of a sheet, with its header
MOST_COLUMNS = 16_384  # of a sheet
MOST_CHARACTERS = 32_767  # of a cell
EXACT = 2**53  # Excel's numbers are floats
UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")  # characters that XML cannot hold


def open_excel(path: Path, plain: Callable[[object], object]) -> Reading:
    """Return the rows of the first sheet. ``plain`` converts a cell to a JSON value."""
    openpyxl = extra("openpyxl", f"reading {path}")
    try:
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
    except (OSError, BadZipFile, KeyError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not an Excel file, or it has a password"
        raise SpecError(f"cannot read {path}: {why}") from None
    try:
        if not book.worksheets:
            raise SpecError(f"{path} has no sheet with cells")
        sheet = book.worksheets[0]
        sheet.reset_dimensions()  # some programs write wrong ones
        if len(book.worksheets) > 1:
            logger.warning("%s has %d sheets: %r is read", path, len(book.worksheets), sheet.title)
        cells = sheet.iter_rows(values_only=True)
        columns = _columns(next(cells, ()), str(path))
    except BaseException:
        book.close()
        raise
    rows = _rows(cells, columns, str(path), plain) if columns else iter(())
    return Reading(rows, book.close, lambda taken: taken, path.stat().st_size * COMPRESSION)


def _columns(header: Sequence[object], name: str) -> list[str]:
    """Return the names of the columns. Raises SpecError if one has no name, or two have the same."""
    names = ["" if cell is None else str(cell).strip() for cell in header]
    while names and not names[-1]:
        names.pop()
    if not all(names):
        raise SpecError(f"{name}: its first row must name all columns; one has no name")
    if twice := {each for each in names if names.count(each) > 1}:
        raise SpecError(f"{name} has more than one column {', '.join(sorted(map(repr, twice)))}")
    return names


def _rows(
    cells: Iterator[Sequence[object]], columns: Sequence[str], name: str, plain: Callable[[object], object]
) -> Iterator[Row]:
    for number, row in enumerate(cells, 2):
        if all(cell is None for cell in row):
            continue
        more = [cell for cell in row[len(columns) :] if cell is not None]
        if more:
            shown = cut(str(more[0]), 40)
            yield UnreadableRow(f"{name} row {number} has {shown!r} in a column that the first row does not name")
            continue
        values = [*row, *[None] * (len(columns) - len(row))]
        yield {column: plain(value) for column, value in zip(columns, values, strict=False)}


def check_excel(path: Path) -> None:
    """Raise SpecError if the package to write the file is missing."""
    extra("openpyxl", f"writing {path}")


def write_excel(rows: Iterable[Sequence[object]], columns: Sequence[str], stream: IO[bytes]) -> None:
    """Write a sheet. Raises OSError if the results have more rows or columns than a sheet can hold."""
    openpyxl: Any = extra("openpyxl", "writing Excel files")
    if len(columns) > MOST_COLUMNS:
        raise OSError(
            errno.EFBIG, f"an Excel sheet has at most {MOST_COLUMNS:,} columns, and the results {len(columns):,}"
        )
    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet("results")
    shortened = 0

    def cell(value: object) -> object:
        nonlocal shortened
        if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) <= EXACT):
            return value if value == value and value not in (float("inf"), float("-inf")) else str(value)
        text = UNPRINTABLE.sub("\ufffd", str(value))
        shortened += len(text) > MOST_CHARACTERS
        written = openpyxl.cell.WriteOnlyCell(
            sheet, value=text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}…"
        )
        written.data_type = "s"  # not a formula
        return written

    try:
        sheet.append([cell(column) for column in columns])
        for number, row in enumerate(rows, 2):
            if number > MOST_ROWS:
                raise OSError(errno.EFBIG, f"an Excel sheet has at most {MOST_ROWS - 1:,} rows, use .csv")
            sheet.append([cell(value) for value in row])
    except BaseException:
        sheet.close()
        raise
    book.save(stream)
    if shortened:
        logger.warning(
            "%d cells are longer than the %s characters of an Excel cell, and were cut; .csv and .jsonl have all",
            shortened,
            f"{MOST_CHARACTERS:,}",
        )
