"""An agent that acts in ticks: what it has seen and done, its goals, its prompt, its tools, and how its answer is read.

``_build_context``, ``_parse_action``, ``perceive`` and ``decide_action`` may be overridden. In a runtime, the runtime
asks the model for all agents together; an agent asks by itself only if its ``decide_action`` is called.

Tools are instructions for a model, a schema for decoding, and a check of answers. They are Tool values, plain
functions, JSON descriptions of either common form, or bare names, which take any parameters. They are never run here:
the world acts. An answer is plain JSON, fenced, in prose, cut off, or ``THINKING:``/``ACTION:`` text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any, Generic, Literal, Protocol, cast

from pydantic import JsonValue
from pydantic_core import to_jsonable_python
from typing_extensions import TypeVar

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import BadArguments, BatchAgentError, Invalid, NotJSON, OutputError, SpecError, WorkerFailed
from batch_agent.messages import JsonObject, Reply, ToolSpec, Usage
from batch_agent.option import check_kind
from batch_agent.outputs.validate import parse_output
from batch_agent.ticks.plain import arguments_for, guarded, method_of, result_of, text_of
from batch_agent.tools.base import Tool, resolve_tools

ActionSource = Literal["answer", "late", "last", "fallback"]
IDLE = "idle"
LAST_RESULT = "last_tool_result"

T = TypeVar("T")
A_co = TypeVar("A_co", covariant=True, default="Action")

FORM = '{"tool": "NAME", "params": {…}, "reasoning": "one short sentence"}'
ANYTHING: JsonObject = {"type": "object"}
# The first of each is what models are asked for. They learnt the others elsewhere.
TOOL_KEYS = ("tool", "tool_name", "action", "name", "function")
PARAMETER_KEYS = ("params", "parameters", "arguments", "args")
REASONING_KEYS = ("reasoning", "thinking", "thought", "reason")

Check = Callable[[JsonObject], JsonObject]

_LABEL = re.compile(r"^[ \t*#]*(thinking|thought|reasoning|action|tool|params|parameters)[ \t*]*:[ \t*]*", re.I | re.M)
_NAMED = re.compile(r"`?([A-Za-z0-9_-]{1,64})`?\s*(?:\(\s*\)|:)?\s*")


@dataclass(slots=True)
class Observation:
    """What an agent perceived. ``source`` names where it comes from: the world, a sense such as hearing, another
    agent."""

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
        action.parameters = dict(self.parameters or {})
        action.source = source
        action.seen_tick = seen_tick
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


def read_call(text: str) -> Action:
    """Return the call in an answer. Raises NotJSON or Invalid; the message lets a model correct itself."""
    try:
        call = _of_object(cast("JsonObject", parse_output(text, _form(*TOOL_KEYS)).value))
    except (NotJSON, Invalid):
        spoken = _of_labels(_labelled(text))
        if spoken is None:
            raise
        call = spoken
    if not call.reasoning:
        call.reasoning = _first(_labelled(text), "thinking", "thought", "reasoning") or None
    return call


def text_of_reply(reply: Reply) -> str:
    """Return the answer as text. A tool call becomes equivalent JSON."""
    if not reply.tool_calls:
        return reply.text
    call = reply.tool_calls[0]
    return json.dumps({"tool": call.name, "params": call.arguments, "reasoning": reply.text or None})


@cache
def _form(*keys: str) -> OutputSchema[object]:
    """Return the schema of an object with at least one of the keys, if any are given."""
    named = [{"required": [key], "properties": {key: {"type": ["string", "object"]}}} for key in keys]
    schema = OutputSchema.of({"type": "object", **({"anyOf": named} if keys else {})})
    assert schema is not None
    return schema


def _of_object(value: Mapping[str, JsonValue]) -> Action:
    tool = _value(value, TOOL_KEYS)
    if isinstance(tool, Mapping):  # {"action": {"tool": …}}
        inner = _of_object(tool)
        reasoning = inner.reasoning or _text(_value(value, REASONING_KEYS))
        return Action(inner.tool_name, inner.parameters or _params(value), reasoning)
    if not isinstance(tool, str) or not tool.strip():
        raise Invalid(f"{TOOL_KEYS[0]}: the name of a tool is missing")
    return Action(tool.strip(), _params(value), _text(_value(value, REASONING_KEYS)))


def _params(value: Mapping[str, JsonValue]) -> JsonObject:
    params = _value(value, PARAMETER_KEYS)
    if params is None:
        return {}
    if isinstance(params, str):  # the form in function calls
        return _object_in(params)
    if not isinstance(params, dict):
        raise Invalid(f"{PARAMETER_KEYS[0]}: must be an object of parameters by name")
    return params


def _value(value: Mapping[str, JsonValue], keys: tuple[str, ...]) -> JsonValue:
    return next((value[key] for key in keys if value.get(key) is not None), None)


def _text(value: JsonValue) -> str | None:
    return value if value is None or isinstance(value, str) else str(value)


def _labelled(text: str) -> Mapping[str, str]:
    """Return the text after each label, up to the next label. If a label occurs twice, the last text counts."""
    found = list(_LABEL.finditer(text))
    ends = [*(label.start() for label in found[1:]), len(text)]
    return {label[1].lower(): text[label.end() : end].strip() for label, end in zip(found, ends, strict=False)}


def _first(labels: Mapping[str, str], *names: str) -> str:
    return next((labels[name] for name in names if labels.get(name)), "")


def _of_labels(labels: Mapping[str, str]) -> Action | None:
    """Return the call in a text such as ``ACTION: move {"x": 1}``; None if there is none. The parameters may have a
    label of their own."""
    named = _NAMED.match(_first(labels, "action", "tool"))
    if named is None:
        return None
    rest = named.string[named.end() :] or _first(labels, "params", "parameters")
    return Action(named[1], _object_in(rest) if "{" in rest else {}, None)


def _object_in(text: str) -> JsonObject:
    return cast("JsonObject", parse_output(text, _form()).value) if text.strip() else {}


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of an answer: JSON of the schema, or a call of one of the tools. None: any form."""

    schema: JsonObject | None = None
    text: str = ""  # the schema as text
    tools: tuple[ToolSpec, ...] = ()


