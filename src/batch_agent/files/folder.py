"""Files as rows: the files of a directory, or those that match a pattern. A row has ``path``, ``name`` and ``text``.

A directory tree is walked in sorted order. Hidden files, hidden directories and run directories are skipped; symlinks
to directories are not followed. PDF, Word and HTML files also have ``pages``; ``documents`` reads them when their row
starts. The row of any other file that is not text fails.
"""

from __future__ import annotations

import glob
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from batch_agent.documents import format_of_document
from batch_agent.documents.content import plain_text
from batch_agent.documents.failure import DocumentError
from batch_agent.errors import SpecError
from batch_agent.files.rows import Reading, Row
from batch_agent.job import UnreadableRow
from batch_agent.messages import Document

RUN_FILES = {"run.json", "journal.db"}  # a directory with these is a run directory
PDF_PACKAGES = "pypdfium2 pillow"


def open_folder(directory: Path) -> Reading:
    return _open(
        lambda: _files(directory), f"the directory {directory} has no files to read (hidden files are skipped)"
    )


def open_document_file(path: Path) -> Reading:
    """Return one document as one row."""
    return _open(lambda: iter((path,)), "")


def open_pattern(pattern: str) -> Reading:
    """Return the files that match a pattern such as ``papers/**/*.pdf``, in sorted order, without hidden files."""
    found = sorted(Path(name) for name in glob.iglob(pattern, recursive=True))  # noqa: PTH207
    return _open(lambda: (path for path in found if path.is_file()), f"no file matches {pattern}")


def is_pattern(text: str) -> bool:
    return glob.has_magic(text)


def _open(files: Callable[[], Iterator[Path]], nothing: str) -> Reading:
    total, formats = 0, set[str | None]()
    for path in files():
        total += 1
        formats.add(format_of_document(path))
    if not total:
        raise SpecError(nothing)
    if "pdf" in formats and importlib.util.find_spec("pypdfium2") is None:
        raise SpecError(f"reading PDF files needs the package pypdfium2; install it with: pip install {PDF_PACKAGES}")
    paged = formats != {None}  # all rows have the same fields

    def rows() -> Iterator[Row]:
        return (_row(path, paged=paged) for path in files())

    # A large memory_bytes makes the rows lazy: they share no values, so reading all of them at once gains nothing.
    return Reading(rows(), lambda: None, lambda taken: max(total, taken), memory_bytes=2**63)


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
        elif entry.is_file():  # not a pipe or socket: opening one would block
            yield directory / entry.name


def _row(path: Path, *, paged: bool) -> Row:
    row: dict[str, object] = {"path": str(path), "name": path.name}
    if format_of_document(path) is not None:
        return {**row, "text": Document(path.absolute()), "pages": None}
    try:
        text = plain_text(path)
    except DocumentError as error:
        return UnreadableRow(f"{path} {error}")
    except OSError as error:
        return UnreadableRow(f"cannot read {path}: {error.strerror}")
    return {**row, "text": text, **({"pages": 1} if paged else {})}
