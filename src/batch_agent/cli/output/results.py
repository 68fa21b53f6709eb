"""Writers for the results of a command: lines of JSON when rows finish or in input order, or a table at the end.

A line of an uncompressed file is written in one call before the next result is taken, so a killed run leaves all paid
results on disk. This holds for a table too: its results are collected as lines in a file beside it until the run ends.

Existing files are not changed until the first row has an answer or has failed. Until then, another process may own the
run, and the file beside the output may hold the only results of a killed run. If a run ends before that, its
interrupted rows do not replace the results of an earlier run.

If the disk is full, the last line is removed again if it is incomplete. (A compressed file may end anywhere.)
"""

from __future__ import annotations

import itertools
import os
import stat
import sys
import tempfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Self

from batch_agent.blocking import in_thread
from batch_agent.cli.output.streams import writing
from batch_agent.errors import BatchAgentError, Invalid, SpecError, explained
from batch_agent.files.compression import Codec
from batch_agent.files.results import result_line, unwritten
from batch_agent.files.tables import InOrderOfInput, check_table, complete_file, is_table, write_table
from batch_agent.job import AgentResult, is_interrupted

STDOUT_DESCRIPTOR = 1


class ResultLines(ABC):
    """The place to which lines of results are written. Call ``finish`` once. ``empty``: even without a line an output
    is made, which replaces an older one."""

    destination = ""  # shown to the user

    async def write(self, line: bytes) -> None:
        self.write_now(line)

    @abstractmethod
    def write_now(self, line: bytes) -> None:
        """Write a line. Blocks until it is written."""

    @abstractmethod
    def finish(self, *, empty: bool) -> None: ...


class ResultWriter:
    """Writes results. ``replaces``: there is an older output, which is replaced only if a row has an answer.
    ``ordered``: results are in the order of their rows; early ones wait in the file ``waiting``, or in a temporary
    file."""

    written = 0  # results that were passed on without an error

    def __init__(
        self, lines: ResultLines, *, replaces: bool = False, ordered: bool = False, waiting: Path | None = None
    ) -> None:
        self._lines = lines
        self._replaces = replaces
        self._ordered = ordered
        self._waiting_path = waiting
        self.destination = lines.destination
        self._begun = False
        self._interrupted: list[AgentResult[object]] = []  # results that wait for the first answer
        self._waiting: IO[bytes] | None = None
        self._order: InputOrder | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._waiting or nullcontext():
            try:
                for line in self._order.rest() if self._order is not None else ():
                    self._lines.write_now(line)
            finally:
                self._lines.finish(empty=exception[0] is None and not self.keeps_old)
        if self._waiting is not None and self._waiting_path is not None:
            self._waiting_path.unlink(missing_ok=True)

    @property
    def keeps_old(self) -> bool:
        """Return whether the older output stays because no row has an answer."""
        return self._replaces and not self._begun

    async def write(self, result: AgentResult[object]) -> bool:
        """Write the result. Returns False if its output cannot be written, and the line says that the row failed."""
        if not self._begun and self._replaces and is_interrupted(result):
            self._interrupted.append(result)
            return True
        self._begun = True
        for earlier in self._interrupted:
            await self._put(earlier)
        self._interrupted.clear()
        return await self._put(result)

    async def _put(self, result: AgentResult[object]) -> bool:
        try:
            own, faithful = result_line(result), True
        except Invalid as error:
            own, faithful = result_line(unwritten(result, error)), False
        for line in self._in_order(result.index, own) if self._ordered else (own,):
            await self._lines.write(line)
        self.written += 1
        return faithful

    def _in_order(self, index: int, line: bytes) -> Iterator[bytes]:
        with explained("cannot store a result until earlier rows finish", BatchAgentError):
            if self._waiting is None:
                path = self._waiting_path
                self._waiting = tempfile.TemporaryFile() if path is None else path.open("w+b")  # noqa: SIM115
                self._order = InputOrder(self._waiting)
            assert self._order is not None
            yield from self._order.put(index, line)


def open_results(path: Path | None, *, ordered: bool = False) -> ResultWriter:
    """Return a writer to the file, in the format of its extension; without a path, to standard output."""
    if path is None:
        return ResultWriter(StdoutLines(STDOUT_DESCRIPTOR), ordered=ordered)
    refuse_missing_directory(path, f"the results to {path}")
    replaces = path.is_file() and path.stat().st_size > 0
    if is_table(path):  # it is in order anyway
        return ResultWriter(TableLines(path), replaces=replaces)
    lines = FileLines(path)
    waiting = path.absolute().with_name(f"{path.name}.waiting.jsonl")
    if ordered:
        _check_place(waiting, str(path))
    return ResultWriter(lines, replaces=replaces, ordered=ordered, waiting=waiting)


class FileLines(ResultLines):
    """Results in a file. Its old content is deleted when the first result is written, so that a run that does not start
    keeps it."""

    def __init__(self, path: Path) -> None:
        self.destination = str(path)
        self._codec = Codec(path)
        self._stream: IO[bytes] | None = None
        self._size = 0  # bytes of whole lines
        with explained(f"cannot write the results to {path}"):
            self._file = path.open("ab", buffering=0)

    def finish(self, *, empty: bool) -> None:
        with self._file:
            if empty:
                self._start()
            if self._stream is not None:
                with explained(f"cannot write the results to {self.destination}", BatchAgentError):
                    self._stream.close()

    def write_now(self, line: bytes) -> None:
        stream = self._start()
        with explained(f"cannot write the results to {self.destination}", BatchAgentError):
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[stream.write(rest) :]
            except OSError:
                if stream is self._file:
                    with suppress(OSError):  # not a regular file
                        self._file.truncate(self._size)
                raise
        self._size += len(line)

    def _start(self) -> IO[bytes]:
        if self._stream is None:
            if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                self._file.truncate(0)
            self._stream = self._codec.writer(self._file)
        return self._stream


