"""What a gold cell means for a field, and when an answer equals it."""

from __future__ import annotations

import enum
from typing import Any, Literal

import pytest
from pydantic import BaseModel, JsonValue

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import SpecError
from batch_agent.trust.gold import Gold, GoldField, field_of, gold_of, right


class Mood(enum.Enum):
    CALM = "calm"
    ANGRY = "angry"


class Address(BaseModel):
    city: str
    zip: int | None = None


class Ticket(BaseModel):
    mood: Mood
    kind: Literal["bug", "wish"] | None
    stars: Literal[1, 2, 3]
    urgent: bool
    count: int
    price: float | None
    address: Address
    tags: list[str]


def field(name: str, schema: object = Ticket) -> GoldField:
    made = OutputSchema.of(schema)
    return field_of(None if made is None else made.json_schema, name)


@pytest.mark.parametrize(
    ("name", "cell", "value"),
    [
        ("mood", " angry ", "angry"),
        ("kind", "null", None),
        ("stars", "2", 2),
        ("stars", 2.0, 2),
        ("urgent", "YES", True),
        ("urgent", "0", False),
        ("urgent", True, True),
        ("count", "4", 4),
        ("count", 4.0, 4),
        ("count", "4.0", 4),
        ("price", "4", 4),
        ("price", "null", None),
        ("address.city", "null", "null"),
        ("address.zip", "null", None),
        ("tags", '["a", "b"]', ["a", "b"]),
        ("tags", ["a"], ["a"]),
        ("tags[0]", "a", "a"),
        ("address", '{"city": "Oslo"}', {"city": "Oslo"}),
    ],
)
def test_a_cell_is_read_by_the_type_of_its_field(name: str, cell: object, value: JsonValue) -> None:
    found = field(name).read(cell)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "cell", "why"),
    [
        ("mood", "mild", "calm, angry"),
        ("stars", "4", "1, 2, 3"),
        ("urgent", "maybe", "yes, true, 1"),
        ("urgent", 2, "yes, true, 1"),
        ("count", "4.5", "whole number"),
        ("count", True, "whole number"),
        ("price", "cheap", "a number"),
        ("price", "nan", "a number"),
        ("mood", "null", "calm, angry"),
        ("tags", "a, b", "JSON"),
    ],
)
def test_a_cell_that_the_field_does_not_allow_is_refused_with_what_is_allowed(
    name: str, cell: object, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        field(name).read(cell)


@pytest.mark.parametrize(
    ("name", "answer", "gold", "is_right"),
    [
        ("mood", "angry", "angry", True),
        ("mood", "Angry", "angry", False),
        ("urgent", True, True, True),
        ("urgent", 1, True, False),
        ("count", 4, 4, True),
        ("price", 4.0000000001, 4, True),
        ("price", 4.001, 4.0, False),
        ("price", 5_000_000_001.0, 5_000_000_000.0, False),
        ("price", None, None, True),
        ("price", None, 4.0, False),
        ("address.city", "  NEW\tYork ", "new york", True),
        ("address.city", "ﬁne", "fine", True),
        ("address.city", "STRASSE", "straße", True),
        ("address.city", "York", "New York", False),
        ("tags", ["a"], ["a"], True),
        ("tags", ["A"], ["a"], False),
        ("address", {"city": "Oslo", "zip": 1}, {"zip": 1.0, "city": "Oslo"}, True),
        ("address", {"city": "Oslo", "zip": 1}, {"city": "Oslo", "zip": True}, False),
    ],
)
def test_what_is_right_depends_on_the_type(name: str, answer: JsonValue, gold: JsonValue, is_right: bool) -> None:
    assert right(field(name), answer, gold) is is_right


def test_a_tolerance_is_absolute() -> None:
    gold = gold_of({"price": "p"}, OutputSchema.of(Ticket).json_schema).with_rules({"price": 0.01}, {})  # type: ignore[union-attr]
    assert gold.fields["price"].right(1.11, 1.1)
    assert not gold.fields["price"].right(1.12, 1.1)
    with pytest.raises(SpecError, match="mood"):
        gold.with_rules({"mood": 1}, {})


def test_a_function_of_the_user_decides_and_must_say_true_or_false() -> None:
    schema = OutputSchema.of(Ticket).json_schema  # type: ignore[union-attr]

    def same_first_letter(answer: Any, gold: Any) -> bool:
        return bool(answer[0] == gold[0])

    gold = gold_of({"mood": "m"}, schema).with_rules({}, {"mood": same_first_letter})
    assert gold.fields["mood"].right("calm", "cold")
    with pytest.raises(SpecError, match="IndexError"):
        gold.fields["mood"].right("", "cold")
    with pytest.raises(SpecError, match="True or False"):
        gold_of({"mood": "m"}, schema).with_rules({}, {"mood": lambda *_: 0.5}).fields["mood"].right("a", "b")


def test_one_column_is_enough_for_an_answer_with_one_field_or_none() -> None:
    assert [*gold_of("label", None).fields] == ["output"]
    assert [*gold_of("label", {"enum": ["a", "b"]}).fields] == ["output"]
    assert gold_of("label", {"type": "boolean"}).fields["output"].kind == "boolean"
    one = {"type": "object", "properties": {"mood": {"enum": ["a", "b"]}}}
    assert [*gold_of("label", one).fields] == ["mood"]
    with pytest.raises(SpecError, match=r"8 fields.*say which column"):
        gold_of("label", OutputSchema.of(Ticket).json_schema)  # type: ignore[union-attr]
    with pytest.raises(SpecError, match=r"'address.town'.*city, zip"):
        gold_of({"address.town": "t"}, OutputSchema.of(Ticket).json_schema)  # type: ignore[union-attr]
    with pytest.raises(SpecError, match="more than one field"):
        gold_of({"mood": "t", "kind": "t"}, OutputSchema.of(Ticket).json_schema)  # type: ignore[union-attr]


def test_an_empty_cell_is_a_row_without_gold() -> None:
    gold = gold_of({"mood": "m", "price": "p"}, OutputSchema.of(Ticket).json_schema)  # type: ignore[union-attr]
    assert gold.read({"m": " ", "p": float("nan")}) == {}
    assert gold.read({"m": "calm", "p": None}) == {"mood": "calm"}
    with pytest.raises(ValueError, match="m is 'mild'"):
        gold.read({"m": "mild"})


def test_without_a_schema_the_type_is_that_of_the_answers() -> None:
    def kinds(*answers: JsonValue) -> str:
        gold = gold_of({"x": "c"}, None, known=False).typed_by([{"x": answer} for answer in answers])
        return gold.fields["x"].kind

    assert kinds("a", "b", None) == "text"
    assert kinds(True, False) == "boolean"
    assert kinds(1, 2) == "integer"
    assert kinds(1, 2.5) == "number"
    assert kinds([1]) == "json"
    assert kinds(1, "a") == "json"


def test_an_answer_is_found_by_its_place() -> None:
    assert field("address.city").take({"address": {"city": "Oslo"}}) == "Oslo"
    assert field("address.city").take({"address": None}) is None
    assert field("tags[1]").take({"tags": ["a", "b"]}) == "b"
    assert field("tags[1]").take({"tags": ["a"]}) is None
    assert GoldField("a.b", "text").take({"a.b": "whole"}) == "whole"
    assert Gold([GoldField("output", "text")], {"output": "c"}).fields["output"].take("text") == "text"
