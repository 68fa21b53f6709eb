"""Cutting the answer out of what a model wrote, without changing any of it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_agent.errors import OutputError
from batch_agent.outputs.extract import fences, last_regions, strip_reasoning


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>hm</think>42", "42"),
        ('\n<thinking>a\n{"x": 1}</thinking>\n\n{} ', "{}"),
        ("<Reasoning>a</Reasoning><think>b</think> c", "c"),
        ("so it must be\n</think>\n\nthe answer", "the answer"),
        ("<think></think>", ""),
        ("<think>a</reasoning>\n</think>\nb", "b"),
        ("The tag </think> ends it", "The tag </think> ends it"),
        ('{"a": "<think>x</think>"}', '{"a": "<think>x</think>"}'),
        ("  as written \n", "  as written \n"),
    ],
)
def test_reasoning_is_cut_from_the_start_only(text: str, answer: str) -> None:
    assert strip_reasoning(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "<think>never closed",
        "\n <Thinking>so it is 42",
        "<think>a</reasoning>b",
        "<think>a</think>\n<think>b, and the answer is 42",
    ],
)
def test_reasoning_that_is_never_closed_is_no_answer(text: str) -> None:
    with pytest.raises(OutputError, match="is never closed"):
        strip_reasoning(text)


def test_fences_give_their_contents() -> None:
    text = 'a\n```json\n{"x": 1}\n```\nb\n  ```\n  two\n  ```\n```inline```\n```open\nlost'
    assert fences(text) == ['{"x": 1}', "two"]


def cuttings(text: str) -> list[str]:
    return [region.text for region in last_regions(text, 32)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('Here: {"a": 1}.', ['{"a": 1}']),
        ('{"a": 1} then [{"b": 2}]', ['[{"b": 2}]', '{"a": 1}']),
        ('{"a": {"b": "}"}} x', ['{"a": {"b": "}"}}']),
        ('{"a": "\\"}"}', ['{"a": "\\"}"}']),
        ("see [below] and {name} of {1, 2}", []),
        ('{{"a": 1}}', ['{"a": 1}']),
        ('[the answer is {"a": 1}]', ['{"a": 1}']),
        ("{'a': [1]}", ["{'a': [1]}"]),
        ("{a: 1}", ["{a: 1}"]),
        ('{"a": [{"b": 1}', ['{"a": [{"b": 1}']),
        ('{"a": [{"b": 1}], oops {"c": 2}', ['{"a": [{"b": 1}], oops {"c": 2}']),
        ("[] {} [-1] [true]", ["[true]", "[-1]", "{}", "[]"]),
    ],
)
def test_outermost_regions_are_found_and_never_their_parts(text: str, found: list[str]) -> None:
    assert cuttings(text) == found


def test_only_the_last_regions_are_kept() -> None:
    assert [region.text for region in last_regions("[1] [2] [3]", 2)] == ["[3]", "[2]"]


def test_a_region_knows_how_deep_it_is() -> None:
    assert last_regions('{"a": [[1], {"b": []}]}', 1)[0].depth == 4


containers = st.recursive(
    st.none() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
).filter(lambda value: isinstance(value, dict | list))


@given(containers, st.text("abc .,!\n'\"", max_size=20), st.text("abc .,!\n'\"", max_size=20))
def test_any_object_or_array_amid_prose_is_cut_out_exactly(value: object, before: str, after: str) -> None:
    encoded = json.dumps(value)
    assert cuttings(f"{before} {encoded} {after}") == [encoded]
