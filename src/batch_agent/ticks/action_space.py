"""What an agent may do: its tools as instructions for a model, as a schema for decoding, and as validation of answers.

Tools are Tool values, plain functions, JSON descriptions of either common form, or bare names, which take any
parameters. They are never run here: the world acts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from pydantic import JsonValue
from pydantic_core import to_jsonable_python

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import BadArguments, Invalid, SpecError
from batch_agent.messages import JsonObject, ToolSpec
from batch_agent.ticks.action import IDLE, Action
from batch_agent.ticks.reading import read_call
from batch_agent.tools.base import Tool, resolve_tools

FORM = '{"tool": "NAME", "params": {…}, "reasoning": "one short sentence"}'
ANYTHING: JsonObject = {"type": "object"}

Check = Callable[[JsonObject], JsonObject]


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
