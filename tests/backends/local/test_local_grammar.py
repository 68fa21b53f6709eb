"""Schema → grammar: whatever a grammar accepts is valid, and what a grammar cannot keep is said."""

from __future__ import annotations

import enum
import json
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Literal
from uuid import UUID

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, JsonValue, TypeAdapter
from tests.backends.local.ebnf_sampler import sampler
from tests.backends.local.schema_strategies import schemas
from tests.examples import examples

from batch_agent.backends.local.grammar import Grammar
from batch_agent.backends.schema.visitor import Inexpressible


def compile_schema(schema: dict[str, JsonValue], max_tokens: int) -> str:
    grammar = Grammar(max_tokens)
    grammar.root(grammar.add(schema))
    return grammar.text()


def texts_of(schema: dict[str, JsonValue], number: int = 20) -> list[str]:
    grammar = compile_schema(schema, max_tokens=256)
    return [sampler(grammar, seed).text() for seed in range(number)]


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=schemas(), seed=st.integers(0, 10_000))
def test_every_text_a_grammar_accepts_is_valid(schema: dict[str, JsonValue], seed: int) -> None:
    text = sampler(compile_schema(schema, max_tokens=256), seed).text()
    assert jsonschema_rs.is_valid(schema, json.loads(text)), text


@given(low=st.integers(-2000, 2000), span=st.integers(0, 3000), seed=st.integers(0, 1000))
def test_integers_keep_to_their_range(low: int, span: int, seed: int) -> None:
    schema: dict[str, JsonValue] = {"type": "integer", "minimum": low, "maximum": low + span}
    assert low <= int(sampler(compile_schema(schema, 64), seed).text()) <= low + span


@given(
    low=st.decimals(-50, 50, places=3),
    span=st.decimals(Decimal("0.01"), 20, places=3),
    seed=st.integers(0, 1000),
    open_ends=st.tuples(st.booleans(), st.booleans()),
)
def test_numbers_keep_to_their_range(low: Decimal, span: Decimal, seed: int, open_ends: tuple[bool, bool]) -> None:
    lowest, highest = float(low), float(low + span)
    schema: dict[str, JsonValue] = {
        "type": "number",
        "exclusiveMinimum" if open_ends[0] else "minimum": lowest,
        "exclusiveMaximum" if open_ends[1] else "maximum": highest,
    }
    value = float(sampler(compile_schema(schema, 64), seed).text())
    assert lowest <= value <= highest
    assert not (open_ends[0] and value == lowest)
    assert not (open_ends[1] and value == highest)


class Colour(enum.Enum):
    RED = "red"
    BLUE = 'bl"ue'


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, lt=10)]


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool = True


class Node(BaseModel):
    label: str
    children: list[Node] = Field(default=[], max_length=2)


class Everything(BaseModel):
    name: str = Field(min_length=1, max_length=150)
    note: str | None = None
    colour: Colour
    ratio: float = Field(gt=0, le=1)
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    pair: tuple[int, str]
    counts: dict[str, int] = Field(max_length=3)
    by_size: dict[Literal["s", "m"], bool] = {}
    tree: Node
    day: date
    at: datetime
    key: UUID
    tags: list[Annotated[str, Field(min_length=2, max_length=5)]] = Field(min_length=1, max_length=4)
    whatever: JsonValue = None


def test_a_pydantic_model_with_everything_parses_back() -> None:
    for text in texts_of(Everything.model_json_schema(), 60):
        assert isinstance(Everything.model_validate_json(text), Everything)


def test_optional_properties_are_sometimes_left_out_and_never_leave_a_stray_comma() -> None:
    class Sparse(BaseModel):
        a: int = 0
        b: int = 0
        c: bool
        d: int = 0

    seen = {tuple(json.loads(text)) for text in texts_of(Sparse.model_json_schema(), 200)}
    assert len(seen) == 8
    assert all("c" in keys and list(keys) == sorted(keys) for keys in seen)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "string", "pattern": "^a+$"}, "pattern"),
        ({"type": "string", "format": "email"}, "email"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "integer", "multipleOf": 5}, "multipleOf"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "no integer"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "overlap"),
        ({"allOf": [{"type": "object"}, {"type": "object"}]}, "allOf"),
        ({"type": "object", "required": ["a"]}, "required"),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}}}, "itself"),
        ({"$ref": "#/$defs/B"}, "points to nothing"),
        ({"type": "string", "minLength": 5000}, "5000"),
        ({"not": {"type": "string"}}, "not"),
    ],
)
def test_what_a_grammar_cannot_keep_is_said(schema: dict[str, JsonValue], reason: str) -> None:
    with pytest.raises(Inexpressible, match=reason):
        compile_schema(schema, 64)


def test_lists_of_plain_types_need_no_model() -> None:
    adapter = TypeAdapter(list[int])
    for text in texts_of(adapter.json_schema()):
        assert isinstance(adapter.validate_json(text), list)
