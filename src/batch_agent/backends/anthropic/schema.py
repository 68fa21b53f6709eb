"""An answer's JSON schema as ``output_config.format`` takes it. Pure.

The API compiles schemas to a grammar and refuses what it cannot compile: objects that are not closed, recursion,
keywords that bound numbers, texts or lists, too many optional or alternative parts. A bound becomes words in the part's
description, since every answer is checked against the whole schema anyway. A schema that means what the grammar cannot
say (a map, a part of any type, a root that is no object) has no such form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import orjson
from pydantic import JsonValue

from batch_agent.messages import JsonObject

# More than these are a 400.
MOST_OPTIONAL = 24
MOST_UNIONS = 16

_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6", "uuid"],
)
_TYPES = frozenset(["object", "array", "string", "integer", "number", "boolean", "null"])
# How long or large something may be.
_BOUND = re.compile(r"(min|max|exclusive|unique|multiple)[A-Z]\w*|minimum|maximum|pattern|format")
# What is no part of what an answer must be.
_NEEDLESS = frozenset(
    ["default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator", "$schema", "$id", "$comment"]
)
_REFERENCE = "#/$defs/"


class _NoForm(Exception):
    pass


def format_schema(schema: JsonObject) -> JsonObject | None:
    """The schema in the form the API takes. None where it has none."""
    definitions = _named(schema.get("$defs"))
    try:
        _check_recursion(definitions)
        root = _node({name: part for name, part in schema.items() if name != "$defs"}, definitions)
        formed = {name: _node(part, definitions) for name, part in definitions.items()}
        _check_root(root, formed)
    except _NoForm:
        return None
    form: JsonObject = {**root, "$defs": {**formed}} if formed else root
    nodes = list(_nodes(form))
    optional = sum(len(_named(node.get("properties"))) - len(_listed(node.get("required"))) for node in nodes)
    unions = sum("anyOf" in node or isinstance(node.get("type"), list) for node in nodes)
    return form if optional <= MOST_OPTIONAL and unions <= MOST_UNIONS else None


def _node(value: JsonValue, definitions: Mapping[str, JsonValue]) -> JsonObject:
    if not isinstance(value, dict):
        raise _NoForm  # True: anything at all
    if "$ref" in value:
        name = _target(value)
        if name not in definitions:
            raise _NoForm
        if "description" not in value:
            return {"$ref": value["$ref"]}
        # A reference stands alone; the words beside it go to a copy of what it names.
        return {**_node(definitions[name], definitions), "description": value["description"]}
    out: JsonObject = {}
    bounds: JsonObject = {}
    for name, part in value.items():
        if _is_kept(name, part):
            out[name] = part
        elif name in ("anyOf", "oneOf"):
            out["anyOf"] = [_node(option, definitions) for option in _listed(part)]
        elif name == "properties":
            out[name] = {key: _node(inner, definitions) for key, inner in _named(part).items()}
        elif name == "items":
            out[name] = _node(part, definitions)
        elif _BOUND.fullmatch(name):
            bounds[name] = part
        elif name not in _NEEDLESS and name != "additionalProperties":
            raise _NoForm
    return _complete(out, bounds)


def _is_kept(name: str, part: JsonValue) -> bool:
    match name:
        case "title" | "description" | "const" | "required":
            return True
        case "type":
            return all(kind in _TYPES for kind in (part if isinstance(part, list) else [part]))
        case "enum":
            return bool(part) and not any(isinstance(option, dict | list) for option in _listed(part))
        case "format":
            return part in _FORMATS
        case "minItems":
            return part in (0, 1)
        case _:
            return False


def _complete(node: JsonObject, bounds: JsonObject) -> JsonObject:
    if not node.keys() & {"type", "enum", "const", "anyOf"}:
        raise _NoForm
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "object" in kinds:
        if "properties" not in node:
            raise _NoForm  # a map: closed, it would be an empty one
        node["additionalProperties"] = False
    if "array" in kinds and "items" not in node:
        raise _NoForm
    if bounds:
        told = ", ".join(f"{name}: {orjson.dumps(bound).decode()}" for name, bound in bounds.items())
        node["description"] = f"{node.get('description', '')} ({told})".strip()
    return node


def _check_root(root: JsonObject, definitions: Mapping[str, JsonObject]) -> None:
    while "$ref" in root:
        root = definitions[_target(root)]
    for option in _listed(root.get("anyOf")):
        _check_root(_named(option), definitions)
    if "anyOf" not in root and root.get("type") != "object":
        raise _NoForm


def _check_recursion(definitions: Mapping[str, JsonValue]) -> None:
    sound: set[str] = set()

    def follow(name: str, above: frozenset[str]) -> None:
        if name in above or name not in definitions:
            raise _NoForm
        for node in _nodes(definitions[name]):
            if "$ref" in node and (target := _target(node)) not in sound:
                follow(target, above | {name})
        sound.add(name)

    for name in definitions:
        follow(name, frozenset())


def _target(node: JsonObject) -> str:
    reference = node["$ref"]
    if not (isinstance(reference, str) and reference.startswith(_REFERENCE)):
        raise _NoForm
    return reference.removeprefix(_REFERENCE)


def _nodes(node: JsonValue) -> Iterator[JsonObject]:
    """A schema and all those inside it."""
    if isinstance(node, dict):
        yield node
        named = [*_named(node.get("properties")).values(), *_named(node.get("$defs")).values()]
        listed = [*_listed(node.get("anyOf")), *_listed(node.get("oneOf"))]
        for part in [*named, *listed, node.get("items")]:
            yield from _nodes(part)


def _named(value: JsonValue) -> dict[str, JsonValue]:
    return value if isinstance(value, dict) else {}


def _listed(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []
