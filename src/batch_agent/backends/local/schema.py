"""Questions about a JSON schema that its grammar depends on: where references lead, which keywords speak of which type,
whether branches can overlap, how many strings are open-ended. Nothing here knows of grammars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, cast

from pydantic import JsonValue

from batch_agent.backends.local.terminals import json_text
from batch_agent.messages import JsonObject

ANNOTATIONS: Final = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
        *("contentEncoding", "contentMediaType", "$schema", "$id", "$comment", "$defs", "definitions"),
    }
)
KEYWORDS: Final[Mapping[str, frozenset[str]]] = {
    "string": frozenset({"minLength", "maxLength", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset(
        {"properties", "required", "additionalProperties", "propertyNames", "minProperties", "maxProperties"}
    ),
    "boolean": frozenset(),
    "null": frozenset(),
}
TYPICAL_ITEMS: Final = 4  # an array shares the room as if it had so many


class Inexpressible(Exception):
    """The schema asks for something that no grammar of ours keeps; the message says what and where."""


def count(said: JsonObject, key: str) -> int | None:
    value = said.get(key)
    return int(value) if isinstance(value, (int, float)) else None


def about(kind: str, said: JsonObject) -> JsonObject:
    """The keywords that speak of one type; JSON schema ignores the others where the value is of that type."""
    others = frozenset().union(*(words for name, words in KEYWORDS.items() if name != kind))
    return {key: value for key, value in said.items() if key in KEYWORDS.get(kind, ()) or key not in others}


def implied_type(said: JsonObject) -> str | None:
    return next((kind for kind in ("object", "array") if said and said.keys() <= KEYWORDS[kind]), None)


def resolve(document: JsonObject, pointer: str) -> JsonValue:
    if not pointer.startswith("#"):
        raise Inexpressible(f"$ref {pointer}: only references within the schema")
    found: JsonValue = document
    for step in pointer.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or step not in found:
            raise Inexpressible(f"$ref {pointer} leads nowhere")
        found = found[step]
    return found


def without_decimal_text(branches: Sequence[JsonValue]) -> list[JsonValue]:
    """A Decimal is a number or a string of a pattern: the number says it all."""
    kinds = [branch.get("type") if isinstance(branch, dict) else None for branch in branches]
    if "number" not in kinds:
        return list(branches)
    return [branch for branch in branches if not (isinstance(branch, dict) and "pattern" in branch)]


def disjoint(document: JsonObject, branches: Sequence[JsonValue]) -> bool:
    """Whether no value can satisfy two of the branches, judged by type and by literal properties."""
    resolved = []
    for branch in branches:
        while isinstance(branch, dict) and "$ref" in branch:
            branch = resolve(document, str(branch["$ref"]))
        if not isinstance(branch, dict):
            return False
        resolved.append(branch)
    return all(_apart(first, second) for index, first in enumerate(resolved) for second in resolved[index + 1 :])


def _apart(first: JsonObject, second: JsonObject) -> bool:
    if (ours := _options(first)) is not None and (theirs := _options(second)) is not None:
        return not ours & theirs
    kinds = (first.get("type"), second.get("type"))
    if None in kinds or any(isinstance(kind, list) for kind in kinds):
        return False
    if kinds[0] != kinds[1]:
        return set(kinds) != {"integer", "number"}
    our_tags, their_tags = _tags(first), _tags(second)
    return any(not our_tags[name] & their_tags[name] for name in our_tags.keys() & their_tags.keys())


def _tags(schema: JsonObject) -> dict[str, frozenset[str]]:
    """The required properties that are literals, with the values they may have."""
    required = cast(list[str], schema.get("required", []))
    found = {
        name: _options(value)
        for name, value in cast(dict[str, JsonValue], schema.get("properties", {})).items()
        if name in required and isinstance(value, dict)
    }
    return {name: options for name, options in found.items() if options is not None}


def _options(schema: JsonObject) -> frozenset[str] | None:
    """The values of a literal or an enum, as JSON."""
    if "const" in schema:
        return frozenset({json_text(schema["const"])})
    return frozenset(map(json_text, cast(list[JsonValue], schema["enum"]))) if "enum" in schema else None


def open_strings(schema: JsonValue, document: JsonObject, seen: tuple[str, ...]) -> int:
    """How many strings without a limit of their own an answer may have, to share the room among them."""
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return 0
    if "$ref" in schema:
        pointer = str(schema["$ref"])
        return 0 if pointer in seen else open_strings(resolve(document, pointer), document, (*seen, pointer))
    total = 0
    for word in ("anyOf", "oneOf", "allOf"):
        branches = cast(list[JsonValue], schema.get(word, []))
        total += max((open_strings(branch, document, seen) for branch in branches), default=0)
    if schema.get("type") == "string":
        total += not schema.keys() & {"maxLength", "format"}
    for inner in cast(dict[str, JsonValue], schema.get("properties", {})).values():
        total += open_strings(inner, document, seen)
    for inner in cast(list[JsonValue], schema.get("prefixItems", [])):
        total += open_strings(inner, document, seen)
    for word, limit in (("items", "maxItems"), ("additionalProperties", "maxProperties")):
        most = count(schema, limit)
        if schema.get(word) and not (word == "additionalProperties" and "properties" in schema):
            each = open_strings(schema[word], document, seen) + (word == "additionalProperties")
            total += each * min(TYPICAL_ITEMS, TYPICAL_ITEMS if most is None else most)
    return total
