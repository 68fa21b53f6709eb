"""Reads PDF, Word and HTML files as text, as page pictures, or as the file itself.

``content`` decides what is sent to the model. It reads each document in a separate process, because PDFium is
not thread-safe, and so that a parser that crashes or hangs affects only that document. ``child`` is the program of that
process.
"""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import PurePath

FORMATS = {".pdf": "pdf", ".docx": "docx", ".html": "html", ".htm": "html", ".xhtml": "html"}
MEDIA_TYPES = {
    "pdf": "application/pdf",
    "docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    "html": "text/html",
}


class DocumentError(Exception):
    """A document that cannot be read. The message continues a sentence that starts with the path of the file.
    ``missing``: a package is not installed, and the file itself may be valid."""

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


def format_of_document(path: str | PathLike[str]) -> str | None:
    """Return the format of a document by its file name, or None for a file that is not a document."""
    return FORMATS.get(PurePath(fspath(path)).suffix.lower())
