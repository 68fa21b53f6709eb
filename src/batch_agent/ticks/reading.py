"""A model's answer → the tool call in it: plain JSON, fenced, in prose, cut off, or ``THINKING:``/``ACTION:`` text.

Whether there is such a tool, and whether the parameters fit, is checked in ``action_space``. Pure code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import cast

from pydantic import JsonValue

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import Invalid, NotJSON
from batch_agent.messages import JsonObject, Reply
from batch_agent.outputs.validate import parse_output
from batch_agent.ticks.action import Action

# The first of each is what models are asked for. They learnt the others elsewhere.
TOOL_KEYS = ("tool", "tool_name", "action", "name", "function")
PARAMETER_KEYS = ("params", "parameters", "arguments", "args")
REASONING_KEYS = ("reasoning", "thinking", "thought", "reason")

_LABEL = re.compile(r"^[ \t*#]*(thinking|thought|reasoning|action|tool|params|parameters)[ \t*]*:[ \t*]*", re.I | re.M)
_NAMED = re.compile(r"`?([A-Za-z0-9_-]{1,64})`?\s*(?:\(\s*\)|:)?\s*")


def read_call(text: str) -> Action:
    """Return the call in an answer. Raises NotJSON or Invalid with a message that a model can correct itself by."""
    labels = _labelled(text)
    try:
        call = _of_object(cast("JsonObject", parse_output(text, _form(*TOOL_KEYS)).value))
    except (NotJSON, Invalid):
        spoken = _of_labels(labels)
        if spoken is None:
            raise
        call = spoken
    call.reasoning = call.reasoning or _first(labels, "thinking", "thought", "reasoning") or None
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
