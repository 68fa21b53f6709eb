"""The recorded steps of an agent: those that cannot be derived from the spec and the input.

Answers and tool calls are found by content: by the digest of the request or call, and by ``nth``, which is 0 for the
first equal one and 1 for the second. The prompts of the tool loop follow from its row and its earlier steps, so they
are not recorded. The code of a user's worker may be different each time, so its prompts and its output are recorded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TypeAlias

import orjson

from batch_agent.compiler.compaction import Cut
from batch_agent.job import AgentError
from batch_agent.messages import Attachment, Message, Reply, Usage
from batch_agent.value_type import value_type


@value_type
class Used:
    """What an agent had used when a step was recorded. Times are in seconds, ``total`` since its first start; cost in
    $."""

    sent: int = 0
    retries: int = 0
    queued: float = 0.0
    inference: float = 0.0
    tool_wait: float = 0.0
    total: float = 0.0
    cost: float | None = None


# What a request continues that continues no earlier request.
SHARED = -1
ALONE = -2
OWN = -3


@value_type
class Asked:
    """An answer of the model. Its request is the conversation of the earlier request number ``after`` (from 0) with
    that request's answer, followed by ``said``. SHARED: it starts with the messages that all rows share. ALONE: it
    starts empty. OWN: it is the next request of the tool loop, whose messages follow from the row."""

    digest: str
    nth: int
    reply: Reply
    spent: Used
    after: int = OWN
    said: tuple[Message, ...] = ()


@value_type
class CallBegun:
    """A tool call that may write and is about to start. ``arguments`` is JSON text. With the digest "", it is call
    number ``nth`` (from 0) of the latest answer of the tool loop; its name and arguments are in that answer."""

    digest: str
    nth: int
    name: str = ""
    arguments: str = ""


@value_type
class CallWithdrawn:
    """A call whose CallBegun is recorded was cancelled before the tool started: it may be made later. The digest may be
    "" as in CallBegun."""

    digest: str
    nth: int


@value_type
class CallEnded:
    """The end of a tool call. ``text`` is the result or the error, ``images`` are those of the result. The digest may
    be "" as in CallBegun."""

    digest: str
    nth: int
    name: str
    arguments: str
    ok: bool
    text: str
    images: tuple[Attachment, ...] = ()


@dataclass(frozen=True, slots=True)
class Compacted:
    """A conversation was compacted before a request. ``usage`` is that of the model that summarised the removed part.
    ``digest`` is that of the request; "" for the next request of the tool loop."""

    cut: Cut
    usage: Usage
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The agent ended with an error; ``text`` is the last text of the model."""

    error: AgentError
    text: str
    spent: Used


@value_type
class Ended:
    """The agent ended successfully. ``output`` is the return value of a user's worker as JSON, and ``fingerprint`` that
    of its run (``record.keys``). ``output`` is None for the tool loop and built-in workers, which compute it again.
    ``reply`` is the answer that ended the tool loop, and ``asked`` the digest of its request; recorded here, the answer
    needs no step of its own. ``truncated``: a text that was cut at max_tokens was kept for the user's worker."""

    spent: Used
    output: str | None = None
    fingerprint: str = ""
    reply: Reply | None = None
    asked: str = ""
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Restarted:
    """The row starts again in a new conversation. ``spent`` is what it had used until then. Its earlier answers are not
    used again; its earlier writes are not repeated."""

    spent: Used


Step: TypeAlias = Asked | CallBegun | CallWithdrawn | CallEnded | Compacted | Failed | Ended | Restarted
WorkStep: TypeAlias = Asked | CallBegun | CallEnded | Compacted


@value_type
class PastTurn:
    """A recorded answer of the tool loop, the ends of its calls by position, and the compaction after it."""

    reply: Reply
    spent: Used
    asked: str = ""
    begun: set[int] = field(default_factory=set)
    outcomes: dict[int, CallEnded] = field(default_factory=dict)
    compacted: Compacted | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """A recorded agent. ``done``: it ended successfully. ``failed``: its last step was a failure. Otherwise it is
    unfinished. ``turns`` are those of the tool loop; ``worked`` are the steps of a user's worker, in order, and
    ``ended`` its end. ``unreadable``: the reason why a record with a begun write cannot be read, or "". ``left``: steps
    of conversations that it left when it started again. ``several``: its turns answer several questions."""

    agent: int
    turns: tuple[PastTurn, ...]
    failed: Failed | None = None
    done: bool = False
    worked: tuple[WorkStep, ...] = ()
    ended: Ended | None = None
    spent: Used | None = None  # from the last step that has it
    unreadable: str = ""
    left: Past | None = None
    several: bool = False

    @property
    def asked(self) -> list[Asked]:
        return [step for step in self.worked if isinstance(step, Asked)]

    @property
    def replies(self) -> list[Reply]:
        """All answers: those of the tool loop, then those to the user's worker."""
        return [turn.reply for turn in self.turns] + [ask.reply for ask in self.asked]

    @property
    def cuts(self) -> list[Compacted]:
        own = [turn.compacted for turn in self.turns if turn.compacted is not None]
        return own + [step for step in self.worked if isinstance(step, Compacted)]

    @property
    def cut_at(self) -> int | None:
        """The number of tokens at which the answer of a successful row was cut; None if the answer is complete."""
        replies = [ask.reply for ask in self.asked] if self.worked else [turn.reply for turn in self.turns[-1:]]
        if not self.done or (self.ended is not None and self.ended.output is not None and not self.ended.truncated):
            return None
        return max(
            (reply.usage.completion_tokens for reply in replies if reply.finish_reason == "length"), default=None
        )

    def restarted(self) -> Past:
        """Return the record of the row for a new conversation."""
        before = self.left or Past(self.agent, ())
        spent = self.spent or Used()
        turns, worked = (*before.turns, *self.turns), (*before.worked, *self.worked)
        return Past(self.agent, (), spent=spent, left=Past(self.agent, turns, worked=worked, spent=spent))


