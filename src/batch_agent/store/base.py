"""The seam between the journal and where it is kept. All of it runs in the journal's own thread, so it may block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from batch_agent.store.steps import Past, Step


@dataclass(frozen=True, slots=True)
class Identity:
    """What a row's record is found by: ``key`` is its whole question, ``row`` the input alone."""

    key: bytes
    row: bytes


@dataclass(frozen=True, slots=True)
class Entry:
    agent: int  # whose step it is; a number that no other agent of this journal has
    identity: Identity
    step: Step


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a session is. ``resumed`` rows, a part of the others, came from the record; tokens and cost ($, None
    where no price is known) are what it has spent."""

    ok: int = 0
    failed: int = 0
    resumed: int = 0
    tokens: int = 0
    cost: float | None = None


class Store(Protocol):
    """Raises StoreError, and nothing else, when something cannot be recorded or read."""

    def commit(self, entries: Sequence[Entry], progress: Progress) -> None:
        """All of the entries are on disk when this returns, or none is; how far the session is, with them at the
        latest."""
        ...

    def claim(self, wanted: Sequence[Identity]) -> list[Past | None]:
        """What is recorded of each row. Every recorded agent is given out once."""
        ...

    def close(self) -> None: ...
