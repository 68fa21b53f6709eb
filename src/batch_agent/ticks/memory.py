"""What an agent remembers: the last observations and actions, or the content of a user's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from batch_agent.ticks.action import Action, Observation
from batch_agent.ticks.plain import text_of

KEPT = 10
SHOWN_OBSERVATIONS, SHOWN_ACTIONS = 5, 3

T = TypeVar("T")


class Memory(Protocol):
    """Give an object with these methods as ``Agent(memory=...)`` to remember in another way."""

    def perceive(self, observation: Observation) -> None: ...

    def act(self, action: Action) -> None:
        """Add an action that the agent chose. Its result comes with a later observation."""

    def render(self) -> str:
        """Return the part of the prompt about the past and the present."""

    def clear(self) -> None:
        """Forget everything: an episode starts again."""


@dataclass(slots=True)
class AgentState:
    """The current state of an agent. The lists are the agent's own, not copies; the newest entries are last."""

    agent_id: str
    goals: list[str] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    action_history: list[Action] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)


class WindowMemory:
    """Keeps the last ``kept`` observations and actions, and shows the last few of each in the prompt."""

    def __init__(
        self, kept: int = KEPT, *, observations: int = SHOWN_OBSERVATIONS, actions: int = SHOWN_ACTIONS
    ) -> None:
        self.observations: list[Observation] = []
        self.actions: list[Action] = []
        self._kept = kept
        self._shown_observations, self._shown_actions = observations, actions

    def perceive(self, observation: Observation) -> None:
        self.observations.append(observation)
        del self.observations[: -self._kept]

    def act(self, action: Action) -> None:
        self.actions.append(action)
        del self.actions[: -self._kept]

    def render(self) -> str:
        lines = []
        if seen := _last(self.observations, self._shown_observations):
            lines.append("Recent observations, the newest last:")
            lines += [f"- [{one.source}] {one.text}" for one in seen]
        if done := _last(self.actions, self._shown_actions):
            lines.append("Recent actions:")
            lines += [f"- {one.tool_name}: {text_of(one.parameters)}" for one in done]
        return "\n".join(lines)

    def clear(self) -> None:
        self.observations.clear()
        self.actions.clear()


def _last(items: list[T], count: int) -> list[T]:
    return items[-count:] if count else []
