"""The program that reads a document from standard input and writes its pages to standard output as lines of JSON.

The lines are ``{"pages": N}``, then a ``{"text": …}`` or ``{"image": base64}`` for each page, then ``{"end": true}``.
If it fails, the last line is ``{"error": …, "missing": …}``. The parent closes the pipe when it needs no more pages.
"""

from __future__ import annotations

import codecs
import importlib
import io
import json
import os
import re
import sys
import zipfile
from base64 import b64encode
from collections.abc import Iterable, Iterator
from contextlib import suppress
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from batch_agent.documents import DocumentError

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument, PdfPage


FILE = "/dev/fd/0"
MEMORY_BYTES = 4 * 2**30  # limit of the address space: stops a file that unpacks to an unlimited size

W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"  # repeats its sibling's text
OLE = b"\xd0\xcf\x11\xe0"  # first bytes of a .doc file, and of an encrypted .docx file
CELL = " | "

MOST_BYTES = 64 * 2**20
CHARSET_BYTES = 2048  # twice the length within which HTML must declare its encoding
HIDDEN = {"script", "style", "noscript", "template", "svg", "iframe", "object", "canvas"}
BLOCKS = {
    *("address", "article", "aside", "blockquote", "body", "br", "caption", "dd", "details", "div", "dl", "dt"),
    *("fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li"),
    *("main", "nav", "ol", "option", "p", "pre", "section", "summary", "table", "title", "tr", "ul"),
}
_CHARSET = re.compile(rb"""<(?:meta|\?xml)[^>]*?(?:charset|encoding)\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE)


def main() -> None:
    """Read the document. Arguments: ``text`` or ``images``, the format, the first page."""
    what = sys.argv[1]
    kind = sys.argv[2]
    first = int(sys.argv[3])
    _limit_memory()
    try:
        _read(what, kind, first)
        _write({"end": True})
    except DocumentError as error:
        _write({"error": str(error), "missing": error.missing})
    except MemoryError:
        _write({"error": "needs too much memory to be read", "missing": False})
    except BrokenPipeError:  # the parent needs no more pages
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        _write({"error": f"cannot be read: {error.strerror}", "missing": False})


def _read(what: str, kind: str, first: int) -> None:
    if kind == "pdf":
        document = open_pdf(FILE)
        _write({"pages": len(document)})
        if what == "images":
            for picture in page_pictures(document, first):
                _write({"image": b64encode(picture).decode()})
        else:
            _write_texts(page_texts(document, first))
        return
    # The number of pages of a Word file is known only at the end.
    pages = list(word_pages(FILE)) if kind == "docx" else [web_text(FILE)]
    _write({"pages": len(pages)})
    _write_texts(islice(pages, first - 1, None))


def _write_texts(texts: Iterable[str]) -> None:
    for text in texts:
        _write({"text": text.encode("utf-8", "replace").decode()})


def _write(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _limit_memory() -> None:
    with suppress(ImportError, OSError, ValueError):  # not supported on every system
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


# A DOCX file does not store its pages. It has the page breaks that the author set, and those that Word wrote when it
# last laid out the file.
def word_pages(path: str) -> Iterator[str]:
    """Yield the text of each page. Raises DocumentError if the file is broken or encrypted."""
    with open(path, "rb") as file:  # noqa: PTH123
        if file.read(4) == OLE:
            raise DocumentError("is encrypted, or in the old .doc format: save it as .docx without a password")
        try:
            with zipfile.ZipFile(file) as archive, archive.open("word/document.xml") as xml:
                yield from _Body().pages(ElementTree.iterparse(xml, ("start", "end")))
        except (zipfile.BadZipFile, KeyError, ElementTree.ParseError, EOFError, ValueError, RuntimeError):
            raise DocumentError("is not a DOCX file, or is damaged") from None


class _Body:
    """The text of the current page. Cells of a table are collected until their row ends."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._words: list[str] = []
        self._cells: list[str] = []
        self._cell: list[str] | None = None
        self._ignored = 0

    def pages(self, events: Iterator[tuple[str, ElementTree.Element]]) -> Iterator[str]:
        for event, element in events:
            if element.tag == FALLBACK:
                self._ignored += 1 if event == "start" else -1
            elif self._ignored:
                continue
            elif event == "start":
                if element.tag == W + "tc":
                    self._cell = []
            elif self._read(element) and (page := self._page()):
                yield page
        if page := self._page():
            yield page

    def _read(self, element: ElementTree.Element) -> bool:
        """Read an element; return whether a page ends here."""
        match element.tag.removeprefix(W):
            case "t":
                self._words.append(element.text or "")
            case "tab":
                self._words.append("\t")
            case "br" if element.get(W + "type") == "page":
                return True
            case "br" | "cr":
                self._words.append("\n")
            case "lastRenderedPageBreak":
                return True
            case "p":
                self._end_line()
                element.clear()
            case "tc":
                self._cells.append(" ".join(filter(None, self._cell or ())))
                self._cell = None
            case "tr":
                self._lines.append(CELL.join(self._cells))
                self._cells.clear()
                element.clear()
        return False

    def _end_line(self) -> None:
        text = "".join(self._words).strip()
        self._words.clear()
        (self._lines if self._cell is None else self._cell).append(text)

    def _page(self) -> str:
        """Return the text of the current page and start another page; "" if the page is empty, because Word writes each
        page break twice."""
        if self._cell is not None or self._cells:
            return ""  # a table row across two pages is not split
        self._end_line()
        text = "\n".join(self._lines).strip()
        if text:
            self._lines.clear()
        return text


def web_text(path: str) -> str:
    """Return the text of an HTML file. Raises DocumentError if the file is too large."""
    with Path(path).open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise DocumentError(f"is larger than {MOST_BYTES // 2**20} MiB")
    page = _TextParser()
    page.feed(_decoded(data))
    page.close()
    return page.text()


def _decoded(data: bytes) -> str:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "replace")
    declared = _CHARSET.search(data[:CHARSET_BYTES])
    for encoding in (*((declared[1].decode("ascii", "replace"),) if declared else ()), "utf-8-sig"):
        try:
            return data.decode(encoding)
        except (LookupError, UnicodeDecodeError):
            continue
    return data.decode("windows-1252", "replace")


class _TextParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._hidden = 0
        self._kept = 0  # depth of elements that keep their line breaks

    def text(self) -> str:
        """Return the text, with one line per block and at most one empty line between two blocks."""
        lines = [re.sub(r"[ \t\r\f\v\xa0]+", " ", line).strip() for line in "".join(self._parts).split("\n")]
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in HIDDEN:
            self._hidden += 1
        elif tag == "pre":
            self._kept += 1
        if tag in BLOCKS:
            self._parts.append("\n- " if tag == "li" else "\n")
        elif tag in ("td", "th"):
            self._parts.append(" | ")

    def handle_endtag(self, tag: str) -> None:
        if tag in HIDDEN:
            self._hidden = max(0, self._hidden - 1)
        elif tag == "pre":
            self._kept = max(0, self._kept - 1)
        if tag in BLOCKS and tag not in ("li", "tr"):
            self._parts.append("\n")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in BLOCKS:
            self._parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self._parts.append(data if self._kept else re.sub(r"\s+", " ", data))


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
