"""Doubt: the tokens of a value are found by its bytes, or the doubt is not known."""

from __future__ import annotations

import json
import math

import pytest

from batch_agent.messages import TokenChance
from batch_agent.trust.doubt import doubts_of
from batch_agent.trust.gold import GoldField
from batch_agent.trust.votes import leaves

MOOD = {"mood": {"enum": ["good", "bad", "very bad"]}}


def fields(properties: object) -> list[GoldField]:
    return [*leaves({"type": "object", "properties": properties})]  # type: ignore[dict-item]


def token(text: str | bytes, chance: float = 1.0, **others: float) -> TokenChance:
    data = text.encode() if isinstance(text, str) else text
    every = {data: chance, **{name.encode(): other for name, other in others.items()}} if others else {}
    return TokenChance(data, math.log(chance), tuple((name, math.log(other)) for name, other in every.items()))


def doubts(text: str, *tokens: TokenChance, of: object = MOOD, **options: bool) -> dict[str, float | None]:
    found = doubts_of(text, tokens, fields(of), [text], **options)
    return {name: None if doubt is None else round(doubt, 6) for name, doubt in found.items()}


def test_the_doubt_is_that_of_the_tokens_of_the_value_alone() -> None:
    said = [token('{"', 0.5), token("mood", 0.5), token('": "', 0.5), token("good", 0.8), token('"}', 0.5)]
    assert doubts('{"mood": "good"}', *said) == {"mood": 0.2}


def test_a_value_of_several_tokens_has_their_product() -> None:
    said = [token('{"mood": "'), token("ve", 0.9), token("ry", 0.9), token(" bad", 0.5), token('"}')]
    assert doubts('{"mood": "very bad"}', *said) == {"mood": round(1 - 0.9 * 0.9 * 0.5, 6)}


def test_a_token_that_holds_more_than_the_value_counts_once() -> None:
    assert doubts('{"mood":"good"}', token('{"mood":'), token('"good"}', 0.7)) == {"mood": 0.3}
    assert doubts('{"mood":"good"}', token('{"mood":"good"}', 0.7)) == {"mood": 0.3}


def test_alternatives_that_are_no_allowed_value_do_not_count() -> None:
    said = [token('{"mood": "'), token("good", 0.6, bad=0.2, fine=0.15, v=0.05), token('"}')]
    assert doubts('{"mood": "good"}', *said) == {"mood": round(1 - 0.6 / 0.85, 6)}


def test_an_alternative_that_begins_the_same_value_is_not_against_it() -> None:
    said = [token('{"mood": "'), token("good", 0.5, go=0.25, bad=0.25), token('"}')]
    assert doubts('{"mood": "good"}', *said) == {"mood": 0.25}


def test_an_alternative_with_other_spaces_is_the_same_value() -> None:
    others = {' "': 0.3, ' "bad': 0.2}
    said = [token('{"mood":'), token('"good', 0.5, **others), token('"}')]
    assert doubts('{"mood":"good"}', *said) == {"mood": 0.2}


def test_a_choice_that_ends_where_another_continues_is_doubted_at_its_end() -> None:
    of = {"grade": {"enum": ["A", "A-", "B"]}}
    said = [token('{"grade":"'), token("A", 1.0), token('"', 0.6, **{"-": 0.3, '"}': 0.1}), token("}")]
    assert doubts('{"grade":"A"}', *said, of=of) == {"grade": 0.3}


def test_a_number_is_doubted_where_it_could_have_had_more_digits() -> None:
    of = {"n": {"type": "integer"}}
    said = [token('{"n": '), token("4", 0.8, **{"5": 0.1, '"': 0.1}), token("}", 0.75, **{"2": 0.25})]
    assert doubts('{"n": 4}', *said, of=of) == {"n": round(1 - 0.8 / 0.9 * 0.75, 6)}
    alone = [token('{"n": '), token("4", 0.8), token("}", 0.75)]
    assert doubts('{"n": 4}', *alone, of=of) == {"n": 0.2}


def test_a_single_reported_token_is_no_alternative() -> None:
    only = TokenChance(b"good", math.log(0.6), ((b"good", math.log(0.6)),))
    assert doubts('{"mood": "good"}', token('{"mood": "'), only, token('"}')) == {"mood": 0.4}


