"""The images and documents that a row names, for a person who reviews it.

The record has their paths, never their bytes. A path counts only in a field that the run declares as an image or a
document, or if its file is below a directory in which the run looked for its rows. What is shown is decided by the
content of a file, so that a row cannot name any other file of this machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from batch_agent.errors import InputError
from batch_agent.files.tables import Record
from batch_agent.messages import JsonObject
from batch_agent.record.scoring import row_fields

STARTS = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"%PDF-": "application/pdf",
}
LONGEST_PATH = 4096
MOST_FILES = 40  # of one row
LARGEST = 64 * 2**20


@dataclass(frozen=True, slots=True)
class AttachedFile:
    """A file of a row. ``number`` is its place among the files of the row."""

    number: int
    field: str
    path: Path
    kind: str

    def to_json(self) -> JsonObject:
        return {"number": self.number, "field": self.field, "name": self.path.name, "type": self.kind}


def attached(record: Record, known: JsonObject) -> list[AttachedFile]:
    """Return the files that a row names. ``known`` describes which fields and directories of the run may have files:
    ``fields`` and ``roots``."""
    declared = _texts(known.get("fields"))
    roots = [Path(root) for root in _texts(known.get("roots"))]
    found: list[AttachedFile] = []
    try:
        fields: Mapping[str, object] = row_fields(record.get("input"))
    except InputError:
        return []
    for field, value in fields.items():
        for text in _paths(value):
            path = _found(text, roots, declared=field in declared)
            kind = None if path is None else _kind(path)
            if path is not None and kind is not None and len(found) < MOST_FILES:
                found.append(AttachedFile(len(found), field, path, kind))
    return found


def _texts(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _paths(value: object) -> Iterator[str]:
    values: Iterable[object] = value if isinstance(value, list) else [value]
    for each in values:
        if isinstance(each, str) and 0 < len(each) <= LONGEST_PATH and "\n" not in each and "\0" not in each:
            yield each


def _found(text: str, roots: Iterable[Path], *, declared: bool) -> Path | None:
    for root in roots:
        path = root / text
        try:
            if path.is_file() and (declared or path.resolve().is_relative_to(root.resolve())):
                return path
        except OSError:  # such as a name that is too long
            continue
    return None


def _kind(path: Path) -> str | None:
    """Return the type of the content of a file; None if it is neither an image nor a PDF file."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > LARGEST:
                return None
            start = file.read(16)
    except OSError:
        return None
    if start.startswith(b"RIFF") and start[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for mark, kind in STARTS.items() if start.startswith(mark)), None)
