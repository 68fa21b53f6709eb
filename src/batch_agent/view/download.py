"""Writes rows as a file to download."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from typing import IO

from batch_agent.errors import SpecError
from batch_agent.files.columns import Record, as_text
from batch_agent.files.results import to_json
from batch_agent.files.tables import CSV, columns_of, write_records


def write_rows(records: Callable[[], Iterable[Record]], kind: str, stream: IO[bytes]) -> None:
    """Write rows as ``csv`` or ``jsonl``. A table needs two passes."""
    if kind == "jsonl":
        stream.writelines(to_json(record) + b"\n" for record in records())
    elif kind == "csv":
        write_records(records(), columns_of(records()), stream, CSV)
    else:
        raise SpecError("the formats are csv and jsonl")


def write_flat(rows: Iterable[Record], stream: IO[bytes]) -> None:
    """Write rows that all have the same fields as CSV."""
    text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
    writer = csv.writer(text, lineterminator="\n")
    for number, row in enumerate(rows):
        if not number:
            writer.writerow(row)
        writer.writerow(["" if cell is None else as_text(cell) for cell in row.values()])
    text.flush()
    text.detach()
