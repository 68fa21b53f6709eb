"""An answer's JSON schema as servers take it, and the answer as the user's schema wants it. Pure.

OpenAI's strict mode knows a part of JSON schema and refuses the request otherwise: the root is an object, every object
is closed and requires all it has, every node has a type, a reference stands alone. Whatever has a form within that part
is sent in it; what strict mode cannot say of a value (a length, a range, a pattern) goes into its description, and
is checked when the answer is there. A schema without such a form goes out as it is, not strict. A root that is no
object is wrapped in one, and ``unwrapped`` takes the answer out again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import orjson
from pydantic import JsonValue

from batch_agent.messages import JsonObject

WRAPPER = "answer"  # the one property of an object around a root that is none

# What a schema may have in all, beyond which strict mode refuses it.
MOST_PROPERTIES, MOST_LEVELS, MOST_VALUES, MOST_CHARACTERS = 5_000, 10, 1_000, 120_000
LONG_ENUM, LONG_ENUM_CHARACTERS = 250, 15_000

_WORDS = frozenset(["title", "description"])
_KEPT = _WORDS | {"type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "$ref"}
# Said in words instead. Some of them strict mode takes, but not for every model and not on every host.
_SAID = (
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minItems",
    "maxItems",
    "uniqueItems",
    "minProperties",
    "maxProperties",
)
# Structure for which there are no words. Whatever else a schema has is a note to its readers, and left out.
_UNSAYABLE = frozenset(
    [
        "allOf",
        "not",
        "if",
        "then",
        "else",
        "prefixItems",
        "additionalItems",
        "contains",
        "patternProperties",
        "propertyNames",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "unevaluatedProperties",
        "unevaluatedItems",
        "$dynamicRef",
        "$anchor",
    ]
)
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_NO_ROOT = frozenset(["anyOf", "oneOf", "allOf", "enum", "not", "$ref"])
_WRAPPED = re.compile(rf'\s*\{{\s*"{WRAPPER}"\s*:(.*)\}}\s*', re.DOTALL)


@dataclass(frozen=True, slots=True)
class SchemaForm:
    """A schema in the form in which it is sent."""

    schema: JsonObject
    strict: bool
    wrapped: bool = False


def strict_form(schema: JsonObject) -> SchemaForm:
    """For OpenAI, which takes nothing else."""
    root = _plain_root(schema)
    wrapped = root is None
    if root is None:
        root = _wrap(schema)
    try:
        return SchemaForm(_Strict().root(root), True, wrapped)
    except _Inexpressible:
        return SchemaForm(root, False, wrapped)


def engine_form(schema: JsonObject) -> SchemaForm:
    """For engines that keep to any schema by a grammar: the strict form where that is the schema with its objects
    closed, which leaves a small model the least to do wrong; else the schema as it is."""
    strict = _Strict()
    try:
        if _is_root(schema) and (form := strict.root(schema)) and strict.only_closed:
            return SchemaForm(form, True)
    except _Inexpressible:
        pass
    return SchemaForm(schema, False)


def unwrapped(text: str) -> str:
    """The answer without the object around it, character for character; as it is where there is none."""
    if found := _WRAPPED.fullmatch(text):
        inner = found[1].strip()
        try:
            orjson.loads(inner)
        except orjson.JSONDecodeError:
            return text
        return inner
    return text


class _Inexpressible(Exception):
    """Strict mode has no form of this."""


@dataclass(slots=True)
class _Strict:
    """Writes one schema in its strict form. Whatever that form accepts, the user's schema accepts too, but for what is
    only said in words. ``only_closed`` while nothing was done but to close objects and to leave out notes."""

    only_closed: bool = True
    _properties: int = 0
    _values: int = 0
    _characters: int = 0

    def root(self, schema: JsonObject) -> JsonObject:
        definitions = _definitions_of(schema)
        written = self._node({name: part for name, part in schema.items() if name not in _DEFINITIONS}, 1)
        if definitions:
            self._characters += sum(map(len, definitions))
            written["$defs"] = {name: self._node(part, 1) for name, part in definitions.items()}
        limits = (self._properties, MOST_PROPERTIES), (self._values, MOST_VALUES), (self._characters, MOST_CHARACTERS)
        if any(count > most for count, most in limits):
            raise _Inexpressible
        return written

    def _node(self, node: JsonValue, level: int) -> JsonObject:
        if not isinstance(node, dict) or level > MOST_LEVELS:
            raise _Inexpressible
        if "oneOf" in node or "allOf" in node:
            self.only_closed = False
            node = _merged(node)
        if not _UNSAYABLE.isdisjoint(node):
            raise _Inexpressible
        written: JsonObject = {name: part for name, part in node.items() if name in _KEPT}
        self._say(node, written)
        if "$ref" in node:
            return _reference(written)
        if "enum" in node or "const" in node:
            return self._choice(written)
        if isinstance(alternatives := node.get("anyOf"), list) and alternatives:
            if not written.keys() <= _WORDS | {"anyOf"}:
                raise _Inexpressible
            return written | {"anyOf": [self._node(part, level) for part in alternatives]}
        return self._typed(written, level)

    def _say(self, node: JsonObject, written: JsonObject) -> None:
        said = [f"{name}: {orjson.dumps(node[name]).decode()}" for name in _SAID if name in node]
        if said:
            self.only_closed = False
            before = f"{node['description']} " if node.get("description") else ""
            written["description"] = f"{before}({', '.join(said)})"

    def _choice(self, node: JsonObject) -> JsonObject:
        values = [node["const"]] if "const" in node else node["enum"]
        if not isinstance(values, list) or not values or not node.keys() <= _WORDS | {"type", "enum", "const"}:
            raise _Inexpressible
        words = {name: node[name] for name in _WORDS if name in node}
        by_type: dict[str, list[JsonValue]] = {}
        for value in values:
            if type(value) not in _TYPES:
                raise _Inexpressible
            by_type.setdefault(_TYPES[type(value)], []).append(value)
        self._count(values)
        if isinstance(kind := node.get("type"), str) and len(by_type) == 1:
            return node | {"type": kind}
        self.only_closed = False
        parts: list[JsonObject] = [
            {"type": "null"} if kind == "null" else {"type": kind, "enum": of_kind} for kind, of_kind in by_type.items()
        ]
        chosen: JsonObject = parts[0] if len(parts) == 1 else {"anyOf": [*parts]}
        return words | chosen

    def _count(self, values: list[JsonValue]) -> None:
        self._values += len(values)
        characters = sum(len(value) for value in values if isinstance(value, str))
        self._characters += characters
        if len(values) > LONG_ENUM and characters > LONG_ENUM_CHARACTERS:
            raise _Inexpressible

    def _typed(self, node: JsonObject, level: int) -> JsonObject:
        if "type" not in node:
            if "properties" not in node and "items" not in node:
                raise _Inexpressible
            self.only_closed = False
            node["type"] = "object" if "properties" in node else "array"
        kinds = node["type"] if isinstance(node["type"], list) else [node["type"]]
        if not kinds or not all(isinstance(kind, str) for kind in kinds):
            raise _Inexpressible
        if "object" in kinds:
            node |= self._object(node, level)
        elif not node.keys().isdisjoint(("properties", "required", "additionalProperties")):
            raise _Inexpressible
        if "array" in kinds:
            node["items"] = self._node(node.get("items"), level)
        return node

    def _object(self, node: JsonObject, level: int) -> JsonObject:
        properties, required = node.get("properties"), node.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise _Inexpressible
        if node.get("additionalProperties", False) is not False or not set(map(str, required)) <= properties.keys():
            raise _Inexpressible
        self._properties += len(properties)
        self._characters += sum(map(len, properties))
        return {
            "properties": {name: self._node(part, level + 1) for name, part in properties.items()},
            "required": list(properties),
            "additionalProperties": False,
        }


_DEFINITIONS = ("$defs", "definitions")


def _definitions_of(schema: JsonObject) -> JsonObject:
    found: JsonObject = {}
    for name in _DEFINITIONS:
        parts = schema.get(name, {})
        if not isinstance(parts, dict):
            raise _Inexpressible
        found |= parts
    return found


def _merged(node: JsonObject) -> JsonObject:
    """With what older writers put in an ``allOf`` of one in its place, and alternatives under one name."""
    whole = node.get("allOf")
    if isinstance(whole, list) and len(whole) == 1 and isinstance(whole[0], dict):
        rest = {name: part for name, part in node.items() if name != "allOf"}
        if whole[0].keys().isdisjoint(rest.keys() - _WORDS):
            node = whole[0] | rest
    if "oneOf" in node and "anyOf" not in node:
        node = {("anyOf" if name == "oneOf" else name): part for name, part in node.items() if name != "discriminator"}
    return node


def _reference(node: JsonObject) -> JsonObject:
    """Strict mode takes a reference only alone; as the one alternative it may have a description."""
    target = node.pop("$ref")
    if not isinstance(target, str) or not node.keys() <= _WORDS:
        raise _Inexpressible
    match target.split("/"):
        case ["#"]:
            pass
        case ["#", ("$defs" | "definitions"), name]:
            target = f"#/$defs/{name}"
        case _:
            raise _Inexpressible
    return {"anyOf": [{"$ref": target}], **node} if node else {"$ref": target}


def _is_root(schema: JsonObject) -> bool:
    return schema.get("type") == "object" and _NO_ROOT.isdisjoint(schema)


def _plain_root(schema: JsonObject) -> JsonObject | None:
    """The schema with an object at its root, where that says the same; else None."""
    seen: set[str] = set()
    while not _is_root(schema):
        schema = _merged(schema)
        target = schema.get("$ref")
        name = target.removeprefix("#/$defs/") if isinstance(target, str) else ""
        definitions = schema.get("$defs")
        found = definitions.get(name) if isinstance(definitions, dict) else None
        if isinstance(found, dict) and name not in seen:
            seen.add(name)
            schema = found | {key: part for key, part in schema.items() if key in _WORDS | {"$defs"}}
        elif "type" not in schema and isinstance(schema.get("properties"), dict):
            schema = {"type": "object", **schema}
        else:
            return schema if _is_root(schema) else None
    return schema


def _wrap(schema: JsonObject) -> JsonObject:
    """An object around the root. References to the root and into it are turned to where it is now."""
    elsewhere = (*_DEFINITIONS, "$schema", "$id")
    moved = _rebased({name: part for name, part in schema.items() if name not in elsewhere})
    definitions = {name: _rebased(part) for name, part in schema.items() if name in _DEFINITIONS}
    root: JsonObject = {"type": "object", "properties": {WRAPPER: moved}, "required": [WRAPPER]}
    return root | {"additionalProperties": False} | definitions


def _rebased(node: JsonValue) -> JsonValue:
    if isinstance(node, list):
        return [_rebased(part) for part in node]
    if not isinstance(node, dict):
        return node
    written = {name: _rebased(part) for name, part in node.items()}
    target = node.get("$ref")
    if isinstance(target, str) and target.startswith("#") and not _starts(target, _DEFINITIONS):
        written["$ref"] = f"#/properties/{WRAPPER}{target[1:]}"
    return written


def _starts(target: str, names: Iterable[str]) -> bool:
    return any(target.startswith(f"#/{name}/") for name in names)
