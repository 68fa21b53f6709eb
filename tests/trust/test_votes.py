"""Votes: the winner, the stop, and what is told of them, checked against all outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from pydantic import JsonValue

from batch_agent.errors import SpecError
from batch_agent.trust.votes import FAILED, PENDING, Outcome, Rule, VoteError, Voting, rules_of

MOOD = {"type": "object", "properties": {"mood": {"enum": ["a", "b", "c"]}}}
SCORE = {"type": "object", "properties": {"score": {"type": "number"}}}


def _load(name: str) -> object:
    raise AssertionError(name)


def _rules(vote: object, schema: object) -> list[Rule]:
    return rules_of(vote, schema, _load)  # type: ignore[arg-type]


def _voting(samples: int, vote: object = "majority", schema: object = MOOD, *, stops: bool = True) -> Voting:
    return Voting(samples, _rules(vote, schema), stops=stops)


def _moods(*values: JsonValue) -> list[Outcome]:
    return [value if value in (FAILED, PENDING) else {"mood": value} for value in values]  # type: ignore[comparison-overlap]


def _asked(voting: Voting, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes of the samples that are asked, if each ends before the next are asked."""
    asked = 0
    while (more := voting.needed(outcomes[:asked])) > asked:
        asked = more
    return list(outcomes[:asked])


@pytest.mark.parametrize(("samples", "at_once"), [(2, 1), (3, 2), (4, 2), (5, 3), (7, 4), (1, 1)])
def test_as_many_samples_are_asked_at_once_as_could_be_needed(samples: int, at_once: int) -> None:
    assert _voting(samples).needed([]) == at_once


def test_a_sample_that_is_surely_needed_is_asked_while_others_are_pending() -> None:
    voting = _voting(5)
    assert voting.needed(_moods("a", "b", PENDING)) == 4
    assert voting.needed(_moods("a", "a", PENDING)) == 3


@pytest.mark.parametrize(
    ("samples", "vote", "values"), [(3, "majority", "abc"), (4, "majority", "abc"), (5, "majority", "ab")]
)
def test_the_stop_changes_neither_the_winner_nor_the_count_against_it(samples: int, vote: str, values: str) -> None:
    stopping, going = _voting(samples, vote), _voting(samples, vote, stops=False)
    for drawn in product([*values, FAILED], repeat=samples):
        outcomes = _moods(*drawn)
        few, every = _asked(stopping, outcomes), _asked(going, outcomes)
        assert stopping.has_failed(few) == going.has_failed(every), drawn
        if not stopping.has_failed(few):
            stopped, whole = stopping.votes(few)["mood"], going.votes(every)["mood"]
            assert (stopped.winner, stopped.against) == (whole.winner, whole.against), drawn


@pytest.mark.parametrize("samples", [3, 4, 5])
def test_no_sample_is_asked_after_the_vote_is_decided_and_none_is_missing_before(samples: int) -> None:
    voting = _voting(samples)
    for drawn in product("ab", repeat=samples):
        few = _asked(voting, _moods(*drawn))
        futures = [
            voting.votes([*few, *_moods(*rest)])["mood"].winner
            for rest in product(["a", "b", "c", FAILED], repeat=samples - len(few))
        ]
        assert len(set(map(str, futures))) == 1, drawn
        earlier = few[:-1]
        winners = {
            str(voting.votes([*earlier, *_moods(*rest)])["mood"].winner)
            for rest in product(["a", "b", "c", FAILED], repeat=samples - len(earlier))
            if not voting.has_failed([*earlier, *_moods(*rest)])
        }
        assert len(winners) > 1 or 2 * len(earlier) < samples, drawn


@pytest.mark.parametrize("samples", [3, 4, 5])
def test_the_stop_does_not_change_a_median(samples: int) -> None:
    stopping, going = _voting(samples, "median", SCORE), _voting(samples, "median", SCORE, stops=False)
    fewer = 0
    for drawn in product([1, 2, 2.5, FAILED], repeat=samples):
        outcomes: list[Outcome] = [value if value is FAILED else {"score": value} for value in drawn]  # type: ignore[dict-item]
        few, every = _asked(stopping, outcomes), _asked(going, outcomes)
        if not going.has_failed(every):
            stopped, whole = stopping.votes(few)["score"], going.votes(every)["score"]
            assert (stopped.winner, stopped.against) == (whole.winner, whole.against), drawn
            fewer += len(few) < len(every)
    assert fewer


def test_a_tie_goes_to_the_earlier_sample() -> None:
    voting = _voting(2, stops=False)
    assert voting.votes(_moods("b", "a"))["mood"].winner == "b"
    assert _voting(3).votes(_moods("c", "a", "b"))["mood"].winner == "c"
    numbers = Voting(4, _rules("median", SCORE))
    assert numbers.votes([{"score": 3}, {"score": 1}, {"score": 9}, {"score": 2}])["score"].winner == 3


