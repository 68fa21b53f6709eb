"""Conversion of ``inputs`` to rows: a path, a table in memory, an open text file, or rows, which stay unchanged."""

from __future__ import annotations

import io
from pathlib import Path

from batch_agent.errors import SpecError
from batch_agent.files.folder import is_pattern
from batch_agent.files.frames import rows_of_frame
from batch_agent.files.read import KNOWN, read_inputs
from batch_agent.job import cut


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
