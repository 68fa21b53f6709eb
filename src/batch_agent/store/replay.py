"""What a user's worker asked and called, found by content: by its digest, and by how often the same was before.

Both what earlier sessions recorded and what this one adds are here. A number that came to nothing is given out again: a
worker that tries again, and is resumed later, finds the answer where it first asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from batch_agent.messages import Message, Reply
from batch_agent.store.digests import message_digest
from batch_agent.store.steps import ALONE, SHARED, Asked, CallBegun, CallEnded, Past, Spent

NO_MESSAGES = b""  # the digest of a conversation without any


class WorkReplay:
    """``asks`` are all of the row, in the order of their answers."""

    def __init__(self, past: Past, shared: Sequence[Message]) -> None:
        """``shared`` is what all rows begin with."""
        self.asks = past.asked
        self._answers = {(ask.digest, ask.nth): ask.reply for ask in self.asks}
        self._calls: dict[tuple[str, int], CallBegun | CallEnded] = {}
        self._wrote: set[tuple[str, int]] = set()
        self._counts: dict[str, int] = {}
        self._freed: dict[str, list[int]] = {}
        for step in past.worked:
            if not isinstance(step, Asked):
                self.add_call(step)
        # Digests of conversations from which an ask may go on: it is recorded without what was said before.
        self._ends = {ALONE: NO_MESSAGES, SHARED: chain(shared)[-1]}
        self._numbers = {digest: number for number, digest in reversed(self._ends.items())}
        for number, ask in enumerate(self.asks):
            self._know(number, ask, chain(ask.said, self._ends[ask.after])[-1])

    def take(self, digest: str) -> int:
        """The number of an ask or a call that begins: how often the same was before."""
        if freed := self._freed.get(digest):
            return heappop(freed)
        nth = self._counts.get(digest, 0)
        self._counts[digest] = nth + 1
        return nth

    def give_back(self, digest: str, nth: int) -> None:
        """It ended without an answer or an outcome. What is recorded keeps its number."""
        if (digest, nth) not in self._answers and (digest, nth) not in self._calls:
            heappush(self._freed.setdefault(digest, []), nth)

    def answer(self, digest: str, nth: int) -> Reply | None:
        return self._answers.get((digest, nth))

    def outcome(self, digest: str, nth: int) -> CallEnded | None:
        ended = self._calls.get((digest, nth))
        return ended if isinstance(ended, CallEnded) else None

    def wrote(self, digest: str, nth: int) -> bool:
        """Whether the call may have written: it was begun, and must not be made again."""
        return (digest, nth) in self._wrote

    def add_call(self, step: CallBegun | CallEnded) -> None:
        self._calls[step.digest, step.nth] = step
        if isinstance(step, CallBegun):
            self._wrote.add((step.digest, step.nth))

    def add_ask(
        self, digest: str, nth: int, reply: Reply, spent: Spent, messages: Sequence[Message], digests: Sequence[bytes]
    ) -> Asked:
        """A new answer, as it is recorded. ``digests`` is the chain of ``messages``."""
        start = next(place for place in range(len(messages), -1, -1) if digests[place] in self._numbers)
        ask = Asked(digest, nth, reply, spent, self._numbers[digests[start]], tuple(messages[start:]))
        self._know(len(self.asks), ask, digests[-1])
        self.asks.append(ask)
        self._answers[digest, nth] = reply
        return ask

    def _know(self, number: int, ask: Asked, asked: bytes) -> None:
        """``asked`` is the digest of the conversation that it answers."""
        end = message_digest(asked, ask.reply.message())
        self._ends[number], self._numbers[end] = end, number


def chain(messages: Sequence[Message], before: bytes = NO_MESSAGES) -> list[bytes]:
    """The digest of the conversation before each message, and of all of it."""
    digests = [before]
    for message in messages:
        digests.append(message_digest(digests[-1], message))
    return digests
