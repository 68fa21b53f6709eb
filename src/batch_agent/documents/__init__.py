"""PDF, Word and HTML files as text, as page pictures, or as the file itself.

``content`` decides what a model is sent. ``process`` reads a document in a process of its own, one per document: PDFium
is not safe in threads, and a parser that crashes or hangs costs only that document. ``child`` is the program of that
process; ``pdf``, ``word`` and ``web`` are the formats, and run there.
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


def format_of_document(path: str | PathLike[str]) -> str | None:
    """Returns the format that the file's name says, or None for a file that is not a document."""
    return FORMATS.get(PurePath(fspath(path)).suffix.lower())