class TableLines(ResultLines):
    """Results in a table in input order, which is written when the run ends. Until then they are lines in a file beside
    it. That file stays if the table cannot be written."""

    def __init__(self, path: Path) -> None:
        check_table(path)
        if path.is_dir():
            raise SpecError(f"cannot write the results to {path}: it is a directory")
        self.destination = str(path)
        path = path.absolute()  # a tool may change the working directory
        self._table = path
        self._partial = path.with_name(f"{path.name}.partial.jsonl")
        self._lines: FileLines | None = None
        _check_place(self._partial, self.destination)

    def finish(self, *, empty: bool) -> None:
        if empty:
            self._start()
        if self._lines is None:
            return
        self._lines.finish(empty=empty)
        try:
            write_table(InOrderOfInput(self._partial), self._table)
        except OSError as error:
            raise BatchAgentError(
                f"cannot write the table {self._table}: {error.strerror}; the results are in {self._partial}"
            ) from None
        self._partial.unlink(missing_ok=True)

    def write_now(self, line: bytes) -> None:
        self._start().write_now(line)

    def _start(self) -> FileLines:
        if self._lines is None:
            try:
                self._lines = FileLines(self._partial)
            except SpecError as error:  # the run has already started
                raise BatchAgentError(str(error)) from None
        return self._lines


class StdoutLines(ResultLines):
    """Results on standard output. A slow reader does not delay agents. A closed pipe raises BrokenPipeError."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._regular = stat.S_ISREG(os.fstat(descriptor).st_mode)

    def finish(self, *, empty: bool) -> None:
        pass

    async def write(self, line: bytes) -> None:
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
            if self._regular:
                self._remove(len(line) - len(rest))
            raise BatchAgentError(f"cannot write the results to standard output: {error.strerror}") from None

    def _remove(self, written: int) -> None:
        """Remove the beginning of a line from the end of a file."""
        with suppress(OSError):
            end = os.lseek(self._descriptor, 0, os.SEEK_CUR)
            if end == os.fstat(self._descriptor).st_size:
                os.ftruncate(self._descriptor, end - written)
                os.lseek(self._descriptor, end - written, os.SEEK_SET)


def refuse_missing_directory(path: Path, what: str) -> None:
    """Raise SpecError if the directory of an output does not exist. ``what`` says what cannot be written."""
    if not path.parent.exists():
        raise SpecError(f"cannot write {what}: No such file or directory: create {path.parent} first")


def _check_place(path: Path, output: str) -> None:
    """Raise SpecError if a file beside the output cannot be written. The file is neither created nor changed."""
    with explained(f"cannot write the results to {output}, with {path.name} beside it"):
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()


@contextmanager
def written_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that replaces the old one when it is complete. Raises BatchAgentError if it cannot be written."""
    with explained(f"cannot write {path}", BatchAgentError), complete_file(path) as stream:
        yield stream


@contextmanager
def opened_output(path: Path | None) -> Iterator[IO[bytes]]:
    """Open the file like ``written_file``; None is standard output."""
    if path is None:
        with writing(sys.stdout):
            yield sys.stdout.buffer
    else:
        with written_file(path) as stream:
            yield stream


def refuse_overwriting(output: Path, other: Path, what: str) -> None:
    """Raise SpecError if the output is the other file, or is in the other directory."""
    if other.is_dir():
        if output.resolve().is_relative_to(other.resolve()):
            raise SpecError(f"--output {output} is in the directory of the {what}, and would be read as one of them")
        return
    try:
        same = output.samefile(other)
    except OSError:  # one of them does not exist yet
        return
    if same:
        raise SpecError(f"--output {output} is the file of the {what}; give another file")


def refuse_in_run_directory(output: Path, directory: Path) -> None:
    """Raise SpecError if the output is in the run directory: the run writes and reads the files there."""
    if output.resolve().is_relative_to(directory.resolve()):
        raise SpecError(
            f"--output {output} is in the run directory {directory}, whose files belong to the run; give another path"
        )


class InputOrder:
    """The lines in the order of their indices. A line that arrives too early waits in a file, so one slow row costs
    disk space; memory holds eight bytes per row. ``waiting`` is an empty file, open for reading and writing. The caller
    closes it."""

    def __init__(self, waiting: IO[bytes]) -> None:
        self._waiting = waiting
        self._places = array("q")  # offset of the line of each index; -1: it does not wait
        self._next = 0
        self._count = 0

    def put(self, index: int, line: bytes) -> Iterator[bytes]:
        """Accept a line, and yield the lines that are next in order."""
        if index > self._next:
            self._places.extend(itertools.repeat(-1, index + 1 - len(self._places)))
            self._places[index] = self._waiting.seek(0, os.SEEK_END)
            self._waiting.write(line)
            self._waiting.flush()
            self._count += 1
            return
        yield line
        self._next = max(self._next, index + 1)
        while self._next < len(self._places) and self._places[self._next] >= 0:
            yield self._take()

    def rest(self) -> Iterator[bytes]:
        """Yield all waiting lines in order, even if lines between them are missing."""
        while self._next < len(self._places):
            if self._places[self._next] >= 0:
                yield self._take()
            else:
                self._next += 1

    def _take(self) -> bytes:
        self._waiting.seek(self._places[self._next])
        line = self._waiting.readline()
        self._places[self._next] = -1
        self._next += 1
        self._count -= 1
        if not self._count:
            self._waiting.truncate(0)
        return line
