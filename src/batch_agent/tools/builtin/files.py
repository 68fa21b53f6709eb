"""read_file: reads text, PDF, Word and HTML files, only below the given directories."""

from __future__ import annotations

import codecs
import io
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from batch_agent.compiler.tokens import BYTES_PER_TOKEN
from batch_agent.documents import DocumentError, format_of_document
from batch_agent.documents.content import open_document, page_mark
from batch_agent.errors import ToolError
from batch_agent.tools.base import Tool
from batch_agent.tools.schema import MAX_TOKENS

MAX_BYTES = MAX_TOKENS * BYTES_PER_TOKEN

# UTF-32 comes before UTF-16: its byte order mark starts with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)


class Located(NamedTuple):
    """A file below a root. No part of ``inside`` was a symlink when the file was located."""

    root: Path
    inside: tuple[str, ...]

    @property
    def path(self) -> Path:
        return self.root.joinpath(*self.inside)

    @property
    def is_hidden(self) -> bool:
        """Whether a part of the path below the root starts with a dot. The name of the root itself is not checked."""
        return any(part.startswith(".") for part in self.inside)


def read_file(
    *, roots: Sequence[str | os.PathLike[str]] | None = None, max_bytes: int = MAX_BYTES, hidden: bool = False
) -> Tool[..., str]:
    """Return the tool for the given directories; without ``roots``, for the working directory at the time of the call.

    Of a file longer than ``max_bytes``, a part is returned, with a note that says how to continue. Below a root, files
    and directories whose names start with a dot (``.env``, ``.git``) are read only with ``hidden``.
    """
    given = None if roots is None else tuple(Path(root) for root in roots)

    def found(path: str) -> Located:
        return locate(path, (Path.cwd(),) if given is None else given, hidden=hidden)

    def version(path: str, page: int = 1, offset: int = 0) -> tuple[object, ...]:
        located = found(path)
        try:
            status = located.path.stat()
        except OSError as error:
            raise _unreadable(path, error) from None
        return str(located.path), status.st_mtime_ns, status.st_size, page, offset

    # max_tokens is None, because the result is already cut here, with a note in bytes of the file.
    @Tool.define(name="read_file", cacheable=True, cache_key=version, max_tokens=None)
    def read(path: str, page: int = 1, offset: int = 0) -> str:
        """Read a text, PDF, Word or HTML file.

        Args:
            path: The file's path, absolute or relative to the directory that may be read.
            page: The page of a PDF or Word file to start at.
            offset: Bytes of the text to skip. A cut file says where to continue.
        """
        return read_located(path, found(path), max_bytes, page=page, offset=offset)

    return read


def locate(path: str, roots: Sequence[Path], *, hidden: bool = False) -> Located:
    """Return the file below one of the roots, with all symlinks resolved. Raises ToolError if there is none."""
    try:
        allowed = [root.resolve() for root in roots]
        candidates = [below for root in allowed for below in _below((root / path).resolve(), allowed)]
        shown = [located for located in candidates if hidden or not located.is_hidden]
        if shown:
            return next((located for located in shown if located.path.exists()), shown[0])
    except (OSError, ValueError, RuntimeError) as error:  # a NUL byte, a too long name, a symlink loop
        raise ToolError(f"{path!r} is not a path that can be read: {error}") from None
    if candidates:
        raise ToolError(f"{path!r} is hidden, and hidden files may not be read")
    raise ToolError(f"{path!r} is outside the directories that may be read")


def _below(real: Path, roots: Sequence[Path]) -> list[Located]:
    return [Located(root, real.relative_to(root).parts) for root in roots if real.is_relative_to(root)]


def read_located(path: str, located: Located, max_bytes: int, *, page: int = 1, offset: int = 0) -> str:
    """Return the text of a located file, from a page and an offset in bytes. ``path`` is its name in errors."""
    if page < 1 or offset < 0:
        raise ToolError("the first page is 1, and the first offset is 0")
    kind = format_of_document(located.path)
    try:
        with io.FileIO(located.path, opener=lambda _, flags: _open(located, flags)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ToolError(f"{path!r} is not a file but a device, pipe or socket")
            if kind is not None:
                return _pages(file, kind, max_bytes, page=page, offset=offset)
            return _text(path, file, max_bytes, offset)
    except DocumentError as error:
        raise ToolError(str(error) if error.missing else f"{path!r} {error}") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _text(path: str, file: io.FileIO, max_bytes: int, offset: int) -> str:
    size, start = os.fstat(file.fileno()).st_size, file.read(4)
    mark, encoding = next(((mark, name) for mark, name in _MARKS if start.startswith(mark)), (b"", "utf-8"))
    file.seek(offset if offset >= len(mark) else len(mark))
    data = file.read(max_bytes + 1)
    if not mark and b"\0" in data:
        raise ToolError(f"{path!r} is not a text file")
    is_cut = len(data) > max_bytes
    text, read = _decode(data[:max_bytes], encoding, complete=not is_cut)
    if is_cut:
        end = max(offset, len(mark)) + read
        text += f"\n[cut: these are bytes {offset} to {end} of {size}; continue with offset={end}]"
    return text


def _pages(file: io.FileIO, kind: str, max_bytes: int, *, page: int, offset: int) -> str:
    """Return as many pages as fit, from a page and an offset in its bytes, and a note that says where to continue."""
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


def _open(located: Located, flags: int) -> int:
    """Open the file without following symlinks, even if one was made after the file was located."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK  # opening a pipe must not wait for its writer
    if not located.inside:
        return os.open(located.root, flags)
    *directories, name = located.inside
    at = os.open(located.root, DIRECTORY)
    try:
        for directory in directories:
            inner = os.open(directory, DIRECTORY, dir_fd=at)
            os.close(at)
            at = inner
        return os.open(name, flags, dir_fd=at)
    finally:
        os.close(at)


def _unreadable(path: str, error: OSError) -> ToolError:
    return ToolError(f"{path!r} cannot be read: {error.strerror or type(error).__name__}")


def _decode(data: bytes, encoding: str, *, complete: bool) -> tuple[str, int]:
    """Return the text and the number of bytes it was decoded from: a cut file may end inside a character."""
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        text = decoder.decode(data, final=complete)
    except UnicodeDecodeError:
        return data.decode("latin-1"), len(data)
    return text, len(data) - len(decoder.getstate()[0])
