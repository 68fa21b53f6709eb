"""The seam between a run that several processes share and the place where it is kept.

Redis implements it (``store/redis``), and so does the actor of a Ray cluster that holds a local run directory. Every
call blocks, is atomic, and may come from any thread; it raises StoreError when the record cannot be reached for good. A
call that is repeated after its answer was lost has the effect of one call. Rows, steps and results are bytes here: what
they mean is known above this seam (``store/codec.py``, ``cluster/``).

Time is the store's alone: no call carries a worker's clock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from batch_agent.errors import StoreError
from batch_agent.messages import JsonObject
from batch_agent.store.lent import LentStore

Phase = Literal["running", "draining", "ended"]
LEASE = 15.0  # seconds; the default of ``--lease``


class FeederReplaced(StoreError):
    """Another process feeds this run now. What this one would write is refused."""


@dataclass(frozen=True, slots=True)
class RowLease:
    """The right of one worker to work on one row.

    ``row`` is what the row's record is kept under, ``place`` its place in the queue. ``token`` is the fencing token: it
    grows each time the row is leased, and a commit with an older one is refused.
    """

    row: str
    place: str
    token: int
    index: int  # of the input, from 0


@dataclass(frozen=True, slots=True)
class KeptStep:
    """One step of one agent of a row. A row that is done in parts has several agents; ``key`` and ``content`` are the
    agent's Identity, ``kind`` and ``body`` its step as ``store.codec`` writes it."""

    agent: int
    key: bytes
    content: bytes
    kind: int
    body: bytes


@dataclass(frozen=True, slots=True)
class LeasedRow:
    """A row that a worker was given. ``value`` is the input as JSON; ``steps`` is what earlier holders recorded."""

    lease: RowLease
    value: bytes
    steps: tuple[KeptStep, ...] = ()


@dataclass(frozen=True, slots=True)
class RowChange:
    """What a commit does to one row: steps to append and, if the row has ended, its result.

    ``result`` is the result as JSON. ``error`` is the type of the error, "" for a row that is ok."""

    lease: RowLease
    steps: tuple[KeptStep, ...] = ()
    result: bytes | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class NewRow:
    """An input as the feeder hands it over: ``key`` is the digest of its whole question (``Identity.key``), ``content``
    that of the input alone."""

    index: int
    key: bytes
    content: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class SharedResult:
    """A result in the order of their ends. ``position`` is where to read on; ``own`` says that the row was fed in the
    sitting of the feeder that reads, so that it is to be delivered."""

    position: str
    row: str
    index: int
    result: bytes
    own: bool


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows of a run: in the queue and not begun, leased, and ended in this sitting. ``fed``: every input was fed."""

    unstarted: int = 0
    leased: int = 0
    ok: int = 0
    failed: int = 0
    fed: bool = False


@dataclass(frozen=True, slots=True)
class RunStanding:
    """What a worker is to do. ``draining``: take nothing new; ``ended``: leave. ``generation`` changes when the run is
    resumed with another spec: a worker of an earlier one leaves. ``feeder``: a feeder holds its lease."""

    phase: Phase
    generation: int
    feeder: bool
    counts: Counts

    @property
    def done(self) -> bool:
        """Every input was fed, and every row has ended."""
        counts = self.counts
        return self.phase == "ended" or (counts.fed and not counts.unstarted and not counts.leased)


@dataclass(frozen=True, slots=True)
class FeederSitting:
    """A feeder's sitting. ``sitting`` is its fencing token; ``previous`` is what ``facts`` said before it."""

    sitting: int
    previous: JsonObject | None
    position: str  # of the latest result


class RunStore(Protocol):
    """Where one run is kept."""

    def facts(self) -> JsonObject | None:
        """What ``run.json`` would say, with ``spec``, ``fingerprint`` and ``lease``; None if there is no run."""
        ...

    def lent(self) -> LentStore:
        """What the workers of this run share beside its rows."""
        ...

    def close(self) -> None: ...

    # The feeder

    def open_feed(self, facts: JsonObject, *, resume: bool, keep_results_only: bool) -> FeederSitting:
        """Become the feeder, after the lease of an earlier one has ended. Another ``fingerprint`` in the facts empties
        the queue and begins a new generation. Raises SpecError when there is a run and ``resume`` was not asked for;
        StoreError when another feeder keeps its lease."""
        ...

    def keep_feed(self, sitting: int) -> RunStanding:
        """Renew the feeder's lease. Raises FeederReplaced."""
        ...

    def write_facts(self, sitting: int, facts: JsonObject) -> None: ...

    def feed(self, sitting: int, rows: Sequence[NewRow], retry: bool | Collection[str]) -> list[bytes | None]:
        """Put rows into the queue. A row that ended in an earlier sitting is not queued: its result is returned, unless
        it failed with a type of error that ``retry`` names."""
        ...

    def end_inputs(self, sitting: int) -> None:
        """Every input was fed. Rows of earlier sittings that were not fed again leave the queue."""
        ...

    def results(self, sitting: int, after: str, count: int, wait: float) -> list[SharedResult]:
        """Results after that position, at most ``count``; waits up to ``wait`` seconds for the first."""
        ...

    def set_phase(self, sitting: int, phase: Phase) -> None: ...

    def close_feed(self, sitting: int, facts: JsonObject, phase: Phase) -> None:
        """Write the facts and the phase, and give up the feeder's lease."""
        ...

    # Workers

    def standing(self) -> RunStanding: ...

    def join(self, description: JsonObject) -> int:
        """The number of a new worker, from 1, that no other has had."""
        ...

    def take(self, worker: int, count: int, wait: float) -> list[LeasedRow]:
        """Lease up to ``count`` rows: those whose lease has ended first, then new ones. Waits up to ``wait`` seconds
        for the first."""
        ...

    def renew(self, worker: int, leases: Sequence[RowLease]) -> tuple[set[str], RunStanding]:
        """Renew these leases. Returns the places of those that are lost."""
        ...

    def commit(self, worker: int, number: int, changes: Sequence[RowChange]) -> set[str]:
        """Record changes of rows whose lease holds. Returns the places of the others, of which nothing is recorded.
        ``number`` grows with each commit of a worker; the latest may be repeated."""
        ...

    def hand_back(self, worker: int, leases: Sequence[RowLease]) -> None:
        """End these leases: the rows can be taken at once."""
        ...

    def leave(self, worker: int) -> None: ...
