"""What an agent remembers: the last observations and actions, or whatever a memory of the user's own keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from batch_agent.ticks.action import Action, Observation

KEPT = 10
SHOWN_OBSERVATIONS, SHOWN_ACTIONS = 5, 3

T = TypeVar("T")


class Memory(Protocol):
    """Give an object with these methods as ``Agent(memory=...)`` to remember in another way."""

    def perceive(self, observation: Observation) -> None: ...

    def act(self, action: Action) -> None:
        """The agent chose this; what came of it is for the next observation to say."""
        ...

    def render(self) -> str:
        """What the model is told of the past, the present included."""
        ...

    def clear(self) -> None:
        """An episode begins again."""
        ...


@dataclass(slots=True)
class AgentState:
    """An agent as it is now. The lists are its own, not copies; the newest come last."""

    agent_id: str
    goals: list[str] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    action_history: list[Action] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)


class WindowMemory:
    """The last observations and actions, as they were: ``kept`` of each are held, and the last few are shown."""

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
            lines += [f"- [{one.source}] {one.data}" for one in seen]
        if done := _last(self.actions, self._shown_actions):
            lines.append("Recent actions:")
            lines += [f"- {one.tool_name}: {one.parameters}" for one in done]
        return "\n".join(lines)

    def clear(self) -> None:
        self.observations.clear()
        self.actions.clear()


def _last(items: list[T], count: int) -> list[T]:
    return items[-count:] if count else []
