"""What OpenAI's API makes of a schema: a judge that refuses what it refuses, for servers of tests."""

from __future__ import annotations

TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}
NOT_AT_THE_ROOT = {"anyOf", "oneOf", "allOf", "enum", "not", "$ref"}
KNOWN = {
    *("type", "title", "description", "properties", "required", "additionalProperties", "items"),
    *("enum", "const", "anyOf", "$ref", "$defs"),
}


class Refused(Exception):
    """The 400's message."""


def judge(form: dict) -> None:
    """``form`` has a name, a schema and whether it is strict. Raises Refused."""
    schema = form["schema"]
    if schema.get("type") != "object" or not NOT_AT_THE_ROOT.isdisjoint(schema):
        raise Refused("schema must be a JSON Schema of 'type: \"object\"', got 'type: \"None\"'")
    if form.get("strict"):
        _strict(schema, schema, ())


def _strict(node: object, root: dict, path: tuple[str, ...]) -> None:  # noqa: C901
    def refuse(why: str) -> None:
        raise Refused(f"In context=({', '.join(path)}), {why}")

    if not isinstance(node, dict):
        return refuse("schema must be an object")
    if unknown := node.keys() - KNOWN:
        refuse(f"{sorted(unknown)[0]!r} is not permitted")
    if "$ref" in node:
        if len(node) > 1:
            refuse("$ref cannot have keywords beside it")
        return _resolves(node["$ref"], root) or refuse(f"reference can only point to definitions: {node['$ref']}")
    if "anyOf" in node:
        if not isinstance(node["anyOf"], list) or not node["anyOf"]:
            refuse("anyOf must be a list of schemas")
        for number, part in enumerate(node["anyOf"]):
            _strict(part, root, (*path, "anyOf", str(number)))
    elif "type" not in node:
        refuse("schema must have a 'type' key")
    kinds = node.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not TYPES.issuperset(kinds):
        refuse(f"{kinds} is not a type")
    if "object" in kinds or "properties" in node:
        if node.get("additionalProperties") is not False:
            refuse("'additionalProperties' is required to be supplied and to be false")
        if sorted(node.get("required", ())) != sorted(node.get("properties", ())):
            refuse("'required' is required to be supplied and to be an array including every key in properties")
    if "array" in kinds and "items" not in node:
        refuse("array schema missing items")
    for name, part in node.get("properties", {}).items():
        _strict(part, root, (*path, "properties", name))
    if "items" in node:
        _strict(node["items"], root, (*path, "items"))
    for name, part in node.get("$defs", {}).items():
        _strict(part, root, (*path, "$defs", name))


def _resolves(target: str, root: dict) -> bool:
    return target == "#" or target.removeprefix("#/$defs/") in root.get("$defs", {})
