"""Many Responses into one value."""

from __future__ import annotations

import pytest

from batch_agent.swarm.aggregators import (
    best_of,
    concat,
    failure_report,
    majority_vote,
    statistics,
    structured_merge,
    top_k,
)
from batch_agent.swarm.pool import Response


def said(*texts: str) -> list[Response]:
    return [Response(True, text, agent_index=place) for place, text in enumerate(texts)]


LOST = Response(False, "lost", "it broke", 9)


def test_a_vote_is_counted_without_case_and_space() -> None:
    assert majority_vote([*said("Yes ", "no", "yes", "YES"), LOST]) == ("yes", 0.75)
    assert majority_vote([*said("a"), LOST, LOST], include_failures=True) == ("lost", 2 / 3)
    assert majority_vote([LOST]) == ("", 0.0)


def test_texts_are_joined() -> None:
    assert concat([*said("a", "b"), LOST]) == "a\nb"
    assert concat([*said("a", "b"), LOST], separator="; ", include_failures=True) == "a; b; lost"
    assert concat([]) == ""


def test_the_best_are_chosen() -> None:
    responses = [*said("aa", "a", "aaaa"), LOST]
    assert best_of(responses, lambda response: len(response.text)).text == "aaaa"
    assert [r.text for r in top_k(responses, 2, lambda response: len(response.text))] == ["aaaa", "aa"]
    assert len(top_k(responses, 9, lambda response: 0.0)) == 3
    assert best_of([LOST], lambda response: 0.0, include_failures=True) is LOST
    nothing = best_of([LOST], lambda response: 0.0)
    assert not nothing.success
    assert nothing.error


def test_json_is_merged_into_one_list() -> None:
    merged, errors = structured_merge([*said("[1, 2]", '{"a": 3}', "no"), LOST])
    assert merged == [1, 2, {"a": 3}]
    assert [error["agent_index"] for error in errors] == [2]
    assert all(error["error"] for error in errors)
    assert len(structured_merge([LOST], include_failures=True)[1]) == 1


def test_numbers_are_summed_up() -> None:
    assert statistics([*said(" 1 ", "2", "6"), LOST]) == {
        "mean": 3.0,
        "std": pytest.approx(2.6457513),
        "median": 2.0,
        "min": 1.0,
        "max": 6.0,
    }
    assert statistics(said("x7"), extract_fn=lambda response: float(response.text[1:]))["std"] == 0.0
    assert set(statistics([]).values()) == {0.0}


def test_failures_are_reported() -> None:
    assert failure_report([*said("a"), LOST]) == {
        "total": 2,
        "success_count": 1,
        "failure_count": 1,
        "failures": [{"agent_index": 9, "error": "it broke"}],
    }
