"""Every kind of schema a user may give: its JSON schema, its exact check, its errors."""

from __future__ import annotations

import asyncio
import typing
from dataclasses import dataclass
from typing import Annotated, Literal

import annotated_types
import pytest
from pydantic import BaseModel, BeforeValidator, Field, Json, field_validator

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import Invalid, NotJSON, SpecError
from batch_agent.messages import JsonObject


class Review(BaseModel):
    file: str
    severity: Literal["low", "high"]
    findings: list[str] = []


@dataclass
class Point:
    x: int
    y: int = 0


class Place(typing.TypedDict):
    name: str
    points: typing.NotRequired[list[int]]


class Trip(typing.TypedDict, total=False):
    """A trip."""

    start: typing.Required[Place]
    stops: list[Place]


JSON_SCHEMA = {
    "title": "A point, named!",
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0}, "day": {"type": "string", "format": "date"}},
    "required": ["x"],
    "additionalProperties": False,
}


def schema_of(value: object) -> OutputSchema[object]:
    schema = OutputSchema.of(value)
    assert schema is not None
    return schema


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Review, '{"file": "a", "severity": "low"}', Review(file="a", severity="low")),
        (Point, '{"x": 1}', Point(1)),
        (Place, '{"name": "n"}', {"name": "n"}),
        (
            Trip,
            '{"start": {"name": "n"}, "stops": [{"name": "m"}]}',
            {"start": {"name": "n"}, "stops": [{"name": "m"}]},
        ),
        (list[Place], '[{"name": "n", "points": [1]}]', [{"name": "n", "points": [1]}]),
        (Place | None, "null", None),
        (list[Point], '[{"x": 1}, {"x": 2}]', [Point(1), Point(2)]),
        (Review | Point, '{"x": 1}', Point(1)),
        (Point | None, "null", None),
        (dict[str, int], '{"a": 1}', {"a": 1}),
        (tuple[int, str], '[1, "a"]', (1, "a")),
        (int, "42", 42),
        (Literal["yes", "no"], '"yes"', "yes"),
        (JSON_SCHEMA, '{"x": 1, "day": "2024-01-02"}', {"x": 1, "day": "2024-01-02"}),
        ({}, "[1]", [1]),
    ],
)
def test_an_answer_becomes_an_instance_of_what_the_user_gave(kind: object, text: str, value: object) -> None:
    schema = schema_of(kind)
    assert schema.validate_json(text) == value
    assert schema.validate_json(text.encode()) == value
    assert type(schema.validate_json(text)) is type(value)


def test_no_schema_and_str_mean_text() -> None:
    assert OutputSchema.of(None) is None
    assert OutputSchema.of(str) is None


@pytest.mark.parametrize(
    "value",
    [
        "Review",
        3,
        Review(file="a", severity="low"),
        print,
        lambda x: x,
        [Review],
        object(),
        typing.Callable[[], int],
        {"type": "json_schema"},
        {"type": "object", "properties": []},
        {"$ref": "https://example.com/schema.json"},
        {"$ref": "#/$defs/missing"},
        {"type": "string", "pattern": "("},
        {"type": object()},
    ],
)
def test_what_is_no_schema_is_refused_with_what_is_allowed(value: object) -> None:
    with pytest.raises(SpecError, match=r"(?s)output_schema.*JSON schema as a dict"):
        OutputSchema.of(value)


def test_a_class_that_pydantic_cannot_read_is_refused() -> None:
    class Opaque:
        pass

    with pytest.raises(SpecError, match="Opaque"):
        OutputSchema.of(Opaque)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Review, "Review"), (Point, "Point"), (Trip, "Trip"), (list[Review], "answer"), (JSON_SCHEMA, "A_point_named")],
)
def test_a_schema_has_a_name_that_every_wire_takes(kind: object, name: str) -> None:
    assert schema_of(kind).name == name


def test_a_very_long_or_unspeakable_title_is_cut() -> None:
    assert schema_of({"title": "é" * 5}).name == "answer"
    assert schema_of({"title": "a" * 100}).name == "a" * 64


def test_the_json_schema_is_what_pydantic_gives_and_a_dict_is_kept_as_it_is() -> None:
    assert schema_of(Review).json_schema == Review.model_json_schema()
    assert schema_of(JSON_SCHEMA).json_schema == JSON_SCHEMA


def test_a_typed_dict_keeps_what_is_required_and_its_description() -> None:
    schema = schema_of(Trip).json_schema
    assert schema["required"] == ["start"]
    assert schema["description"] == "A trip."


@pytest.mark.parametrize("text", ["", "hello", '{"x": 1', '{"x": 1} trailing', "[" * 5000, "\ud800", '{"x": NaN, }'])
@pytest.mark.parametrize("kind", [Review, JSON_SCHEMA])
def test_what_is_not_json_is_said_to_be_so_with_its_beginning(kind: object, text: str) -> None:
    with pytest.raises(NotJSON) as caught:
        schema_of(kind).validate_json(text)
    assert len(str(caught.value)) < 300


