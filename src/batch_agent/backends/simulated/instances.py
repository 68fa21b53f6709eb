"""The smallest JSON value that fits a JSON schema: what a model that says nothing in particular would answer.

Understood: ``$ref`` into the schema itself, ``const``, ``enum``, ``anyOf``, ``oneOf``, ``allOf``, types and lists of
types, required properties, array and string lengths, number bounds and ``multipleOf``, the common string formats.
Not understood: ``pattern``, ``not``, conditionals, ``uniqueItems`` above one item; such a value may not validate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import orjson
from pydantic import JsonValue

from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject

Schema = Mapping[str, JsonValue]

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
    """Every value of this schema contains another one of it."""


def minimal_instance(schema: JsonObject, *, filler: str = "") -> JsonValue:
    """``filler`` is put into strings that may hold anything, so that two callers can differ."""
    try:
        return _Builder(schema, filler).build(schema, ())
    except Endless:
        raise SpecError("this JSON schema has no finite value: it requires itself") from None


class _Builder:
    def __init__(self, root: JsonObject, filler: str) -> None:
        self._root = root
        self._filler = filler

    def build(self, schema: JsonValue, refs: tuple[str, ...]) -> JsonValue:
        if not isinstance(schema, dict):
            return None  # true: anything fits
        if isinstance(ref := schema.get("$ref"), str):
            if ref in refs:
                raise Endless
            return self.build({**self._resolve(ref), **_without(schema, "$ref")}, (*refs, ref))
        if "const" in schema:
            return schema["const"]
        if isinstance(options := schema.get("enum"), list) and options:
            return options[0]
        for key in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(key), list) and options:
                return self._smallest([_merge(_without(schema, key), option) for option in options], refs)
        if isinstance(parts := schema.get("allOf"), list):
            merged: JsonObject = _without(schema, "allOf")
            for part in parts:
                merged = _merge(merged, self._flat(part, refs))
            return self.build(merged, refs)
        return self._typed(schema, refs)

    def _typed(self, schema: JsonObject, refs: tuple[str, ...]) -> JsonValue:
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._smallest([{**schema, "type": one} for one in kind], refs)
        if kind == "object" or (kind is None and ("properties" in schema or "required" in schema)):
            return self._object(schema, refs)
        if kind == "array" or (kind is None and ("items" in schema or "prefixItems" in schema)):
            return self._array(schema, refs)
        if kind == "string":
            return self._string(schema)
        if kind in ("integer", "number"):
            return _number(schema, whole=kind == "integer")
        return False if kind == "boolean" else None

    def _smallest(self, options: list[JsonObject], refs: tuple[str, ...]) -> JsonValue:
        values: list[JsonValue] = []
        for option in options:
            try:
                values.append(self.build(option, refs))
            except Endless:
                continue
        if not values:
            raise Endless
        return min(values, key=lambda value: len(orjson.dumps(value)))

    def _object(self, schema: JsonObject, refs: tuple[str, ...]) -> JsonValue:
        properties, required = schema.get("properties"), schema.get("required")
        known = properties if isinstance(properties, dict) else {}
        names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        others = schema.get("additionalProperties", True)
        value: JsonObject = {name: self.build(known.get(name, others), refs) for name in names}
        for name in [*known, *(f"key{i}" for i in range(_int(schema, "minProperties")))]:
            if len(value) >= _int(schema, "minProperties"):
                break
            value.setdefault(name, self.build(known.get(name, others), refs))
        return value

    def _array(self, schema: JsonObject, refs: tuple[str, ...]) -> JsonValue:
        first = schema.get("prefixItems")
        heads = first if isinstance(first, list) else []
        rest = schema.get("items", True)
        kinds = [*heads, *([rest] * _int(schema, "minItems"))][: _int(schema, "minItems")]
        return [self.build(kind, refs) for kind in kinds]

    def _string(self, schema: JsonObject) -> str:
        if isinstance(form := schema.get("format"), str) and form in FORMATS:
            return FORMATS[form]
        text = self._filler.ljust(_int(schema, "minLength"), "x")
        return text[: _int(schema, "maxLength")] if "maxLength" in schema else text

    def _flat(self, schema: JsonValue, refs: tuple[str, ...]) -> JsonValue:
        if isinstance(schema, dict) and isinstance(ref := schema.get("$ref"), str):
            if ref in refs:
                raise Endless
            return self._flat({**self._resolve(ref), **_without(schema, "$ref")}, (*refs, ref))
        return schema

    def _resolve(self, ref: str) -> JsonObject:
        target: JsonValue = self._root
        for part in ref.removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, dict) else None
        if not ref.startswith("#") or not isinstance(target, dict):
            raise SpecError(f"the JSON schema refers to {ref!r}, which is not in it")
        return target


def _without(schema: Schema, key: str) -> JsonObject:
    return {name: value for name, value in schema.items() if name != key}


def _merge(left: JsonObject, right: JsonValue) -> JsonObject:
    if not isinstance(right, dict):
        return left
    merged: JsonObject = {**left, **right}
    for key in ("properties", "$defs"):
        a, b = left.get(key), right.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            merged[key] = {**a, **b}
    a, b = left.get("required"), right.get("required")
    if isinstance(a, list) and isinstance(b, list):
        merged["required"] = [*a, *(name for name in b if name not in a)]
    return merged


def _int(schema: Schema, key: str) -> int:
    value = schema.get(key)
    return int(value) if isinstance(value, int | float) else 0


def _bound(schema: Schema, key: str) -> float | None:
    value = schema.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _number(schema: Schema, *, whole: bool) -> JsonValue:
    """The allowed number nearest to 0."""
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
