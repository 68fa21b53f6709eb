"""Protocols between the journal and its storage. All methods run in the journal's own thread, so they may block."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from batch_agent.errors import StoreError
from batch_agent.record.steps import Past, Step
from batch_agent.value_type import value_type


@value_type
class Identity:
    """Identifies the record of a row. ``key`` is the digest of its whole question, ``row`` the digest of the input
    alone."""

    key: bytes
    row: bytes


@value_type
class Entry:
    agent: int  # the agent that took the step; the number is unique in this journal
    identity: Identity
    step: Step


@value_type
class Progress:
    """Progress of a session. ``resumed`` counts the rows, among the others, that came from the record. ``tokens`` and
    ``cost`` are what the session has spent; ``cost`` is in $, None if no price is known. ``lease`` is what it may spend
    before the next commit, in tokens and $. It is None without a limit, or after the session returned its lease at its
    end."""

    ok: int = 0
    failed: int = 0
    resumed: int = 0
    tokens: int = 0
    cost: float | None = None
    lease: tuple[int, float] | None = None
    learnt: tuple[int, ...] | None = None  # statistics of calls, for the next session


class Account:
    """Reports to the journal what a session spends. The base class is for a session that spends nothing."""

    def so_far(self) -> tuple[int, float | None]:
        """Return the tokens and $ spent in this session; $ is None if no price is known."""
        return 0, None

    def lease(self) -> tuple[int, float] | None:
        """Return the lease to write with the commit that begins now."""
        return None

    def learnt(self) -> tuple[int, ...] | None:
        """Return the statistics of calls, for the next session."""
        return None

    def leased(self, error: StoreError | None = None) -> None:
        """Called when that commit is on disk, or with the error if it failed. After a failure, all later commits fail
        too."""


class Store(Protocol):
    """Storage of a journal. Raises only StoreError, when a step cannot be recorded or read. The entries of one agent
    keep the order of their commits; no order depends on a clock."""

    def sessions(self) -> int:
        """Return how many sessions have begun."""
        ...

    def spent(self) -> tuple[int, float]:
        """Return the tokens and $ of all sessions. A session that did not return its lease counts as having spent all
        of it."""
        ...

    def learnt(self) -> tuple[int, ...] | None:
        """Return the statistics of calls of the latest session that recorded some."""
        ...

    def next_agent(self) -> int:
        """Return 1 + the largest number of a recorded agent, or 1 if there is none."""
        ...

    def begin(self, fingerprint: bytes, started: str) -> None:
        """Begin a session. The following commits record its progress."""
        ...

    def commit(self, entries: Sequence[Entry], progress: Progress) -> None:
        """Write all entries, and a lease that grew, to disk before this returns, or write none of them. The progress is
        on disk at the latest together with the next entries."""
        ...

    def sort_by(self, column: Literal["key", "row"]) -> None:
        """Prepare the agents recorded so far to be claimed. ``key``: by key. ``row``: by key first, then by row if no
        agent has the key. Finished agents come first, then unfinished ones, then failed ones. By row, the newest agent
        comes first, because agents of the same row may have been asked different questions."""
        ...

    def claim(self, wanted: Sequence[Identity]) -> list[Past | None]:
        """Return the record of each row, or None. Each recorded agent is returned only once."""
        ...

    def close(self) -> None: ...


class OpenStore(Protocol):
    def __call__(self, path: Path, *, begun: bool) -> Store:
        """Open a store. ``path`` is where the journal is in its run directory, for a store that is a file. ``begun``: a
        run has begun in that directory. Raises StoreError if the store cannot be used."""
        ...
