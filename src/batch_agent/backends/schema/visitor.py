"""One traversal of JSON schemas for all their readers: the form of a wire, a grammar, an instance. Pure.

A visitor has a method for each kind of node; ``visit`` finds the kind. Each visitor decides what a node becomes.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, Literal, TypeVar

from pydantic import JsonValue

from batch_agent.errors import ContextOverflow, OutputError, Rejected
from batch_agent.messages import JsonObject
from batch_agent.outputs.extract import strip_reasoning
from batch_agent.outputs.surrogates import read_json

Where = TypeVar("Where")  # passed from node to node: a path, a depth, the references above
Result = TypeVar("Result")

_NAMED = re.compile(
    r"response_?format|json_?schema|text\.format|structured.?output|guided|grammar|not support\w* .*schema",
    re.IGNORECASE,
)
_UNCLEAR = frozenset({400, 415, 422, 501})


class Inexpressible(Exception):
    """The visitor cannot express this schema. The message is the reason."""


class SchemaVisitor(ABC, Generic[Where, Result]):
    """Reads one schema. ``document`` is the target of its references."""

    def __init__(self, document: JsonObject) -> None:
        self.document = document

    def visit(self, node: JsonValue, where: Where) -> Result:
        if not isinstance(node, dict):
            return self.anything(node, where)
        if "const" in node or "enum" in node:
            return self.choice(node, where)
        if "$ref" in node:
            return self.reference(node, str(node["$ref"]), where)
        for word in ("anyOf", "oneOf", "allOf"):
            if word in node:
                return self.combined(word, node, where)
        return self.typed(node, where)

    def anything(self, node: JsonValue, where: Where) -> Result:
        """Handle a node that is not an object: True accepts every value, False none."""
        raise Inexpressible

    def choice(self, node: JsonObject, where: Where) -> Result:
        """Handle a node with ``const`` or ``enum``."""
        return self.typed(node, where)

    @abstractmethod
    def reference(self, node: JsonObject, pointer: str, where: Where) -> Result: ...

    def combined(self, word: str, node: JsonObject, where: Where) -> Result:
        """Handle a node with anyOf, oneOf or allOf, the first of these that it has."""
        return self.typed(node, where)

    @abstractmethod
    def typed(self, node: JsonObject, where: Where) -> Result:
        """Handle any other node, usually one with a type."""

    def resolve(self, pointer: str) -> JsonValue:
        """Return the node that a reference points to. Raises Inexpressible if there is none."""
        if not pointer.startswith("#"):
            raise Inexpressible(f"$ref {pointer}: only references within the schema are supported")
        found: JsonValue = self.document
        for step in pointer.removeprefix("#").split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or step not in found:
                raise Inexpressible(f"$ref {pointer} points to nothing")
            found = found[step]
        return found


def nodes(node: JsonValue) -> Iterator[JsonObject]:
    """Yield the schema and all schemas inside it, without following references."""
    if isinstance(node, dict):
        yield node
        inner = [*named(node, "properties").values(), *named(node, "$defs").values(), node.get("items")]
        for part in inner + [part for word in ("anyOf", "oneOf", "allOf") for part in listed(node, word)]:
            yield from nodes(part)


def named(node: JsonObject, keyword: str) -> JsonObject:
    """Return the object of a keyword; empty if it has none."""
    value = node.get(keyword)
    return value if isinstance(value, dict) else {}


def listed(node: JsonObject, keyword: str) -> list[JsonValue]:
    """Return the list of a keyword; empty if it has none."""
    value = node.get(keyword)
    return value if isinstance(value, list) else []


def without(node: JsonObject, *keywords: str) -> JsonObject:
    return {name: part for name, part in node.items() if name not in keywords}


def blamed(refusal: Rejected) -> Literal["surely", "perhaps", "no"]:
    """Return whether the schema is the reason for a refusal: "surely", "perhaps" if another field may be the reason, or
    "no"."""
    if isinstance(refusal, ContextOverflow) or refusal.status is None:
        return "no"
    if refusal.status in _UNCLEAR:
        return "surely" if _NAMED.search(str(refusal)) else "perhaps"
    return "no"


def is_kept(text: str, schema: JsonObject) -> bool:
    """Return whether a complete answer looks as if the schema was enforced by a grammar."""
    try:
        value = read_json(strip_reasoning(text.strip()))
    except (ValueError, OutputError):
        return False
    schema = _root(schema)
    match schema.get("type"):
        case "object":
            required = schema.get("required")
            return isinstance(value, dict) and set(required if isinstance(required, list) else ()) <= value.keys()
        case "array":
            return isinstance(value, list)
    return True


def _root(schema: JsonObject) -> JsonObject:
    target, definitions = schema.get("$ref"), schema.get("$defs")
    if isinstance(target, str) and isinstance(definitions, dict):
        found = definitions.get(target.removeprefix("#/$defs/"))
        return found if isinstance(found, dict) else schema
    return schema