class ActionSpace:
    """The actions of an agent. ``form`` is the form of an answer; ``instructions`` describe the actions to a model."""

    def __init__(self, tools: Iterable[object] = ()) -> None:
        if isinstance(tools, str):
            raise SpecError(f"tools is the text {tools!r}: give a list, [{tools!r}]")
        self._tools: dict[str, tuple[ToolSpec, Check]] = {}
        for tool in tools:
            spec, check = _described(tool)
            if spec.name in self._tools:
                raise SpecError(f"two tools are called {spec.name!r}: give one another name")
            self._tools[spec.name] = spec, check
        specs = tuple(spec for spec, _ in self._tools.values())
        schema = _schema(specs) if specs else None
        self.form = AnswerForm(schema, json.dumps(schema), specs) if specs else AnswerForm()
        self.instructions = _instructions(specs)

    def read(self, text: str) -> Action:
        """Return the action in an answer. Raises NotJSON or Invalid if there is none with these tools."""
        action = read_call(text)
        name = action.tool_name
        if name in self._tools:
            action.parameters = dict(self._tools[name][1](action.parameters))
        elif self._tools and name != IDLE:  # which needs no tool
            raise Invalid(f"tool: there is no tool {name!r}; there are {', '.join(self._tools)}")
        return action


def _described(tool: object) -> tuple[ToolSpec, Check]:
    if isinstance(tool, str):
        return ToolSpec(tool, "", ANYTHING), lambda params: params
    if isinstance(tool, Mapping):
        spec = _of_description(tool)
        schema = OutputSchema.of(spec.parameters)
        assert schema is not None
        return spec, lambda params: cast("JsonObject", schema.validate_python(params))
    [known] = resolve_tools([tool])
    return known.spec, lambda params: _fitted(known, params)


def _fitted(tool: Tool, params: JsonObject) -> JsonObject:
    """Return the parameters as JSON, after the function's annotations were applied to them. Missing ones stay missing:
    the function has their defaults."""
    try:
        arguments = tool.signature.parse(json.dumps(params))
    except BadArguments as error:
        raise Invalid(f"params of {tool.name}: {error}") from None
    return cast("JsonObject", to_jsonable_python(dict(arguments.values), fallback=str))


