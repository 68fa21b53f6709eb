"""Schemas as OpenAI takes them, and the answers they bring, out of pydantic's types and by hand."""

from __future__ import annotations

import datetime
import enum
import json
import uuid
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import jsonschema_rs
import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel
from tests.backends.strict_mode import Refused, judge
from typing_extensions import TypeAliasType

from batch_agent.backends.openai.schema import MOST_LEVELS, SchemaForm, engine_form, strict_form, unwrapped
from batch_agent.compiler.schema import OutputSchema


class Colour(enum.Enum):
    red = "red"
    blue = "blue"


class Level(enum.IntEnum):
    low = 1
    high = 2


class Inner(BaseModel):
    """What is inside."""

    x: int


class Node(BaseModel):
    value: int
    children: list[Node] = []


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]


class Row(TypedDict, total=False):
    a: int


class Pair(NamedTuple):
    a: int
    b: str


@dataclass
class Point:
    x: float
    y: float = 0.0


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Everything(BaseModel):
    inner: Inner = Field(description="A reference with a description.", examples=[{"x": 1}])
    again: Inner
    maybe: Inner | None = None
    number: float = Field(ge=0, le=1)
    count: int = Field(5, gt=0, multiple_of=5)
    word: str = Field(min_length=1, max_length=9, pattern="^[a-z]+$")
    words: list[str] = Field(min_length=1, max_length=3)
    unique: set[int]
    when: datetime.datetime
    day: datetime.date
    id: uuid.UUID
    colour: Colour
    level: Level
    choice: Literal["a", "b"]
    mixed: Literal["low", 1, None]
    one: Literal["only"]
    flag: bool = False
    nothing: None = None
    point: Point
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    either: int | str
    tree: Node


Tree = TypeAliasType("Tree", "dict[str, Tree] | list[Tree] | str")
Names = TypeAliasType("Names", "list[Names] | str")

STRICT = {
    "everything": (Everything, None),
    "nested": (Inner, {"x": 1}),
    "recursive": (Node, {"value": 1, "children": [{"value": 2, "children": []}]}),
    "dataclass": (Point, {"x": 1, "y": 2}),
    "typed dict": (Row, {"a": 1}),
    "empty": (type("Empty", (BaseModel,), {}), {}),
    "list of models": (list[Inner], [{"x": 1}]),
    "list of texts": (list[str], ["a"]),
    "union": (Cat | Dog, {"kind": "dog"}),
    "discriminated": (Annotated[Cat | Dog, Field(discriminator="kind")], {"kind": "cat", "lives": 9}),
    "optional model": (Inner | None, None),
    "list of recursive": (list[Node], [{"value": 1, "children": []}]),
    "recursive list": (RootModel[list[Node]], []),
    "recursive alias": (Names, ["a", ["b"]]),
    "integer": (int, 3),
    "boolean": (bool, True),
    "literal": (Literal["low", 1], 1),
    "enum": (Colour, "red"),
    "text or number": (str | float, "x"),
    "date": (datetime.date, "2026-01-02"),
}
LOOSE = {
    "map": (dict[str, int], {"a": 1}),
    "model with a map": (type("M", (BaseModel,), {"__annotations__": {"m": dict[str, int]}}), {"m": {"a": 1}}),
    "anything": (Any, [1, {"a": None}]),
    "bare list": (list, [1, "a"]),
    "bare dict": (dict, {"a": 1}),
    "list of anything": (list[Any], [1]),
    "model with anything": (type("N", (BaseModel,), {"__annotations__": {"a": Any, "b": list}}), {"a": 1, "b": []}),
    "tuple": (tuple[int, str], [1, "a"]),
    "named tuple": (Pair, [1, "a"]),
    "open model": (Open, {"a": 1, "b": 2}),
    "tree with maps": (Tree, {"a": ["b"]}),
    "decimal": (dict[str, Decimal], {"a": "1.5"}),
}


def schema_of(kind: object) -> OutputSchema[object]:
    schema = OutputSchema.of(kind)
    assert schema is not None
    return schema


def form_of(kind: object) -> SchemaForm:
    return strict_form(schema_of(kind).json_schema)


def judged(form: SchemaForm) -> None:
    judge({"name": "answer", "schema": form.schema, "strict": form.strict})


@pytest.mark.parametrize("name", STRICT)
def test_a_type_with_a_strict_form_goes_out_in_it(name: str) -> None:
    form = form_of(STRICT[name][0])
    judged(form)
    assert form.strict


@pytest.mark.parametrize("name", LOOSE)
def test_a_type_without_one_goes_out_as_an_object_that_is_not_strict(name: str) -> None:
    form = form_of(LOOSE[name][0])
    judged(form)
    assert not form.strict


@pytest.mark.parametrize("name", [*STRICT, *LOOSE])
def test_what_fits_the_form_is_read_as_the_users_type(name: str) -> None:
    kind, value = (STRICT | LOOSE)[name]
    if name == "everything":
        return
    form = form_of(kind)
    sent = {"answer": value} if form.wrapped else value
    assert jsonschema_rs.is_valid(form.schema, sent), form.schema
    text = json.dumps(sent, indent=1)
    schema_of(kind).validate_json(unwrapped(text) if form.wrapped else text)


def test_only_a_root_that_is_no_object_is_wrapped() -> None:
    wrapped = {name for name, (kind, _) in (STRICT | LOOSE).items() if form_of(kind).wrapped}
    plain = {"everything", "nested", "recursive", "dataclass", "typed dict", "empty", "map", "model with a map"}
    assert wrapped == (STRICT | LOOSE).keys() - plain - {"bare dict", "model with anything", "open model", "decimal"}


