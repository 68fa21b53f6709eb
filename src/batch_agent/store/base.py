"""The seam between the journal and where it is kept. All of it runs in the journal's own thread, so it may block."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from batch_agent.errors import StoreError
from batch_agent.store.steps import Past, Step
from batch_agent.value_type import value_type


@value_type
class Identity:
    """What a row's record is found by: ``key`` is its whole question, ``row`` the input alone."""

    key: bytes
    row: bytes


@value_type
class Entry:
    agent: int  # whose step it is; a number that no other agent of this journal has
    identity: Identity
    step: Step


@value_type
class Progress:
    """How far a session is. ``resumed`` rows, a part of the others, came from the record; tokens and cost ($, None
    where no price is known) are what it has spent. ``lease`` is what it may spend before the next commit, in tokens and
    $; None when it has no limit, or has returned its lease at its end."""

    ok: int = 0
    failed: int = 0
    resumed: int = 0
    tokens: int = 0
    cost: float | None = None
    lease: tuple[int, float] | None = None
    learnt: tuple[int, ...] | None = None  # what is known of calls, for the next session


class Account(Protocol):
    """What a session spends, for its journal."""

    def so_far(self) -> tuple[int, float | None]:
        """Tokens and $ spent in this session; None where no price is known."""
        ...

    def lease(self) -> tuple[int, float] | None:
        """The lease that is written with the commit that begins now."""
        ...

    def learnt(self) -> tuple[int, ...] | None:
        """What is known of calls, for the next session."""
        ...

    def leased(self, error: StoreError | None = None) -> None:
        """That commit is on disk; or it failed, and so will all that follow."""
        ...


class Store(Protocol):
    """Raises StoreError, and nothing else, when something cannot be recorded or read. The entries of one agent stay in
    the order in which they were committed; nothing depends on a clock."""

    def sessions(self) -> int:
        """How many have begun."""
        ...

    def spent(self) -> tuple[int, float]:
        """Tokens and $ of all sessions so far. A session that did not return its lease has spent all of it."""
        ...

    def learnt(self) -> tuple[int, ...] | None:
        """What the latest session that learnt something knows of calls."""
        ...

    def next_agent(self) -> int:
        """The first number, from 1, that is above those of all recorded agents."""
        ...

    def begin(self, fingerprint: bytes, started: str) -> None:
        """A session, whose progress the commits that follow tell."""
        ...

    def commit(self, entries: Sequence[Entry], progress: Progress) -> None:
        """All of the entries, and a lease that grew, are on disk when this returns, or none is; how far the session is,
        with them at the latest."""
        ...

    def sort_by(self, column: Literal["key", "row"]) -> None:
        """Make the agents recorded until now ready to be claimed by their key; or by that first, and by their row where
        no agent has the key. Those that are done come first, then those under way, then those that failed; by row,
        where they may have been asked different questions, the newest of them."""
        ...

    def claim(self, wanted: Sequence[Identity]) -> list[Past | None]:
        """What is recorded of each row. Every recorded agent is given out once."""
        ...

    def close(self) -> None: ...


class OpenStore(Protocol):
    def __call__(self, path: Path, *, begun: bool) -> Store:
        """``path`` is the journal's place in its run directory, for a store that is a file; ``begun`` says that a run
        has begun there. Raises StoreError when it cannot be used."""
        ...
