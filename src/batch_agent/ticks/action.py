"""What crosses between a world and its agents: observations in, actions and decisions out."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, Literal

from typing_extensions import TypeVar

from batch_agent.messages import Usage

Source = Literal["answer", "late", "last", "fallback"]
SOURCES: tuple[Source, ...] = ("answer", "late", "last", "fallback")
IDLE = "idle"

A_co = TypeVar("A_co", covariant=True, default="Action")


@dataclass(slots=True)
class Observation:
    """What an agent perceived; ``source`` is through what: the world, its ears, another agent."""

    timestamp: datetime
    data: Any
    source: str = "world"


@dataclass(slots=True)
class Action:
    """What an agent does. ``source`` says where it comes from, ``seen_tick`` which tick's observation it answers:

    answer    the model's, to this tick's observation
    late      the model's, to an earlier one's
    last      what the agent did last, again: nothing newer came in time, or nothing has changed
    fallback  nothing could be had; ``reasoning`` says why
    """

    tool_name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    reasoning: str | None = None
    source: Source = "answer"
    seen_tick: int | None = None


@dataclass(frozen=True, slots=True)
class Decision(Generic[A_co]):
    """What one agent does in one tick, and where that comes from. ``action`` is None only where nothing could be had
    and no fallback was given."""

    action: A_co | None
    source: Source
    seen_tick: int | None = None  # None of a fallback: it saw nothing
    usage: Usage = field(default_factory=Usage)
    latency: float | None = None  # seconds from the question to the action, waiting for a slot included
    reason: str = ""  # why it is not an answer to this tick


def idle(why: str) -> Action:
    return Action(IDLE, {}, reasoning=why, source="fallback")
