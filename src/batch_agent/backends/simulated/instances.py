"""Builds the smallest JSON value that fits a JSON schema, as the answer of a simulated model.

Supported: ``$ref`` into the schema itself, ``const``, ``enum``, ``anyOf``, ``oneOf``, ``allOf``, types and lists of
types, required properties, array and string lengths, number bounds and ``multipleOf``, the common string formats.
Not supported: ``pattern``, ``not``, conditionals, ``uniqueItems`` above one item; such a value may not validate.
"""

from __future__ import annotations

import math

import orjson
from pydantic import JsonValue

from batch_agent.backends.schema.visitor import Inexpressible, SchemaVisitor, listed, named, without
from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject

FORMATS = {
    "date": "2000-01-01",
    "date-time": "2000-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "duration": "PT0S",
    "email": "a@example.com",
    "uri": "http://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "hostname": "example.com",
}


class Endless(Exception):
    """Every value of this schema contains another value of it."""


def minimal_instance(schema: JsonObject, *, filler: str = "") -> JsonValue:
    """Return the value. ``filler`` is put into unconstrained strings, so that two callers can differ."""
    try:
        return _Builder(schema, filler).visit(schema, ())
    except Endless:
        raise SpecError("this JSON schema has no finite value: it requires itself") from None
    except Inexpressible as error:
        raise SpecError(f"the JSON schema has an unresolved reference: {error}") from None


class _Builder(SchemaVisitor[tuple[str, ...], JsonValue]):
    """``where`` holds the references that led to a node."""

    def __init__(self, document: JsonObject, filler: str) -> None:
        super().__init__(document)
        self._filler = filler

    def anything(self, node: JsonValue, where: tuple[str, ...]) -> JsonValue:
        return None

    def choice(self, node: JsonObject, where: tuple[str, ...]) -> JsonValue:
        if "const" in node:
            return node["const"]
        options = listed(node, "enum")
        return options[0] if options else self.visit(without(node, "enum"), where)

    def reference(self, node: JsonObject, pointer: str, where: tuple[str, ...]) -> JsonValue:
        return self.visit(self._flat(node, where), (*where, pointer))

    def combined(self, word: str, node: JsonObject, where: tuple[str, ...]) -> JsonValue:
        rest, parts = without(node, word), listed(node, word)
        if word != "allOf" and parts:
            return self._smallest([_merge(rest, part) for part in parts], where)
        for part in parts:
            rest = _merge(rest, self._flat(part, where))
        return self.visit(rest, where)

    def typed(self, node: JsonObject, where: tuple[str, ...]) -> JsonValue:
        kind = node.get("type")
        if isinstance(kind, list):
            return self._smallest([{**node, "type": one} for one in kind], where)
        if kind == "object" or (kind is None and ("properties" in node or "required" in node)):
            return self._object(node, where)
        if kind == "array" or (kind is None and ("items" in node or "prefixItems" in node)):
            return self._array(node, where)
        if kind == "string":
            return self._string(node)
        if kind in ("integer", "number"):
            return _number(node, whole=kind == "integer")
        return False if kind == "boolean" else None

    def _smallest(self, options: list[JsonObject], refs: tuple[str, ...]) -> JsonValue:
        values: list[JsonValue] = []
        for option in options:
            try:
                values.append(self.visit(option, refs))
            except Endless:
                continue
        if not values:
            raise Endless
        return min(values, key=lambda value: len(orjson.dumps(value)))

    def _object(self, schema: JsonObject, refs: tuple[str, ...]) -> JsonValue:
        known = named(schema, "properties")
        names = [name for name in listed(schema, "required") if isinstance(name, str)]
        others = schema.get("additionalProperties", True)
        value: JsonObject = {name: self.visit(known.get(name, others), refs) for name in names}
        for name in [*known, *(f"key{i}" for i in range(_int(schema, "minProperties")))]:
            if len(value) >= _int(schema, "minProperties"):
                break
            value.setdefault(name, self.visit(known.get(name, others), refs))
        return value

    def _array(self, schema: JsonObject, refs: tuple[str, ...]) -> JsonValue:
        rest = schema.get("items", True)
        kinds = [*listed(schema, "prefixItems"), *([rest] * _int(schema, "minItems"))][: _int(schema, "minItems")]
        return [self.visit(kind, refs) for kind in kinds]

    def _string(self, schema: JsonObject) -> str:
        if isinstance(form := schema.get("format"), str) and form in FORMATS:
            return FORMATS[form]
        text = self._filler.ljust(_int(schema, "minLength"), "x")
        return text[: _int(schema, "maxLength")] if "maxLength" in schema else text

    def _flat(self, node: JsonValue, refs: tuple[str, ...]) -> JsonValue:
        """Return the target of a chain of references, with the keywords beside them."""
        while isinstance(node, dict) and "$ref" in node:
            pointer = str(node["$ref"])
            if pointer in refs:
                raise Endless
            target = self.resolve(pointer)
            if not isinstance(target, dict):
                raise Inexpressible(f"$ref {pointer} points to no schema")
            node, refs = {**target, **without(node, "$ref")}, (*refs, pointer)
        return node


def _merge(left: JsonObject, right: JsonValue) -> JsonObject:
    if not isinstance(right, dict):
        return left
    merged: JsonObject = {**left, **right}
    for keyword in ("properties", "$defs"):
        if both := named(left, keyword) | named(right, keyword):
            merged[keyword] = both
    if names := [*listed(left, "required"), *listed(right, "required")]:
        merged["required"] = list(dict.fromkeys(map(str, names)))
    return merged


def _int(schema: JsonObject, key: str) -> int:
    value = schema.get(key)
    return int(value) if isinstance(value, int | float) else 0


def _bound(schema: JsonObject, key: str) -> float | None:
    value = schema.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _number(schema: JsonObject, *, whole: bool) -> JsonValue:
    """Return the allowed number nearest to 0."""
    step = _bound(schema, "multipleOf") or (1 if whole else None)
    low, high = _bound(schema, "minimum"), _bound(schema, "maximum")
    above, below = _bound(schema, "exclusiveMinimum"), _bound(schema, "exclusiveMaximum")
    floor = max((bound for bound in (low, above) if bound is not None), default=-math.inf)
    ceiling = min((bound for bound in (high, below) if bound is not None), default=math.inf)
    value = min(max(0.0, floor), ceiling)
    if step is not None:
        value = (math.ceil(value / step) if value > 0 else math.floor(value / step)) * step
        value += step * (value == above) - step * (value == below)
    elif value == above:
        value = (above + ceiling) / 2 if ceiling < math.inf else above + 1
    elif value == below:
        value = (below + floor) / 2 if floor > -math.inf else below - 1
    return int(value) if value == int(value) else value
