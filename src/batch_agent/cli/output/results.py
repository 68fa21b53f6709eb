"""Where the results of a command go: lines of JSON as they finish, or in input order, or a table at the end.

A line of an uncompressed file leaves in one piece before the next result is taken, so what a killed run has paid for is
on disk. That goes for a table as well: its results are collected as lines beside it until the run ends.

Nothing that was there before is touched until the first result comes: until then another process may be the one whose
run this is, and what is beside the output may be all that a killed run left.
"""

from __future__ import annotations

import os
import stat
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Self

from batch_agent.blocking import in_thread
from batch_agent.errors import BatchAgentError, Invalid, SpecError
from batch_agent.files.compression import Codec
from batch_agent.files.order import InputOrder
from batch_agent.files.results import result_line, unwritten
from batch_agent.files.tables import InOrderOfInput, check_table, is_table, write_table
from batch_agent.job import AgentResult

STDOUT_DESCRIPTOR = 1


class ResultWriter(ABC):
    destination = ""  # for people: where the results are

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *exception: object) -> None: ...

    @abstractmethod
    async def write(self, result: AgentResult[object]) -> bool:
        """Whether its line says what the result does; False when the line is that of a failed row, because the output
        cannot be written."""


class LineWriter(ResultWriter):
    async def write(self, result: AgentResult[object]) -> bool:
        line, faithful = _line(result)
        await self.write_line(line)
        return faithful

    async def write_line(self, line: bytes) -> None:
        self.write_now(line)

    @abstractmethod
    def write_now(self, line: bytes) -> None:
        """The same when no event loop is to be kept going."""


def open_results(path: Path | None, *, ordered: bool = False) -> ResultWriter:
    """A writer to the file, in the format of its extension; without one, to standard output."""
    writer: LineWriter
    if path is not None and is_table(path):
        return TableWriter(path)
    writer = StdoutWriter(STDOUT_DESCRIPTOR) if path is None else FileWriter(path)
    return OrderedWriter(writer, path) if ordered else writer


class FileWriter(LineWriter):
    """Results in a file. What was in it goes when the first result comes, not when a run fails to start."""

    def __init__(self, path: Path) -> None:
        self._path, self.destination = path, str(path)
        self._codec = Codec(path)
        self._stream: IO[bytes] | None = None
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise SpecError(f"cannot write the results to {path}: {error.strerror}") from None

    def __exit__(self, *exception: object) -> None:
        with self._file:
            if exception[0] is None:  # a run without a single row leaves an empty file, not an old one
                self._start()
            if self._stream is not None:
                self._in_words(self._stream.close)

    def write_now(self, line: bytes) -> None:
        self._in_words(lambda: _write_all(self._start(), line))

    def _start(self) -> IO[bytes]:
        if self._stream is None:
            if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                self._file.truncate(0)
            self._stream = self._codec.writer(self._file)
        return self._stream

    def _in_words(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            raise BatchAgentError(f"cannot write the results to {self._path}: {error.strerror}") from None


class TableWriter(LineWriter):
    """Results in a table in input order, which is made when the run is over. Until then they are lines in a file beside
    it, and stay there if the table cannot be made."""

    def __init__(self, path: Path) -> None:
        check_table(path)
        if path.is_dir():
            raise SpecError(f"cannot write the results to {path}: it is a directory")
        self._table, self.destination = path, str(path)
        self._partial = path.with_name(f"{path.name}.partial.jsonl")
        self._lines: FileWriter | None = None
        _check_place(self._partial)

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:  # a run without a single row leaves an empty table, not an old one
            self._start()
        if self._lines is None:
            return
        self._lines.__exit__(*exception)
        try:
            write_table(InOrderOfInput(self._partial), self._table)
        except OSError as error:
            raise BatchAgentError(
                f"cannot write the table {self._table}: {error.strerror}; the results are in {self._partial}"
            ) from None
        self._partial.unlink(missing_ok=True)

    def write_now(self, line: bytes) -> None:
        self._start().write_now(line)

    def _start(self) -> FileWriter:
        if self._lines is None:
            try:
                self._lines = FileWriter(self._partial)
            except SpecError as error:  # too late for one: the run has begun
                raise BatchAgentError(str(error)) from None
        return self._lines


class StdoutWriter(LineWriter):
    """Results on standard output. A reader that is slow makes results wait, not agents that are under way; a reader
    that is gone raises BrokenPipeError."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._regular = stat.S_ISREG(os.fstat(descriptor).st_mode)

    def __exit__(self, *exception: object) -> None:
        pass

    async def write_line(self, line: bytes) -> None:
        if self._regular:
            self.write_now(line)
        else:
            await in_thread(lambda: self.write_now(line))

    def write_now(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            raise BatchAgentError(f"cannot write the results to standard output: {error.strerror}") from None


class OrderedWriter(ResultWriter):
    """Results in the order of their rows. Those that finish too early wait in a file beside the output, or, for
    standard output, in a temporary one."""

    def __init__(self, writer: LineWriter, path: Path | None) -> None:
        self._writer, self.destination = writer, writer.destination
        self._waiting_path = path and path.with_name(f"{path.name}.waiting.jsonl")
        self._files = ExitStack()
        self._order: InputOrder | None = None
        if self._waiting_path is not None:
            _check_place(self._waiting_path)

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    async def write(self, result: AgentResult[object]) -> bool:
        own, faithful = _line(result)
        try:
            for line in self._start().put(result.index, own):
                await self._writer.write_line(line)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise BatchAgentError(f"cannot keep a result until its turn: {error.strerror}") from None
        return faithful

    def __exit__(self, *exception: object) -> None:
        with self._files:
            try:
                for line in self._order.rest() if self._order is not None else ():
                    self._writer.write_now(line)
            finally:
                self._writer.__exit__(*exception)
        if self._order is not None and self._waiting_path is not None:
            self._waiting_path.unlink(missing_ok=True)

    def _start(self) -> InputOrder:
        if self._order is None:
            waiting = self._files.enter_context(_open_temporary(self._waiting_path))
            places = self._files.enter_context(_open_temporary(None))
            self._order = InputOrder(waiting, places)
        return self._order


def _line(result: AgentResult[object]) -> tuple[bytes, bool]:
    try:
        return result_line(result), True
    except Invalid as error:
        return result_line(unwritten(result, error)), False


def _check_place(path: Path) -> None:
    """SpecError when a file beside the output could not be written. Neither makes nor changes it."""
    try:
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise SpecError(f"cannot write the results to {path}: {error.strerror}") from None


def _open_temporary(path: Path | None) -> IO[bytes]:
    return tempfile.TemporaryFile(buffering=0) if path is None else path.open("w+b", buffering=0)


def _write_all(stream: IO[bytes], data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[stream.write(rest) :]
