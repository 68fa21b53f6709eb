"""The record of one row, found by content: a digest, and the number of earlier equal requests or calls.

Holds the steps of a user's worker, of earlier sessions and of this one. The number of a request that got no answer is
used again. So a worker that retries, and is resumed later, finds the answer at its first request. The calls of the tool
loop are found too, in every format, if a worker takes over its record.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from batch_agent.messages import Message, Reply
from batch_agent.record.journal import WHOLE, message_digest
from batch_agent.record.steps import (
    ALONE,
    SHARED,
    Asked,
    CallBegun,
    CallEnded,
    Compacted,
    Left,
    Past,
    PastTurn,
    Spent,
    call_digest,
)

NO_MESSAGES = b""  # the digest of an empty conversation


class WorkReplay:
    """``takes_over``: the calls of the tool loop are found too. The tool loop itself finds them in its turns."""

    __slots__ = ("_asks", "_calls", "_counts", "_cuts", "_ends", "_freed", "_numbers", "_replies", "_wrote")

    def __init__(self, past: Past, *, takes_over: bool) -> None:
        self._asks = past.asked  # answered requests of a user's worker, in the order of their answers
        self._replies = {(ask.digest[:WHOLE], ask.nth): ask.reply for ask in self._asks}
        self._cuts: dict[str, Compacted] = {}
        self._calls: dict[tuple[str, int], CallEnded] = {}
        self._wrote: set[tuple[str, int]] = set()
        self._counts: dict[str, int] = {}
        self._freed: dict[str, list[int]] = {}
        # Digests of conversations that a later request may continue, once they are needed.
        self._ends: dict[int, bytes] = {}
        self._numbers: dict[bytes, int] = {}
        self._index(past, past.turns if takes_over else ())
        if past.left is not None:
            self._index_writes(past.left)

    def _index_writes(self, left: Left) -> None:
        """Find the writes of conversations that the row left. They are not repeated; reads are."""
        counts: dict[str, int] = {}
        ends = {(step.digest, step.nth): step for step in left.worked if isinstance(step, CallEnded)}
        begun: list[tuple[str, CallEnded | None]] = []
        for turn in left.turns:
            for place in sorted(turn.begun):
                call, text = turn.reply.tool_calls[place], turn.outcomes.get(place)
                end = None if text is None else CallEnded("", place, "", "", True, text, turn.images.get(place, ()))
                begun.append((call_digest(call.name, call.arguments), end))
        for step in left.worked:
            if isinstance(step, CallBegun):
                begun.append((call_digest(step.name, step.arguments), ends.get((step.digest, step.nth))))
        for digest, end in begun:
            key = digest, counts.get(digest, 0)
            counts[digest] = key[1] + 1
            self._wrote.add(key)
            if end is not None:
                self._calls.setdefault(key, end)

    def _index(self, past: Past, turns: Sequence[PastTurn]) -> None:
        for step in past.worked:
            if isinstance(step, CallBegun | CallEnded):
                self.add_call(step, (call_digest(step.name, step.arguments), step.nth))
            elif isinstance(step, Compacted):
                self._cuts[step.digest] = step  # a later cut includes the earlier one
        counts: dict[str, int] = {}
        for turn in turns:
            for place in sorted(turn.begun | turn.outcomes.keys()):
                call = turn.reply.tool_calls[place]
                digest = call_digest(call.name, call.arguments)
                key = digest, counts.get(digest, 0)
                counts[digest] = key[1] + 1
                if place in turn.begun:
                    self._wrote.add(key)
                if (text := turn.outcomes.get(place)) is not None:
                    self._calls[key] = CallEnded("", place, "", "", True, text, turn.images.get(place, ()))

    def add_call(self, step: CallBegun | CallEnded, key: tuple[str, int]) -> None:
        if isinstance(step, CallBegun):
            self._wrote.add(key)
        else:
            self._calls[key] = step

    def take(self, digest: str) -> int:
        """Return the number of a request or call that begins: how many equal ones came before it."""
        if freed := self._freed.get(digest):
            return heappop(freed)
        nth = self._counts.get(digest, 0)
        self._counts[digest] = nth + 1
        return nth

    def give_back(self, digest: str, nth: int) -> None:
        """Release the number of a request or call that ended without an answer. A recorded one keeps its number."""
        key = digest, nth
        if key not in self._replies and key not in self._calls and key not in self._wrote:
            heappush(self._freed.setdefault(digest, []), nth)

    def reply(self, digest: str, nth: int) -> Reply | None:
        return self._replies.get((digest, nth))

    def cut(self, digest: str) -> Compacted | None:
        """Return the compaction before the request of a user's worker."""
        return self._cuts.get(digest)

    def outcome(self, digest: str, nth: int) -> CallEnded | None:
        return self._calls.get((digest, nth))

    def wrote(self, digest: str, nth: int) -> bool:
        """Return whether the call may have written. It was begun, so it must not be made again."""
        return (digest, nth) in self._wrote

    def add_ask(
        self,
        digest: str,
        nth: int,
        reply: Reply,
        spent: Spent,
        messages: Sequence[Message],
        digests: Sequence[bytes],
        shared: Sequence[Message],
    ) -> Asked:
        """Return the record of a new answer to a user's worker. ``digests`` is the chain of ``messages``. ``shared``
        are the messages that all rows begin with. Only messages that no earlier request has are recorded."""
        if not self._ends:
            self._ends = {ALONE: NO_MESSAGES, SHARED: chain(shared)[-1]}
            self._numbers = {end: number for number, end in reversed(self._ends.items())}
            for number, ask in enumerate(self._asks):
                self._know(number, ask, chain(ask.said, self._ends[ask.after])[-1])
        start = next(place for place in range(len(messages), -1, -1) if digests[place] in self._numbers)
        ask = Asked(digest, nth, reply, spent, self._numbers[digests[start]], tuple(messages[start:]))
        self._know(len(self._asks), ask, digests[-1])
        self._asks.append(ask)
        self._replies[digest, nth] = reply
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
