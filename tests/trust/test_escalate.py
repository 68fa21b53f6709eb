"""Rules of a cascade: which answers go on, and where a rule that cannot be read is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batch_agent.errors import SpecError
from batch_agent.files.results import result_line
from batch_agent.job import AgentError, AgentResult, BaseResult, Earlier
from batch_agent.messages import Usage
from batch_agent.record.row_json import decode_result, encode_result
from batch_agent.trust.escalate import failed_by_content, is_reference, rule_of


def answer(output: object = "x", **known: Any) -> AgentResult[object]:
    result: Any = BaseResult(0, "0", "in", True, output, **known)
    return result  # type: ignore[no-any-return]


def failure(kind: str, stage: str = "infer") -> AgentResult[object]:
    result: Any = BaseResult(0, "0", "in", False, None, AgentError(stage, kind, "why"))
    return result  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("rule", "goes_on"),
    [
        ("doubt > 0.3", True),
        ("doubt > 0.4", False),
        ("doubt >= .4", True),
        ("doubts.mood < 0.2", True),
        ("doubts.mood < 1e-3", False),
        ("votes.mood.against > 0", True),
        ("votes.mood.against == 2", False),
        ("output.unsure", True),
        ("not output.unsure", False),
        ("output.mood == 'bad'", True),
        ('output.mood != "bad"', False),
        ("output.score < 0", False),
        ("output.nested.deep == 1", True),
        ("output.unsure and doubt > 0.9", False),
        ("output.unsure and not (doubt > 0.9)", True),
        ("doubt > 0.9 or output.unsure and output.mood == 'good'", False),
        ("(doubt > 0.9 or output.unsure) and output.mood == 'bad'", True),
        ("not not output.unsure", True),
        ("invalid", False),
        ("invalid or doubt > 0.3", True),
        ("0.3 < doubt", True),
        ("output.none == null", True),
    ],
)
def test_a_rule_decides_by_doubts_votes_and_fields(rule: str, goes_on: bool) -> None:
    output = {"unsure": True, "mood": "bad", "score": 3, "nested": {"deep": 1}, "none": None}
    result = answer(output, doubts={"mood": 0.1, "why": 0.4}, votes={"mood": {"counts": {}, "against": 1}})
    assert rule_of(rule).decides(result, output) is goes_on  # type: ignore[arg-type]


def test_an_answer_that_was_cut_is_invalid() -> None:
    assert rule_of("invalid").decides(answer(truncated=True))
    assert not rule_of("invalid").decides(answer())


@pytest.mark.parametrize("rule", ["doubt > 0.3", "not doubt > 0.3", "doubts.mood > 0", "votes.mood.against > 5"])
def test_what_the_rule_needs_and_is_not_known_sends_the_row_on(rule: str) -> None:
    assert rule_of(rule).decides(answer({}, doubts={"mood": None}), {})
    assert rule_of("output.score > 3").decides(answer({"score": None}), {"score": None})
    assert rule_of("output.score > 3").decides(answer({"score": "4"}), {"score": "4"})


@pytest.mark.parametrize("kind", ["NotJSON", "Invalid", "Truncated", "ContextOverflow", "LimitExceeded", "Rejected"])
def test_a_row_that_failed_by_its_content_goes_on_under_every_rule(kind: str) -> None:
    for rule in ("invalid", "doubt > 0.3", "output.unsure", "not invalid"):
        assert rule_of(rule).decides(failure(kind))
    assert rule_of(lambda result: False).decides(failure(kind))


@pytest.mark.parametrize("kind", ["Unavailable", "RateLimited", "TimeoutError", "Cancelled", "Interrupted"])
def test_a_row_whose_server_was_away_or_that_was_stopped_does_not_go_on(kind: str) -> None:
    assert not rule_of("invalid").decides(failure(kind))
    assert not failed_by_content(failure(kind).error)


def test_a_function_decides_by_the_result() -> None:
    rule = rule_of(lambda result: result.output == "x")
    assert rule.decides(answer("x"))
    assert not rule.decides(answer("y"))
    assert not rule.needs_doubt


def test_a_rule_says_which_fields_it_reads() -> None:
    rule = rule_of("doubt > 0.3 or doubts.a.b > 0 and votes.a.b.against > 0 or output.c == 'x'")
    assert rule.needs_doubt
    assert rule.doubts == {"", "a.b"}
    assert rule.votes == {"a.b"}
    assert rule.outputs == {"c"}
    assert not rule_of("invalid").needs_doubt


def test_a_name_of_a_function_is_no_rule() -> None:
    assert is_reference("rules:unsure")
    assert is_reference("a.b:c")
    assert not is_reference("doubt > 0.3")
    assert not is_reference("invalid")


@pytest.mark.parametrize(
    ("rule", "at", "words"),
    [
        ("doubt", 1, "compared with a number"),
        ("votes.mood.against", 1, "compared with a number"),
        ("doubt > ", 8, "is expected"),
        ("doubt > x", 9, "there is no 'x'"),
        ("doubt > 'a'", 9, "a number is expected"),
        ("doubt = 0.3", 7, "write =="),
        ("(doubt > 0.3", 1, "never closed"),
        ("doubt > 0.3)", 12, "not expected"),
        ("doubt > 0.3 doubt < 1", 13, "not expected"),
        ("doubt > 0.3 and", 16, "is expected"),
        ("or doubt > 0.3", 1, "is expected"),
        ("sure > 0.3", 1, "there is no 'sure'"),
        ("votes.mood > 0", 1, "there is no 'votes.mood'"),
        ("doubt > 0.3 & invalid", 13, "not part of a rule"),
        ("invalid > 3", 1, "not compared"),
        ("1 < 2", 1, "a comparison needs"),
    ],
)
def test_an_error_in_a_rule_shows_its_place(rule: str, at: int, words: str) -> None:
    with pytest.raises(SpecError, match=words.replace("(", r"\(")) as raised:
        rule_of(rule)
    first, shown, mark = str(raised.value).split("\n")
    assert f"(at character {at})" in first
    assert shown[2:] == rule
    assert mark == "  " + " " * (at - 1) + "^"


def test_an_empty_rule_is_refused() -> None:
    with pytest.raises(SpecError, match="escalate is empty"):
        rule_of("  ")


def test_what_earlier_entries_answered_is_kept_by_the_record() -> None:
    earlier = (
        Earlier(
            "small", {"mood": "bad"}, None, {"mood": 0.5}, {"mood": {"counts": {"bad": 2}, "against": 1}}, Usage(3), 0.1
        ),
        Earlier("large", None, AgentError("validate", "Invalid", "no")),
    )
    result = answer({"mood": "bad"}, answered_by="small", earlier=earlier, waits_for="people")
    read, _ = decode_result(encode_result(result, None, worker=0, messages=False), 0, None, resumed=True)
    assert (read.answered_by, read.earlier, read.waits_for) == ("small", earlier, "people")
    assert read.escalated
    assert read.earlier[0].doubt == 0.5
    assert b'"escalated":true' in result_line(result)
    plain = answer()
    assert not plain.escalated
    assert not {"answered_by", "earlier", "escalated"} & set(result_line(plain).decode().split('"'))
    assert replace(plain).earlier == ()