def test_a_recursive_model_has_its_root_in_place_of_the_reference_to_it() -> None:
    form = form_of(Node)
    assert form.schema["properties"]["children"] == {
        "items": {"$ref": "#/$defs/Node"},
        "title": "Children",
        "type": "array",
    }
    assert form.schema["$defs"]["Node"]["required"] == ["value", "children"]


def test_what_strict_mode_cannot_say_is_said_in_words() -> None:
    schema = form_of(Everything).schema["properties"]
    assert schema["word"] == {
        "title": "Word",
        "type": "string",
        "description": '(minLength: 1, maxLength: 9, pattern: "^[a-z]+$")',
    }
    assert schema["inner"] == {"anyOf": [{"$ref": "#/$defs/Inner"}], "description": "A reference with a description."}
    assert schema["mixed"]["anyOf"] == [
        {"type": "string", "enum": ["low"]},
        {"type": "integer", "enum": [1]},
        {"type": "null"},
    ]
    assert [part["$ref"] for part in schema["pet"]["anyOf"]] == ["#/$defs/Cat", "#/$defs/Dog"]


def by_hand(node: object, **root: object) -> dict:
    return {"type": "object", "properties": {"a": node}, **root}


@pytest.mark.parametrize(
    "schema",
    [
        by_hand({"enum": ["a", "b"]}),
        by_hand({"const": 5}),
        by_hand({"type": ["string", "null"]}),
        by_hand({"properties": {"b": {"type": "string"}}}),
        by_hand({"items": {"type": "string"}}),
        by_hand({"allOf": [{"$ref": "#/definitions/B"}]}, definitions={"B": {"type": "string"}}),
        by_hand({"$ref": "#/definitions/B", "default": "x"}, definitions={"B": {"type": "string", "x-note": 1}}),
        by_hand({"oneOf": [{"type": "string"}, {"type": "integer"}]}),
        by_hand({"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "null"}]}),
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "properties": {"a": {"type": "string"}}},
        {"allOf": [{"$ref": "#/$defs/B"}], "$defs": {"B": by_hand({"type": "string"})}},
    ],
)
def test_schemas_by_hand_have_a_strict_form_too(schema: dict) -> None:
    form = strict_form(schema)
    judged(form)
    assert form.strict
    assert not form.wrapped


@pytest.mark.parametrize(
    "schema",
    [
        by_hand({}),
        by_hand(True),
        by_hand({"description": "anything"}),
        by_hand({"type": "array"}),
        by_hand({"type": "object"}),
        by_hand({"type": ["object", "null"]}),
        by_hand({"$ref": "#/properties/b"}),
        by_hand({"$ref": "#/$defs/C", "enum": ["a"]}),
        by_hand({"enum": [{"a": 1}]}),
        by_hand({"enum": []}),
        by_hand({"not": {"type": "string"}}),
        by_hand({"type": "string"}, additionalProperties={"type": "string"}),
        by_hand({"type": "string"}, required=["b"]),
        by_hand({"type": "string"}, anyOf=[{"required": ["a"]}]),
        by_hand({"enum": [str(number) for number in range(2000)]}),
        by_hand({"enum": ["x" * 100 + str(number) for number in range(300)]}),
        {"type": "array", "items": {"$ref": "#"}},
        {"anyOf": []},
    ],
)
def test_schemas_by_hand_without_one_are_not_refused(schema: dict) -> None:
    form = strict_form(schema)
    judged(form)
    assert not form.strict


def test_a_reference_that_leads_to_itself_ends() -> None:
    judged(strict_form({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}))


def test_a_schema_that_is_too_deep_for_strict_mode_is_sent_without() -> None:
    def nested(levels: int) -> dict:
        return by_hand({"type": "string"} if levels == 1 else nested(levels - 1))

    assert strict_form(nested(MOST_LEVELS - 1)).strict
    assert not strict_form(nested(MOST_LEVELS + 1)).strict


def test_references_to_a_root_that_is_wrapped_still_lead_to_it() -> None:
    form = strict_form({"type": "array", "items": {"anyOf": [{"$ref": "#"}, {"type": "integer"}]}})
    assert form.wrapped
    assert jsonschema_rs.is_valid(form.schema, {"answer": [1, [2, [3]]]})
    assert not jsonschema_rs.is_valid(form.schema, {"answer": [1, ["x"]]})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('{"answer": [1, 2.50]}', "[1, 2.50]"),
        (' {\n "answer" : {"answer": "}"} }\n', '{"answer": "}"}'),
        ('{"answer": "x"}', '"x"'),
        ("[1, 2]", "[1, 2]"),
        ('{"answer": 1, "more": 2}', '{"answer": 1, "more": 2}'),
        ('{"answer": [1', '{"answer": [1'),
        ("I cannot do that.", "I cannot do that."),
        ("", ""),
    ],
)
def test_an_answer_is_taken_out_of_its_wrapper_character_for_character(text: str, answer: str) -> None:
    assert unwrapped(text) == answer


def test_engines_get_what_they_can_keep_to_as_it_is() -> None:
    for kind, _ in (STRICT | LOOSE).values():
        schema = schema_of(kind).json_schema
        form = engine_form(schema)
        assert not form.wrapped
        assert form.strict or form.schema == schema
    assert engine_form(schema_of(Point).json_schema).strict


def test_the_judge_refuses_what_openai_refuses() -> None:
    for schema in (list[str], Everything, Cat | Dog, dict[str, int], Node):
        with pytest.raises(Refused):
            judge({"name": "answer", "schema": schema_of(schema).json_schema, "strict": True})
