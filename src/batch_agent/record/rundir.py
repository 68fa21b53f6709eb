"""A run's directory: its lock, its description, and its results for people and other programs.

    run.json        description and versions of the run; when and why it began and ended
    journal.db      every answer and tool result, the authoritative record; see ``sqlite``
    results.jsonl   the successful rows, in the order in which they finish
    failures.jsonl  the rows that failed
    summary.json    the totals, written when a session ends
    timeline.jsonl  and the files named in ``timeline``: the history of the run, for the views
    control.json    where the control socket is, while a process works here
    gold.jsonl      the right answers of some rows, which the run itself does not read; looks.jsonl: looks at them
    run.lock        held while a process works here
    NAME/           the same for each stage of a pipeline, which ``run.json`` names

The outermost run owns the lock, the ledger and the jobs at batch APIs (``jobs.jsonl``) of all its stages. The name of a
stage has no dot, so it is never the name of a file.

A session writes every row that it delivers to the two result files, including rows from the journal. After a complete
session they hold one line per row; ``ResultFiles`` describes an incomplete one. All methods block, and run in the
journal's thread.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, cast

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import Invalid, SpecError, StoreError
from batch_agent.files.results import (
    error_record,
    from_json,
    record_line,
    result_line,
    result_record,
    to_json,
    unwritten,
)
from batch_agent.job import AgentResult
from batch_agent.messages import JsonObject
from batch_agent.record.lock import Lock
from batch_agent.record.private import DIRECTORY, private
from batch_agent.record.sqlite import SqliteJournal

State = Literal["running", "complete", "failed", "interrupted", "out of budget", "unreachable"]

RUN = "run.json"
JOURNAL = "journal.db"
RESULTS = "results.jsonl"
FAILURES = "failures.jsonl"
SUMMARY = "summary.json"
LOCK = "run.lock"
JOBS = "jobs.jsonl"
GOLD = "gold.jsonl"
FORGED = "forged_entries"  # fact of a run in Redis: entries of its queue that were no rows of it, and were dropped
SCHEMA = "schema"  # the fact that has the schema of the answers
REVIEWED = "review"  # the fact that has what a review needs to know of the options
OPTIONS = "options"  # the fact that has the resolved options of a run


class RunDir:
    """A locked run directory."""

    def __init__(self, path: Path, lock: Lock, journal: SqliteJournal, *, lost_journal: bool = False) -> None:
        self.path = path
        self.journal = journal
        self.schema: OutputSchema[object] | None = None  # schema of the outputs
        self.lost_journal = lost_journal  # a run began here, but its journal is missing
        self._lock = lock
        self._files = ResultFiles(path / RESULTS, path / FAILURES)

    @classmethod
    def open(
        cls, path: Path, *, resume: bool, open_journal: Callable[..., SqliteJournal] = SqliteJournal.open
    ) -> RunDir:
        """Open and lock the directory. Raises SpecError if it holds a run and ``resume`` is False, StoreError if it
        cannot be used."""
        try:
            path.mkdir(DIRECTORY, parents=True, exist_ok=True)  # an existing directory keeps its mode
            lock = Lock(path / LOCK)
        except OSError as error:
            raise StoreError(f"the run directory {path} cannot be used: {error.strerror}") from None
        with ExitStack() as undone:
            undone.callback(lock.release)
            begun = (path / RUN).exists()
            if begun and not resume:
                raise _taken(path)
            journal = open_journal(path / JOURNAL, begun=begun)
            undone.callback(journal.close)
            lost = begun and journal.sessions() == 0
            if not resume and journal.next_agent() > 1:
                raise _taken(path)
            undone.pop_all()
        return cls(path, lock, journal, lost_journal=lost)

    def begin_files(self, *, drop: bool = False) -> None:
        """Begin the result files of a session. ``drop``: earlier lines are no longer results of the run."""
        with self._writing():
            self._files.begin(drop=drop)
            (self.path / SUMMARY).unlink(missing_ok=True)

    def end_files(self, *, every: bool) -> None:
        """End the result files of a session. ``every``: each row of the run was delivered in this session."""
        with self._writing():
            self._files.end(every=every)

    def write(self, results: Sequence[AgentResult[object] | bytes]) -> None:
        """Append results to the files. A successful result may be given as its line."""
        with self._writing():
            self._files.write(*_lines(results, self.schema))

    def write_run(self, facts: JsonObject) -> None:
        self._replace(RUN, facts)

    def write_summary(self, summary: JsonObject) -> None:
        self._replace(SUMMARY, summary)

    def job_lines(self) -> list[bytes]:
        return read_jobs(self.path)

    def add_job_lines(self, lines: Sequence[bytes]) -> None:
        """Append lines durably: they survive a loss of power. On an error nothing is appended."""
        with self._writing(), open(self.path / JOBS, "a+b", buffering=0, opener=private) as file:
            size = file.seek(0, os.SEEK_END)
            # A kill may have cut the last line short: end it, so that the next one is a line of its own.
            torn = size and os.pread(file.fileno(), 1, size - 1) != b"\n"
            rest = memoryview(b"\n" * torn + b"".join(line + b"\n" for line in lines))
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(size)
                raise
            os.fsync(file.fileno())

    def close(self) -> None:
        try:
            self._files.close()
            self.journal.close()
        finally:
            self._lock.release()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an error of the disk into a StoreError that names the directory."""
        try:
            yield
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def _replace(self, name: str, content: JsonObject) -> None:
        """Replace a file atomically."""
        path = self.path / name
        draft = self.path / f"{name}.new"
        data = to_json(content) + b"\n"
        try:
            with open(draft, "wb", opener=private) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            if error.errno == errno.ENOSPC and _overwrite(path, data):
                return
            raise _unwritable(self.path, error) from None


