"""Judges from refusals and answers whether a server enforces the schema that it is sent. Pure."""

from __future__ import annotations

import re
from typing import Literal

from batch_agent.errors import ContextOverflow, OutputError, Rejected
from batch_agent.messages import JsonObject
from batch_agent.outputs.extract import strip_reasoning
from batch_agent.outputs.surrogates import read_json

_NAMED = re.compile(
    r"response_?format|json_?schema|text\.format|structured.?output|guided|grammar|not support\w* .*schema",
    re.IGNORECASE,
)
_UNCLEAR = frozenset({400, 415, 422, 501})


def blamed(refusal: Rejected) -> Literal["surely", "perhaps", "no"]:
    """Return whether the schema is the reason for a refusal. "perhaps": another field may be the reason."""
    if isinstance(refusal, ContextOverflow) or refusal.status is None:
        return "no"
    if refusal.status in _UNCLEAR:
        return "surely" if _NAMED.search(str(refusal)) else "perhaps"
    return "no"


def is_kept(text: str, schema: JsonObject) -> bool:
    """Return whether a complete answer looks as if the schema was enforced by a grammar."""
    try:
        value = read_json(strip_reasoning(text.strip()))
    except (ValueError, OutputError):
        return False
    schema = _root(schema)
    match schema.get("type"):
        case "object":
            required = schema.get("required")
            return isinstance(value, dict) and set(required if isinstance(required, list) else ()) <= value.keys()
        case "array":
            return isinstance(value, list)
    return True


def _root(schema: JsonObject) -> JsonObject:
    target, definitions = schema.get("$ref"), schema.get("$defs")
    if isinstance(target, str) and isinstance(definitions, dict):
        found = definitions.get(target.removeprefix("#/$defs/"))
        return found if isinstance(found, dict) else schema
    return schema
