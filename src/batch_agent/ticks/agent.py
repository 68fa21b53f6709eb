"""An agent that acts in ticks: what it has seen and done, what it wants, how its prompt is made and its answer read.

``_build_context``, ``_parse_action``, ``perceive`` and ``decide_action`` may be overridden. An agent asks nobody by
itself unless its ``decide_action`` is called: in a runtime, the runtime asks for all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from datetime import datetime
from typing import Any

from pydantic import JsonValue

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import Invalid, OutputError, SpecError
from batch_agent.foreign import describe
from batch_agent.messages import JsonObject
from batch_agent.outputs.validate import parse_output
from batch_agent.ticks.action import Action, Observation, idle
from batch_agent.ticks.generation import GeneratesOne, arguments_for, result_of
from batch_agent.ticks.memory import AgentState, Memory, WindowMemory
from batch_agent.ticks.repertoire import Repertoire

LAST_RESULT = "last_tool_result"

Fallback = Action | Callable[[Any], Any]
Priority = float | Callable[[Any], float]


class Agent:
    """``priority``: who is asked first, the greater the sooner; a number, or a function of the observation.
    ``fallback``: what it does when nothing can be had; an Action, or a function of the observation."""

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
            raise SpecError(f"agent_id is {agent_id!r}; it is the agent's name, as text")
        if isinstance(goals, str):
            raise SpecError(f"goals is the text {goals!r}: give a list, [{goals!r}]")
        if not (fallback is None or callable(fallback) or self.accepts(fallback)):
            raise SpecError(
                f"fallback is a {type(fallback).__name__}; it is an Action, or a function of the observation"
            )
        if not (callable(priority) or isinstance(priority, int | float)):
            raise SpecError(f"priority is {priority!r}; it is a number, or a function of the observation")
        self.agent_id = agent_id
        self.given_backend = backend
        self.lent_backend: object = None  # the runtime's, with generate and its siblings, for who has none
        self.available_tools = tools if isinstance(tools, str) else list(tools or ())
        self.repertoire = Repertoire(self.available_tools)
        self.fallback = fallback
        self.priority = priority
        self.system_prompt = system_prompt
        self._window = WindowMemory()
        self.memory: Memory = self._window if memory is None else memory
        self.state = AgentState(agent_id, list(goals or ()), self._window.observations, self._window.actions)
        self._result: list[object] = []  # of its last action, until it was told

    # What people call

    def perceive(self, observation: Any, source: str = "world") -> None:
        """Remember what was observed, with the result of the last action where the world did not bring it."""
        seen = Observation(datetime.now(), self.with_result(observation), source)
        self._window.perceive(seen)
        if self.memory is not self._window:
            self.memory.perceive(seen)

    def report(self, result: object) -> None:
        """What came of the last action: ``last_tool_result`` of the next observation."""
        self._result = [result]

    @property
    def backend(self) -> object:
        """What ``decide_action`` may ask: the object that was given, or the runtime's, under the same names."""
        is_object = self.given_backend is not None and not isinstance(self.given_backend, str)
        return self.given_backend if is_object else self.lent_backend

    @backend.setter
    def backend(self, backend: object) -> None:
        self.given_backend = backend

    def decide_action(self) -> Action | None:
        """Ask this agent's backend now, for this agent alone, and wait for the answer. Overridden, it is what the
        runtime calls in place of asking; it may be async."""
        action = self._decide_alone()
        if action.source != "fallback":
            self.remember(action)
        return action

    def _decide_alone(self) -> Action:
        backend = self.backend
        if not isinstance(backend, GeneratesOne):
            return self._fall_back(f"{self.agent_id} has no backend that it could ask by itself")
        prompt, options = arguments_for(backend.generate, self._build_context(), self.system_text(None))
        try:
            said = result_of(backend.generate(prompt, **options))
        except Exception as error:
            return self._fall_back(describe(error))
        if said.error:
            return self._fall_back(said.error)
        action = self._parse_action(said.text)
        if action is None or action.source == "fallback":
            return self._fall_back("there is no action in the answer" if action is None else action.reasoning or "")
        return action

    def _fall_back(self, why: str) -> Action:
        action = self.fallback_for(why)
        return action if isinstance(action, Action) else idle(why)

    def add_goal(self, goal: str) -> None:
        self.state.goals.append(goal)

    def clear_goals(self) -> None:
        self.state.goals.clear()

    def get_state(self) -> AgentState:
        return self.state

    def reset(self) -> None:
        """An episode begins again: nothing is remembered."""
        self._result.clear()
        self._window.clear()
        if self.memory is not self._window:
            self.memory.clear()

    # What people override

    def _build_context(self) -> str:
        """The prompt of the next decision. What may be done, and how to say it, is told beside it."""
        parts = [f"You are agent {self.agent_id}."]
        if self.state.goals:
            parts.append(f"Your goals: {', '.join(self.state.goals)}")
        if remembered := self.memory.render():
            parts.append(remembered)
        parts.append("What do you do next?")
        return "\n\n".join(parts)

    def _parse_action(self, text: str) -> Action | None:
        """The action in a model's words; where there is none, the fallback with the reason."""
        try:
            return self.repertoire.read(text)
        except OutputError as error:
            return idle(str(error))

    # What the runtime calls

    def with_result(self, observation: Any) -> Any:
        """The observation, and what was reported of the last action, once."""
        if self._result and isinstance(observation, Mapping):
            return {LAST_RESULT: self._result.pop(), **observation}
        return observation

    @property
    def schema(self) -> JsonObject | None:
        """What an answer is held to while it is written; nothing, where answers are read in the agent's own way."""
        return None if _is_overridden(self._parse_action, Agent._parse_action) else self.repertoire.schema

    @property
    def schema_text(self) -> str:
        """The same, as text by which agents with one schema are known."""
        return "" if self.schema is None else self.repertoire.schema_text

    @property
    def decides_itself(self) -> bool:
        return _is_overridden(self.decide_action, Agent.decide_action)

    @property
    def instructions(self) -> str:
        own = _is_overridden(self._parse_action, Agent._parse_action)
        return "" if own and not self.available_tools else self.repertoire.instructions

    def system_text(self, general: str | None) -> str:
        """What the model is told before the prompt: alike for agents with the same tools, so that it is shared."""
        return "\n\n".join(filter(None, (self.system_prompt or general, self.instructions)))

    def read(self, text: str) -> object:
        """The action that an answer means. OutputError where it means none."""
        action = self._parse_action(text)
        if action is None:
            raise Invalid("there is no action in it")
        if action.source == "fallback":
            raise Invalid(action.reasoning or "there is no action in it")
        return action

    def fallback_for(self, why: str) -> object:
        """What the agent does when nothing can be had. A fallback of the user's that fails is idling, too."""
        if self.fallback is None:
            return self._idle(why)
        seen = self.state.observations[-1].data if self.state.observations else None
        try:
            action = self.fallback(seen) if callable(self.fallback) else deepcopy(self.fallback)
        except Exception as error:
            return self._idle(f"{why}; and the fallback raised {describe(error)}")
        if not self.accepts(action):
            return self._idle(f"{why}; and the fallback is a {type(action).__name__}, not an Action")
        if isinstance(action, Action):
            action = replace(action, source="fallback", seen_tick=None, reasoning=action.reasoning or why)
        return action

    def accepts(self, action: object) -> bool:
        """Whether that is an action of this agent's."""
        return isinstance(action, Action)

    def remember(self, action: object) -> None:
        """It was chosen, and the world is told."""
        assert isinstance(action, Action)
        if self.state.action_history and self.state.action_history[-1] is action:
            return  # its own decide_action has remembered it
        self._window.act(action)
        if self.memory is not self._window:
            self.memory.act(action)

    def recorded(self, value: JsonValue) -> object:
        """An action as a trace tells of it."""
        if not isinstance(value, dict):
            return None
        params, reasoning = value.get("params"), value.get("reasoning")
        return Action(
            str(value.get("tool")),
            dict(params) if isinstance(params, dict) else {},
            None if reasoning is None else str(reasoning),
        )

    def _idle(self, why: str) -> object:
        return idle(why)


class TypedAgent(Agent):
    """An agent whose actions are values of a schema in place of tool calls."""

    def __init__(self, agent_id: str, schema: OutputSchema[object], **options: Any) -> None:
        super().__init__(agent_id, **options)
        self._schema = schema

    @property
    def schema(self) -> JsonObject | None:
        return self._schema.json_schema

    @property
    def schema_text(self) -> str:
        return self._schema.json_text

    @property
    def instructions(self) -> str:
        return f"Choose your next action. Answer with JSON of this schema and nothing else:\n{self._schema.json_text}"

    def read(self, text: str) -> object:
        return parse_output(text, self._schema).value

    def accepts(self, action: object) -> bool:
        return True

    def remember(self, action: object) -> None:
        plain = self._schema.to_plain(action)
        super().remember(Action("act", plain if isinstance(plain, dict) else {"choice": plain}))

    def recorded(self, value: JsonValue) -> object:
        return None if value is None else self._schema.validate_python(value)

    def _idle(self, why: str) -> object:
        return None


def _is_overridden(method: object, original: object) -> bool:
    return getattr(method, "__func__", None) is not original
