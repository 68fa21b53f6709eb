"""Reads the pages of a PDF file as text or as JPEG pictures. Runs in the process of ``child``."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

from batch_agent.documents.failure import DocumentError

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument, PdfPage

PICTURE_PIXELS = 1568  # length of the longer side: providers scale larger pictures down
JPEG_QUALITY = 85
WRONG_PASSWORD = 4  # FPDF_ERR_PASSWORD
_LINE_BREAKS = {"\r\n": "\n", "\r": "\n", "\x02\n": "", "\ufffe\n": "", "\x02": "", "\ufffe": "", "\0": ""}


def open_pdf(path: str) -> PdfDocument:
    """Open a PDF file. Raises DocumentError if it is broken or encrypted."""
    try:
        pdfium = importlib.import_module("pypdfium2")
    except ModuleNotFoundError:
        raise DocumentError(
            "reading PDF needs the package pypdfium2; install it with: pip install pypdfium2 pillow", missing=True
        ) from None
    try:
        document: PdfDocument = pdfium.PdfDocument(path)
    except pdfium.PdfiumError as error:
        if getattr(error, "err_code", None) == WRONG_PASSWORD or "password" in str(error).lower():
            raise DocumentError("is encrypted: save a copy without a password") from None
        raise DocumentError("is not a PDF file, or is damaged") from None
    if not len(document):
        raise DocumentError("is a PDF file without pages")
    return document


def page_texts(document: PdfDocument, first: int) -> Iterator[str]:
    for number in range(first - 1, len(document)):
        page = document[number]
        text = page.get_textpage().get_text_range()
        page.close()
        for mark, replacement in _LINE_BREAKS.items():  # this also removes marks of hyphenated line ends
            text = text.replace(mark, replacement)
        yield text


def page_pictures(document: PdfDocument, first: int) -> Iterator[bytes]:
    try:
        importlib.import_module("PIL")
    except ModuleNotFoundError:
        raise DocumentError(
            "page pictures need the package pillow; install it with: pip install pillow", missing=True
        ) from None
    for number in range(first - 1, len(document)):
        page = document[number]
        yield _jpeg(page)
        page.close()


def _jpeg(page: PdfPage) -> bytes:
    longer = max(page.get_size()) or 1.0
    bitmap = page.render(scale=PICTURE_PIXELS / longer)
    out = io.BytesIO()
    bitmap.to_pil().convert("RGB").save(out, "JPEG", quality=JPEG_QUALITY)
    bitmap.close()
    return out.getvalue()
