"""An input file as bytes. Errors of reading become a SpecError that names the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from batch_agent.errors import SpecError
from batch_agent.files.compression import Codec
from batch_agent.files.rows import BOM, converted

CHUNK_BYTES = 256 * 2**10
UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


class Source:
    """An open file. ``size`` is its size on disk, in bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        codec = Codec(path)
        self._errors = codec.errors
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise self._error(error) from None
        self.size = os.fstat(self._file.fileno()).st_size
        self._stream = codec.reader(self._file)
        try:
            self._check_start()
        except SpecError:
            self.close()
            raise

    def lines(self) -> Iterator[bytes]:
        """Yield the lines, each with its newline, the first without a byte order mark."""
        return _without_bom(self._reading(iter(self._stream)))

    def chunks(self) -> Iterator[bytes]:
        return _without_bom(self._reading(iter(lambda: self._stream.read(CHUNK_BYTES), b"")))

    def fraction_read(self) -> float:
        return self._file.tell() / self.size if self.size else 1.0

    def close(self) -> None:
        self._stream.close()
        self._file.close()

    def _check_start(self) -> None:
        try:
            start = self._stream.peek(2)[:2]
        except self._errors as error:
            raise self._error(error) from None
        if start in UTF16_BOMS:
            raise SpecError(f"{self._path} is UTF-16; convert it to UTF-8{converted(str(self._path), 'UTF-16')}")

    def _reading(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        try:
            yield from parts
        except self._errors as error:
            raise self._error(error) from None

    def _error(self, error: Exception) -> SpecError:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return SpecError(f"cannot read the inputs {self._path}: {reason}")


def _without_bom(parts: Iterator[bytes]) -> Iterator[bytes]:
    for first in parts:
        yield first.removeprefix(BOM)
        break
    yield from parts
