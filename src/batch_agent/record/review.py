"""The answers of people, as a log of events in the record that only grows (``trust/review`` gives their meaning).

``review.jsonl`` lies beside the results of the run, or of the stage whose answers are reviewed, with a lock of its own:
people work while the run works, and after it. In Redis it is a list. A line counts when its newline is written; the
next writer removes what a killed process has left after the last newline. An event is appended only if the writer knows
all events before it, so that two processes never decide at the same time.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from types import UnionType
from typing import TypeVar, cast, get_args

from pydantic import JsonValue

from batch_agent.errors import StoreError
from batch_agent.files.results import from_json, to_json
from batch_agent.record.address import RunPlace
from batch_agent.record.lock import exclusively
from batch_agent.record.private import private
from batch_agent.record.reader import RunReader
from batch_agent.trust.review import AUDIT, QUEUES, Event, EventKind, Review

T = TypeVar("T")
REVIEW, REVIEW_LOCK = "review.jsonl", "review.lock"
KINDS = frozenset(get_args(EventKind))
TYPES: Mapping[str, type | UnionType] = {
    **dict.fromkeys(("row", "undoes", "rows"), int),
    **dict.fromkeys(("who", "id", "input", "queue"), str),
    **{"at": int | float, "until": int | float | None},
}
DEFAULTS = {each.name: each.default for each in fields(Event) if each.name not in ("n", "kind")}


class ReviewLog(ABC):
    """The log of one run. Methods block. Use it in one thread at a time."""

    def __init__(self) -> None:
        self.count = 0  # events that were read

    @abstractmethod
    def exists(self) -> bool:
        """Return whether the log has any line."""

    @abstractmethod
    def read(self) -> tuple[list[Event], bool]:
        """Return the events since the last call, and whether another log has replaced this one; then these are all
        events of the new log."""

    def append(self, events: Sequence[Event]) -> bool:
        """Append events durably, if all events before them were read. Returns False if others have appended meanwhile.
        Raises StoreError if they cannot be written; then none of them is in the log."""
        return self.append_lines([line_of(event) for event in events])

    @abstractmethod
    def append_lines(self, lines: Sequence[bytes]) -> bool:
        """Append the lines of events."""

    @abstractmethod
    def lines(self) -> list[bytes]:
        """Return all complete lines, unchanged."""

    @abstractmethod
    def now(self) -> float:
        """Return the time of the clock that all users of this log share."""

    def close(self) -> None:  # noqa: B027
        """Close what the log holds open. A file is not held open."""

    def change(self, review: Review, decide: Callable[[float], tuple[Sequence[Event], T]]) -> T:
        """Decide with all events known, append the events that ``decide`` returns, and return its answer. ``decide``
        gets the time. It is called again if others have appended meanwhile."""
        while True:
            self.catch_up(review)
            now = self.now()
            events, answer = decide(now)
            numbered = [replace(each, n=self.count + place + 1, at=now) for place, each in enumerate(events)]
            if not numbered or self.append(numbered):
                review.add(numbered)
                return answer

    def catch_up(self, review: Review) -> None:
        """Add the events that are new."""
        events, again = self.read()
        if again:
            review.clear()
        review.add(events)


def log_of(run: RunReader) -> ReviewLog:
    """Return the log of a run, or of the stage that the reader reads."""
    return log_at(run.place)


def log_at(place: RunPlace) -> ReviewLog:
    """Return the log of a run, or of a stage of one."""
    if isinstance(place, Path):
        return DirectoryLog(place)
    from batch_agent.record.redis.review import RedisLog

    return RedisLog(place)


class JudgedRows:
    """The judgements of people in a run, for readers who may see all of it."""

    def __init__(self, run: RunReader) -> None:
        self._log = log_of(run)
        self._review = Review(lambda one, other: one == other, overlap=0.0)

    def of(self, row: int) -> list[Event]:
        """Return the judgements of a row that count now."""
        self._log.catch_up(self._review)
        return self._review.judgements_of(row)

    def to_json(self, row: int) -> list[JsonValue]:
        return [
            {"who": each.who, "at": each.at, "queue": each.queue, "kind": each.kind, "output": each.output}
            for each in self.of(row)
        ]

    def close(self) -> None:
        self._log.close()


def copy_log(source: RunReader, target: RunPlace) -> None:
    """Copy the log of a run, or of the stage that the reader reads, to a copy of the run."""
    with closing(log_of(source)) as old:
        if lines := old.lines():
            with closing(log_at(target)) as new:
                new.append_lines(lines)


def line_of(event: Event) -> bytes:
    """Return the line of an event, without fields that have their defaults."""
    named = {name: value for name, default in DEFAULTS.items() if (value := getattr(event, name)) != default}
    if event.row >= 0:
        named["queue"] = event.queue
    if event.kind == "lease":
        named["until"] = event.until
    return to_json({"n": event.n, "kind": event.kind, **named})


def event_of(line: bytes, n: int) -> Event | None:
    """Return the event of a line; None if the line is not an event. ``n`` is the number of the line."""
    try:
        read = from_json(line)
    except ValueError:
        return None
    if not isinstance(read, dict) or read.get("kind") not in KINDS:
        return None
    given: dict[str, object] = {name: read[name] for name in DEFAULTS if name in read}
    if not all(isinstance(value, TYPES.get(name, object)) for name, value in given.items()):
        return None
    if given.get("queue", AUDIT) not in QUEUES:
        return None
    return Event(n, cast(EventKind, read["kind"]), **cast("dict[str, JsonValue]", given))  # type: ignore[arg-type]


class DirectoryLog(ReviewLog):
    """The log in a run directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._path = directory / REVIEW
        self._lock = directory / REVIEW_LOCK
        self._done, self._file = 0, (0, 0)  # bytes of complete lines that were read, and of which file

    def exists(self) -> bool:
        try:
            return self._path.stat().st_size > 0
        except OSError:
            return False

    def now(self) -> float:
        return time.time()

    def read(self) -> tuple[list[Event], bool]:
        try:
            with self._path.open("rb") as file:
                return self._read(file.fileno())
        except FileNotFoundError:
            replaced = bool(self._done)
            self._done = 0
            self.count = 0
            return [], replaced
        except OSError as error:
            raise StoreError(f"cannot read {self._path}: {error.strerror}") from None

    def _read(self, descriptor: int) -> tuple[list[Event], bool]:
        stat = os.fstat(descriptor)
        replaced = bool(self._done) and ((stat.st_dev, stat.st_ino) != self._file or stat.st_size < self._done)
        if replaced:
            self._done = self.count = 0
        self._file = stat.st_dev, stat.st_ino
        data = os.pread(descriptor, max(0, stat.st_size - self._done), self._done)
        data = data[: data.rfind(b"\n") + 1]
        self._done += len(data)
        return self._events(data.splitlines()), replaced

    def _events(self, lines: Iterable[bytes]) -> list[Event]:
        found = []
        for line in lines:
            self.count += 1
            if (event := event_of(line, self.count)) is not None:
                found.append(event)
        return found

    def lines(self) -> list[bytes]:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"cannot read {self._path}: {error.strerror}") from None
        return data[: data.rfind(b"\n") + 1].splitlines()

    def append_lines(self, lines: Sequence[bytes]) -> bool:
        data = b"".join(line + b"\n" for line in lines)
        try:
            with exclusively(self._lock), open(self._path, "a+b", buffering=0, opener=private) as file:
                stat = os.fstat(file.fileno())
                if self._done and (stat.st_dev, stat.st_ino) != self._file:
                    return False
                rest = os.pread(file.fileno(), max(0, stat.st_size - self._done), self._done)
                if b"\n" in rest or stat.st_size < self._done:
                    return False
                if rest:  # of a line that a killed process began
                    file.truncate(self._done)
                try:
                    left = memoryview(data)
                    while left:
                        left = left[file.write(left) :]
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(self._done)
                    raise
                self._file = stat.st_dev, stat.st_ino
        except OSError as error:
            raise StoreError(
                f"{self._path} cannot be written: {error.strerror}. This answer is not recorded; earlier ones are"
            ) from None
        self._done += len(data)
        self.count += len(lines)
        return True
