"""Everything that is persisted comes back as it was."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_agent.compiler.compaction import Cut
from batch_agent.job import AgentError
from batch_agent.messages import Image, Message, Reply, Sealed, ToolCall, Usage
from batch_agent.record.codec import (
    ASKED,
    CALL_BEGUN,
    CALL_ENDED,
    CALL_WITHDRAWN,
    COMPACTED,
    ENDED,
    FAILED,
    ROLES,
    SLOWLY,
    decode,
    encode,
)
from batch_agent.record.steps import (
    Asked,
    CallBegun,
    CallEnded,
    CallWithdrawn,
    Compacted,
    Ended,
    Failed,
    Step,
    Used,
    read_past,
)

# Lone surrogates and integers beyond 64 bits included: models and servers do write them.
texts = st.text(st.characters(exclude_categories=()))
counts = st.integers(min_value=0)
seconds = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
usages = st.builds(Usage, counts, counts, counts, counts, counts)
calls = st.lists(st.builds(ToolCall, texts, texts, texts)).map(tuple)
values = st.recursive(st.none() | st.booleans() | texts, lambda part: st.lists(part) | st.dictionaries(texts, part))
sealed = st.none() | st.builds(Sealed, texts, values)
doubts = st.none() | st.dictionaries(texts, st.none() | seconds)
answered = (texts, calls, usages, texts, st.none() | seconds, texts, st.none() | usages, sealed)
replies = st.builds(Reply, *answered, doubts=doubts)
spents = st.builds(Used, counts, counts, seconds, seconds, seconds, seconds, st.none() | seconds)
errors = st.builds(AgentError, texts, texts, texts, st.booleans(), texts)
positions = st.integers(min_value=0, max_value=100)
messages = st.builds(Message, st.sampled_from(ROLES), texts, calls, texts, texts, texts)
images = st.lists(st.builds(lambda url, tokens: Image(url, tokens=tokens), texts, counts), max_size=2).map(tuple)
steps = st.one_of(
    st.builds(Asked, texts, positions, replies, spents, positions, st.lists(messages, max_size=3).map(tuple)),
    st.builds(Asked, texts, positions, replies, spents),
    st.builds(CallBegun, st.just(""), positions),
    st.builds(CallEnded, st.just(""), positions, st.just(""), st.just(""), st.booleans(), texts, images),
    st.builds(Ended, spents, st.none() | texts, texts, st.none() | replies, texts, st.booleans()),
    st.builds(CallBegun, texts, positions, texts, texts),
    st.builds(CallWithdrawn, texts, positions),
    st.builds(CallEnded, texts, positions, texts, texts, st.booleans(), texts, images),
    st.builds(Failed, errors, texts, spents),
    st.builds(Ended, spents, st.none() | texts, texts),
    st.builds(Compacted, st.builds(Cut, positions, texts, st.dictionaries(positions, texts)), usages, texts),
)


@given(steps)
def test_a_step_decodes_to_what_was_encoded(step: Step) -> None:
    assert decode(*encode(step)) == step


def test_a_reply_without_the_later_fields_is_read() -> None:
    body = b'["",0,["hi",[],[9,4,2,1],"",null,"stop",[9,4,2,1]],[1,0,0.0,0.5,0.0,0.5,null]]'
    reply = Reply("hi", (), Usage(9, 4, 2, 1), saved=Usage(9, 4, 2, 1))
    assert decode(ASKED, body) == Asked("", 0, reply, Used(1, 0, 0.0, 0.5, 0.0, 0.5, None))


@given(st.integers(), st.binary())
def test_what_was_never_encoded_is_an_error_and_never_a_step(kind: int, body: bytes) -> None:
    try:
        step = decode(kind, body)
    except ValueError:
        return
    assert encode(step)[0] == kind


def test_a_record_of_another_form_is_a_value_error() -> None:
    for body in (b"[]", b"{}", b"null", b'["text"]', b"[[],[]]", b"7", b"[0,1]", b'"text"', b"[true]"):
        for kind in (FAILED, ENDED, COMPACTED, ASKED, CALL_BEGUN, CALL_WITHDRAWN, CALL_ENDED):
            with pytest.raises(ValueError, match=r"form|expected"):
                decode(kind, body)


@given(steps, st.data())
def test_a_record_with_one_value_of_another_type_is_a_value_error(step: Step, data: st.DataObject) -> None:
    if isinstance(step, Asked | Ended) and step.reply is not None:  # what is sealed is the wire's own, of any type
        step = replace(step, reply=replace(step.reply, sealed=None))
    kind, body = encode(step)
    record = json.loads(body)
    place = record
    while True:
        if not place:
            return  # no value to change
        key = data.draw(st.integers(0, len(place) - 1))
        if not isinstance(place[key], list):
            break
        place = place[key]
    place[key] = {"another": "type"}
    with pytest.raises(ValueError, match="expected"):
        decode(kind, SLOWLY + json.dumps(record).encode())


@pytest.mark.parametrize("body", [None, "text", 7, 1.5])
def test_a_record_that_is_not_bytes_is_a_value_error(body: object) -> None:
    with pytest.raises(ValueError, match="bytes are expected"):
        decode(CALL_BEGUN, body)  # type: ignore[arg-type]


def asked(text: str) -> Asked:
    return Asked("", 0, Reply(text, (ToolCall("1", "a", "{}"), ToolCall("2", "b", "{}"))), Used())


def ended(place: int, text: str) -> CallEnded:
    return CallEnded("", place, "", "", True, text)


@pytest.mark.parametrize("step", [CallBegun("", 0), ended(0, "x"), CallBegun("", 2), ended(-1, "x")])
def test_a_step_of_a_call_that_no_answer_asked_for_is_a_value_error(step: CallBegun | CallEnded) -> None:
    before: list[Step] = [] if step.nth == 0 else [asked("one")]
    with pytest.raises(ValueError, match="no call"):
        read_past(1, [*before, step])


def test_steps_are_read_as_turns_with_what_became_of_their_calls() -> None:
    begun = CallBegun("", 0), CallBegun("", 1)
    past = read_past(3, [asked("one"), *begun, ended(0, "x"), asked("two"), begun[1]])
    assert [turn.reply.text for turn in past.turns] == ["one", "two"]
    assert (past.turns[0].begun, {0: "x"}) == (
        {0, 1},
        {place: end.text for place, end in past.turns[0].outcomes.items()},
    )
    assert (past.turns[1].begun, past.turns[1].outcomes) == ({1}, {})
    assert past.failed is None


def test_a_failure_counts_only_as_the_last_step() -> None:
    failed = Failed(AgentError("infer", "Unavailable", "gone", True), "", Used())
    assert read_past(1, [asked("one"), failed]).failed == failed
    went_on = read_past(1, [asked("one"), failed, asked("two")])
    assert went_on.failed is None
    assert len(went_on.turns) == 2
