"""Keys: equal for the same question, different for any other, and blind to everything else."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from batch_agent import BatchAgent
from batch_agent.agent.fingerprint import fingerprint_of
from batch_agent.record.keys import Keys, row_of
from batch_agent.testing import ScriptedBackend

LONG = "a long text that all rows share " * 100


def plan(**options: Any) -> Any:
    known = {"task": "{word}: {text}", "inputs": [], "backend": ScriptedBackend(), "model": "m"}
    return BatchAgent.plan(**{**known, **options})


ids = st.none() | st.text(max_size=3)
questions = st.text(max_size=5)


@given(st.tuples(ids, questions), st.tuples(ids, questions))
def test_two_keys_are_equal_exactly_when_id_and_question_are(
    one: tuple[str | None, str], other: tuple[str | None, str]
) -> None:
    assert (Keys(b"f").key(*one) == Keys(b"f").key(*other)) == (one == other)


def test_another_fingerprint_makes_other_keys() -> None:
    assert Keys(b"f").key(None, "q") != Keys(b"g").key(None, "q")


@given(st.lists(st.tuples(ids, questions), max_size=6), st.randoms())
def test_the_digest_tells_another_list_or_another_order(rows: list[tuple[str | None, str]], chance: Any) -> None:
    shuffled = list(rows)
    chance.shuffle(shuffled)
    one, other = Keys(b"f"), Keys(b"f")
    for row in rows:
        one.identify({}, *row)
    for row in shuffled:
        other.identify({}, *row)
    assert (one.digest == other.digest) == (rows == shuffled)
    one.identify({}, None, "one more")
    assert one.digest != other.digest


def test_a_question_reads_the_same_whether_or_not_a_value_was_hoisted() -> None:
    rows = [{"word": "a", "text": LONG}, {"word": "b", "text": LONG}]
    hoisted, as_written = plan(inputs=rows), plan(inputs=rows, no_hoist=True)
    assert tuple(hoisted.plan.hoisted) == ("text",)
    one, other = hoisted.plan.job(0, rows[0]), as_written.plan.job(0, rows[0])
    assert one.prompt != other.prompt
    assert hoisted.plan.question(one) == as_written.plan.question(other) == f"a: {LONG}"
    assert hoisted.plan.asks(rows[0]) == (None, f"a: {LONG}")
    assert fingerprint_of(hoisted) == fingerprint_of(as_written)


def test_where_the_server_is_and_how_it_is_driven_is_not_in_the_fingerprint() -> None:
    same = {"inputs": [{"word": "a", "text": "b"}], "system_prompt": "s"}
    here = fingerprint_of(plan(**same, backend="vllm://one:8000"))
    there = fingerprint_of(plan(**same, backend="vllm://two:9000", max_inflight=3, max_turns=9, timeout_per_turn=1))
    assert here == there
    assert here != fingerprint_of(plan(**same, backend="vllm://one:8000", temperature=1))


def test_a_row_is_all_it_holds_and_one_that_cannot_be_written_is_what_it_asks() -> None:
    rows = [{"word": "a"}, {"word": "a", "more": 1}, {"word": "a", "id": 7}, {"word": "b", "id": 7}]
    assert len({row_of(row, "q") for row in rows}) == 4
    assert row_of({"word": "a"}, "q") == row_of(dict(rows[0]), "other")
    endless: dict[str, object] = {"word": "a"}
    endless["self"] = endless
    assert row_of(endless, "q") == row_of(endless, "q") != row_of(endless, "other")


def test_the_digest_sees_columns_that_the_task_does_not_use() -> None:
    one, other = Keys(b"f"), Keys(b"f")
    first = one.identify({"word": "a", "note": "x"}, None, "a")
    second = other.identify({"word": "a", "note": "y"}, None, "a")
    assert first.key == second.key
    assert one.digest != other.digest
