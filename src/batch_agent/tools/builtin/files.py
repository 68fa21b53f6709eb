"""read_file: text files below given directories, and nothing else of the machine."""

from __future__ import annotations

import codecs
import io
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from batch_agent.compiler.budget import BYTES_PER_TOKEN
from batch_agent.errors import ToolError
from batch_agent.tools.base import Tool
from batch_agent.tools.render import MAX_TOKENS

MAX_BYTES = MAX_TOKENS * BYTES_PER_TOKEN

# The longer mark first: UTF-32's begins with UTF-16's.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def read_file(*, roots: Sequence[str | os.PathLike[str]] | None = None, max_bytes: int = MAX_BYTES) -> Tool[..., str]:
    """The tool for given directories; without ``roots``, the working directory at the time of the call.

    Of a file longer than ``max_bytes`` the beginning is returned, with a note.
    """
    given = None if roots is None else tuple(Path(root) for root in roots)

    def locate(path: str) -> Path:
        return _locate(path, (Path.cwd(),) if given is None else given)

    def version(path: str) -> tuple[str, int, int]:
        found = locate(path)
        try:
            status = found.stat()
        except OSError as error:
            raise _unreadable(path, error) from None
        return str(found), status.st_mtime_ns, status.st_size

    # Not cut a second time: what was not read is counted here, in the words of a file.
    @Tool.define(name="read_file", cacheable=True, cache_key=version, max_tokens=None)
    def read(path: str) -> str:
        """Read a text file.

        Args:
            path: The file's path, absolute or relative to the directory that may be read.
        """
        return _read(path, locate(path), max_bytes)

    return read


def _locate(path: str, roots: Sequence[Path]) -> Path:
    """The real path of a file, all symlinks resolved, if it is below one of the roots."""
    try:
        allowed = [root.resolve() for root in roots]
        candidates = [real for root in allowed if _is_below(real := (root / path).resolve(), allowed)]
        if candidates:
            return next((real for real in candidates if real.exists()), candidates[0])
    except (OSError, ValueError, RuntimeError) as error:  # a NUL, a name too long, a loop of symlinks
        raise ToolError(f"{path!r} is not a path that can be read: {error}") from None
    raise ToolError(f"{path!r} is outside the directories that may be read")


def _is_below(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)


def _read(path: str, real: Path, max_bytes: int) -> str:
    try:
        with io.FileIO(real, opener=_open) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ToolError(f"{path!r} is not a file but a device, pipe or socket")
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise _unreadable(path, error) from None
    text = _decode(path, data[:max_bytes], complete=len(data) <= max_bytes)
    if len(data) > max_bytes:
        text += f"\n[cut: these are the first {max_bytes} of {status.st_size} bytes]"
    return text


def _open(path: str, flags: int) -> int:
    # NOFOLLOW: the last part was no symlink a moment ago. NONBLOCK: opening a pipe must not wait for its writer.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _unreadable(path: str, error: OSError) -> ToolError:
    return ToolError(f"{path!r} cannot be read: {error.strerror or type(error).__name__}")


def _decode(path: str, data: bytes, *, complete: bool) -> str:
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), None)
    if encoding is None:
        if b"\0" in data:
            raise ToolError(f"{path!r} is not a text file")
        encoding = "utf-8"
    try:
        # A file that was cut may end inside a character; the decoder keeps that part to itself.
        return codecs.getincrementaldecoder(encoding)().decode(data, final=complete)
    except UnicodeDecodeError:
        return data.decode("latin-1")
