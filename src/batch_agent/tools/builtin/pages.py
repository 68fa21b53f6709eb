"""Pages of a document for a tool: as many as fit, with a note that says where to continue."""

from __future__ import annotations

import io

from batch_agent.documents.content import page_mark
from batch_agent.documents.failure import DocumentError
from batch_agent.documents.process import open_document


def read_pages(file: io.FileIO, kind: str, max_bytes: int, *, page: int = 1, offset: int = 0) -> str:
    """Return the text from a page and an offset in its bytes. Raises DocumentError."""
    pieces: list[str] = []
    left = max_bytes
    with open_document(file, kind, first=page) as document:
        if page > document.pages:
            raise DocumentError(f"has {document.pages} pages: there is no page {page}")
        for number, text in enumerate(document.texts(), start=page):
            data = text.strip().encode()[offset:]
            if len(data) > left and number > page:
                pieces.append(f"[cut: these are pages {page} to {number - 1} of {document.pages}; {_go_on(number)}]")
                break
            piece = data[:left].decode(errors="ignore")  # a cut may fall inside a character
            pieces.append(f"{page_mark(number)}\n{piece}" if document.pages > 1 else piece)
            left -= len(data)
            if left < 0:
                at = offset + len(piece.encode())
                pieces.append(f"[cut in page {number} of {document.pages}; {_go_on(number, at)}]")
                break
            offset = 0
    return "\n\n".join(pieces)


def _go_on(page: int, offset: int = 0) -> str:
    return f"continue with page={page}" + (f", offset={offset}" if offset else "")
