"""What crosses between a world and its agents: observations in, actions and decisions out."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, Literal

from typing_extensions import TypeVar

from batch_agent.messages import JsonObject, Usage
from batch_agent.ticks.plain import text_of

ActionSource = Literal["answer", "late", "last", "fallback"]
IDLE = "idle"

A_co = TypeVar("A_co", covariant=True, default="Action")


@dataclass(slots=True)
class Observation:
    """What an agent perceived. ``source`` names the sense: the world, its ears, another agent."""

    timestamp: datetime
    data: Any
    source: str = "world"
    _text: str | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def text(self) -> str:
        """Return the data as text, computed once: a prompt shows each observation several times."""
        if self._text is None:
            self._text = text_of(self.data)
        return self._text


@dataclass(slots=True)
class Action:
    """What an agent does. ``source`` is its origin, ``seen_tick`` the tick whose observation it answers.

    answer    the model's answer to this tick's observation
    late      the model's answer to an earlier tick's observation
    last      the agent's last action again: no newer answer arrived in time, or nothing has changed
    fallback  there is no answer; ``reasoning`` says why
    """

    tool_name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    reasoning: str | None = None
    source: ActionSource = "answer"
    seen_tick: int | None = None

    def marked(self, source: ActionSource, seen_tick: int | None) -> Action:
        action = copy(self)
        action.parameters, action.source, action.seen_tick = dict(self.parameters or {}), source, seen_tick
        return action

    def as_json(self) -> JsonObject:
        return {"tool": self.tool_name, "params": self.parameters or {}, "reasoning": self.reasoning}


@dataclass(frozen=True, slots=True)
class Decision(Generic[A_co]):
    """What one agent does in one tick. ``action`` is None only if there is neither an answer nor a fallback."""

    action: A_co | None
    source: ActionSource
    seen_tick: int | None = None  # None for a fallback
    usage: Usage = field(default_factory=Usage)
    latency: float | None = None  # seconds from the request to the action, including the wait for a slot
    reason: str = ""  # why it is not an answer to this tick


def idle(why: str) -> Action:
    return Action(IDLE, {}, reasoning=why, source="fallback")


def fault_of(value: object) -> str:
    """Return why the value cannot be used as an Action, or ""."""
    if not isinstance(value, Action):
        return f"a {type(value).__name__}, not an Action"
    name: object = value.tool_name
    parameters: object = value.parameters
    if isinstance(name, str) and isinstance(parameters, dict | None):
        return ""
    return f"an Action of a {type(name).__name__} and a {type(parameters).__name__}, not of a text and a dict"
