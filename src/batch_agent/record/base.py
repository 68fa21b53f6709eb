"""Values that a run and its record exchange: who a row is, what a session spends."""

from __future__ import annotations

from batch_agent.errors import StoreError
from batch_agent.value_type import value_type


@value_type
class Identity:
    """Identifies the record of a row. ``key`` is the digest of its whole question, ``row`` the digest of the input
    alone."""

    key: bytes
    row: bytes


@value_type
class RunProgress:
    """Progress of a session. ``resumed`` counts the rows, among the others, that came from the record. ``tokens`` and
    ``cost`` are what the session has spent; ``cost`` is in $, None if no price is known. ``advance`` is what it may
    spend before the next commit, in tokens and $. It is None without a limit, or after the session returned its advance
    at its end."""

    ok: int = 0
    failed: int = 0
    resumed: int = 0
    tokens: int = 0
    cost: float | None = None
    advance: tuple[int, float] | None = None
    learnt: tuple[int, ...] | None = None  # statistics of calls, for the next session


@value_type
class Outlay:
    """What a session has spent. ``cost`` is in $, None if no price is known. ``advance`` is what the session may spend
    before the next commit, in tokens and $: None without a limit, or after the session returned it. ``learnt`` are
    statistics of calls, for the next session."""

    tokens: int = 0
    cost: float | None = None
    advance: tuple[int, float] | None = None
    learnt: tuple[int, ...] | None = None


class Account:
    """Reports to the journal what a session spends. The base class is for a session that spends nothing."""

    def so_far(self) -> tuple[int, float | None]:
        """Return the tokens and $ spent in this session; $ is None if no price is known."""
        return 0, None

    def next_advance(self) -> tuple[int, float] | None:
        """Return the advance to write with the commit that begins now."""
        return None

    def learnt(self) -> tuple[int, ...] | None:
        """Return the statistics of calls, for the next session."""
        return None

    def advance_written(self, error: StoreError | None = None) -> None:
        """Called when that commit is on disk, or with the error if it failed. After a failure, all later commits fail
        too."""
