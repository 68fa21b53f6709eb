"""An answer's JSON schema as OpenAI's ``response_format`` takes it: strict wherever the schema has a strict form. Pure.

Strict mode knows a part of JSON schema and refuses the request otherwise. A schema that has a form within that part is
sent in it; any other goes out as it is, not strict.
"""

from __future__ import annotations

from pydantic import JsonValue

from batch_agent.backends.base import RequestShape
from batch_agent.messages import JsonObject

# What strict mode is known to take; a schema with anything else is sent without it rather than refused.
_STRICT_KEYWORDS = frozenset(
    [
        "type",
        "title",
        "description",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "enum",
        "const",
        "anyOf",
        "$ref",
        "$defs",
    ]
)
_WORDS = frozenset(["title", "description"])


def response_schema(shape: RequestShape) -> JsonObject:
    """The schema in the form that strict mode takes, where it has one: every object closed, every property required.
    Whatever that form accepts, the user's schema accepts too."""
    closed = _closed(shape.schema)
    is_object = isinstance(closed, dict) and closed.get("type") == "object" and "anyOf" not in closed
    strict = is_object and _strict_node(closed)
    return {"name": shape.schema_name, "schema": closed if strict else shape.schema, "strict": strict}


def _closed(node: JsonValue) -> JsonValue:
    if isinstance(node, list):
        return [_closed(part) for part in node]
    if not isinstance(node, dict):
        return node
    closed = {name: _closed(part) if name in ("items", "anyOf") else part for name, part in node.items()}
    closed.pop("default", None)
    for name in ("properties", "$defs"):
        if isinstance(parts := closed.get(name), dict):
            closed[name] = {key: _closed(part) for key, part in parts.items()}
    if isinstance(properties := closed.get("properties"), dict):
        closed["required"] = list(properties)
        closed.setdefault("additionalProperties", False)
    if "$ref" in closed and len(closed) > 1 and closed.keys() <= _WORDS | {"$ref"}:
        # Strict mode takes a reference only alone; as the one alternative it may have a description.
        return {"anyOf": [{"$ref": closed.pop("$ref")}], **closed}
    return closed


def _strict_node(node: JsonValue) -> bool:
    if not isinstance(node, dict) or not node.keys() <= _STRICT_KEYWORDS:
        return False
    properties, required, definitions = node.get("properties", {}), node.get("required", []), node.get("$defs", {})
    if not (isinstance(properties, dict) and isinstance(required, list) and isinstance(definitions, dict)):
        return False
    if "$ref" in node:
        return len(node) == 1
    alternatives, kinds = node.get("anyOf", []), node.get("type", [])
    if not isinstance(alternatives, list) or not (alternatives or kinds):
        return False
    kinds = kinds if isinstance(kinds, list) else [kinds]
    is_object = "object" in kinds or "properties" in node
    if is_object and (node.get("additionalProperties") is not False or set(map(str, required)) != properties.keys()):
        return False
    if "array" in kinds and "items" not in node:
        return False
    items = [node["items"]] if "items" in node else []
    return all(map(_strict_node, [*properties.values(), *definitions.values(), *items, *alternatives]))
