"""The recorded steps of an agent: those that cannot be derived from the spec and the input.

For the tool loop, prompts, repair prompts and typed outputs are not recorded: its code computes them again from these
steps, so a resumed agent takes the same path. The code of a user's worker may be different each time, so its requests
and its output are recorded too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from batch_agent.compiler.compaction import Cut
from batch_agent.job import AgentError
from batch_agent.messages import Message, Reply, Usage
from batch_agent.value_type import value_type


@value_type
class Spent:
    """What an agent had used when a step was recorded. Times are in seconds, ``total`` since its first start; cost in
    $."""

    sent: int = 0
    retries: int = 0
    queued: float = 0.0
    inference: float = 0.0
    tool_wait: float = 0.0
    total: float = 0.0
    cost: float | None = None


@value_type
class Turn:
    """A complete answer of the model that did not complete the agent. ``asked`` is the digest of the request
    (``record.digests``), "" if an older version recorded it."""

    reply: Reply
    spent: Spent
    asked: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """Positions of calls of the last turn that may write and are about to start."""

    calls: tuple[int, ...]


@value_type
class Outcome:
    """The result text that the model received for one call of the last turn, by position."""

    call: int
    text: str


@value_type
class Done:
    """The answer that completed the agent successfully."""

    reply: Reply
    spent: Spent
    asked: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The agent ended with an error; ``text`` is the last text of the model."""

    error: AgentError
    text: str
    spent: Spent


@value_type
class Ended:
    """The agent ended successfully, without an answer of its own. ``output`` is the return value of a user's worker as
    JSON, and ``fingerprint`` that of its run (``record.keys``). ``output`` is None for a built-in worker, which
    computes it again."""

    spent: Spent
    output: str | None = None
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Compacted:
    """The conversation was compacted after the last turn. ``usage`` is that of the model that summarised the removed
    part."""

    cut: Cut
    usage: Usage


# Steps of a user's worker. Each is found by the digest of the request or call, and by ``nth``: 0 for the first equal
# one, 1 for the second.


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer to a user's worker. The request is the conversation of the earlier request number ``after`` (from 0)
    with its answer, followed by ``said``. SHARED: it starts with the messages that all rows share. ALONE: it starts
    empty."""

    digest: str
    nth: int
    reply: Reply
    spent: Spent
    after: int
    said: tuple[Message, ...]


SHARED, ALONE = -1, -2


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a user's worker that may write and is about to start. ``arguments`` is JSON text."""

    digest: str
    nth: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The end of a call of a user's worker. ``text`` is the result or the error."""

    digest: str
    nth: int
    name: str
    arguments: str
    ok: bool
    text: str


Step: TypeAlias = Turn | Begun | Outcome | Done | Failed | Ended | Compacted | Asked | CallBegun | CallEnded


@dataclass(frozen=True, slots=True)
class PastTurn:
    """A recorded answer, the outcomes of its tool calls, and the compaction after it, if any."""

    reply: Reply
    spent: Spent
    asked: str = ""
    begun: set[int] = field(default_factory=set)
    outcomes: dict[int, str] = field(default_factory=dict)
    compacted: Compacted | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """A recorded agent. ``done``: it ended successfully. ``failed``: its last step was a failure. Otherwise it is
    unfinished. ``worked`` are the requests and calls of a user's worker, in order, and ``ended`` its end.
    ``unreadable`` is the reason why a record that contains a begun write cannot be read."""

    agent: int
    turns: tuple[PastTurn, ...]
    failed: Failed | None = None
    done: bool = False
    worked: tuple[Asked | CallBegun | CallEnded, ...] = ()
    ended: Ended | None = None
    spent: Spent | None = None  # from the last step that has it
    unreadable: str = ""

    @property
    def asked(self) -> list[Asked]:
        return [step for step in self.worked if isinstance(step, Asked)]


def read_past(agent: int, steps: list[Step]) -> Past:
    """Return what a resumed agent needs from its recorded steps, which are given in order. Raises ValueError for an
    impossible sequence of steps."""
    turns: list[PastTurn] = []
    worked: list[Asked | CallBegun | CallEnded] = []
    for step in steps:
        match step:
            case Turn(reply, spent, asked) | Done(reply, spent, asked):
                turns.append(PastTurn(reply, spent, asked))
            case Begun(calls):
                for call in calls:
                    _turn_of(turns, call).begun.add(call)
            case Outcome(call, text):
                _turn_of(turns, call).outcomes[call] = text
            case Compacted():
                if not turns:
                    raise ValueError("a compaction is recorded before the first turn")
                turns[-1] = replace(turns[-1], compacted=step)
            case Asked() | CallBegun() | CallEnded():
                worked.append(step)
            case Failed() | Ended():
                pass  # steps after a failure belong to the retry
    asks = [step for step in worked if isinstance(step, Asked)]
    if any(not ALONE <= step.after < place for place, step in enumerate(asks)):
        raise ValueError("a request continues one that is not recorded")
    last = steps[-1] if steps else None
    return Past(
        agent,
        tuple(turns),
        last if isinstance(last, Failed) else None,
        isinstance(last, Done | Ended),
        tuple(worked),
        last if isinstance(last, Ended) else None,
        next((step.spent for step in reversed(steps) if isinstance(step, Turn | Done | Failed | Ended | Asked)), None),
    )


def _turn_of(turns: list[PastTurn], call: int) -> PastTurn:
    """Return the turn that a recorded call belongs to."""
    if not turns or not 0 <= call < len(turns[-1].reply.tool_calls):
        raise ValueError(f"the last turn has no call {call}")
    return turns[-1]


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
