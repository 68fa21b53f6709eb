"""Analyses a JSON schema for its grammar: which keywords apply to which type, whether branches can overlap, how many
strings are unbounded. Independent of grammars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pydantic import JsonValue

from batch_agent.backends.local.terminals import json_text
from batch_agent.backends.schema.visitor import SchemaVisitor, listed, named, without
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
TYPICAL_ITEMS: Final = 4  # assumed length of an array when room is divided


def count(said: JsonObject, key: str) -> int | None:
    value = said.get(key)
    return int(value) if isinstance(value, (int, float)) else None


def about(kind: str, said: JsonObject) -> JsonObject:
    """Return the keywords that apply to one type; JSON schema ignores the others for values of that type."""
    others = frozenset().union(*(words for name, words in KEYWORDS.items() if name != kind))
    return {key: value for key, value in said.items() if key in KEYWORDS.get(kind, ()) or key not in others}


def implied_type(said: JsonObject) -> str | None:
    return next((kind for kind in ("object", "array") if said and said.keys() <= KEYWORDS[kind]), None)


def without_decimal_text(branches: Sequence[JsonValue]) -> list[JsonValue]:
    """Drop the string branch of a Decimal (a number, or a string with a pattern): the number is enough."""
    kinds = [branch.get("type") if isinstance(branch, dict) else None for branch in branches]
    if "number" not in kinds:
        return list(branches)
    return [branch for branch in branches if not (isinstance(branch, dict) and "pattern" in branch)]


def disjoint(resolve: Callable[[str], JsonValue], branches: Sequence[JsonValue]) -> bool:
    """Return whether no value can satisfy two of the branches, judged by type and by literal properties."""
    resolved = []
    for branch in branches:
        while isinstance(branch, dict) and "$ref" in branch:
            branch = resolve(str(branch["$ref"]))
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
    """Return the required properties that are literals, with their allowed values."""
    required = listed(schema, "required")
    found = {
        name: _options(value)
        for name, value in named(schema, "properties").items()
        if name in required and isinstance(value, dict)
    }
    return {name: options for name, options in found.items() if options is not None}


def _options(schema: JsonObject) -> frozenset[str] | None:
    """Return the values of a literal or an enum, as JSON."""
    if "const" in schema:
        return frozenset({json_text(schema["const"])})
    return frozenset(map(json_text, listed(schema, "enum"))) if "enum" in schema else None


def open_strings(schema: JsonObject) -> int:
    """Return how many unbounded strings an answer may have, so that they can share the available length."""
    return _OpenStrings(schema).visit(schema, ())


class _OpenStrings(SchemaVisitor[tuple[str, ...], int]):
    """``where`` holds the references that led to a node."""

    def anything(self, node: JsonValue, where: tuple[str, ...]) -> int:
        return 0

    def choice(self, node: JsonObject, where: tuple[str, ...]) -> int:
        return 0

    def reference(self, node: JsonObject, pointer: str, where: tuple[str, ...]) -> int:
        return 0 if pointer in where else self.visit(self.resolve(pointer), (*where, pointer))

    def combined(self, word: str, node: JsonObject, where: tuple[str, ...]) -> int:
        most = max((self.visit(branch, where) for branch in listed(node, word)), default=0)
        return most + self.visit(without(node, word), where)

    def typed(self, node: JsonObject, where: tuple[str, ...]) -> int:
        total = int(node.get("type") == "string" and not node.keys() & {"maxLength", "format"})
        for inner in [*named(node, "properties").values(), *listed(node, "prefixItems")]:
            total += self.visit(inner, where)
        for word, limit in (("items", "maxItems"), ("additionalProperties", "maxProperties")):
            most = count(node, limit)
            if node.get(word) and not (word == "additionalProperties" and "properties" in node):
                each = self.visit(node[word], where) + (word == "additionalProperties")
                total += each * min(TYPICAL_ITEMS, TYPICAL_ITEMS if most is None else most)
        return total
