"""What is recorded of an agent: the steps that cannot be derived again from the spec and the input.

Of the tool loop, prompts, repair prompts and typed outputs are not recorded: its code makes them again from these, so
what comes back after a resume has gone the same way as what came the first time. A user's worker is not ours to run
again: its questions and its output are recorded too.
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
    """What an agent had used when a step was recorded. Times in seconds, ``total`` since it first began; cost in $."""

    sent: int = 0
    retries: int = 0
    queued: float = 0.0
    inference: float = 0.0
    tool_wait: float = 0.0
    total: float = 0.0
    cost: float | None = None


@value_type
class Turn:
    """A complete answer of the model that did not end the agent well. ``asked`` is a digest of what it answers
    (``store.digests``), "" where an older version recorded it."""

    reply: Reply
    spent: Spent
    asked: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """Calls of the last turn, by position, that may write and are about to start."""

    calls: tuple[int, ...]


@value_type
class Outcome:
    """What the model was told of one call of the last turn, by position."""

    call: int
    text: str


@value_type
class Done:
    """The answer that ended the agent well."""

    reply: Reply
    spent: Spent
    asked: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The agent ended in an error; ``text`` is what the model said last."""

    error: AgentError
    text: str
    spent: Spent


@value_type
class Ended:
    """The agent ended well, and not with an answer. ``output`` is what a user's worker returned, as JSON, and
    ``fingerprint`` is that of its run (``store.keys``); None for a worker of our own, which makes its output again."""

    spent: Spent
    output: str | None = None
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Compacted:
    """The conversation was cut after the last turn. ``usage`` is of the model that told what was left out."""

    cut: Cut
    usage: Usage


# What a user's worker did. Each step is found by what was asked or called, and by ``nth``: 0 for the first time that
# the same was asked, 1 for the second.


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer that a user's worker was given. What was asked is the conversation of the earlier ask ``after``, by its
    number from 0, with its answer, and then ``said``. SHARED: what all rows begin with comes before it; ALONE:
    nothing."""

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
    """How a call of a user's worker ended: ``text`` is the result, or the error."""

    digest: str
    nth: int
    name: str
    arguments: str
    ok: bool
    text: str


Step: TypeAlias = Turn | Begun | Outcome | Done | Failed | Ended | Compacted | Asked | CallBegun | CallEnded


@dataclass(frozen=True, slots=True)
class PastTurn:
    """A recorded answer, what became of its tool calls, and how the conversation was cut after that, if it was."""

    reply: Reply
    spent: Spent
    asked: str = ""
    begun: set[int] = field(default_factory=set)
    outcomes: dict[int, str] = field(default_factory=dict)
    compacted: Compacted | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """A recorded agent. ``done`` when it ended well, ``failed`` when its last step was a failure, else under way.
    ``worked`` is what a user's worker asked and called, in order, and ``ended`` how it ended. ``unreadable`` says why
    the record cannot be read although it holds a write that was begun."""

    agent: int
    turns: tuple[PastTurn, ...]
    failed: Failed | None = None
    done: bool = False
    worked: tuple[Asked | CallBegun | CallEnded, ...] = ()
    ended: Ended | None = None
    spent: Spent | None = None  # as the last step that says it tells
    unreadable: str = ""

    @property
    def asked(self) -> list[Asked]:
        return [step for step in self.worked if isinstance(step, Asked)]


def read_past(agent: int, steps: list[Step]) -> Past:
    """The steps of one agent, in the order they were recorded, as what a resumed agent needs of them. Raises ValueError
    for steps that no agent takes."""
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
                    raise ValueError("there is no turn after which it could be")
                turns[-1] = replace(turns[-1], compacted=step)
            case Asked() | CallBegun() | CallEnded():
                worked.append(step)
            case Failed() | Ended():
                pass  # what followed a failure, if anything, is the retry
    asks = [step for step in worked if isinstance(step, Asked)]
    if any(not ALONE <= step.after < place for place, step in enumerate(asks)):
        raise ValueError("an ask goes on from one that is not there")
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
    """The turn that the step of a call belongs to."""
    if not turns or not 0 <= call < len(turns[-1].reply.tool_calls):
        raise ValueError(f"there is no call {call} that it could be of")
    return turns[-1]


def conversation_of_ask(asks: Sequence[Asked], place: int, shared: Sequence[Message]) -> list[Message]:
    """All messages of the ask at ``place``, with its answer."""
    pieces: list[list[Message]] = []
    while place >= 0:
        ask = asks[place]
        pieces.append([*ask.said, ask.reply.message()])
        place = ask.after
    if place == SHARED:
        pieces.append(list(shared))
    return [message for piece in reversed(pieces) for message in piece]
