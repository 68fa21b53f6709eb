"""Schemas as Anthropic's structured outputs take them, tried on the rules of the strict server."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

import jsonschema_rs
import pytest
from pydantic import BaseModel, Field, TypeAdapter

from batch_agent.backends.anthropic.request import MOST_OPTIONAL, MOST_UNIONS, format_schema
from batch_agent.testing.messages_server import MessagesRequest, check_messages


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Part(BaseModel):
    size: int = Field(ge=1, le=5, description="How large.")
    colour: Colour = Field(description="Which.")
    names: list[str] = Field(default=[], min_length=2, max_length=9)


class Whole(BaseModel):
    """A thing of parts."""

    first: Part
    others: list[Part] = Field(min_length=1)
    note: str | None = None
    level: Literal["low", 1]
    when: str = Field(json_schema_extra={"format": "date"})
    code: str = Field(pattern="^a+$", default="a")


class Node(BaseModel):
    children: list[Node]


class Map(BaseModel):
    counts: dict[str, int]


class Anything(BaseModel):
    value: Any


class Listed(BaseModel):
    values: list


class Open(BaseModel, extra="allow"):
    name: str


def form_of(kind: Any) -> dict | None:
    form = format_schema(TypeAdapter(kind).json_schema())
    if form is not None:
        config = {"format": {"type": "json_schema", "schema": form}}
        body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "output_config": config}
        check_messages(MessagesRequest(0, "", body, {"anthropic-version": "2023-06-01"}), None, {})
    return form


@pytest.mark.parametrize("kind", [Whole, Part, Part | Whole, Open], ids=str)
def test_a_schema_is_sent_in_a_form_that_the_api_takes(kind: Any) -> None:
    assert form_of(kind) is not None


@pytest.mark.parametrize("kind", [Node, Map, Anything, Listed, list[Part], dict[str, int], int, Any], ids=str)
def test_what_the_grammar_cannot_say_has_no_form(kind: Any) -> None:
    assert form_of(kind) is None


def test_whatever_the_form_accepts_but_for_bounds_the_schema_accepts() -> None:
    part = {"size": 3, "colour": "red"}
    good = {"first": part, "others": [part], "level": 1, "when": "2026-01-01"}
    form = form_of(Whole)
    assert form is not None
    for change, fits in [
        ({}, True),
        ({"note": None}, True),
        ({"others": []}, False),
        ({"level": "high"}, False),
        ({"more": 1}, False),
        ({"first": {"size": 3}}, False),
        ({"first": part | {"size": 9}}, True),
    ]:
        assert jsonschema_rs.is_valid(form, good | change) is fits, change


def test_bounds_become_words_and_words_beside_a_reference_are_kept() -> None:
    form = form_of(Part)
    assert form is not None
    assert form["properties"]["size"]["description"] == "How large. (maximum: 5, minimum: 1)"
    assert form["properties"]["colour"]["description"] == "Which."
    assert form["properties"]["colour"]["enum"] == ["red", "blue"]
    assert "minItems" not in form["properties"]["names"]


def test_more_optional_parts_or_unions_than_the_api_compiles_have_no_form() -> None:
    def made(count: int, schema: dict, required: bool) -> dict:
        names = [f"f{n}" for n in range(count)]
        return {
            "type": "object",
            "properties": dict.fromkeys(names, schema),
            "required": names if required else [],
        }

    union = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    assert format_schema(made(MOST_OPTIONAL, {"type": "string"}, False)) is not None
    assert format_schema(made(MOST_OPTIONAL + 1, {"type": "string"}, False)) is None
    assert format_schema(made(MOST_UNIONS, union, True)) is not None
    assert format_schema(made(MOST_UNIONS + 1, union, True)) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/Gone"},
        {"$ref": "https://elsewhere.example/schema"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "object", "properties": {"a": {"enum": [{"b": 1}]}}},
        {"type": "object", "properties": {"a": True}},
        {"type": "object", "properties": {}, "patternProperties": {"^a": {"type": "string"}}},
        {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"},
    ],
    ids=str,
)
def test_an_odd_schema_has_no_form_and_does_no_harm(schema: dict) -> None:
    assert format_schema(schema) is None
