"""What a program may give as ``inputs``, as rows: a path, a table in memory, an open text file, or rows as they are."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

from batch_agent.errors import SpecError
from batch_agent.files.folder import is_pattern
from batch_agent.files.frames import rows_of_frame
from batch_agent.files.read import KNOWN, read_inputs
from batch_agent.job import cut


def rows_from(inputs: object) -> object:
    """Something to iterate. Whether what comes of it are rows is for the plan to say."""
    match inputs:
        case str():
            return _of_path(_existing(inputs))
        case Path():
            return _of_path(inputs)
        case io.TextIOBase():
            return _lines(inputs)
        case _:
            rows = rows_of_frame(inputs)
            return inputs if rows is None else rows


def _existing(text: str) -> Path:
    """SpecError for a text that names no file: it was meant as a row, or as lines."""
    path = Path(text)
    try:
        if text.strip() and (path.exists() or (is_pattern(text) and "\n" not in text and " " not in text)):
            return path
    except (OSError, ValueError):  # too long for a name, or with characters that none has
        pass
    what = f"there is no file {text}" if path.suffix in KNOWN else f"it is one text, {cut(text, 60)!r}, and no file"
    raise SpecError(
        f"inputs: {what}. Give rows: a list of dicts or of texts (text.splitlines()), the path of a file, a DataFrame"
    )


def _of_path(path: Path) -> object:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise SpecError(f"cannot read the inputs {path}: it is neither a file nor a directory")
    return read_inputs(path)


def _lines(file: io.TextIOBase) -> Iterator[str]:
    """Those of an open file, as the run needs them; blank ones are left out."""
    return (line.rstrip("\r\n") for line in file if line.strip())
