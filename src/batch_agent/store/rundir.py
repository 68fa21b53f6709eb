"""A run's directory: who is working on it, what the run is, and its results for people and other programs.

    run.json        what the run is, its versions, when it began and ended, and why
    journal.db      every answer and tool result: the truth, see ``sqlite``
    results.jsonl   the rows that are ok, as they finish
    failures.jsonl  the rows that failed
    summary.json    the numbers, when a session ended
    lock            held while a process works here

The two files of results belong to the latest session: it begins them anew and writes what it takes from the journal
like everything else, so a line of theirs is never of a row that is no longer there, and a line that a kill tore is gone
after the next session. All of this blocks, and runs in the journal's thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, cast

from batch_agent.errors import Invalid, SpecError, StoreError
from batch_agent.files.results import from_json, record_line, result_line, to_json, unwritten
from batch_agent.job import AgentResult, UnreadableRow
from batch_agent.messages import JsonObject
from batch_agent.store.lock import Lock, is_locked
from batch_agent.store.sqlite import Glance, SqliteJournal, glance

State = Literal["running", "complete", "failed", "interrupted", "out of budget"]

RUN, JOURNAL, RESULTS, FAILURES, SUMMARY, LOCK = (
    "run.json",
    "journal.db",
    "results.jsonl",
    "failures.jsonl",
    "summary.json",
    "lock",
)


class RunDir:
    """A locked run directory."""

    def __init__(self, path: Path, lock: Lock, journal: SqliteJournal) -> None:
        self.path = path
        self.journal = journal
        self._lock = lock
        self._results: BinaryIO | None = None
        self._failures: BinaryIO | None = None

    @classmethod
    def open(cls, path: Path, *, resume: bool) -> RunDir:
        """SpecError when there is a run already and ``resume`` was not asked for; StoreError when it cannot be used."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = Lock(path / LOCK)
        except OSError as error:
            raise StoreError(f"the run directory {path} cannot be used: {error.strerror}") from None
        try:
            if not resume and ((path / JOURNAL).exists() or (path / RUN).exists()):
                raise SpecError(
                    f"{path} holds a run already: go on with it (resume=True, or batch-agent resume {path}), or give "
                    "another run directory"
                )
            return cls(path, lock, SqliteJournal.open(path / JOURNAL, begun=(path / RUN).exists()))
        except BaseException:
            lock.release()
            raise

    def begin_files(self) -> None:
        try:
            self._results = (self.path / RESULTS).open("wb", buffering=0)
            self._failures = (self.path / FAILURES).open("wb", buffering=0)
            (self.path / SUMMARY).unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def write(self, results: Sequence[AgentResult[object]]) -> None:
        good, bad = _lines(results)
        try:
            for file, data in ((self._results, good), (self._failures, bad)):
                if file is not None and data:
                    _write_all(file, data)
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def write_run(self, facts: JsonObject) -> None:
        self._replace(RUN, facts)

    def write_summary(self, summary: JsonObject) -> None:
        self._replace(SUMMARY, summary)

    def close(self) -> None:
        try:
            for file in (self._results, self._failures):
                if file is not None:
                    with file:
                        os.fsync(file.fileno())
        except OSError as error:
            raise _unwritable(self.path, error) from None
        finally:
            self.journal.close()
            self._lock.release()

    def _replace(self, name: str, content: JsonObject) -> None:
        """In one piece, whatever happens meanwhile."""
        path, draft = self.path / name, self.path / f"{name}.new"
        try:
            with draft.open("wb") as file:
                file.write(to_json(content) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except OSError as error:
            raise _unwritable(self.path, error) from None


@dataclass(frozen=True, slots=True)
class RunView:
    """A run directory seen from outside, also while a process works on it."""

    path: Path
    facts: JsonObject
    state: State
    glance: Glance

    @classmethod
    def of(cls, path: Path) -> RunView:
        facts = read_run(path)
        state = cast(State, facts.get("state"))
        if state == "running" and not is_locked(path / LOCK):
            state = "interrupted"  # killed, or the machine went down: nobody was left to say so
        return cls(path, facts, state, glance(path / JOURNAL))


def read_run(path: Path) -> JsonObject:
    """What ``run.json`` says. Raises SpecError when there is no run."""
    try:
        facts = from_json((path / RUN).read_bytes())
    except FileNotFoundError:
        raise SpecError(f"{path} holds no run: there is no {RUN} in it") from None
    except OSError as error:
        raise SpecError(f"cannot read {path / RUN}: {error.strerror}") from None
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise StoreError(f"{path / RUN} is damaged; move it away and resume the run with its own spec")
    return cast(JsonObject, facts)


def failure_line(result: AgentResult[object]) -> bytes:
    """Why a row failed, flat."""
    error = result.error
    record = {
        "index": result.index,
        "job_id": result.job_id,
        "stage": error and error.stage,
        "type": error and error.type,
        "message": error and error.message,
        "retryable": error and error.retryable,
        "attempts": result.attempts,
        "turns": result.turns,
        "usage": result.usage,
        "input": None if isinstance(result.input, UnreadableRow) else result.input,
        "raw_text": result.raw_text,
    }
    return record_line(record)


def _lines(results: Sequence[AgentResult[object]]) -> tuple[bytes, bytes]:
    """Those of results.jsonl and those of failures.jsonl."""
    good, bad = [], []
    for result in results:
        try:
            if result.ok:
                good.append(result_line(result))
            else:
                bad.append(failure_line(result))
        except Invalid as error:  # the answer itself is in the journal
            bad.append(failure_line(unwritten(result, error)))
    return b"".join(good), b"".join(bad)


def _write_all(file: BinaryIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _unwritable(path: Path, error: OSError) -> StoreError:
    return StoreError(f"cannot write in the run directory {path}: {error.strerror}. What was recorded is kept")
