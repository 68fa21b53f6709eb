"""Finds the requests and calls of a user's worker by content: a digest, and the number of earlier equal ones.

Holds the records of earlier sessions and of this one. The number of a request that got no answer is used again. So a
worker that retries, and is resumed later, finds the answer at its first request.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from batch_agent.messages import Message, Reply
from batch_agent.record.digests import message_digest
from batch_agent.record.steps import ALONE, SHARED, Asked, CallBegun, CallEnded, Past, Spent

NO_MESSAGES = b""  # the digest of an empty conversation


class WorkReplay:
    """``asks`` are all answered requests of the row, in the order of their answers."""

    def __init__(self, past: Past, shared: Sequence[Message]) -> None:
        """``shared`` are the messages that all rows begin with."""
        self.asks = past.asked
        self._answers = {(ask.digest, ask.nth): ask.reply for ask in self.asks}
        self._calls: dict[tuple[str, int], CallBegun | CallEnded] = {}
        self._wrote: set[tuple[str, int]] = set()
        self._counts: dict[str, int] = {}
        self._freed: dict[str, list[int]] = {}
        for step in past.worked:
            if not isinstance(step, Asked):
                self.add_call(step)
        # Digests of conversations that a later request may continue; only its new messages are recorded.
        self._ends = {ALONE: NO_MESSAGES, SHARED: chain(shared)[-1]}
        self._numbers = {digest: number for number, digest in reversed(self._ends.items())}
        for number, ask in enumerate(self.asks):
            self._know(number, ask, chain(ask.said, self._ends[ask.after])[-1])

    def take(self, digest: str) -> int:
        """Return the number of a request or call that begins: how many equal ones came before it."""
        if freed := self._freed.get(digest):
            return heappop(freed)
        nth = self._counts.get(digest, 0)
        self._counts[digest] = nth + 1
        return nth

    def give_back(self, digest: str, nth: int) -> None:
        """Release the number of a request or call that ended without an answer. A recorded one keeps its number."""
        if (digest, nth) not in self._answers and (digest, nth) not in self._calls:
            heappush(self._freed.setdefault(digest, []), nth)

    def answer(self, digest: str, nth: int) -> Reply | None:
        return self._answers.get((digest, nth))

    def outcome(self, digest: str, nth: int) -> CallEnded | None:
        ended = self._calls.get((digest, nth))
        return ended if isinstance(ended, CallEnded) else None

    def wrote(self, digest: str, nth: int) -> bool:
        """Return whether the call may have written. It was begun, so it must not be made again."""
        return (digest, nth) in self._wrote

    def add_call(self, step: CallBegun | CallEnded) -> None:
        self._calls[step.digest, step.nth] = step
        if isinstance(step, CallBegun):
            self._wrote.add((step.digest, step.nth))

    def add_ask(
        self, digest: str, nth: int, reply: Reply, spent: Spent, messages: Sequence[Message], digests: Sequence[bytes]
    ) -> Asked:
        """Return the record of a new answer. ``digests`` is the chain of ``messages``."""
        start = next(place for place in range(len(messages), -1, -1) if digests[place] in self._numbers)
        ask = Asked(digest, nth, reply, spent, self._numbers[digests[start]], tuple(messages[start:]))
        self._know(len(self.asks), ask, digests[-1])
        self.asks.append(ask)
        self._answers[digest, nth] = reply
        return ask

    def _know(self, number: int, ask: Asked, asked: bytes) -> None:
        """Remember the digest of the conversation after ``ask``. ``asked`` is the digest of the conversation before its
        answer."""
        end = message_digest(asked, ask.reply.message())
        self._ends[number], self._numbers[end] = end, number


def chain(messages: Sequence[Message], before: bytes = NO_MESSAGES) -> list[bytes]:
    """Return the digest of the conversation before each message, and of the whole conversation."""
    digests = [before]
    for message in messages:
        digests.append(message_digest(digests[-1], message))
    return digests
