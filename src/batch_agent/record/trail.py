"""One agent's trail in the journal: the recorded turns of earlier sessions to replay, and the place for new steps.

An agent without a run directory has a trail too. It has no recorded turns, and records nothing.
"""

from __future__ import annotations

from batch_agent.errors import JobError
from batch_agent.record.base import Entry, Identity
from batch_agent.record.journal import Journal
from batch_agent.record.steps import Compacted, Failed, Outcome, Past, PastTurn, Step

UNKNOWN_OUTCOME = (
    "Error: the run was interrupted while {name} was running, and its outcome is unknown: it may or may not have taken "
    "effect. It was not run again. Find out before you repeat it."
)
NOBODY = Identity(b"", b"")
NOTHING = Past(0, ())  # the record of a new agent


class FailedBefore(JobError):
    """The record ends with this failure, which is not retried."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.error.message)
        self.failed = failed


class Trail:
    """Replays the recorded turns one by one; after the last one the agent continues on its own. ``retried``: the agent
    failed and is retried. ``ended``: the record is complete. ``has_past``: an earlier session recorded something.
    ``fresh``: this session did some work for it. ``records``: new steps are kept. ``checks``: a recorded answer is used
    only for the same request. ``past`` is the whole record."""

    __slots__ = (
        "_commit",
        "_failed",
        "_identity",
        "_journal",
        "_past",
        "_turns",
        "agent",
        "checks",
        "ended",
        "fresh",
        "has_past",
        "past",
        "records",
        "retried",
    )

    def __init__(
        self,
        journal: Journal | None = None,
        identity: Identity = NOBODY,
        past: Past | None = None,
        *,
        retried: bool = False,
        checks: bool = True,
    ) -> None:
        """``past`` is the record of the agent. Without one, the agent gets a new number."""
        self._journal = journal
        self._identity = identity
        self.past = NOTHING if past is None else past
        # Its number in the journal; 0 for all agents of a run without a record.
        self.agent = past.agent if past is not None else 0 if journal is None else journal.new_agent()
        self._commit = 0
        self._turns = list(reversed(self.past.turns))
        self._past: PastTurn | None = None  # the latest answer, if it came from the record
        self._failed = None if retried else self.past.failed
        self.records = journal is not None
        self.retried = retried
        self.checks = checks
        self.ended = self.past.done or self._failed is not None
        self.has_past = bool(self._turns or self.past.worked) or self.ended
        self.fresh = not self.has_past

    def anew(self) -> Trail:
        """Return a trail of the same row without recorded turns, for an agent that starts again."""
        return Trail(self._journal, self._identity)

    @property
    def key(self) -> bytes:
        """The digest of the whole question of its row."""
        return self._identity.key

    @property
    def goes_on(self) -> bool:
        """Whether recorded turns are left to replay. Limits on an agent's length do not apply to them."""
        return bool(self._turns)

    @property
    def stays_failed(self) -> bool:
        """Whether all recorded turns are replayed, and a failure that is not retried followed."""
        return self._failed is not None and not self._turns

    @property
    def forgives(self) -> bool:
        """Whether an invalid answer may be repaired beyond the limit: the record continues after it, or the agent
        failed on it and is now retried."""
        return self.goes_on or (self.retried and self._past is not None)

    def next_turn(self) -> PastTurn | None:
        self._past = self._turns.pop() if self._turns else None
        return self._past

    @property
    def compacted(self) -> Compacted | None:
        """The compaction after the latest answer, if it is recorded."""
        return None if self._past is None else self._past.compacted

    def leave(self) -> None:
        """End the replay: the agent continues on its own. Raises FailedBefore if the record ends with a failure that is
        not retried."""
        if self._failed is not None:
            raise FailedBefore(self._failed)
        self.fresh = True

    def outcomes(self) -> dict[int, str]:
        """Return the recorded outcomes of the calls of the latest answer, by position. If the agent continues, a write
        that was begun and has no outcome gets one that says so."""
        past = self._past
        if past is None:
            return {}
        known = past.outcomes
        for position in () if self.stays_failed else sorted(past.begun - known.keys()):
            known[position] = UNKNOWN_OUTCOME.format(name=past.reply.tool_calls[position].name)
            self.add(Outcome(position, known[position]))
        return known

    def add(self, step: Step) -> None:
        """Record a step of this session. It is on disk after ``settle``."""
        if self._journal is not None:
            self._commit = self._journal.add(Entry(self.agent, self._identity, step))

    async def settle(self) -> None:
        """Wait until all added steps are on disk. Raises StoreError if that is impossible."""
        if self._journal is not None:
            await self._journal.wait(self._commit)
