"""What is recorded of an agent: the steps that cannot be derived again from the spec and the input.

Prompts, repair prompts and typed outputs are not recorded: the agent's own code makes them again from these, so what
comes back after a resume has gone the same way as what came the first time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

from batch_agent.compiler.compaction import Cut
from batch_agent.job import AgentError
from batch_agent.messages import Reply, Usage


@dataclass(frozen=True, slots=True)
class Spent:
    """What an agent had used when a step was recorded. Times in seconds, ``total`` since it first began; cost in $."""

    sent: int = 0
    retries: int = 0
    queued: float = 0.0
    inference: float = 0.0
    tool_wait: float = 0.0
    total: float = 0.0
    cost: float | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """A complete answer of the model that did not end the agent well."""

    reply: Reply
    spent: Spent


@dataclass(frozen=True, slots=True)
class Begun:
    """Calls of the last turn, by position, that may write and are about to start."""

    calls: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the model was told of one call of the last turn, by position."""

    call: int
    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The answer that ended the agent well."""

    reply: Reply
    spent: Spent


@dataclass(frozen=True, slots=True)
class Failed:
    """The agent ended in an error; ``text`` is what the model said last."""

    error: AgentError
    text: str
    spent: Spent


@dataclass(frozen=True, slots=True)
class Ended:
    """The agent ended well, and not with an answer: its worker did something after the last, or asked nothing."""

    spent: Spent


@dataclass(frozen=True, slots=True)
class Compacted:
    """The conversation was cut after the last turn. ``usage`` is of the model that told what was left out."""

    cut: Cut
    usage: Usage


Step: TypeAlias = Turn | Begun | Outcome | Done | Failed | Ended | Compacted


@dataclass(frozen=True, slots=True)
class PastTurn:
    """A recorded answer, what became of its tool calls, and how the conversation was cut after that, if it was."""

    reply: Reply
    spent: Spent
    begun: set[int] = field(default_factory=set)
    outcomes: dict[int, str] = field(default_factory=dict)
    compacted: Compacted | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """A recorded agent. ``done`` when it ended well, ``failed`` when its last step was a failure, else under way."""

    agent: int
    turns: tuple[PastTurn, ...]
    failed: Failed | None = None
    done: bool = False


def read_past(agent: int, steps: list[Step]) -> Past:
    """The steps of one agent, in the order they were recorded, as what a resumed agent needs of them. Raises ValueError
    for steps that no agent takes."""
    turns: list[PastTurn] = []
    for step in steps:
        match step:
            case Turn(reply, spent) | Done(reply, spent):
                turns.append(PastTurn(reply, spent))
            case Begun(calls):
                for call in calls:
                    _turn_of(turns, call).begun.add(call)
            case Outcome(call, text):
                _turn_of(turns, call).outcomes[call] = text
            case Compacted():
                if not turns:
                    raise ValueError("there is no turn after which it could be")
                turns[-1] = replace(turns[-1], compacted=step)
            case Failed() | Ended():
                pass  # what followed a failure, if anything, is the retry
    last = steps[-1] if steps else None
    return Past(agent, tuple(turns), last if isinstance(last, Failed) else None, isinstance(last, Done | Ended))


def _turn_of(turns: list[PastTurn], call: int) -> PastTurn:
    """The turn that the step of a call belongs to."""
    if not turns or not 0 <= call < len(turns[-1].reply.tool_calls):
        raise ValueError(f"there is no call {call} that it could be of")
    return turns[-1]