def test_errors_name_the_path_the_rule_and_the_value() -> None:
    with pytest.raises(Invalid) as caught:
        schema_of(list[Review]).validate_json('[{"severity": "medium", "findings": ["a", 1]}]')
    lines = str(caught.value).split("\n")
    assert lines[0] == "[0].file: Field required"
    assert lines[1] == "[0].severity: Input should be 'low' or 'high', got 'medium'"
    assert lines[2].startswith("[0].findings[1]: Input should be a valid string, got 1")


def test_a_json_schema_is_really_validated_and_its_errors_read_the_same() -> None:
    with pytest.raises(Invalid) as caught:
        schema_of(JSON_SCHEMA).validate_json('{"x": -1, "day": "' + "z" * 500 + '", "q": null}')
    message = str(caught.value)
    assert "x: the value is less than the minimum of 0, got -1" in message
    assert 'day: the value is not a "date", got \'zzz' in message
    assert "the answer: Additional properties are not allowed ('q' was unexpected)" in message
    assert len(message) < 400
    with pytest.raises(Invalid, match=r'the answer: "x" is a required property$'):
        schema_of(JSON_SCHEMA).validate_json("{}")


def test_many_errors_are_counted_rather_than_listed() -> None:
    with pytest.raises(Invalid, match="… and 90 more"):
        schema_of(list[int]).validate_json(str(["x"] * 100).replace("'", '"'))


class Picky(BaseModel):
    value: int

    @field_validator("value")
    @classmethod
    def judge(cls, value: int) -> int:
        if value == 1:
            raise ValueError("not one")
        if value == 2:
            raise KeyError("two")
        if value == 3:
            raise RecursionError("three")
        if value == 4:
            raise SystemExit("four")
        if value == 5:
            raise GeneratorExit("five")
        if value == 6:
            raise asyncio.CancelledError("six")
        return value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1, "value: Value error, not one"),
        (2, "KeyError: 'two'"),
        (3, "three"),
        (4, "SystemExit: four"),
        (5, "GeneratorExit: five"),
        (6, "CancelledError: six"),
    ],
)
def test_whatever_a_users_validator_raises_is_an_invalid_answer(value: int, said: str) -> None:
    with pytest.raises(Invalid, match=said):
        schema_of(Picky).validate_json(f'{{"value": {value}}}')
    with pytest.raises(Invalid, match=said):
        schema_of(Picky).validate_python({"value": value})


class Unspeakable:
    def __repr__(self) -> str:
        raise OSError("no words")


def test_a_value_that_cannot_be_shown_is_an_invalid_answer() -> None:
    schema = schema_of(Annotated[int, BeforeValidator(lambda value: Unspeakable()), Field(gt=1)])
    with pytest.raises(Invalid):
        schema.validate_python(Unspeakable())


def test_advice_for_those_who_use_pydantic_directly_is_left_out() -> None:
    with pytest.raises(SpecError, match=r"there is no JSON schema for 5\. Give a pydantic model class") as caught:
        OutputSchema.of(5)
    assert "arbitrary_types" not in str(caught.value)


def test_invalid_json_in_a_field_is_not_an_answer_that_is_no_json() -> None:
    class Nested(BaseModel):
        inner: Json[int]

    with pytest.raises(Invalid, match="inner"):
        schema_of(Nested).validate_json('{"inner": "{"}')


@pytest.mark.parametrize(
    ("kind", "scalar"),
    [
        (int, True),
        (Literal["a", 1], True),
        (Annotated[str, annotated_types.MinLen(2)], True),
        (int | None, True),
        ({"type": ["string", "null"]}, True),
        (Annotated[list[int], Field(min_length=1)], False),
        (Review, False),
        (Review | None, False),
        ({}, False),
        ({"type": ["string", "object"]}, False),
    ],
)
def test_scalar_schemas_are_known(kind: object, scalar: bool) -> None:
    assert schema_of(kind).is_scalar is scalar


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "objekt"}, r"the type 'objekt' is unknown: did you mean 'object'\? The types are object, "),
        ({"type": "object", "properties": {"a": {"type": ["strng", "null"]}}}, "the type 'strng' of a is unknown"),
        ({"anyOf": [{"items": {"type": "text"}, "type": "array"}]}, "the type 'text' is unknown: The types are"),
    ],
)
def test_an_unknown_type_is_named_with_its_place_and_the_types_that_exist(schema: JsonObject, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        OutputSchema.of(schema)


def test_a_property_and_a_constant_may_be_called_type() -> None:
    fields = {"type": {"type": "string"}, "kind": {"const": {"type": "odd"}}, "other": {"enum": [{"type": "odd"}]}}
    assert OutputSchema.of({"type": "object", "properties": fields}) is not None
