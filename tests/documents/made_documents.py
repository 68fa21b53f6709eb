"""Real PDF and DOCX files for tests, written byte by byte."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
SCAN = "\0scan"  # a page with a picture and no text


def write_pdf(path: Path, pages: Sequence[str], *, encrypted: bool = False) -> Path:
    """A page for each text, its lines below each other."""
    font, first = 3, 4
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>"
        % (b" ".join(b"%d 0 R" % (first + 2 * place) for place in range(len(pages))), len(pages)),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for place, text in enumerate(pages):
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
            b"/Resources << /Font << /F1 %d 0 R >> >> >>" % (first + 2 * place + 1, font)
        )
        content = zlib.compress(_drawn(text))
        objects.append(b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(content), content))
    locked = b""
    if encrypted:  # a password that nobody knows
        owner, user = b"6f" * 32, b"75" * 32
        objects.append(b"<< /Filter /Standard /V 1 /R 2 /O <%s> /U <%s> /P -4 >>" % (owner, user))
        locked = b"/Encrypt %d 0 R /ID [<00> <00>] " % len(objects)
    path.write_bytes(_pdf(objects, locked))
    return path


def _drawn(text: str) -> bytes:
    if text == SCAN:
        return b"0.5 g 100 100 400 500 re f"
    lines = text.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)").split("\n")
    shown = b" T* ".join(b"(%s) Tj" % line.encode("latin-1") for line in lines)
    return b"BT /F1 12 Tf 14 TL 72 720 Td %s ET" % shown


def _pdf(objects: Sequence[bytes], locked: bytes) -> bytes:
    out, places = bytearray(b"%PDF-1.7\n"), []
    for number, body in enumerate(objects, start=1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    out += b"trailer\n<< /Size %d /Root 1 0 R %s>>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, locked, table)
    return bytes(out)


def write_docx(path: Path, body: str) -> Path:
    """``body`` is the content of ``w:body``; ``paragraph`` writes its usual part."""
    document = f'<?xml version="1.0"?><w:document xmlns:w="{W}"><w:body>{body}</w:body></w:document>'
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        archive.writestr("word/document.xml", document)
    return path


def paragraph(text: str, before: str = "") -> str:
    return f"<w:p><w:r>{before}<w:t>{escape(text)}</w:t></w:r></w:p>"


def table(*rows: Sequence[str]) -> str:
    cells = ("".join(f"<w:tc>{paragraph(cell)}</w:tc>" for cell in row) for row in rows)
    return f"<w:tbl>{''.join(f'<w:tr>{row}</w:tr>' for row in cells)}</w:tbl>"