def _overwrite(path: Path, data: bytes) -> bool:
    """Overwrite a file within its allocated blocks, which works on a full disk. Returns False if the blocks are too
    few."""
    if sys.platform == "win32":  # it does not report allocated blocks
        return False
    try:
        with path.open("r+b", buffering=0) as file:
            if len(data) > os.fstat(file.fileno()).st_blocks * 512:
                return False
            file.write(data)
            file.truncate()
    except OSError:
        return False
    return True


def stage_names(facts: JsonObject) -> list[str]:
    """Return the names of a pipeline's stages, in order; empty for a plain run."""
    named = facts.get("stages")
    return [str(name) for name in named] if isinstance(named, list) else []


def read_jobs(path: Path) -> list[bytes]:
    """Return the lines about jobs at batch APIs in a run directory."""
    try:
        return (path / JOBS).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"cannot read {path / JOBS}: {error.strerror}") from None


def recorded_options(facts: JsonObject) -> JsonObject:
    """Return the options that a run was recorded with."""
    options = facts.get(OPTIONS)
    return options if isinstance(options, dict) else {}


def read_run(path: Path) -> JsonObject:
    """Return the content of ``run.json``. Raises SpecError if there is no run."""
    try:
        facts = from_json((path / RUN).read_bytes())
    except FileNotFoundError:
        go_on = f"; its {JOURNAL} is there: {_go_on_without_it(path)}" if (path / JOURNAL).exists() else ""
        raise SpecError(f"{path} holds no run: there is no {RUN} in it{go_on}") from None
    except OSError as error:
        raise SpecError(f"cannot read {path / RUN}: {error.strerror}") from None
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise StoreError(f"{path / RUN} is damaged: {_go_on_without_it(path)}")
    return cast(JsonObject, facts)


def _go_on_without_it(path: Path) -> str:
    return f"batch-agent run SPEC --run-dir {path} --resume continues from the journal (in Python resume=True)"


def _taken(path: Path) -> SpecError:
    return SpecError(
        f"{path} holds a run already: resume it (resume=True, or batch-agent resume {path}), or use another run "
        "directory"
    )


def failure_line(result: AgentResult[object]) -> bytes:
    """Return the line of a failed row, as a flat object."""
    record = result_record(result)
    first = {name: record.pop(name) for name in ("index", "job_id")}
    for name in ("ok", "output", "error"):
        del record[name]
    return record_line({**first, **(error_record(result.error) or {}), **record, "raw_text": result.raw_text})


def _lines(results: Sequence[AgentResult[object] | bytes], schema: OutputSchema[object] | None) -> tuple[bytes, bytes]:
    """Return the lines for results.jsonl and the lines for failures.jsonl."""
    good, bad = [], []
    for result in results:
        if isinstance(result, bytes):
            good.append(result)
            continue
        try:
            if result.ok:
                good.append(result_line(result, schema))
            else:
                bad.append(failure_line(result))
        except Invalid as error:  # the answer itself is in the journal
            bad.append(failure_line(unwritten(result, error)))
    return b"".join(good), b"".join(bad)