def test_booleans_null_and_texts_have_a_doubt_and_long_values_have_none() -> None:
    of = {
        "sure": {"type": "boolean"},
        "mood": {"anyOf": [{"enum": ["good"]}, {"type": "null"}]},
        "city": {"type": "string"},
        "why": {"type": "string"},
    }
    text = json.dumps({"sure": True, "mood": None, "city": "Bonn", "why": "x" * 65})
    parts = ['{"sure": ', "true", ', "mood": ', "null", ', "city": "', "Bonn", '", "why": "', "x" * 65, '"}']
    chances = {"true": 0.9, "null": 0.8, "Bonn": 0.7}
    found = doubts(text, *(token(part, chances.get(part, 0.99)) for part in parts), of=of)
    assert found == {"sure": 0.1, "mood": 0.2, "city": 0.3}


def test_the_size_of_a_value_is_that_of_its_text_and_a_class_may_be_long() -> None:
    of = {"name": {"type": "string"}, "kind": {"enum": ["x" * 70, "y"]}}
    text = json.dumps({"name": "\u00f6" * 30, "kind": "x" * 70})
    assert doubts(text, token(text, 0.9), of=of) == {"name": 0.1, "kind": 0.1}
    longer = json.dumps({"name": "\u00f6" * 33, "kind": "y"})
    assert doubts(longer, token(longer, 0.9), of=of) == {"kind": 0.1}
    assert doubts(longer, token("x"), of=of) == {"kind": None}


def test_the_quote_of_a_value_that_may_be_null_counts_only_with_alternatives() -> None:
    of = {"mood": {"anyOf": [{"enum": ["good"]}, {"type": "null"}]}}
    said = [token('{"mood":'), token(' "', 0.5), token("good", 0.9), token('"}')]
    assert doubts('{"mood": "good"}', *said, of=of) == {"mood": 0.1}
    said[1] = token(' "', 0.5, **{" null": 0.25, " {": 0.25})
    assert doubts('{"mood": "good"}', *said, of=of) == {"mood": 0.4}


def test_escapes_and_split_characters_are_found_by_their_bytes() -> None:
    of = {"city": {"type": "string"}}
    text = r'{"city": "K\u00f6ln \"am\" Rhein"}'
    said = [token(r'{"city": "'), token("K", 0.9), token(r"\u00f6"), token(r"ln \"am\" Rhein", 0.5), token('"}')]
    assert doubts(text, *said, of=of) == {"city": 0.55}
    first, second = "ö".encode()[:1], "ö".encode()[1:]
    said = [token('{"city": "K'), token(first, 0.5), token(second), token("ln"), token('"}')]
    assert doubts('{"city": "Köln"}', *said, of=of) == {"city": 0.5}
    said = [token('{"city": "'), token("", 0.5), token("Ö", 0.8), token('"}')]  # the character with its last token
    assert doubts('{"city": "Ö"}', *said, of=of) == {"city": 0.6}


def test_fields_inside_fields_and_lists_with_the_same_words_are_told_apart() -> None:
    of = {
        "all": {"type": "array"},
        "mood": {"enum": ["good", "bad"]},
        "inner": {"type": "object", "properties": {"mood": {"enum": ["good", "bad"]}}},
    }
    text = '{"all": [{"mood": "bad"}], "mood": "good", "inner": {"mood": "bad"}}'
    parts = ['{"all": ', '[{"mood": "', "bad", '"}]', ', "mood": "', "good", '", "inner": {"mood": "', "bad", '"}}']
    chances = [1, 1, 0.1, 1, 1, 0.8, 1, 0.6, 1]
    found = doubts(text, *(token(part, chance) for part, chance in zip(parts, chances, strict=True)), of=of)
    assert found == {"all": 0.9, "mood": 0.2, "inner.mood": 0.4}


