"""What crosses between a world and its agents: observations in, actions and decisions out. Pure.

Tools are instructions for a model, a schema for decoding, and a check of answers. They are Tool values, plain
functions, JSON descriptions of either common form, or bare names, which take any parameters. They are never run here:
the world acts. An answer is plain JSON, fenced, in prose, cut off, or ``THINKING:``/``ACTION:`` text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any, Generic, Literal, cast

from pydantic import JsonValue
from pydantic_core import to_jsonable_python
from typing_extensions import TypeVar

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import BadArguments, Invalid, NotJSON, SpecError
from batch_agent.messages import JsonObject, Reply, ToolSpec, Usage
from batch_agent.outputs.validate import parse_output
from batch_agent.ticks.plain import text_of
from batch_agent.tools.base import Tool, resolve_tools

ActionSource = Literal["answer", "late", "last", "fallback"]
IDLE = "idle"

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


def read_call(text: str) -> Action:
    """Return the call in an answer. Raises NotJSON or Invalid with a message that a model can correct itself by."""
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
    """Return the text after each label, up to the next one. The last label of a name counts."""
    found = list(_LABEL.finditer(text))
    ends = [*(label.start() for label in found[1:]), len(text)]
    return {label[1].lower(): text[label.end() : end].strip() for label, end in zip(found, ends, strict=False)}


def _first(labels: Mapping[str, str], *names: str) -> str:
    return next((labels[name] for name in names if labels.get(name)), "")


def _of_labels(labels: Mapping[str, str]) -> Action | None:
    """Return the call in ``ACTION: move {"x": 1}``. The parameters may have a label of their own."""
    named = _NAMED.match(_first(labels, "action", "tool"))
    if named is None:
        return None
    rest = named.string[named.end() :] or _first(labels, "params", "parameters")
    return Action(named[1], _object_in(rest) if "{" in rest else {}, None)


def _object_in(text: str) -> JsonObject:
    return cast("JsonObject", parse_output(text, _form()).value) if text.strip() else {}


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer must be: JSON of the schema, or a call of one of the tools. None: anything."""

    schema: JsonObject | None = None
    text: str = ""  # the schema as text
    tools: tuple[ToolSpec, ...] = ()


class ActionSpace:
    """``form`` is that of an answer, ``instructions`` are for a model."""

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
    """Return the parameters as the function's annotations read them, as JSON. Defaults are left to the function."""
    try:
        arguments = tool.signature.parse(json.dumps(params))
    except BadArguments as error:
        raise Invalid(f"params of {tool.name}: {error}") from None
    return cast("JsonObject", to_jsonable_python(dict(arguments.values), fallback=str))


def _of_description(value: Mapping[object, object]) -> ToolSpec:
    inner = value.get("function")
    described = inner if isinstance(inner, Mapping) else value
    name, parameters = described.get("name"), described.get("parameters", described.get("input_schema"))
    if not isinstance(name, str) or not name:
        raise SpecError(f"a tool's description has no name: {dict(value)!r}")
    if parameters is None:
        parameters = ANYTHING
    if not isinstance(parameters, Mapping):
        raise SpecError(f"tool {name}: parameters must be a JSON schema, not {parameters!r}")
    return ToolSpec(name, str(described.get("description") or ""), cast("JsonObject", dict(parameters)))


def _schema(tools: Iterable[ToolSpec]) -> JsonObject:
    """Return a schema with one form for each tool, so that decoding allows nothing else."""
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
