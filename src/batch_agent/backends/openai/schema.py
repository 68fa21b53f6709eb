"""An answer's JSON schema as servers take it, and the answer as the user's schema wants it. Pure.

OpenAI's strict mode knows a part of JSON schema and refuses the request otherwise: the root is an object, every object
is closed and requires all it has, every node has a type, a reference stands alone. Whatever has a form within that part
is sent in it; what strict mode cannot say of a value (a length, a range, a pattern) goes into its description, and
is checked when the answer is there. A schema without such a form goes out as it is, not strict. A root that is no
object is wrapped in one, and ``unwrapped`` takes the answer out again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import orjson
from pydantic import JsonValue

from batch_agent.backends.schema.visitor import Inexpressible, SchemaVisitor, listed, named, without
from batch_agent.messages import JsonObject
from batch_agent.outputs.surrogates import read_json

WRAPPER = "answer"  # the one property of an object around a root that is none

# What a schema may have in all, beyond which strict mode refuses it.
MOST_PROPERTIES, MOST_LEVELS, MOST_VALUES, MOST_CHARACTERS = 5_000, 10, 1_000, 120_000
LONG_ENUM, LONG_ENUM_CHARACTERS = 250, 15_000

_WORDS = frozenset(["title", "description"])
_KEPT = _WORDS | {"type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "$ref"}
# Said in words instead. Some of them strict mode takes, but not for every model and not on every host.
_SAID = (
    *("minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties"),
)
# Structure for which there are no words. Whatever else a schema has is a note to its readers, and left out.
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
    """For OpenAI, which takes nothing else."""
    root = _plain_root(schema)
    wrapped = root is None
    if root is None:
        root = _wrap(schema)
    try:
        return SchemaForm(_Strict(root).root(), True, wrapped)
    except Inexpressible:
        return SchemaForm(root, False, wrapped)


def engine_form(schema: JsonObject) -> SchemaForm:
    """For engines that keep to any schema by a grammar: the strict form where that is the schema with its objects
    closed, which leaves a small model the least to do wrong; else the schema as it is."""
    strict = _Strict(schema)
    try:
        if _is_root(schema) and (form := strict.root()) and strict.only_closed:
            return SchemaForm(form, True)
    except Inexpressible:
        pass
    return SchemaForm(schema, False)


def unwrapped(text: str) -> str:
    """The answer without the object around it, character for character; as it is where there is none."""
    if found := _WRAPPED.fullmatch(text):
        inner = found[1].strip()
        try:
            read_json(inner)
        except ValueError:
            return text
        return inner
    return text


class _Strict(SchemaVisitor[int, JsonObject]):
    """Writes one schema in its strict form. Whatever that form accepts, the user's schema accepts too, but for what is
    only said in words. ``where`` is the level of a node. ``only_closed``: nothing was done but to close objects and to
    leave out notes."""

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
        """Strict mode takes a reference only alone; as the one alternative it may have a description."""
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
        words = {name: part for name, part in node.items() if name in _WORDS}  # in an order that stays
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
    """With what older writers put in an ``allOf`` of one in its place, and alternatives under one name."""
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