def _of_description(value: Mapping[object, object]) -> ToolSpec:
    inner = value.get("function")
    described = inner if isinstance(inner, Mapping) else value
    name = described.get("name")
    parameters = described.get("parameters", described.get("input_schema"))
    if not isinstance(name, str) or not name:
        raise SpecError(f"a tool's description has no name: {dict(value)!r}")
    if parameters is None:
        parameters = ANYTHING
    if not isinstance(parameters, Mapping):
        raise SpecError(f"tool {name}: parameters must be a JSON schema, not {parameters!r}")
    return ToolSpec(name, str(described.get("description") or ""), cast("JsonObject", dict(parameters)))


def _schema(tools: Iterable[ToolSpec]) -> JsonObject:
    """Return a schema with one alternative for each tool, so that decoding allows nothing else."""
    definitions: JsonObject = {}
    forms: list[JsonValue] = []
    for tool in tools:
        params = dict(tool.parameters)
        if "$defs" in params:  # they are resolved at the root, where two tools may have equal names
            moved: JsonObject = json.loads(json.dumps(params).replace('"#/$defs/', f'"#/$defs/{tool.name}.'))
            own = cast("JsonObject", moved.pop("$defs"))
            definitions |= {f"{tool.name}.{name}": definition for name, definition in own.items()}
            params = moved
        form: JsonObject = {
            "type": "object",
            "properties": {
                "tool": {"type": "string", "enum": [tool.name]},
                "params": params,
                "reasoning": {"type": "string"},
            },
            "required": ["tool", "params"],  # a reason takes as long to write as the action
            "additionalProperties": False,
        }
        forms.append(form)
    schema: JsonObject = forms[0] if len(forms) == 1 and isinstance(forms[0], dict) else {"anyOf": forms}
    return {**schema, "$defs": definitions} if definitions else schema


def _instructions(tools: Sequence[ToolSpec]) -> str:
    lines = ["Choose your next action. Answer with one JSON object and nothing else:", FORM]
    if tools:
        lines.append("The tools:")
        lines += [
            f"- {tool.name}: {' '.join(tool.description.split())} params: {json.dumps(tool.parameters)}"
            for tool in tools
        ]
    return "\n".join(lines)


# Agents

Fallback = Action | Callable[[Any], Any]
Priority = float | Callable[[Any], float]


class Memory(Protocol):
    """What an agent remembers. Give an object with these methods as ``Agent(memory=...)`` to replace it."""

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
        """The backend that ``decide_action`` may use: the given object, or the runtime's backend with the same
        methods."""
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
        """Return the observation with the reported result of the last action. The result is only added once."""
        if self._result and isinstance(observation, Mapping):
            return {LAST_RESULT: self._result.pop(), **observation}
        return observation

    @property
    def form(self) -> AnswerForm:
        """The form that decoding enforces. An agent that overrides the parser may get any text."""
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
        """Return the action that the user's method chose. Raises Invalid with ``nothing`` if it chose none,
        WorkerFailed if it returned something else."""
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
        """Return the reason why a value is not a valid action of this agent, or ""."""
        if not isinstance(action, Action):
            return f"a {type(action).__name__}, not an Action"
        name: object = action.tool_name
        parameters: object = action.parameters
        if isinstance(name, str) and isinstance(parameters, dict | None):
            return ""
        return f"an Action of a {type(name).__name__} and a {type(parameters).__name__}, not of a text and a dict"

    def remember(self, action: object) -> None:
        """Add an action that was chosen to the memory."""
        assert isinstance(action, Action)
        if self.state.action_history and self.state.action_history[-1] is action:
            return  # its own decide_action has remembered it
        for memory in self._memories():
            memory.act(action)

    def recorded(self, value: JsonValue) -> object:
        """Return the action from the form in which a trace recorded it."""
        if not isinstance(value, dict):
            return None
        params, reasoning = value.get("params"), value.get("reasoning")
        params = params if isinstance(params, dict) else {}
        return Action(str(value.get("tool")), params, None if reasoning is None else str(reasoning))

    def _idle(self, why: str) -> object:
        return idle(why)

    def _memories(self) -> list[Memory]:
        """Return the memories for ``state``: the window of recent ones and the memory that the user gave."""
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
