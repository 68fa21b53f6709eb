"""One agent's trail through the journal: what it did in an earlier session, to be followed, and where it writes now."""

from __future__ import annotations

from collections.abc import Sequence

from batch_agent.store.base import Entry, Identity
from batch_agent.store.journal import Journal
from batch_agent.store.steps import Failed, PastTurn, Step


class Trail:
    """The recorded turns are taken one by one; after the last the agent is on its own. ``failed`` is how it ended, when
    that is not to be tried again, ``retried`` says that it is; ``ended`` says that nothing should be left to do.
    ``has_past``: an earlier session recorded something of it."""

    __slots__ = ("_agent", "_commit", "_identity", "_journal", "_turns", "ended", "failed", "has_past", "retried")

    def __init__(
        self,
        journal: Journal,
        identity: Identity,
        agent: int,
        turns: Sequence[PastTurn] = (),
        *,
        failed: Failed | None = None,
        retried: bool = False,
        done: bool = False,
    ) -> None:
        self._journal = journal
        self._identity = identity
        self._agent = agent
        self._commit = 0
        self._turns = list(reversed(turns))
        self.failed = failed
        self.retried = retried
        self.ended = done or failed is not None
        self.has_past = bool(turns) or self.ended

    @property
    def goes_on(self) -> bool:
        """Whether there are more turns to follow; what was recorded is past all limits on how long an agent may go
        on."""
        return bool(self._turns)

    def next_turn(self) -> PastTurn | None:
        return self._turns.pop() if self._turns else None

    def add(self, step: Step) -> None:
        """Record a step of this session. It is on disk after ``settle``."""
        self._commit = self._journal.add(Entry(self._agent, self._identity, step))

    async def settle(self) -> None:
        """Until everything added is on disk. Raises StoreError when it cannot be."""
        await self._journal.wait(self._commit)
