"""One agent's trail through the journal: what it did in an earlier session, to be followed, and where it writes now.

An agent without a run directory has a trail too: there is nothing to follow, and it leads nowhere.
"""

from __future__ import annotations

from batch_agent.errors import JobError
from batch_agent.store.base import Entry, Identity
from batch_agent.store.journal import Journal
from batch_agent.store.steps import Compacted, Failed, Outcome, Past, PastTurn, Step

UNKNOWN_OUTCOME = (
    "Error: the run was interrupted while {name} was running, and its outcome is unknown: it may or may not have taken "
    "effect. It was not run again. Find out before you repeat it."
)
NOBODY = Identity(b"", b"")
NOTHING = Past(0, ())  # what is recorded of a new agent


class FailedBefore(JobError):
    """The record ends in this failure, which is not to be tried again."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.error.message)
        self.failed = failed


class Trail:
    """The recorded turns are taken one by one; after the last the agent is on its own. ``retried`` says that it failed
    and is tried again; ``ended`` that nothing should be left to do; ``has_past`` that an earlier session recorded
    something of it; ``fresh`` that this one did something for it. ``records``: what is added is kept. ``checks``: a
    recorded answer is used only for the request that it answers. ``past`` is all that was recorded."""

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
        """``past`` is what was recorded of the agent; without any, one of a new number."""
        self._journal = journal
        self._identity = identity
        self.past = NOTHING if past is None else past
        # Its number in the journal; 0 for all agents of a run that is not recorded.
        self.agent = past.agent if past is not None else 0 if journal is None else journal.new_agent()
        self._commit = 0
        self._turns = list(reversed(self.past.turns))
        self._past: PastTurn | None = None  # the latest answer, when it comes from the record
        self._failed = None if retried else self.past.failed
        self.records = journal is not None
        self.retried = retried
        self.checks = checks
        self.ended = self.past.done or self._failed is not None
        self.has_past = bool(self._turns or self.past.worked) or self.ended
        self.fresh = not self.has_past

    @property
    def key(self) -> bytes:
        """The digest of the whole question of its row."""
        return self._identity.key

    @property
    def goes_on(self) -> bool:
        """Whether there are more turns to follow; what was recorded is past all limits on how long an agent may go
        on."""
        return bool(self._turns)

    @property
    def stays_failed(self) -> bool:
        """The last recorded turn was taken, and what followed it then was a failure that is not tried again."""
        return self._failed is not None and not self._turns

    @property
    def forgives(self) -> bool:
        """Whether an answer that does not validate may be repaired beyond the limit: it was, or it failed its agent
        then and gets another chance now."""
        return self.goes_on or (self.retried and self._past is not None)

    def next_turn(self) -> PastTurn | None:
        self._past = self._turns.pop() if self._turns else None
        return self._past

    @property
    def compacted(self) -> Compacted | None:
        """How the conversation was cut after the latest answer, where that is recorded."""
        return None if self._past is None else self._past.compacted

    def leave(self) -> None:
        """There is nothing more to follow: the agent failed then and there, or goes on from here."""
        if self._failed is not None:
            raise FailedBefore(self._failed)
        self.fresh = True

    def outcomes(self) -> dict[int, str]:
        """What the record has of the calls of the latest answer, by position. Where the agent goes on, a write that was
        begun and has no outcome gets one that says so."""
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
        """Until everything added is on disk. Raises StoreError when it cannot be."""
        if self._journal is not None:
            await self._journal.wait(self._commit)