def test_a_row_fails_below_half_of_its_samples_and_no_more_are_asked_then() -> None:
    voting = _voting(3)
    assert voting.needed(_moods(FAILED, PENDING)) == 3
    assert voting.needed(_moods(FAILED, FAILED)) == 2
    assert voting.must_fail(2)
    assert not voting.must_fail(1)
    assert not _voting(4).has_failed(_moods("a", FAILED, "b", FAILED))


def test_a_vote_says_its_counts_and_how_many_were_against() -> None:
    vote = _voting(3).votes(_moods("b", "a", "b"))["mood"]
    assert vote.shown() == {"counts": {"b": 2, "a": 1}, "against": 1}
    assert vote.doubt == pytest.approx(1 / 3)
    late = _voting(5, stops=False).votes(_moods("a", "a", "a", "b", "b"))["mood"]
    assert late.shown() == {"counts": {"a": 3, "b": 2}, "against": 0}


def test_texts_are_the_same_vote_after_case_and_spaces() -> None:
    voting = Voting(3, _rules(None, None))
    vote = voting.votes(["Paris", "Rome", " paris"])["output"]
    assert vote.shown() == {"counts": {"Paris": 2, "Rome": 1}, "against": 1}
    assert vote.winner == "Paris"


def test_true_is_not_one_and_null_is_a_value() -> None:
    schema = {"type": "object", "properties": {"x": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}}}
    vote = Voting(3, _rules("majority", schema)).votes([{"x": None}, {"x": True}, {"x": None}])["x"]
    assert vote.winner is None
    assert vote.shown() == {"counts": {"null": 2, "true": 1}, "against": 1}


def test_fields_that_are_not_voted_come_from_the_sample_that_agrees_most() -> None:
    schema = {
        "type": "object",
        "properties": {"mood": {"enum": ["a", "b"]}, "sure": {"type": "boolean"}, "why": {"type": "string"}},
    }
    voting = Voting(3, _rules(None, schema))
    outcomes: list[Outcome] = [
        {"mood": "a", "sure": True, "why": "one"},
        {"mood": "b", "sure": False, "why": "two"},
        {"mood": "b", "sure": True, "why": "three"},
    ]
    votes = voting.votes(outcomes)
    assert [*votes] == ["mood", "sure"]
    assert voting.combined(outcomes, votes) == (2, {"mood": "b", "sure": True, "why": "three"})
    split: list[Outcome] = [{"mood": "a", "sure": True, "why": "one"}, {"mood": "b", "sure": True, "why": "two"}]
    split.append({"mood": "b", "sure": False, "why": "three"})
    split.append(FAILED)
    assert voting.combined(split, voting.votes(split)) == (1, {"mood": "b", "sure": True, "why": "two"})


def test_fields_inside_fields_are_voted() -> None:
    inner = {"type": "object", "properties": {"city": {"enum": ["x", "y"]}}}
    voting = Voting(3, _rules(None, {"type": "object", "properties": {"address": inner}}))
    outcomes: list[Outcome] = [{"address": {"city": "x"}}, {"address": {"city": "y"}}, {"address": {"city": "y"}}]
    votes = voting.votes(outcomes)
    assert votes["address.city"].winner == "y"
    assert voting.combined(outcomes, votes)[1] == {"address": {"city": "y"}}


def test_a_function_gets_all_values_and_decides_at_the_end() -> None:
    voting = Voting(3, rules_of({"mood": "my:pick"}, MOOD, lambda name: lambda values: values[-1]))  # type: ignore[arg-type]
    assert voting.needed([]) == 3
    votes = voting.votes(_moods("a", "a", "b"))
    assert votes["mood"].shown() == {"counts": {"a": 2, "b": 1}, "against": 2}
    failing = Voting(3, rules_of("my:pick", MOOD, lambda name: lambda values: values[9]))
    with pytest.raises(VoteError):
        failing.votes(_moods("a", "a", "b"))


@pytest.mark.parametrize(
    ("vote", "schema", "words"),
    [
        ({"tone": "majority"}, MOOD, "tone"),
        ({"mood": "median"}, MOOD, "mood is no number"),
        ("median", MOOD, "no field of an answer is a number"),
        ("most", MOOD, "most"),
        ({}, MOOD, "names no field"),
        (None, SCORE, "no field with classes"),
    ],
)
def test_a_vote_that_cannot_be_taken_is_refused_by_name(vote: object, schema: object, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        _rules(vote, schema)


def test_three_votes_of_two_classes_cost_2_32_answers_if_samples_are_right_with_0_8() -> None:
    voting, cost = _voting(3), 0.0
    for drawn in product("ab", repeat=3):
        chance = 0.8 ** drawn.count("a") * 0.2 ** drawn.count("b")
        cost += chance * len(_asked(voting, _moods(*drawn)))
    assert cost == pytest.approx(2.32)
