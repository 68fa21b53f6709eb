"""Rewrites an answer's JSON schema for ``output_config.format``. Pure.

The API compiles schemas to a grammar and refuses what it cannot compile: open objects, recursion, bounds of numbers,
strings or lists, and too many optional or alternative parts. Bounds move into the part's description, because every
answer is checked against the full schema anyway. A schema that a grammar cannot express (a map, a part of any type, a
root that is not an object) is not sent.
"""

from __future__ import annotations

import re

import orjson
from pydantic import JsonValue

from batch_agent.backends.schema.visitor import Inexpressible, SchemaVisitor, listed, named, nodes, without
from batch_agent.messages import JsonObject

# The API answers 400 to more than these.
MOST_OPTIONAL = 24
MOST_UNIONS = 16

_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6", "uuid"],
)
_TYPES = frozenset(["object", "array", "string", "integer", "number", "boolean", "null"])
# Keywords that bound a size or a value.
_BOUND = re.compile(r"(min|max|exclusive|unique|multiple)[A-Z]\w*|minimum|maximum|pattern|format")
# Keywords that do not constrain an answer.
_NEEDLESS = frozenset(
    ["default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator", "$schema", "$id", "$comment"]
)
_REFERENCE = "#/$defs/"


def format_schema(schema: JsonObject) -> JsonObject | None:
    """Return the schema in the form the API accepts; None if that is impossible."""
    try:
        form = _Form(schema).root()
    except Inexpressible:
        return None
    parts = list(nodes(form))
    optional = sum(len(named(part, "properties")) - len(listed(part, "required")) for part in parts)
    unions = sum("anyOf" in part or isinstance(part.get("type"), list) for part in parts)
    return form if optional <= MOST_OPTIONAL and unions <= MOST_UNIONS else None


class _Form(SchemaVisitor[frozenset[str], JsonObject]):
    """Rewrites one schema. ``where`` holds the references above a node: the API allows no recursion."""

    def __init__(self, document: JsonObject) -> None:
        super().__init__(document)
        self._definitions: dict[str, JsonObject] = {}  # definitions already written

    def root(self) -> JsonObject:
        definitions: JsonObject = {
            name: self._definition(_REFERENCE + name, frozenset()) for name in named(self.document, "$defs")
        }
        root = self.visit(without(self.document, "$defs"), frozenset())
        self._check_root(root)
        return {**root, "$defs": definitions} if definitions else root

    def _definition(self, pointer: str, above: frozenset[str]) -> JsonObject:
        if pointer not in self._definitions:
            known, name = named(self.document, "$defs"), pointer.removeprefix(_REFERENCE)
            if pointer in above or name == pointer or name not in known:
                raise Inexpressible
            self._definitions[pointer] = self.visit(known[name], above | {pointer})
        return self._definitions[pointer]

    def reference(self, node: JsonObject, pointer: str, where: frozenset[str]) -> JsonObject:
        target = self._definition(pointer, where)
        # A reference must stand alone, so a description beside it goes to a copy of its target.
        return {**target, "description": node["description"]} if "description" in node else {"$ref": pointer}

    def typed(self, node: JsonObject, where: frozenset[str]) -> JsonObject:
        out: JsonObject = {}
        bounds: JsonObject = {}
        for name, part in node.items():
            if _is_kept(name, part):
                out[name] = part
            elif name in ("anyOf", "oneOf"):
                out["anyOf"] = [self.visit(option, where) for option in listed(node, name)]
            elif name == "properties":
                out[name] = {key: self.visit(inner, where) for key, inner in named(node, name).items()}
            elif name == "items":
                out[name] = self.visit(part, where)
            elif _BOUND.fullmatch(name):
                bounds[name] = part
            elif name not in _NEEDLESS and name != "additionalProperties":
                raise Inexpressible
        return _complete(out, bounds)

    def _check_root(self, root: JsonObject) -> None:
        while "$ref" in root:
            root = self._definitions[str(root["$ref"])]
        for option in listed(root, "anyOf"):
            self._check_root(option if isinstance(option, dict) else {})
        if "anyOf" not in root and root.get("type") != "object":
            raise Inexpressible


def _is_kept(name: str, part: JsonValue) -> bool:
    match name:
        case "title" | "description" | "const" | "required":
            return True
        case "type":
            return all(kind in _TYPES for kind in (part if isinstance(part, list) else [part]))
        case "enum":
            options = part if isinstance(part, list) else []
            return bool(part) and not any(isinstance(option, dict | list) for option in options)
        case "format":
            return part in _FORMATS
        case "minItems":
            return part in (0, 1)
        case _:
            return False


def _complete(node: JsonObject, bounds: JsonObject) -> JsonObject:
    if not node.keys() & {"type", "enum", "const", "anyOf"}:
        raise Inexpressible
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "object" in kinds:
        if "properties" not in node:
            raise Inexpressible  # a map: closed, it would be empty
        node["additionalProperties"] = False
    if "array" in kinds and "items" not in node:
        raise Inexpressible
    if bounds:
        told = ", ".join(f"{name}: {orjson.dumps(bound).decode()}" for name, bound in bounds.items())
        node["description"] = f"{node.get('description', '')} ({told})".strip()
    return node
