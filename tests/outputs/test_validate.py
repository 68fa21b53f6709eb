"""From what models write to values: exact where possible, marked where mended, never silently wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import annotated_types
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict
from tests.examples import examples

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import Invalid, NotJSON, OutputError
from batch_agent.outputs.repair import REPAIR_CHARS, repair_prompt
from batch_agent.outputs.validate import Parsed, parse_output


class Review(BaseModel):
    file: str
    severity: Literal["low", "high"] = "low"


@dataclass
class Node:
    name: str
    children: list[Node] = field(default_factory=list)


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)
    pair: tuple[int, int]


def schema_of(value: object) -> OutputSchema[object]:
    schema = OutputSchema.of(value)
    assert schema is not None
    return schema


REVIEW = schema_of(Review)
A, B = Review(file="a"), Review(file="b")


def parse(text: str, schema: OutputSchema[object] = REVIEW) -> Parsed[object]:
    return parse_output(text, schema)


@pytest.mark.parametrize(
    "text",
    [
        '{"file": "a"}',
        ' \n{"file": "a"}\n',
        '\ufeff{"file": "a"}',
        '<think>maybe {"file": "b"}?</think>{"file": "a"}',
        'or {"file": "b"}\n</think>\n{"file": "a"}',
        '```json\n{"file": "a"}\n```',
    ],
)
def test_an_answer_without_prose_is_read_exactly(text: str) -> None:
    assert parse(text) == Parsed(A, repaired=False)


@pytest.mark.parametrize(
    "text",
    [
        'Sure! Here it is: {"file": "a"}. Anything else?',
        'Sure, I can do that.\n\n{"file": "a"}\n\nI hope this helps!',
        '{"file": "a"}\n\nExplanation: the file is a.',
        'It has two faults, the second of which is in a\n\n{"file": "a"}',
        '**Answer:** `{"file": "a"}`',
        'answer = {"file": "a"};',
        '<answer>{"file": "a"}</answer>',
        'Sure:\n```\n{"file": "a"}\n```\nDone {x}.',
        '```json {"file": "a"} ```',
        'First: {"file": "b"}\nFinally: {"file": "a"}',
        '{"file": "b"}\n{"file": "a"}',
        '{"file": "a"}\n\nNote that {"file": "b"} would be wrong.',
        'Other {"x": 1}, mine: {"file": "a"}\nsee [1] and {"note": 2}',
        'Not {"file": "b"} but\n```json\n{"file": "a"}\n```\nand not {"file": "b"}',
        '{{"file": "a"}}',
    ],
)
def test_an_answer_that_stands_apart_from_prose_is_taken_and_marked(text: str) -> None:
    assert parse(text) == Parsed(A, repaired=True)


@pytest.mark.parametrize(
    "text",
    [
        'I considered {"file": "a"} but refuse.',
        'I considered\n{"file": "a"}\nbut refuse.',
        'I considered: {"file": "a"}, but refuse.',
        '{"file": "a"} is what I would say if I were allowed to.',
        "I considered {'file': 'a',} but refuse.",
        'I will not answer {"file": "a"}',
        '```\nprint({"file": "a"})\n```',
    ],
)
def test_json_inside_a_sentence_is_not_the_answer(text: str) -> None:
    with pytest.raises(NotJSON, match="inside a sentence"):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"file": "a",}',
        "{'file': 'a'}",
        '{file: "a"}',
        '{"file": "a", "severity": "low"',
        '{"severity": "low", "file": "a',
        'Here: ```json\n{"file": "a", "severity": "low",\n',
        '{"file": "a" "severity": "low"}',
        '{"file": "a", // the name\n "severity": "low"}',
        'Sure: {"file": "a", "severity": "low",}\nbye',
    ],
)
def test_what_is_nearly_json_is_mended_and_marked(text: str) -> None:
    assert parse(text) == Parsed(A, repaired=True)


def test_half_of_a_surrogate_pair_costs_its_own_character_and_nothing_else() -> None:
    text = '{"file": "a \\ud83d b \\ud83d\\ude00 \\\\ud800"}'
    assert parse(text) == Parsed(Review(file="a \ufffd b 😀 \\ud800"), repaired=True)


def test_quotes_and_braces_inside_strings_survive_mending() -> None:
    parsed = parse('{"file": "it\'s {a}, [b]: \\"c\\" // d",}')
    assert parsed == Parsed(Review(file='it\'s {a}, [b]: "c" // d'), repaired=True)


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("{'file': 'a } b'}", "a } b"),
        ("So: {'file': 'a, } b', 'n': 3}. That's it", "a, } b"),
        ("{'file': 'it's a } b', 'n': [1, 2,],}", "it's a } b"),
        ("{'file': 'x, } y', 'ok': True, 'why': None}", "x, } y"),
        ("{'file': 'True, or \"None\" } ', }", 'True, or "None" } '),
        ("{'file': 'don\\'t } \\u00e9\\\\'}", "don't } é\\"),
        ("{file: 'b, } c'}", "b, } c"),
        ("{'file': 'cut, } of", "cut, } of"),
        ('{"file": "C:\\\\dir\\\\",}', "C:\\dir\\"),
        ('{"file": "He said \\"hi, }\\" ok",}', 'He said "hi, }" ok'),
    ],
)
def test_mending_loses_nothing_of_a_string(text: str, file: str) -> None:
    parsed: Any = parse(text)
    assert (parsed.value.file, parsed.repaired) == (file, True)


python_text = st.text("ab ,:{}[]'\"\\\n\t/é", max_size=12)


@given(st.dictionaries(python_text, python_text | st.booleans() | st.none(), min_size=1), st.sampled_from(["", ","]))
def test_an_object_as_python_writes_it_is_read_exactly(value: dict[str, object], comma: str) -> None:
    literal = repr(value).removesuffix("}") + comma + "}"
    assert parse(literal, schema_of({})).value == value


@pytest.mark.parametrize(
    ("kind", "text", "parsed"),
    [
        (int, "42", Parsed(42, False)),
        (int, "```\n42\n```", Parsed(42, False)),
        (int, "<think>7</think>\n42", Parsed(42, False)),
        (int, "So:\n```\n42\n```", Parsed(42, True)),
        (Literal["yes", "no"], '"yes"', Parsed("yes", False)),
        (Literal["yes", "no"], "yes", Parsed("yes", True)),
        (Literal["1", "2"], "1", Parsed("1", True)),
        (Literal["yes", "no"], "So:\n```\nno\n```", Parsed("no", True)),
        (Annotated[str, annotated_types.MinLen(2)], "free text", Parsed("free text", True)),
        (list[Review], '[{"file": "a"}, {"file": "b"}]', Parsed([A, B], False)),
        (list[Review], 'Two: [{"file": "a"}, {"file": "b"}].', Parsed([A, B], True)),
        (list[Review], '[{"file": "a"}, {"file": "b"},]', Parsed([A, B], True)),
        (list[Review], '[{"file": "a"}, {"file": "b', Parsed([A, B], True)),
        (list[int], "see: [1, 2", Parsed([1, 2], True)),
        (Review | None, "null", Parsed(None, False)),
        (Strict, '{"pair": [1, 2],}', Parsed(Strict(pair=(1, 2)), True)),
        ({"type": "object", "required": ["file"]}, 'x: {"file": 1}', Parsed({"file": 1}, True)),
    ],
)
def test_every_kind_of_schema_is_served(kind: object, text: str, parsed: Parsed[object]) -> None:
    assert parse(text, schema_of(kind)) == parsed


@pytest.mark.parametrize(
    "text",
    [
        '{"name": 1, "children": [{"name": "x"}]}',
        'So: {"name": 1, "children": [{"name": "x"}]}',
        '{"name": 1, "children": [{"name": "x"}],}',
        '{"name": 1, "children": [{"name": "x"}',
        '[{"name": "x"}]',
    ],
)
def test_a_part_of_a_wrong_answer_is_never_taken_for_the_answer(text: str) -> None:
    with pytest.raises(Invalid):
        parse(text, schema_of(Node))


def test_the_errors_are_those_of_the_likeliest_part() -> None:
    with pytest.raises(Invalid, match=r"severity: .*got 'medium'"):
        parse('Answer: {"file": "a", "severity": "medium"} as in [1].')
    with pytest.raises(Invalid, match=r"severity: .*got 'medium'"):
        parse('Answer: {"file": "a", "severity": "medium",} as in [1].')


@pytest.mark.parametrize("text", ["", "I cannot do that.", "<think>hm</think>", "see [below]", "```\n```"])
def test_text_without_json_is_not_json(text: str) -> None:
    with pytest.raises(NotJSON):
        parse(text)
    with pytest.raises(NotJSON):
        parse(text, schema_of({}))


@pytest.mark.parametrize("kind", [Review, {}, Annotated[str, annotated_types.MinLen(2)], Literal["yes", "no"]])
def test_a_draft_in_reasoning_that_is_never_closed_is_not_the_answer(kind: object) -> None:
    with pytest.raises(NotJSON, match="<think> is never closed"):
        parse('<think>Perhaps {"file": "a"}. Or "yes"?\n```\n{"file": "b"}\n```\nWait', schema_of(kind))


def test_a_schema_that_takes_anything_does_not_take_the_ruins_of_json() -> None:
    assert parse("{'a': 1}", schema_of({})) == Parsed({"a": 1}, repaired=True)
    assert parse('{"a": 1}', schema_of(Any)) == Parsed({"a": 1}, repaired=False)


@pytest.mark.parametrize(
    "text",
    [
        "{" * 100_000,
        "[" * 100_000,
        '{"a":' * 20_000,
        "{'" * 50_000,
        '{"' * 50_000,
        '{"a" ' * 20_000,
        '{"x": "' + '\\"' * 50_000,
        '{"x": "' + "\\" * 99_999,
        "```a\n" * 20_000,
        "```\n" * 20_000,
        "{} " * 30_000,
        '{"x":1}' * 15_000,
        '["a: ' + '"a: ' * 25_000,
        "{a" * 50_000,
        "{" + " " * 100_000,
        "<think>" * 15_000,
        "</think" * 15_000,
        "\n</think>x" * 10_000,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_hostile_text_ends_in_an_error_and_soon(text: str) -> None:
    with pytest.raises(OutputError):
        parse(text)


def test_a_long_truncated_answer_is_completed_without_the_slow_library() -> None:
    rows = [{"file": f"file {number}"} for number in range(2 * REPAIR_CHARS // 20)]
    cut = json.dumps(rows)[:-5]
    assert len(cut) > REPAIR_CHARS
    parsed = parse(cut, schema_of(list[Review]))
    assert parsed.repaired
    assert isinstance(parsed.value, list)
    assert len(parsed.value) == len(rows)


@settings(max_examples=examples(300))
@given(
    st.text(st.sampled_from("{}[]\"':,\\ \n`ab1/<>-#"), max_size=60),
    st.sampled_from([Review, Node, list[int], int, {}]),
)
def test_whatever_a_model_writes_ends_in_a_value_or_an_output_error(text: str, kind: object) -> None:
    try:
        parsed = parse(text, schema_of(kind))
    except (NotJSON, Invalid):
        return
    assert isinstance(parsed, Parsed)


VALID = json.dumps({"name": 'root "x"', "children": [{"name": "é{", "children": []}, {"name": "b"}]})


@settings(max_examples=examples(100))
@given(st.data())
def test_a_mutated_answer_ends_in_a_value_or_an_output_error(data: st.DataObject) -> None:
    text = list(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.text(max_size=2))
    try:
        assert isinstance(parse("".join(text), schema_of(Node)).value, Node)
    except (NotJSON, Invalid):
        return


@given(st.integers(0, len(VALID) - 1))
def test_a_truncated_answer_is_never_passed_off_as_a_whole_one(cut: int) -> None:
    try:
        assert parse(VALID[:cut], schema_of(Node)).repaired
    except (NotJSON, Invalid):
        return


@pytest.mark.parametrize(
    ("text", "said"), [("no", "is not JSON"), ('{"severity": "x"}', "does not fit the JSON schema")]
)
def test_the_model_is_shown_the_exact_errors_and_the_schema(text: str, said: str) -> None:
    with pytest.raises(OutputError) as caught:
        parse(text)
    prompt = repair_prompt(caught.value, REVIEW)
    assert said in prompt
    assert str(caught.value) in prompt
    assert REVIEW.json_text in prompt
