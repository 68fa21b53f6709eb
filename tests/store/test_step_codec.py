"""Everything that is persisted comes back as it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_agent.job import AgentError
from batch_agent.messages import Reply, Sealed, ToolCall, Usage
from batch_agent.store.codec import DONE, TURN, decode, encode
from batch_agent.store.steps import Begun, Done, Failed, Outcome, Spent, Step, Turn, read_past

# Lone surrogates and integers beyond 64 bits included: models and servers do write them.
texts = st.text(st.characters(exclude_categories=()))
counts = st.integers(min_value=0)
seconds = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
usages = st.builds(Usage, counts, counts, counts, counts, counts)
calls = st.lists(st.builds(ToolCall, texts, texts, texts)).map(tuple)
values = st.recursive(st.none() | st.booleans() | texts, lambda part: st.lists(part) | st.dictionaries(texts, part))
sealed = st.none() | st.builds(Sealed, texts, values)
replies = st.builds(Reply, texts, calls, usages, texts, st.none() | seconds, texts, st.none() | usages, sealed)
spents = st.builds(Spent, counts, counts, seconds, seconds, seconds, seconds, st.none() | seconds)
errors = st.builds(AgentError, texts, texts, texts, st.booleans())
positions = st.integers(min_value=0, max_value=100)
steps = st.one_of(
    st.builds(Turn, replies, spents),
    st.builds(Done, replies, spents),
    st.builds(Begun, st.lists(positions).map(tuple)),
    st.builds(Outcome, positions, texts),
    st.builds(Failed, errors, texts, spents),
)


@given(steps)
def test_a_step_decodes_to_what_was_encoded(step: Step) -> None:
    assert decode(*encode(step)) == step


def test_a_reply_without_the_later_fields_is_read() -> None:
    body = b'[["hi",[],[9,4,2,1],"",null,"stop",[9,4,2,1]],[1,0,0.0,0.5,0.0,0.5,null]]'
    reply = Reply("hi", (), Usage(9, 4, 2, 1), saved=Usage(9, 4, 2, 1))
    assert decode(DONE, body) == Done(reply, Spent(1, 0, 0.0, 0.5, 0.0, 0.5, None))


@given(st.integers(), st.binary())
def test_what_was_never_encoded_is_an_error_and_never_a_step(kind: int, body: bytes) -> None:
    try:
        step = decode(kind, body)
    except ValueError:
        return
    assert encode(step)[0] == kind


@pytest.mark.parametrize("body", [b"[]", b"{}", b"null", b'["text"]', b"[[],[]]", b"7"])
def test_a_turn_of_another_form_is_a_value_error(body: bytes) -> None:
    for kind in (TURN, DONE):
        with pytest.raises(ValueError, match=r"form|unpack|expected"):
            decode(kind, body)


def reply(text: str) -> Reply:
    return Reply(text, (ToolCall("1", "a", "{}"), ToolCall("2", "b", "{}")))


def test_steps_are_read_as_turns_with_what_became_of_their_calls() -> None:
    past = read_past(
        3, [Turn(reply("one"), Spent()), Begun((0, 1)), Outcome(0, "x"), Turn(reply("two"), Spent()), Begun((1,))]
    )
    assert [turn.reply.text for turn in past.turns] == ["one", "two"]
    assert (past.turns[0].begun, past.turns[0].outcomes) == ({0, 1}, {0: "x"})
    assert (past.turns[1].begun, past.turns[1].outcomes) == ({1}, {})
    assert past.failed is None


def test_a_failure_counts_only_as_the_last_step() -> None:
    failed = Failed(AgentError("infer", "Unavailable", "gone", True), "", Spent())
    assert read_past(1, [Turn(reply("one"), Spent()), failed]).failed == failed
    went_on = read_past(1, [Turn(reply("one"), Spent()), failed, Turn(reply("two"), Spent())])
    assert went_on.failed is None
    assert len(went_on.turns) == 2