def _unwritable(path: Path, error: OSError) -> StoreError:
    if not path.exists():
        return StoreError(f"the run directory {path} is gone, with everything that was recorded in it")
    return StoreError(f"cannot write in the run directory {path}: {error.strerror}. Earlier records are kept")


LINE = re.compile(rb'\{"index": ?(\d{1,10}),.*\}\n', re.DOTALL)  # a complete line


class ResultFiles:
    """Writes ``results.jsonl`` and ``failures.jsonl``, and keeps them complete when sessions are interrupted. ``paths``
    are the files. Each row has its line in one of them. All calls block and raise OSError.

    The first session writes the files themselves. A later session writes drafts beside them (``.new``) and replaces the
    files when it ends. If it delivered every row, the drafts are used unchanged. Else the earlier lines of rows that it
    did not deliver are added, so that stopping a resumed run loses no line. Drafts left by a kill are merged when the
    next session begins.
    """

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._drafts = tuple(path.with_name(f"{path.name}.new") for path in paths)
        self._open: tuple[BinaryIO, ...] = ()
        self._drafting = False

    def begin(self, *, drop: bool = False) -> None:
        """Begin the files of a session. ``drop``: earlier lines are removed, because their rows are asked again."""
        for path in (*self._paths, *self._drafts) if drop else ():
            path.unlink(missing_ok=True)
        if any(draft.exists() for draft in self._drafts):
            self._merge()
        self._drafting = any(path.exists() and path.stat().st_size for path in self._paths)
        with ExitStack() as opened:
            paths = self._drafts if self._drafting else self._paths
            self._open = tuple(opened.enter_context(open(path, "wb", buffering=0, opener=private)) for path in paths)
            opened.pop_all()

    def write(self, *data: bytes) -> None:
        """Append lines to each of the files."""
        for file, lines in zip(self._open, data, strict=True):
            rest = memoryview(lines)
            while rest:
                rest = rest[file.write(rest) :]

    def end(self, *, every: bool) -> None:
        """Put the lines of this session in place. ``every``: each row of the run has a line of this session. On an
        error the files stay unchanged; the journal has the missing results."""
        opened, self._open = self._open, ()
        try:
            for file in opened:
                with file:
                    os.fsync(file.fileno())
            if opened and self._drafting:
                if every:
                    self._put_in_place()
                else:
                    self._merge()
        except OSError:
            for draft in self._drafts:
                draft.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Close the files of a session that did not end. The next session puts their lines in place."""
        for file in self._open:
            file.close()
        self._open = ()

    def _merge(self) -> None:
        seen = _Indexes()
        for draft in self._drafts:
            for index, _ in _read_lines(draft):
                seen.add(index)
        for path, draft in zip(self._paths, self._drafts, strict=True):
            with open(draft, "a+b", opener=private) as file:
                _drop_torn_line(file)
                file.writelines(line for index, line in _read_lines(path) if seen.add(index))
                file.flush()
                os.fsync(file.fileno())
        self._put_in_place()

    def _put_in_place(self) -> None:
        for path, draft in zip(self._paths, self._drafts, strict=True):
            draft.replace(path)


class _Indexes:
    """A set of indexes, one bit each."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def add(self, index: int) -> bool:
        """Add an index. Returns whether it is new."""
        byte, bit = index >> 3, 1 << (index & 7)
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1 - len(self._bits)))
        new = not self._bits[byte] & bit
        self._bits[byte] |= bit
        return new


def _read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the complete lines of a file with the indexes of their rows."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if (found := LINE.fullmatch(line)) is not None:
                yield int(found[1]), line


def _drop_torn_line(file: BinaryIO) -> None:
    """Remove an incomplete last line, which a kill may have left, before lines are appended."""
    whole = file.seek(0, os.SEEK_END)
    while whole:
        start = max(0, whole - 4096)
        file.seek(start)
        last = file.read(whole - start).rfind(b"\n")
        if last >= 0:
            whole = start + last + 1
            break
        whole = start
    file.truncate(whole)
    file.seek(0, os.SEEK_END)


def recounted(facts: JsonObject, rows: Iterable[Mapping[str, object]]) -> JsonObject:
    """Return the facts of a killed run with the count of answers by model made again: it may lack the last ones."""
    if not facts.get("answered_by"):
        return facts
    return {**facts, "answered_by": dict(Counter(str(row["answered_by"]) for row in rows if row.get("answered_by")))}
