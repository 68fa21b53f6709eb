"""Protocol between a run that several processes share and its storage.

Redis implements it (``record/redis``), and so does the actor of a Ray cluster with a local run directory. Every call
blocks, is atomic, and may come from any thread. It raises StoreError if the storage stays unreachable. A call that is
repeated after its answer was lost has the effect of one call. Rows, steps and results are bytes here; the layers above
decode them (``record/codec.py``, ``cluster/``).

All times are by the store's clock: no call carries a worker's clock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from batch_agent.errors import StoreError
from batch_agent.messages import JsonObject
from batch_agent.record.lent import LentStore

Phase = Literal["running", "draining", "ended"]
LEASE = 15.0  # seconds; the default of ``--lease``


class FeederReplaced(StoreError):
    """Another process feeds this run now. Writes of this process are refused."""


@dataclass(frozen=True, slots=True)
class RowLease:
    """The right of one worker to work on one row.

    ``row`` is the name of the row's record, ``place`` its place in the queue. ``token`` is the fencing token: it grows
    each time the row is leased, and a commit with an older token is refused.
    """

    row: str
    place: str
    token: int
    index: int  # index of the input, from 0


@dataclass(frozen=True, slots=True)
class KeptStep:
    """One step of one agent of a row. A row that is processed in parts has several agents. ``key`` and ``content`` are
    the agent's Identity; ``kind`` and ``body`` are the step as ``record.codec`` encodes it."""

    agent: int
    key: bytes
    content: bytes
    kind: int
    body: bytes


@dataclass(frozen=True, slots=True)
class LeasedRow:
    """A row leased to a worker. ``value`` is the input as JSON; ``steps`` is what earlier holders recorded."""

    lease: RowLease
    value: bytes
    steps: tuple[KeptStep, ...] = ()


@dataclass(frozen=True, slots=True)
class RowChange:
    """Changes of one row in a commit: steps to append and, if the row has ended, its result.

    ``result`` is the result as JSON. ``error`` is the type of the error, "" for a successful row.
    """

    lease: RowLease
    steps: tuple[KeptStep, ...] = ()
    result: bytes | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class NewRow:
    """An input from the feeder. ``key`` is the digest of its whole question (``Identity.key``), ``content`` the digest
    of the input alone."""

    index: int
    key: bytes
    content: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class SharedResult:
    """A result, in the order in which rows ended. ``position`` is where to continue reading. ``own``: the row was fed
    in the session of the feeder that reads, so the feeder delivers it."""

    position: str
    row: str
    index: int
    result: bytes
    own: bool


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of rows: queued and not begun, leased, and ended in this session. ``fed``: every input was fed."""

    unstarted: int = 0
    leased: int = 0
    ok: int = 0
    failed: int = 0
    fed: bool = False


@dataclass(frozen=True, slots=True)
class RunStanding:
    """Instructions for a worker. ``draining``: take no new rows; ``ended``: leave. ``generation`` changes when the run
    is resumed with another spec; workers of an earlier generation leave. ``feeder``: a feeder holds its lease."""

    phase: Phase
    generation: int
    feeder: bool
    counts: Counts

    @property
    def done(self) -> bool:
        """Whether every input was fed, and every row has ended."""
        counts = self.counts
        return self.phase == "ended" or (counts.fed and not counts.unstarted and not counts.leased)


@dataclass(frozen=True, slots=True)
class FeederSitting:
    """A session of a feeder. ``sitting`` is its fencing token; ``previous`` are the facts before it."""

    sitting: int
    previous: JsonObject | None
    position: str  # position of the latest result


class RunStore(Protocol):
    """Storage of one run."""

    def facts(self) -> JsonObject | None:
        """Return the content of ``run.json``, with ``spec``, ``fingerprint`` and ``lease``; None if there is no run."""
        ...

    def lent(self) -> LentStore:
        """Return the store of what the workers of this run share besides its rows."""
        ...

    def stage(self, name: str) -> RunStore:
        """Return the store of a stage of this run, which is a pipeline. Close it like any other store."""
        ...

    def close(self) -> None: ...

    # The feeder

    def open_feed(self, facts: JsonObject, *, resume: bool, keep_results_only: bool) -> FeederSitting:
        """Become the feeder once the lease of an earlier one has ended. Another ``fingerprint`` in the facts empties
        the queue and begins a new generation. Raises SpecError if there is a run and ``resume`` is False; StoreError if
        another feeder keeps its lease."""
        ...

    def keep_feed(self, sitting: int) -> RunStanding:
        """Renew the feeder's lease and return the state of the run. Raises FeederReplaced."""
        ...

    def write_facts(self, sitting: int, facts: JsonObject) -> None: ...

    def feed(self, sitting: int, rows: Sequence[NewRow], retry: bool | Collection[str]) -> list[bytes | None]:
        """Add rows to the queue. Returns, for each row, its result from an earlier session, or None if it was queued. A
        failed row is queued again if ``retry`` names its type of error."""
        ...

    def end_inputs(self, sitting: int) -> None:
        """Record that every input was fed. Rows of earlier sessions that were not fed again leave the queue."""
        ...

    def results(self, sitting: int, after: str, count: int, wait: float) -> list[SharedResult]:
        """Return at most ``count`` results after that position. Waits up to ``wait`` seconds for the first."""
        ...

    def set_phase(self, sitting: int, phase: Phase) -> None: ...

    def close_feed(self, sitting: int, facts: JsonObject, phase: Phase) -> None:
        """Write the facts and the phase, and release the feeder's lease."""
        ...

    # Workers

    def standing(self) -> RunStanding: ...

    def join(self, description: JsonObject) -> int:
        """Return the number of a new worker, from 1. No number is used twice."""
        ...

    def take(self, worker: int, count: int, wait: float) -> list[LeasedRow]:
        """Lease up to ``count`` rows: first those whose lease has ended, then new ones. Waits up to ``wait`` seconds
        for the first."""
        ...

    def renew(self, worker: int, leases: Sequence[RowLease]) -> tuple[set[str], RunStanding]:
        """Renew these leases. Returns the places of the lost ones, and the state of the run."""
        ...

    def commit(self, worker: int, number: int, changes: Sequence[RowChange]) -> set[str]:
        """Record the changes of rows whose lease is valid. Returns the places of the others, of which nothing is
        recorded. ``number`` grows with each commit of a worker; the latest commit may be repeated."""
        ...

    def hand_back(self, worker: int, leases: Sequence[RowLease]) -> None:
        """End these leases. The rows can be leased again at once."""
        ...

    def leave(self, worker: int) -> None: ...
