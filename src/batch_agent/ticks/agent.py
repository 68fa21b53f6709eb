"""An agent that acts in ticks: what it has seen and done, its goals, its prompt, and how its answer is read.

``_build_context``, ``_parse_action``, ``perceive`` and ``decide_action`` may be overridden. In a runtime, the runtime
asks the model for all agents together; an agent asks by itself only if its ``decide_action`` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol, TypeVar, cast

from pydantic import JsonValue

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import BatchAgentError, Invalid, OutputError, SpecError, WorkerFailed
from batch_agent.option import check_kind
from batch_agent.outputs.validate import parse_output
from batch_agent.ticks.action import Action, ActionSpace, AnswerForm, Observation, fault_of, idle
from batch_agent.ticks.backends import arguments_for, method_of, result_of
from batch_agent.ticks.plain import guarded, text_of

LAST_RESULT = "last_tool_result"

T = TypeVar("T")
Fallback = Action | Callable[[Any], Any]
Priority = float | Callable[[Any], float]


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

    def __init__(self, kept: int = 10, *, observations: int = 5, actions: int = 3) -> None:
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


class Agent:
    """``priority`` decides which agents are asked first: the greater, the sooner. It is a number or a function of the
    observation. ``fallback`` is the action when there is no answer: an Action, or a function of the observation."""

    def __init__(
        self,
        agent_id: str,
        backend: object = None,
        tools: Iterable[object] | None = None,
        goals: Iterable[str] | None = None,
        *,
        fallback: Fallback | None = None,
        priority: Priority = 0.0,
        memory: Memory | None = None,
        system_prompt: str | None = None,
    ) -> None:
        if not agent_id or type(agent_id) is not str:
            raise SpecError(f"agent_id is {text_of(agent_id)}; it is the agent's name, as text")
        if isinstance(goals, str):
            raise SpecError(f"goals is the text {goals!r}: give a list, [{goals!r}]")
        if fallback is not None and not callable(fallback) and (fault := self.fault_of(fallback)):
            raise SpecError(f"fallback is {fault}; give an Action, or a function of the observation")
        if not (callable(priority) or isinstance(priority, int | float)):
            raise SpecError(f"priority is {priority!r}; it is a number, or a function of the observation")
        check_kind(str, "text", system_prompt=system_prompt)
        self.agent_id = agent_id
        self.given_backend = backend
        self.lent_backend: object = None  # the runtime's, for an agent without one
        self.available_tools = tools if isinstance(tools, str) else list(tools or ())
        self.action_space = ActionSpace(self.available_tools)
        self.fallback = fallback
        self.priority = priority
        self.system_prompt = system_prompt
        self._window = WindowMemory()
        self.memory: Memory = self._window if memory is None else memory
        self.state = AgentState(agent_id, list(goals or ()), self._window.observations, self._window.actions)
        self._result: list[object] = []  # result of its last action, until the next observation includes it

    # For users

    def perceive(self, observation: Any, source: str = "world") -> None:
        """Remember an observation, with the reported result of the last action."""
        seen = Observation(datetime.now(), self.with_result(observation), source)
        for memory in self._memories():
            memory.perceive(seen)

    def report(self, result: object) -> None:
        """Set the result of the last action: ``last_tool_result`` of the next observation."""
        self._result = [result]

    @property
    def backend(self) -> object:
        """Return what ``decide_action`` may use: the given object, or the runtime's backend with the same methods."""
        is_object = self.given_backend is not None and not isinstance(self.given_backend, str)
        return self.given_backend if is_object else self.lent_backend

    @backend.setter
    def backend(self, backend: object) -> None:
        self.given_backend = backend

    def decide_action(self) -> Action | None:
        """Ask this agent's backend now, for this agent alone, and wait for the answer. If overridden, the runtime calls
        it instead of sending a request; it may be async."""
        try:
            generate = method_of(self.backend, "generate")
            if generate is None:
                raise WorkerFailed(f"{self.agent_id} has no backend of its own")
            prompt, options = arguments_for(generate, self._build_context(), self.system_text(None))
            said = result_of(guarded("generate", lambda: generate(prompt, **options)))
            if said.error:
                raise WorkerFailed(said.error)
            action = cast(Action, self.read(said.text))
        except BatchAgentError as error:
            return cast(Action, self.fallback_for(str(error)))
        self.remember(action)
        return action

    def add_goal(self, goal: str) -> None:
        self.state.goals.append(goal)

    def clear_goals(self) -> None:
        self.state.goals.clear()

    def get_state(self) -> AgentState:
        return self.state

    def reset(self) -> None:
        """Forget everything: an episode starts again."""
        self._result.clear()
        for memory in self._memories():
            memory.clear()

    # For users to override

    def _build_context(self) -> str:
        """Return the prompt of the next decision. The tools and the form of the answer are in the system prompt."""
        parts = [f"You are agent {self.agent_id}."]
        if self.state.goals:
            parts.append(f"Your goals: {', '.join(self.state.goals)}")
        if remembered := self.memory.render():
            parts.append(remembered)
        parts.append("What do you do next?")
        return "\n\n".join(parts)

    def _parse_action(self, text: str) -> Action | None:
        """Return the action in a model's answer. If there is none, return the fallback with the reason."""
        try:
            return self.action_space.read(text)
        except OutputError as error:
            return idle(str(error))

    # For the runtime

    def with_result(self, observation: Any) -> Any:
        """Return the observation with the reported result of the last action, once."""
        if self._result and isinstance(observation, Mapping):
            return {LAST_RESULT: self._result.pop(), **observation}
        return observation

    @property
    def form(self) -> AnswerForm:
        """Return the form that decoding enforces. An agent with its own parser may get any text."""
        return AnswerForm() if _is_overridden(self._parse_action, Agent._parse_action) else self.action_space.form

    @property
    def decides_itself(self) -> bool:
        return _is_overridden(self.decide_action, Agent.decide_action)

    @property
    def instructions(self) -> str:
        own = _is_overridden(self._parse_action, Agent._parse_action)
        return "" if own and not self.available_tools else self.action_space.instructions

    def system_text(self, general: str | None) -> str:
        """Return the system prompt with the instructions: equal, so cached, for agents with the same tools."""
        return "\n\n".join(filter(None, (self.system_prompt or general, self.instructions)))

    def read(self, text: str) -> object:
        """Return the action in an answer. Raises OutputError if there is none."""
        return self.chosen(self._parse_action(text), "_parse_action", "the answer contains no action")

    def chosen(self, action: object, method: str, nothing: str) -> object:
        """Return what the user's method chose. Raises Invalid if that is nothing, WorkerFailed if it is no action."""
        if isinstance(action, Action) and action.source == "fallback":
            raise Invalid(text_of(action.reasoning or nothing))
        if action is None:
            raise Invalid(nothing)
        if fault := self.fault_of(action):
            raise WorkerFailed(f"{method} returned {fault}")
        return action

    def fallback_for(self, why: str) -> object:
        """Return the action for when there is no answer. If the user's fallback fails too, the agent idles."""
        if self.fallback is None:
            return self._idle(why)
        try:
            return guarded("the fallback", lambda: self._own_fallback(why))
        except BatchAgentError as error:
            return self._idle(f"{why}; and {error}")

    def _own_fallback(self, why: str) -> object:
        seen = self.state.observations[-1].data if self.state.observations else None
        action: object = self.fallback(seen) if callable(self.fallback) else deepcopy(self.fallback)
        if fault := self.fault_of(action):
            raise WorkerFailed(f"the fallback is {fault}")
        if isinstance(action, Action):
            action = action.marked("fallback", None)
            action.reasoning = action.reasoning or why
        return action

    def fault_of(self, action: object) -> str:
        """Return why that is not a valid action of this agent, or ""."""
        return fault_of(action)

    def remember(self, action: object) -> None:
        """Add an action that was chosen to the memory."""
        assert isinstance(action, Action)
        if self.state.action_history and self.state.action_history[-1] is action:
            return  # its own decide_action has remembered it
        for memory in self._memories():
            memory.act(action)

    def recorded(self, value: JsonValue) -> object:
        """Return an action as it was before a trace recorded it."""
        if not isinstance(value, dict):
            return None
        params, reasoning = value.get("params"), value.get("reasoning")
        params = params if isinstance(params, dict) else {}
        return Action(str(value.get("tool")), params, None if reasoning is None else str(reasoning))

    def _idle(self, why: str) -> object:
        return idle(why)

    def _memories(self) -> list[Memory]:
        """Return the window of memories for ``state``, whatever memory the user gave."""
        return [self._window] if self.memory is self._window else [self._window, self.memory]


class TypedAgent(Agent):
    """An agent whose actions are values of a schema instead of tool calls."""

    def __init__(self, agent_id: str, schema: OutputSchema[object], **options: Any) -> None:
        super().__init__(agent_id, **options)
        self._schema = schema

    @property
    def form(self) -> AnswerForm:
        return AnswerForm(self._schema.json_schema, self._schema.json_text)

    @property
    def instructions(self) -> str:
        return f"Choose your next action. Answer with JSON of this schema and nothing else:\n{self._schema.json_text}"

    def read(self, text: str) -> object:
        return parse_output(text, self._schema).value

    def fault_of(self, action: object) -> str:
        return ""

    def remember(self, action: object) -> None:
        plain = self._schema.to_plain(action)
        super().remember(Action("act", plain if isinstance(plain, dict) else {"choice": plain}))

    def recorded(self, value: JsonValue) -> object:
        return None if value is None else self._schema.validate_python(value)

    def _idle(self, why: str) -> object:
        return None


def _is_overridden(method: object, original: object) -> bool:
    return getattr(method, "__func__", None) is not original
