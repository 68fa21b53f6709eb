"""Where a record is tested: how a store is opened, how a kill is simulated, how time passes; and rows and steps for it.

``StorePlace`` is what the author of a store writes. ``run_store_contract`` has the tests.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeVar, cast

from batch_agent.errors import StoreError
from batch_agent.files.results import from_json, to_json
from batch_agent.messages import JsonObject, Reply
from batch_agent.record.codec import encode
from batch_agent.record.steps import Asked, CallBegun, Ended, Used
from batch_agent.record.store import (
    OBSERVED,
    Commit,
    KeptStep,
    Lease,
    Resuming,
    Row,
    RowChange,
    RunStore,
    WorkStore,
)

Opened = TypeVar("Opened", bound=RunStore)

LEASE_SECONDS = 3600.0  # of the rows and the feeder in the tests
MEMBER, DEAD = 60.0, 1e-7  # seconds of a membership that lasts, and of one that has ended when the call returns
FRESH, RESUME = Resuming(), Resuming(resume=True)


class StorePlace(ABC):
    """The place of one run. The attributes say what the store promises.

    ``keeps`` is what a later process finds of rows that have ended: their "results"; only their "steps", from which
    results are computed again; or "nothing". ``shared``: several processes have the record open at once, so the leases
    of workers hold when another process becomes the feeder. ``ledger``: a run may have one worker, whose budget
    is written with its commits (``lend``).
    ``file`` is the main file of the store that ``open`` returns, and ``log`` the file to which it appends commits; None
    if there is none.
    """

    keeps: Literal["results", "steps", "nothing"] = "results"
    shared = False
    ledger = False
    file: Path | None = None
    log: Path | None = None

    def __init__(self) -> None:
        self._opened: list[RunStore] = []

    def opened(self, store: Opened) -> Opened:
        """Close the store when the test ends."""
        self._opened.append(store)
        return store

    @abstractmethod
    def open(self) -> RunStore:
        """Return the store as one more process opens it. It need not be usable yet: ``open`` of the store comes
        next."""

    @abstractmethod
    def reopen(self, killed: RunStore) -> RunStore:
        """Return the store as the next process opens it after kill -9 of the process with the store ``killed``, and of
        all workers. Do not close or flush ``killed``: a store of files opens a copy of its folder as it is now. All
        leases have ended. ``killed`` may have been closed before."""

    @abstractmethod
    def expire(self) -> None:
        """Let more than ``LEASE_SECONDS`` pass."""

    def wait_half(self) -> bool:
        """Let half of ``LEASE_SECONDS`` pass. False if only ``expire`` can move the time."""
        return False

    def worker(self, store: RunStore) -> WorkStore:
        """Return the store as a worker sees it."""
        return store

    def lose_power(self) -> RunStore | None:
        """Return the store after a loss of power: only what was synced is there. None if syncing cannot be observed,
        because a library or a server does it. ``SyncedFiles`` helps."""
        return None

    def unwritable(self) -> RunStore | None:
        """Return a store at a place that cannot be written. None if there is no such place."""
        return None

    def steps_kept(self, store: RunStore, lease: Lease) -> int | None:
        """Return how many steps of an ended row the store keeps. None if the store keeps all."""
        return None

    def value(self, text: str) -> object:
        """Return an input as the feeder gives it to this store."""
        return to_json(text)

    def read_value(self, value: object) -> object:
        """Return the text of an input that a worker got."""
        return from_json(cast(bytes, value))

    def result(self, text: str, index: int) -> object:
        """Return a result as a worker gives it to this store."""
        return text.encode()

    def read_result(self, result: object) -> object:
        """Return the text of a result that the feeder got."""
        return cast(bytes, result).decode()

    def close(self) -> None:
        for store in self._opened:
            with suppress(StoreError):
                store.close()


class SyncedFiles:
    """Remembers what was synced to disk. Give ``sync`` to the store instead of ``os.fsync`` or ``os.fdatasync``."""

    def __init__(self) -> None:
        self._synced: dict[tuple[int, int], bytes] = {}  # content of each file when it was synced, by device and inode

    def sync(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        self._synced[found.st_dev, found.st_ino] = os.pread(descriptor, found.st_size, 0)

    def copy(self, folder: Path, to: Path) -> None:
        """Write the files of ``folder`` to a new folder, as a loss of power leaves them."""
        for file in folder.rglob("*"):
            found = file.stat()
            content = self._synced.get((found.st_dev, found.st_ino))
            if file.is_file() and content is not None:
                target = to / file.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """Let writing beyond ``size`` bytes of a file fail, as on a full disk."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def copied(folder: Path, to: Path) -> Path:
    """Copy the folder of a store as it is now, as a kill leaves it. Returns the copy."""
    shutil.copytree(folder, to)
    return to


