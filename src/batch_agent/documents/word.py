"""Reads the text of a Word file (DOCX), page by page. Runs in the process of ``child``.

A DOCX file does not store its pages. It has the page breaks that the author set, and those that Word wrote when it last
laid out the file.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from xml.etree import ElementTree

from batch_agent.documents.failure import DocumentError

W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"  # repeats its sibling's text
OLE = b"\xd0\xcf\x11\xe0"  # first bytes of a .doc file, and of an encrypted .docx file
CELL = " | "


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
        """Return the current page and start another; "" if the page has no text, because Word writes a break twice."""
        if self._cell is not None or self._cells:
            return ""  # a table row across two pages is not split
        self._end_line()
        text = "\n".join(self._lines).strip()
        if text:
            self._lines.clear()
        return text
