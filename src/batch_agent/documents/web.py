"""Reads the text of an HTML file. Runs in the process of ``child``."""

from __future__ import annotations

import codecs
import re
from html.parser import HTMLParser
from pathlib import Path

from batch_agent.documents.failure import DocumentError

MOST_BYTES = 64 * 2**20
CHARSET_BYTES = 2048  # twice the length within which HTML must declare its encoding
HIDDEN = {"script", "style", "noscript", "template", "svg", "iframe", "object", "canvas"}
BLOCKS = {
    *("address", "article", "aside", "blockquote", "body", "br", "caption", "dd", "details", "div", "dl", "dt"),
    *("fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li"),
    *("main", "nav", "ol", "option", "p", "pre", "section", "summary", "table", "title", "tr", "ul"),
}
_CHARSET = re.compile(rb"""<(?:meta|\?xml)[^>]*?(?:charset|encoding)\s*=\s*["']?\s*([\w.:-]+)""", re.IGNORECASE)


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