def test_a_field_of_an_item_of_a_list_is_not_the_field_of_the_answer() -> None:
    of = {"mood": {"enum": ["good", "bad"]}, "all": {"type": "array"}}
    for last in ('[{"mood": "bad"}]', '[[{"mood": "bad"}]]', '[{"mood": "bad"}, {"mood": "bad"}]'):
        parts = ['{"mood": "', "good", '", "all": ', last, "}"]
        found = doubts("".join(parts), *(token(part, 0.8 if part == "good" else 1) for part in parts), of=of)
        assert found == {"mood": 0.2, "all": 0.0}
    parts = ['{"mood": "', "good", '", "": {"mood": "bad"}}']
    found = doubts("".join(parts), *(token(part, 0.8 if part == "good" else 1) for part in parts))
    assert found == {"mood": 0.2}


def test_an_answer_with_many_fields_is_read_in_time_that_grows_with_its_length() -> None:
    text = json.dumps({f"k{number}": number for number in range(20_000)} | {"mood": "good"})
    assert doubts(text, token(text, 0.8)) == {"mood": 0.2}
    items = json.dumps({"all": [{"mood": "bad", "n": number} for number in range(10_000)], "mood": "good"})
    assert doubts(items, token(items, 0.8)) == {"mood": 0.2}
    nested = '{"a":' * 5_000 + "1" + "}" * 5_000
    assert doubts(nested, token(nested)) == {"mood": None}


def test_of_a_key_that_comes_twice_the_last_value_counts() -> None:
    said = [token('{"mood":"'), token("bad", 0.2), token('","mood":"'), token("good", 0.9), token('"}')]
    assert doubts('{"mood":"bad","mood":"good"}', *said) == {"mood": 0.1}


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        [token('{"mood": "'), token("good", 0.8)],
        [token('{"mood": "'), token("good", 0.8), token('" }')],
        [token('{"mood": "'), token("bad", 0.8), token('"}')],
        [token('{"mood": "'), TokenChance(b"good", None), token('"}')],
    ],
)
def test_tokens_that_are_not_the_answer_or_have_no_probability_give_no_doubt(tokens: list[TokenChance]) -> None:
    assert doubts('{"mood": "good"}', *tokens) == {"mood": None}


@pytest.mark.parametrize("text", ["mood: good", '{"mood": "good"', "{'mood': 'good'}", '{"mood": "good"} thanks'])
def test_an_answer_that_is_not_json_gives_no_doubt(text: str) -> None:
    assert doubts(text, token(text, 0.8)) == {"mood": None}


def test_a_field_that_the_answer_does_not_have_gives_no_doubt() -> None:
    assert doubts("{}", token("{}", 0.8)) == {"mood": None}


def test_spaces_around_the_answer_and_the_token_that_ends_it_do_not_hide_its_tokens() -> None:
    said = [token("\n\n"), token('{"mood": "'), token("good", 0.8), token('"}\n'), token("<|im_end|>")]
    assert doubts('{"mood": "good"}', *said) == {"mood": 0.2}


def test_the_tokens_of_a_reasoning_come_before_those_of_the_answer() -> None:
    said = [token("<think>"), token("good?"), token("</think>"), token('{"mood": "'), token("good", 0.8), token('"}')]
    assert doubts('{"mood": "good"}', *said, reasoned=True) == {"mood": 0.2}
    assert doubts('{"mood": "good"}', *said) == {"mood": None}


def test_an_answer_in_a_fence_is_found() -> None:
    text = '```json\n{"mood": "good"}\n```'
    said = [token('```json\n{"mood": "'), token("good", 0.8), token('"}\n```')]
    found = doubts_of(text, said, fields(MOOD), [text, '{"mood": "good"}'])
    assert found["mood"] == pytest.approx(0.2)


def test_a_short_text_without_a_schema_is_a_value_and_a_long_one_is_not() -> None:
    of = [*leaves(None)]
    assert doubts_of(" good\n", [token(" go", 0.9), token("od", 0.5), token("\n", 0.1)], of, [])[
        "output"
    ] == pytest.approx(0.55)
    assert doubts_of("x" * 65, [token("x" * 65)], of, []) == {}


def test_a_scalar_answer_is_the_field_output() -> None:
    of = [*leaves({"enum": ["good", "bad"]})]
    found = doubts_of('"good"', [token('"'), token("good", 0.8, bad=0.1), token('"')], of, ['"good"'])
    assert found["output"] == pytest.approx(1 - 0.8 / 0.9)
