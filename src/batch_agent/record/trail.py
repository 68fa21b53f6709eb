"""One agent's trail in the journal: its record from earlier sessions, and the place for new steps.

An agent without a run directory has a trail too. It has no record, and records nothing.
"""

from __future__ import annotations

from batch_agent.errors import JobError
from batch_agent.record.base import Entry, Identity
from batch_agent.record.journal import Journal
from batch_agent.record.steps import Failed, Past, Restarted, Spent, Step

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
    """``retried``: the agent failed and is retried. ``restarts``: it starts again in a new conversation. ``ended``: the
    record is complete. ``has_past``: an earlier session recorded something. ``fresh``: this session did some work for
    it. ``records``: new steps are kept. ``checks``: a recorded answer is used only for the same request. ``past`` is
    the whole record."""

    __slots__ = (
        "_commit",
        "_identity",
        "_journal",
        "_restarts",
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
        restarts: bool = False,
        checks: bool = True,
    ) -> None:
        """``past`` is the record of the agent. Without one, the agent gets a new number."""
        self._journal = journal
        self._identity = identity
        self.past = NOTHING if past is None else past.restarted() if restarts else past
        self._restarts = restarts  # and this is not recorded yet
        # Its number in the journal; 0 for all agents of a run without a record.
        self.agent = past.agent if past is not None else 0 if journal is None else journal.new_agent()
        self._commit = 0
        self.records = journal is not None
        self.retried = retried
        self.checks = checks
        self.ended = self.past.done or self.stays_failed
        self.has_past = bool(self.past.turns or self.past.worked) or self.ended
        self.fresh = not self.has_past

    def anew(self) -> Trail:
        """Return a trail of the same row without a record, for an agent that starts again."""
        return Trail(self._journal, self._identity)

    @property
    def key(self) -> bytes:
        """The digest of the whole question of its row."""
        return self._identity.key

    @property
    def stays_failed(self) -> bool:
        """Whether the record ends with a failure that is not retried."""
        return self.past.failed is not None and not self.retried

    def add(self, step: Step) -> None:
        """Record a step of this session. It is on disk after ``settle``."""
        if self._journal is not None:
            if self._restarts:
                self._restarts = False
                self._journal.add(Entry(self.agent, self._identity, Restarted(self.past.spent or Spent())))
            self._commit = self._journal.add(Entry(self.agent, self._identity, step))

    async def settle(self) -> None:
        """Wait until all added steps are on disk. Raises StoreError if that is impossible."""
        if self._journal is not None:
            await self._journal.wait(self._commit)
