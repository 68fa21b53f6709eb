"""The short form of ``--schema``: the fields of an answer with their types, which become a JSON schema.

    {"label": "a|b|c", "score": "number", "why": "text", "tags": ["text"], "place": {"city": "text"}}

A JSON schema, from the command line or from a .json file, is used unchanged. ``module:Class`` is returned unchanged;
``specfile`` resolves it.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import JsonValue

from batch_agent.cli.spec.textfile import read_text
from batch_agent.compiler.schema import JSON_TYPES
from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject

TYPES = {
    **dict.fromkeys(("text", "string", "str"), "string"),
    **dict.fromkeys(("number", "float"), "number"),
    **dict.fromkeys(("integer", "int"), "integer"),
    **dict.fromkeys(("boolean", "bool"), "boolean"),
}
COMBINED = ("$schema", "$ref", "anyOf", "oneOf", "allOf", "enum")
CHOICE = "|"


def schema_of(text: str, directory: Path) -> JsonObject | str:
    """Return a JSON schema, or ``text`` itself if it is a reference."""
    if text.lstrip().startswith("{"):
        value = _parse(text, "")
    elif text.endswith(".json"):
        path = directory / text
        value = _parse(read_text(path), f"{path}: ")
    else:
        return text
    if not isinstance(value, dict):
        raise SpecError("must be an object")
    return value if _is_schema(value) else _object(value)


def _parse(text: str, where: str) -> JsonValue:
    try:
        value: JsonValue = json.loads(text)
    except ValueError as error:
        raise SpecError(f"{where}is not JSON: {error}") from None
    return value


def _is_schema(value: JsonObject) -> bool:
    return (
        value.get("type") in JSON_TYPES
        or isinstance(value.get("properties"), dict)
        or any(name in value for name in COMBINED)
    )


def _object(fields: JsonObject) -> JsonObject:
    if not fields:
        raise SpecError('names no field; give fields as {"label": "a|b|c"}')
    properties: JsonObject = {name: _field(name, value) for name, value in fields.items()}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _field(name: str, value: JsonValue) -> JsonObject:
    if isinstance(value, dict):
        return value if _is_schema(value) else _object(value)
    if isinstance(value, list) and len(value) == 1:
        return {"type": "array", "items": _field(name, value[0])}
    if isinstance(value, str) and value in TYPES:
        return {"type": TYPES[value]}
    choices = value.split(CHOICE) if isinstance(value, str) else []
    if len(choices) > 1 and all(choice.strip() for choice in choices):
        return {"type": "string", "enum": [choice.strip() for choice in choices]}
    schema = f"; the type of a JSON schema is {', '.join(JSON_TYPES)}" if name == "type" else ""
    raise SpecError(
        f"{name} is {json.dumps(value)}: a field is text, number, integer, boolean, a choice such as a|b|c, "
        f"a list of one of these or an object{schema}"
    )
