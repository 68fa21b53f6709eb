"""Rewrites an answer's JSON schema for servers, and converts the answer back to the user's schema. Pure.

OpenAI's strict mode supports a part of JSON schema and refuses the rest: the root must be an object, every object is
closed and requires all its properties, every node has a type, a reference stands alone. A schema that can be expressed
in that part is sent that way. What strict mode cannot express (a length, a range, a pattern) goes into a description,
and is checked when the answer arrives. Any other schema is sent unchanged and not strict. A root that is not an object
is wrapped in one, and ``unwrapped`` removes it from the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import orjson
from pydantic import JsonValue

from batch_agent.backends.schema.visitor import Inexpressible, SchemaVisitor, listed, named, without
from batch_agent.messages import JsonObject
from batch_agent.outputs.surrogates import read_json

WRAPPER = "answer"  # the only property of an object around a root of another type

# Totals beyond which strict mode refuses a schema.
MOST_PROPERTIES = 5_000
MOST_LEVELS = 10
MOST_VALUES = 1_000
MOST_CHARACTERS = 120_000
LONG_ENUM, LONG_ENUM_CHARACTERS = 250, 15_000

_WORDS = frozenset(["title", "description"])
_KEPT = _WORDS | {"type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "$ref"}
# Expressed in words instead. Strict mode accepts some of them, but not for every model and host.
_SAID = (
    *("minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties"),
)
# Structure that words cannot express. All other keywords are annotations and are left out.
_UNSAYABLE = {
    *("allOf", "not", "if", "then", "else", "prefixItems", "additionalItems", "contains", "unevaluatedItems"),
    *("patternProperties", "propertyNames", "unevaluatedProperties", "$dynamicRef", "$anchor"),
    *("dependencies", "dependentRequired", "dependentSchemas"),
}
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_DEFINITIONS = ("$defs", "definitions")
_NO_ROOT = frozenset(["anyOf", "oneOf", "allOf", "enum", "not", "$ref"])
_WRAPPED = re.compile(rf'\s*\{{\s*"{WRAPPER}"\s*:(.*)\}}\s*', re.DOTALL)


@dataclass(frozen=True, slots=True)
class SchemaForm:
    """A schema in the form in which it is sent."""

    schema: JsonObject
    strict: bool
    wrapped: bool = False


def strict_form(schema: JsonObject) -> SchemaForm:
    """Return the schema for OpenAI, which accepts only this form."""
    root = _plain_root(schema)
    wrapped = root is None
    if root is None:
        root = _wrap(schema)
    try:
        return SchemaForm(_Strict(root).root(), True, wrapped)
    except Inexpressible:
        return SchemaForm(root, False, wrapped)


def engine_form(schema: JsonObject) -> SchemaForm:
    """Return the schema for engines that enforce any schema with a grammar: the strict form if it only closes objects,
    which leaves a small model the least room for errors; else the schema unchanged."""
    strict = _Strict(schema)
    try:
        if _is_root(schema) and (form := strict.root()) and strict.only_closed:
            return SchemaForm(form, True)
    except Inexpressible:
        pass
    return SchemaForm(schema, False)


def unwrapped(text: str) -> str:
    """Return the answer without the wrapping object, character for character; unchanged if there is none."""
    if found := _WRAPPED.fullmatch(text):
        inner = found[1].strip()
        try:
            read_json(inner)
        except ValueError:
            return text
        return inner
    return text


class _Strict(SchemaVisitor[int, JsonObject]):
    """Rewrites one schema in strict form. The result accepts nothing that the schema does not accept, except where a
    limit could only be put into words. ``where`` is the level of a node. ``only_closed``: nothing was changed except
    that objects were closed and annotations dropped."""

    def __init__(self, document: JsonObject) -> None:
        super().__init__(document)
        self.only_closed = True
        self._properties = self._values = self._characters = 0

    def root(self) -> JsonObject:
        definitions = named(self.document, "$defs") | named(self.document, "definitions")
        written = self.visit(without(self.document, *_DEFINITIONS), 1)
        if definitions:
            self._characters += sum(map(len, definitions))
            written["$defs"] = {name: self.visit(part, 1) for name, part in definitions.items()}
        limits = (self._properties, MOST_PROPERTIES), (self._values, MOST_VALUES), (self._characters, MOST_CHARACTERS)
        if any(count > most for count, most in limits):
            raise Inexpressible
        return written

    def visit(self, node: JsonValue, where: int) -> JsonObject:
        if not isinstance(node, dict) or where > MOST_LEVELS:
            raise Inexpressible
        if "oneOf" in node or "allOf" in node:
            self.only_closed = False
            node = _merged(node)
        if not _UNSAYABLE.isdisjoint(node):
            raise Inexpressible
        written: JsonObject = {name: part for name, part in node.items() if name in _KEPT}
        self._say(node, written)
        return super().visit(written, where)

    def reference(self, node: JsonObject, pointer: str, where: int) -> JsonObject:
        """Rewrite a reference. Strict mode accepts it only alone; as the only alternative it may have a description."""
        words = without(node, "$ref")
        match pointer.split("/"):
            case ["#"]:
                pass
            case ["#", ("$defs" | "definitions"), name]:
                pointer = f"#/$defs/{name}"
            case _:
                raise Inexpressible
        if not words.keys() <= _WORDS:
            raise Inexpressible
        return {"anyOf": [{"$ref": pointer}], **words} if words else {"$ref": pointer}

    def combined(self, word: str, node: JsonObject, where: int) -> JsonObject:
        if not (alternatives := listed(node, word)):
            return self.typed(node, where)
        if not node.keys() <= _WORDS | {"anyOf"}:
            raise Inexpressible
        return node | {"anyOf": [self.visit(part, where) for part in alternatives]}

    def _say(self, node: JsonObject, written: JsonObject) -> None:
        said = [f"{name}: {orjson.dumps(node[name]).decode()}" for name in _SAID if name in node]
        if said:
            self.only_closed = False
            before = f"{node['description']} " if node.get("description") else ""
            written["description"] = f"{before}({', '.join(said)})"

    def choice(self, node: JsonObject, where: int) -> JsonObject:
        values = [node["const"]] if "const" in node else node["enum"]
        if not isinstance(values, list) or not values or not node.keys() <= _WORDS | {"type", "enum", "const"}:
            raise Inexpressible
        words = {name: part for name, part in node.items() if name in _WORDS}  # in a stable order
        by_type: dict[str, list[JsonValue]] = {}
        for value in values:
            if type(value) not in _TYPES:
                raise Inexpressible
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
            raise Inexpressible

    def typed(self, node: JsonObject, where: int) -> JsonObject:
        if "type" not in node:
            if "properties" not in node and "items" not in node:
                raise Inexpressible
            self.only_closed = False
            node["type"] = "object" if "properties" in node else "array"
        kinds = node["type"] if isinstance(node["type"], list) else [node["type"]]
        if not kinds or not all(isinstance(kind, str) for kind in kinds):
            raise Inexpressible
        if "object" in kinds:
            node |= self._object(node, where)
        elif not node.keys().isdisjoint(("properties", "required", "additionalProperties")):
            raise Inexpressible
        if "array" in kinds:
            node["items"] = self.visit(node.get("items"), where)
        return node

    def _object(self, node: JsonObject, level: int) -> JsonObject:
        properties, required = node.get("properties"), node.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise Inexpressible
        if node.get("additionalProperties", False) is not False or not set(map(str, required)) <= properties.keys():
            raise Inexpressible
        self._properties += len(properties)
        self._characters += sum(map(len, properties))
        return {
            "properties": {name: self.visit(part, level + 1) for name, part in properties.items()},
            "required": list(properties),
            "additionalProperties": False,
        }


def _merged(node: JsonObject) -> JsonObject:
    """Return the node with a one-element ``allOf`` merged, and alternatives under one keyword."""
    whole = node.get("allOf")
    if isinstance(whole, list) and len(whole) == 1 and isinstance(whole[0], dict):
        rest = without(node, "allOf")
        if whole[0].keys().isdisjoint(rest.keys() - _WORDS):
            node = whole[0] | rest
    if "oneOf" in node and "anyOf" not in node:
        node = {("anyOf" if name == "oneOf" else name): part for name, part in node.items() if name != "discriminator"}
    return node


def _is_root(schema: JsonObject) -> bool:
    return schema.get("type") == "object" and _NO_ROOT.isdisjoint(schema)


def _plain_root(schema: JsonObject) -> JsonObject | None:
    """Return the schema with an object at its root, if that is equivalent; else None."""
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
    """Wrap the root in an object. References to the root and into it are adjusted."""
    elsewhere = (*_DEFINITIONS, "$schema", "$id")
    moved = _rebased(without(schema, *elsewhere))
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
    if isinstance(target, str) and target.startswith("#") and not target.startswith(("#/$defs/", "#/definitions/")):
        written["$ref"] = f"#/properties/{WRAPPER}{target[1:]}"
    return written