def facts(fingerprint: str = "0f", **more: object) -> JsonObject:
    """Return the facts of a run whose leases last ``LEASE_SECONDS``."""
    found = {"fingerprint": fingerprint, "lease": LEASE_SECONDS, "spec": {"task": "t"}, "session_started": "now"}
    return cast(JsonObject, {**found, **more})


def new_row(place: StorePlace, index: int, name: str | None = None, *, question: str = "") -> Row:
    """Return the row ``name``. Rows with one name ask the same; another ``question`` is another question about it."""
    name = name or f"row {index}"
    return Row(index, f"{question}{name}".encode(), f"content of {name}".encode(), place.value(f"input {name}"))


def turn(row: Row, text: str, agent: int = 1) -> KeptStep:
    """Return a step of a row: a turn of the agent with that number."""
    return KeptStep(agent, row.key, row.content, *encode(Asked("", 0, Reply(text), Used())))


def done(row: Row, text: str, agent: int = 1) -> KeptStep:
    return KeptStep(agent, row.key, row.content, *encode(Ended(Used(), reply=Reply(text))))


def begun(row: Row, agent: int = 1) -> KeptStep:
    """Return the step before a tool that writes is called."""
    return KeptStep(agent, row.key, row.content, *encode(CallBegun("", 0)))


def bodies(steps: Sequence[KeptStep]) -> list[tuple[int, bytes]]:
    """Return the steps without the numbers of their agents, which a store may change."""
    return [(step.kind, step.body) for step in steps]


class Session:
    """A session of a feeder with one worker, for tests. ``answers`` is what the feeder got for its rows."""

    def __init__(
        self, place: StorePlace, store: RunStore, rows: Sequence[Row], how: Resuming, facts: JsonObject
    ) -> None:
        store.open(how)
        self.place = place
        self.store = store
        self.facts = facts
        opened = store.open_feed(facts, how)
        self.number = opened.number
        self.position = opened.position
        self.previous = opened.previous
        self.answers = [None if got is None else place.read_result(got) for got in store.feed(self.number, rows)]
        self.work = place.worker(store)
        self.worker = self.work.join({})
        self._commits = 0

    def take(self, most: int = 100) -> list[Lease]:
        return self.work.take(self.worker, most, 0)

    def record(self, row: Lease, *steps: KeptStep) -> set[str]:
        return self.commit(RowChange(row, steps))

    def finish(self, *rows: Lease, error: str = "", steps: Sequence[KeptStep] = ()) -> set[str]:
        return self.commit(*(self.ended(row, error, steps) for row in rows))

    def ended(self, lease: Lease, error: str = "", steps: Sequence[KeptStep] = ()) -> RowChange:
        return RowChange(lease, tuple(steps), self.place.result(f"result {lease.row.index}", lease.row.index), error)

    def commit(self, *changes: RowChange) -> set[str]:
        self._commits += 1
        return self.work.commit(self.worker, self._commits, Commit(changes))

    def delivered(self) -> list[tuple[int, object]]:
        """Return the results of this session, in the order of the ends of their rows."""
        found = self.store.results(self.number, self.position, 1000, 0)
        return [(each.index, self.place.read_result(each.result)) for each in found if each.own]

    def close(self) -> None:
        self.store.close_feed(self.number, self.facts, "ended")
        self.store.close()


def begin(
    place: StorePlace,
    store: RunStore,
    *rows: Row,
    how: Resuming = FRESH,
    fingerprint: str = "0f",
    observed: bool = False,
) -> Session:
    return Session(place, store, rows, how, facts(fingerprint, **({OBSERVED: True} if observed else {})))


def texts(rows: Sequence[Lease], place: StorePlace) -> list[object]:
    return [place.read_value(row.row.value) for row in rows]


def needs(condition: object, reason: str) -> None:
    """Skip the test unless the condition is true."""
    import pytest

    if not condition:
        pytest.skip(reason)