def read_past(agent: int, steps: list[Step]) -> Past:
    """Return what a resumed agent needs, from its recorded steps in order. Raises ValueError for an impossible sequence
    of steps."""
    turns: list[PastTurn] = []
    worked: list[WorkStep] = []
    spent: Used | None = None
    left: Past | None = None
    for step in steps:
        match step:
            case Restarted(spent):
                left = Past(agent, tuple(turns), worked=tuple(worked), spent=spent, left=left).restarted().left
                turns, worked = [], []
            case Asked(digest, _, reply, spent, after):
                if after == OWN:
                    turns.append(PastTurn(reply, spent, digest))
                else:
                    worked.append(step)
            case CallBegun("", place):
                _turn_of(turns, place).begun.add(place)
            case CallWithdrawn("", place):
                _turn_of(turns, place).begun.discard(place)
            case CallWithdrawn(digest, nth):
                worked = [
                    each
                    for each in worked
                    if not isinstance(each, CallBegun) or (each.digest, each.nth) != (digest, nth)
                ]
            case CallEnded("", place):
                _turn_of(turns, place).outcomes[place] = step
            case CallBegun() | CallEnded():
                worked.append(step)
            case Compacted():
                if step.digest:
                    worked.append(step)
                else:
                    turns[-1:] = [replace(_last(turns), compacted=step)]
            case Ended(spent, _, _, reply, asked):
                if reply is not None:
                    turns.append(PastTurn(reply, spent, asked))
            case Failed(_, _, spent):
                pass  # steps after a failure belong to the retry
    asks = [step for step in worked if isinstance(step, Asked)]
    if any(not ALONE <= step.after < place for place, step in enumerate(asks)):
        raise ValueError("a request continues one that is not recorded")
    last = steps[-1] if steps else None
    return Past(
        agent,
        tuple(turns),
        last if isinstance(last, Failed) else None,
        isinstance(last, Ended),
        tuple(worked),
        last if isinstance(last, Ended) else None,
        spent,
        left=left,
    )


def _last(turns: list[PastTurn]) -> PastTurn:
    if not turns:
        raise ValueError("no call and no compaction of the tool loop can come before its first answer")
    return turns[-1]


def _turn_of(turns: list[PastTurn], call: int) -> PastTurn:
    """Return the turn that a recorded call belongs to."""
    if not 0 <= call < len(_last(turns).reply.tool_calls):
        raise ValueError(f"the last turn has no call {call}")
    return turns[-1]


def call_digest(name: str, arguments: str) -> str:
    """Return the digest under which a tool call is recorded. The order of the arguments does not matter."""
    written = arguments.encode("utf-8", "surrogatepass")
    with suppress(ValueError):  # the tool rejects arguments that are not JSON
        try:
            written = orjson.dumps(orjson.loads(arguments or "{}"), option=orjson.OPT_SORT_KEYS)
        except (orjson.JSONDecodeError, TypeError):  # a lone surrogate, or an integer beyond 64 bits
            written = json.dumps(json.loads(arguments or "{}"), sort_keys=True).encode("ascii")
    return blake2b(name.encode("utf-8", "surrogatepass") + b"\0" + written, digest_size=8).hexdigest()


def conversation_of_ask(asks: Sequence[Asked], place: int, shared: Sequence[Message]) -> list[Message]:
    """Return all messages of the request at ``place``, with its answer."""
    pieces: list[list[Message]] = []
    while place >= 0:
        ask = asks[place]
        pieces.append([*ask.said, ask.reply.message()])
        place = ask.after
    if place == SHARED:
        pieces.append(list(shared))
    return [message for piece in reversed(pieces) for message in piece]
