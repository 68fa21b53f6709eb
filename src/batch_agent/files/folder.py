"""Files as rows: those of a directory, or those that a pattern matches. A row is ``path``, ``name``, ``text``.

The tree of a directory is walked in sorted order, one directory's names at a time. Hidden files, hidden directories and
directories that record a run are left out, links to directories are not followed. PDF, Word and HTML files are rows
with ``pages`` too: they are read when their row is due, by ``documents``. A file that is none of these and not text is
a row that fails.
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
from batch_agent.files.reading import Reading
from batch_agent.files.rows import Row
from batch_agent.job import UnreadableRow
from batch_agent.messages import Document

RUN_FILES = {"run.json", "journal.db"}  # they tell a run directory
PDF_PACKAGES = "pypdfium2 pillow"


def open_folder(directory: Path) -> Reading:
    return _open(
        lambda: _files(directory), f"the directory {directory} has no files to read (hidden ones do not count)"
    )


def open_document_file(path: Path) -> Reading:
    """One document as one row."""
    return _open(lambda: iter((path,)), "")


def open_pattern(pattern: str) -> Reading:
    """The files that a pattern such as ``papers/**/*.pdf`` matches, in sorted order; hidden ones are left out."""
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

    # Every row differs from every other, so there is nothing to gain from having them all at once.
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
        elif entry.is_file():  # neither a pipe nor a socket, which would wait for somebody
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
