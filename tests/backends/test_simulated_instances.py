"""The smallest value that fits a schema, checked by a real validator."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime
from enum import Enum
from typing import Annotated, Literal
from uuid import UUID

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, TypeAdapter

from batch_agent.backends.simulated import minimal_instance
from batch_agent.errors import SpecError


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Leaf(BaseModel):
    kind: Literal["leaf"]
    score: Annotated[float, Field(gt=0, le=1)]
    count: Annotated[int, Field(ge=3, multiple_of=5)]


class Tree(BaseModel):
    kind: Literal["tree"]
    left: Tree | None
    children: list[Tree]
    name: Annotated[str, Field(min_length=3, max_length=5)]


@dataclass
class Record:
    leaf: Leaf
    tree: Tree
    either: Leaf | Tree
    pair: tuple[int, str]
    when: datetime
    day: date
    id: UUID
    colour: Colour
    tags: Annotated[list[str], Field(min_length=2)]
    mapping: dict[str, int]
    flag: bool
    nothing: None
    maybe: int | None
    defaulted: str = "x"


@pytest.mark.parametrize("kind", [Leaf, Tree, Record, list[Record], int, str, Colour, dict[str, Leaf]])
def test_an_instance_of_a_types_schema_is_a_value_of_that_type(kind: type[object]) -> None:
    adapter = TypeAdapter(kind)
    schema = adapter.json_schema()
    value = minimal_instance(schema, filler="some text")
    assert jsonschema_rs.is_valid(schema, value), value
    adapter.validate_python(value, strict=False)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": ["null", "string"]},
        {
            "allOf": [{"$ref": "#/$defs/a"}, {"required": ["b"]}],
            "$defs": {"a": {"properties": {"b": {"type": "null"}}}},
        },
        {"type": "object", "minProperties": 2},
        {"type": "object", "required": ["x"], "additionalProperties": {"type": "integer", "minimum": 4}},
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "string"}, "minItems": 3},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        {"type": "number", "exclusiveMaximum": 0},
        {"type": "integer", "exclusiveMinimum": 6},
        {"type": "integer", "maximum": -3},
        {"type": "string", "format": "email"},
        {"oneOf": [{"type": "string", "minLength": 9}, {"type": "boolean"}]},
        {"const": {"a": [1]}},
    ],
)
def test_the_instance_is_valid(schema: dict) -> None:
    value = minimal_instance(schema)
    assert jsonschema_rs.is_valid(schema, value), value


@given(st.integers(-1000, 1000), st.integers(0, 500), st.integers(1, 9))
def test_bounds_of_whole_numbers_are_kept(low: int, width: int, step: int) -> None:
    schema = {"type": "integer", "minimum": low, "maximum": low + width + step, "multipleOf": step}
    assert jsonschema_rs.is_valid(schema, minimal_instance(schema))


def test_the_filler_makes_texts_differ_within_their_length() -> None:
    schema = {"type": "object", "properties": {"q": {"type": "string", "maxLength": 4}}, "required": ["q"]}
    assert minimal_instance(schema, filler="abcdef") == {"q": "abcd"}


def test_a_schema_without_a_finite_value_and_a_reference_to_nowhere_are_spec_errors() -> None:
    endless = {"$ref": "#/$defs/n", "$defs": {"n": {"required": ["n"], "properties": {"n": {"$ref": "#/$defs/n"}}}}}
    with pytest.raises(SpecError, match="no finite value"):
        minimal_instance(endless)
    with pytest.raises(SpecError, match="unresolved reference"):
        minimal_instance({"$ref": "#/$defs/missing"})
