"""gzip and zstd, chosen by a file's extension."""

from __future__ import annotations

import gzip
import importlib
import io
import zlib
from pathlib import Path
from types import ModuleType
from typing import IO, cast

from batch_agent.errors import SpecError


def extra(module: str, purpose: str) -> ModuleType:
    """Return a module of an optional package. Raises SpecError, which says what to install."""
    package = module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise SpecError(f"{purpose} needs the package {package}; install it with: pip install {package}") from None


GZIP, ZSTD = ".gz", ".zst"


def format_of(path: Path) -> tuple[str, str]:
    """Return the extensions of the format and the compression: ``.jsonl`` and ``.gz`` for ``rows.jsonl.gz``."""
    suffix = path.suffix.lower()
    if suffix in (GZIP, ZSTD):
        return Path(path.stem).suffix.lower(), suffix
    return suffix, ""


class Codec:
    """The compression of a file, by its extension. Raises SpecError if a package for it is missing. ``errors`` are the
    exceptions of reading. Closing a stream does not close the file below it."""

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
        """Return a writer. The compressed file is complete when the writer is closed."""
        if self._zstandard is not None:
            return cast("IO[bytes]", self._zstandard.ZstdCompressor().stream_writer(file, closefd=False))
        if self._compression == GZIP:
            return cast("IO[bytes]", gzip.GzipFile(filename="", mode="wb", fileobj=file))
        return file
