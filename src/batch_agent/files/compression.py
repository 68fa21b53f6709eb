"""gzip and zstd, chosen by a file's extension."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from types import ModuleType
from typing import IO, cast

from batch_agent.files.extras import extra

GZIP, ZSTD = ".gz", ".zst"


def format_of(path: Path) -> tuple[str, str]:
    """The extensions that name the format and the compression: ``.jsonl`` and ``.gz`` of ``rows.jsonl.gz``."""
    suffix = path.suffix.lower()
    if suffix in (GZIP, ZSTD):
        return Path(path.stem).suffix.lower(), suffix
    return suffix, ""


class Codec:
    """How the file at ``path`` is compressed, if it is. SpecError when a package for that is missing.

    ``errors`` is what reading may raise. Closing a stream leaves the file below it open.
    """

    def __init__(self, path: Path) -> None:
        self._compression = format_of(path)[1]
        self._zstandard: ModuleType | None = None
        self.errors: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
        if self._compression == ZSTD:
            self._zstandard = extra("zstandard", f"{path}: zstd")
            self.errors += (self._zstandard.ZstdError,)

    def reader(self, file: IO[bytes]) -> io.BufferedReader:
        if self._zstandard is not None:
            decompressor = self._zstandard.ZstdDecompressor()
            return io.BufferedReader(decompressor.stream_reader(file, read_across_frames=True, closefd=False))
        return cast("io.BufferedReader", gzip.GzipFile(fileobj=file) if self._compression == GZIP else file)

    def writer(self, file: IO[bytes]) -> IO[bytes]:
        """The compressed file is complete when the writer is closed."""
        if self._zstandard is not None:
            return cast("IO[bytes]", self._zstandard.ZstdCompressor().stream_writer(file, closefd=False))
        if self._compression == GZIP:
            return cast("IO[bytes]", gzip.GzipFile(filename="", mode="wb", fileobj=file))
        return file
