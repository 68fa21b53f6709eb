"""The record of one row, found by content: a digest, and the number of earlier equal requests or calls.

Holds the steps of the tool loop and of a user's worker, of earlier sessions and of this one. Each may take over the
record of the other. The number of a request that got no answer is used again. So a worker that retries, and is resumed
later, finds the answer at its first request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import TypeAlias

from batch_agent.messages import Message, Reply
from batch_agent.record.commits import WHOLE, message_digest
from batch_agent.record.steps import (
    ALONE,
    SHARED,
    Asked,
    CallBegun,
    CallEnded,
    Compacted,
    Past,
    PastTurn,
    Used,
    call_digest,
)

NO_MESSAGES = b""  # the digest of an empty conversation
Key: TypeAlias = tuple[str, int]  # the digest of a request or call, and the number of equal ones before it
Call: TypeAlias = tuple[str, bool, CallEnded | None]  # the digest of a recorded call, whether it may have written, end


class WorkReplay:
    """The recorded requests and calls of one row. ``checks``: a recorded answer is used only for the same request.
    ``wrote``: the calls of earlier entries of a cascade that may have written; they are not made again."""

    __slots__ = ("_asks", "_calls", "_counts", "_cuts", "_ends", "_freed", "_numbers", "_replies", "_wrote")

    def __init__(self, past: Past, *, checks: bool, wrote: Iterable[Call] = ()) -> None:
        self._asks = past.asked  # answered requests of a user's worker, in the order of their answers
        self._replies = {(ask.digest[:WHOLE], ask.nth): ask.reply for ask in self._asks}
        self._cuts: dict[str, Compacted] = {}
        self._calls: dict[Key, CallEnded] = {}
        self._wrote: set[Key] = set()
        self._counts: dict[str, int] = {}
        self._freed: dict[str, list[int]] = {}
        # Digests of conversations that a later request may continue, once they are needed.
        self._ends: dict[int, bytes] = {}
        self._numbers: dict[bytes, int] = {}
        before = [*wrote, *(() if past.left is None else writes_of(past.left))]
        if before:
            self._add_calls(before)
        for step in past.worked:
            if isinstance(step, CallBegun | CallEnded):
                self.add_call(step, (call_digest(step.name, step.arguments), step.nth))
            elif isinstance(step, Compacted):
                self._cuts[step.digest] = step  # a later cut includes the earlier one
        for place, turn in enumerate(past.turns):
            self._replies[(turn.asked[:WHOLE] if checks else "") or _by_place(place), 0] = turn.reply
            if turn.compacted is not None:
                self._cuts[_by_place(place + 1)] = turn.compacted
        self._add_calls(_calls_of(past.turns))

    def _add_calls(self, calls: Iterable[Call]) -> None:
        """Number calls that are recorded in order, and add them. A call replaces an earlier one with the same
        number."""
        counts: dict[str, int] = {}
        for digest, begun, end in calls:
            key = digest, counts.get(digest, 0)
            counts[digest] = key[1] + 1
            if begun:
                self._wrote.add(key)
            if end is not None:
                self._calls[key] = end

    def add_call(self, step: CallBegun | CallEnded, key: Key) -> None:
        if isinstance(step, CallBegun):
            self._wrote.add(key)
        else:
            self._calls[key] = step

    def withdraw_call(self, key: Key) -> None:
        """Forget that a call began: it did not start."""
        self._wrote.discard(key)

    def answer(self, digest: str, place: int | None) -> tuple[int, Reply | None, Compacted | None]:
        """Return three values for a request that begins: its number, its recorded answer, and the compaction before it;
        None for what is not recorded. ``place`` is the place of a request of the tool loop."""
        nth = self._take(digest)
        other = digest if place is None else _by_place(place)
        return nth, self._replies.get((digest, nth)) or self._replies.get((other, nth)), self._cuts.get(other)

    def call(self, name: str, arguments: str) -> tuple[Key, CallEnded | None, bool]:
        """Return three values for a call that begins: its digest and number; its recorded end, or None; and whether it
        may have written, so that it must not be made again. The end has no digest if it belongs to the present
        conversation of the tool loop."""
        digest = call_digest(name, arguments)
        key = digest, self._take(digest)
        return key, self._calls.get(key), key in self._wrote

    def _take(self, digest: str) -> int:
        """Return the number of a request or call that begins: how many equal ones came before it."""
        if freed := self._freed.get(digest):
            return heappop(freed)
        nth = self._counts.get(digest, 0)
        self._counts[digest] = nth + 1
        return nth

    def give_back(self, digest: str, nth: int) -> None:
        """Release the number of a request or call that ended without an answer. If an answer is recorded, the number
        stays taken."""
        key = digest, nth
        if key not in self._replies and key not in self._calls and key not in self._wrote:
            heappush(self._freed.setdefault(digest, []), nth)

    def add_ask(
        self,
        digest: str,
        nth: int,
        reply: Reply,
        spent: Used,
        messages: Sequence[Message],
        digests: Sequence[bytes],
        shared: Sequence[Message],
    ) -> Asked:
        """Return the step that records a new answer to a user's worker. ``digests`` is the chain of ``messages``.
        ``shared`` are the messages with which all rows begin. Only messages that no earlier request has are
        recorded."""
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


# The adapter for the tool loop, whose steps are recorded by position (``read_past``).


def _by_place(place: int) -> str:
    """Return a name for request number ``place`` (from 0) of the tool loop. It is used for steps that were recorded
    without a digest, and for answers that are used without a check."""
    return f"request {place}"


def _calls_of(turns: Sequence[PastTurn]) -> Iterator[Call]:
    """Yield all calls of the tool loop, with those that did not begin, because they have numbers too."""
    for turn in turns:
        for place, call in enumerate(turn.reply.tool_calls):
            yield call_digest(call.name, call.arguments), place in turn.begun, turn.outcomes.get(place)


def writes_of(left: Past) -> Iterator[Call]:
    """Yield the writes of the conversations that a row has left. Writes are not repeated; reads are."""
    if left.left is not None:
        yield from writes_of(left.left)
    for digest, begun, end in _calls_of(left.turns):
        if begun:
            yield digest, True, end and replace(end, digest=digest)
    ends = {(step.digest, step.nth): step for step in left.worked if isinstance(step, CallEnded)}
    for step in left.worked:
        if isinstance(step, CallBegun):
            yield call_digest(step.name, step.arguments), True, ends.get((step.digest, step.nth))
