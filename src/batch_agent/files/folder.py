"""A directory of text files, each file a row: ``path``, ``name``, ``text``.

The tree is walked in sorted order, one directory's names at a time. Hidden files, hidden directories and directories
that record a run are left out, links to directories are not followed. A file that is not text is a row that fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from batch_agent.errors import SpecError
from batch_agent.files.reading import Reading
from batch_agent.files.rows import Row
from batch_agent.job import UnreadableRow

RUN_FILES = {"run.json", "journal.db"}  # they tell a run directory
FILE_BYTES = 16 * 2**20  # more than any model reads at once


def open_folder(directory: Path) -> Reading:
    total = sum(1 for _ in _files(directory))
    if not total:
        raise SpecError(f"the directory {directory} has no files to read (hidden ones do not count)")
    # Every row differs from every other, so there is nothing to gain from having them all at once.
    return Reading(map(_row, _files(directory)), lambda: None, lambda taken: max(total, taken), memory_bytes=2**63)


def _files(directory: Path) -> Iterator[Path]:
    try:
        with os.scandir(directory) as listing:
            entries = sorted((entry for entry in listing if not entry.name.startswith(".")), key=lambda e: e.name)
    except OSError as error:
        raise SpecError(f"cannot read the directory {directory}: {error.strerror}") from None
    if {entry.name for entry in entries} >= RUN_FILES:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(directory / entry.name)
        elif entry.is_file():  # neither a pipe nor a socket, which would wait for somebody
            yield directory / entry.name


def _row(path: Path) -> Row:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES + 1)
    except OSError as error:
        return UnreadableRow(f"cannot read {path}: {error.strerror}")
    if len(content) > FILE_BYTES:
        return UnreadableRow(f"{path} is larger than {FILE_BYTES // 2**20} MiB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return UnreadableRow(f"{path} is not UTF-8 text")
    if "\0" in text:
        return UnreadableRow(f"{path} is not text: it has NUL bytes")
    return {"path": str(path), "name": path.name, "text": text}
