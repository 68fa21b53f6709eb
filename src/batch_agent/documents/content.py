"""Makes the content that is sent to the model for a document: its text, pictures of its pages, or the file itself.

Pictures exist only for PDF. Word and HTML files are sent as text, unless the backend accepts the file itself. A bad
file raises InputError, which fails only its own row. The functions block, so callers use threads.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import Literal

from batch_agent.documents import MEDIA_TYPES, DocumentError, format_of_document
from batch_agent.errors import InputError
from batch_agent.messages import Attachment, Document, Image

SILENCE = 60.0  # seconds without a page after which the process is killed
CHUNK_BYTES = 2**16
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from batch_agent.documents.child import main; main()"
)


class OpenDocument:
    """A document that is being read. ``pages`` is the number of pages in the whole file."""

    def __init__(self, lines: Iterator[dict[str, object]]) -> None:
        self._lines = lines
        self.pages = int(str(self._next("pages")))

    def texts(self) -> Iterator[str]:
        """Yield the text of each page, from the requested first page."""
        while (text := self._next("text")) is not None:
            yield str(text)

    def pictures(self) -> Iterator[str]:
        """Yield each page as a JPEG picture in base64."""
        while (picture := self._next("image")) is not None:
            yield str(picture)

    def _next(self, name: str) -> object:
        """Return the value of that name in the next line; None at the end. Raises DocumentError."""
        line = next(self._lines)
        if "error" in line:
            raise DocumentError(str(line["error"]), missing=bool(line["missing"]))
        return line.get(name)


@contextmanager
def open_document(
    file: FileIO,
    kind: str,
    what: Literal["text", "images"] = "text",
    *,
    first: int = 1,
    silence: float = SILENCE,
    program: str = PROGRAM,
) -> Iterator[OpenDocument]:
    """Start the process, and kill it when the block ends. Raises DocumentError. ``kind`` is one of ``FORMATS``.
    ``first`` is the first page to read."""
    command = [sys.executable, "-c", program, json.dumps(sys.path), what, kind, str(first)]
    # The open file is the standard input of the process. So the process reads the file that was checked here, even if
    # another file now has that path. In its own session it gets no Ctrl-C from the terminal.
    process = subprocess.Popen(
        command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield OpenDocument(_lines(process, silence))
    finally:
        process.kill()
        process.communicate()


def _lines(process: subprocess.Popen[bytes], silence: float) -> Iterator[dict[str, object]]:
    assert process.stdout is not None
    descriptor, unread = process.stdout.fileno(), bytearray()
    output = select.poll()  # unlike select(), it takes descriptors above 1023
    output.register(descriptor, select.POLLIN)
    until = time.monotonic() + silence
    while True:
        if not output.poll(max(0.0, until - time.monotonic()) * 1000):
            raise DocumentError(f"could not be read: no page was read in {silence:g} s")
        chunk = os.read(descriptor, CHUNK_BYTES)
        if not chunk:
            code = process.wait()
            how = f"crashed with {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            raise DocumentError(f"could not be read: the reader {how}")
        unread += chunk
        if b"\n" in chunk:
            until = time.monotonic() + silence
            *lines, unread = unread.split(b"\n")
            for line in lines:
                yield json.loads(line)


TEXT_BYTES = 16 * 2**20  # more than the context of any model
MOST_PICTURES = 100  # pages: the most that providers accept in one request
FILE_BYTES = 32 * 2**20  # of a file that is sent unchanged
TOKENS_PER_PAGE = 2000  # about what providers count for the text and the picture of one page
NO_TEXT = "[no text on this page: probably a scan]"


@dataclass(frozen=True, slots=True)
class DocumentContent:
    """``text`` has a mark at the place of each item in ``attached``."""

    text: str
    pages: int
    attached: tuple[Attachment, ...] = ()


def read_document(
    document: Document,
    *,
    how: Literal["text", "images", "native"],
    root: Path | None = None,
    confined: bool = False,
    native: Collection[str] = (),
    picture: Callable[[Image], Image] = lambda image: image,
) -> DocumentContent:
    """Return the content of a file; see ``place_of`` for ``root`` and ``confined``. Raises InputError. ``native`` are
    the formats that the backend accepts as files. ``picture`` prepares a page picture for sending."""
    path = Path(document.url)
    try:
        path = place_of(document.url, root, confined=confined)
        kind = format_of_document(path)
        if kind is None:
            return DocumentContent(plain_text(path), 1)
        with _opened(path) as file:
            if how == "native" and kind in native:
                return _file(file, kind, path.name)
            if how == "images" and kind == "pdf":
                return _pictures(file, picture)
            return _text(file, kind)
    except DocumentError as error:
        raise InputError(str(error) if error.missing else f"{path} {error}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def place_of(name: str, root: Path | None, *, confined: bool) -> Path:
    """Return the path of a file that a row names; a relative one is below ``root``, or the working directory.
    ``confined``: raises InputError for a file outside, because others can change the rows."""
    path = Path(name).expanduser() if root is None else root / Path(name).expanduser()
    if confined and not path.resolve().is_relative_to((root or Path.cwd()).resolve()):
        raise InputError(f"{path} is outside of {root or Path.cwd()}, and a worker reads no other files")
    return path


def page_mark(number: int) -> str:
    return f"[page {number}]"


def _opened(path: Path) -> FileIO:
    if path.exists() and not path.is_file():  # opening a pipe would block until it has a writer
        raise DocumentError("is not a file")
    return FileIO(path)


def _text(file: FileIO, kind: str) -> DocumentContent:
    pieces: list[str] = []
    size = with_text = 0
    with open_document(file, kind) as opened:
        for number, text in enumerate(opened.texts(), start=1):
            stripped = text.strip()
            with_text += bool(stripped)
            mark = f"{page_mark(number)}\n" if opened.pages > 1 else ""
            pieces.append(mark + (stripped or NO_TEXT))
            size += len(stripped.encode())
            if size > TEXT_BYTES:
                raise DocumentError(f"has more than {TEXT_BYTES // 2**20} MiB of text")
    if not with_text and kind == "pdf":
        raise DocumentError(
            f'has no text on any of its pages ({opened.pages}): it is probably a scan. documents="images" sends '
            "pictures of the pages; a program such as ocrmypdf adds the text"
        )
    if not with_text:
        raise DocumentError("has no text")
    return DocumentContent("\n\n".join(pieces), opened.pages)


def _pictures(file: FileIO, ready: Callable[[Image], Image]) -> DocumentContent:
    pictures: list[Image] = []
    with open_document(file, "pdf", "images") as opened:
        if opened.pages > MOST_PICTURES:
            raise DocumentError(
                f'has {opened.pages} pages, and at most {MOST_PICTURES} are sent as pictures: use documents="text", '
                "or split the file"
            )
        for data in opened.pictures():
            pictures.append(ready(Image.of(b64decode(data), "image/jpeg")))
    marked = (f"{page_mark(number)}\n{picture.mark}" for number, picture in enumerate(pictures, start=1))
    return DocumentContent("\n".join(marked), opened.pages, tuple(pictures))


def _file(file: FileIO, kind: str, name: str) -> DocumentContent:
    """Return the file itself. It is also parsed, so that a broken or encrypted file fails before it is sent."""
    data = file.read(FILE_BYTES + 1)
    if len(data) > FILE_BYTES:
        raise DocumentError(f'is larger than {FILE_BYTES // 2**20} MiB, the limit for files: use documents="text"')
    with open_document(file, kind) as opened:
        pages = opened.pages
    attached = Document.of(data, MEDIA_TYPES[kind], tokens=TOKENS_PER_PAGE * pages, digest=sha256(data).hexdigest())
    attached.name = name
    return DocumentContent(f"[file {name}]\n{attached.mark}", pages, (attached,))  # Bedrock requires text with a file


def plain_text(path: Path) -> str:
    """Return the text of a file that is not a document. Raises DocumentError."""
    with _opened(path) as file:
        data = file.read(TEXT_BYTES + 1)
    if len(data) > TEXT_BYTES:
        raise DocumentError(f"is larger than {TEXT_BYTES // 2**20} MiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DocumentError("is not UTF-8 text") from None
    if "\0" in text:
        raise DocumentError("is not text: it has NUL bytes")
    return text
