"""What gives way when a conversation outgrows its context: whole exchanges, oldest first, and never the task."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from batch_agent.compiler.compaction import Cut, history_tokens, left_out, note, plan_cut, shorten
from batch_agent.compiler.tokens import estimate_tokens
from batch_agent.messages import Message, ToolCall

TASK = Message("user", "Find out what happened.")


def exchange(number: int, words: int = 800, calls: int = 1) -> list[Message]:
    asked = tuple(ToolCall(f"call_{number}_{n}", "look", f'{{"page": {number}}}') for n in range(calls))
    found = [Message("tool", f"page {number} " + "word " * words, tool_call_id=call.id) for call in asked]
    return [Message("assistant", f"step {number}", asked, reasoning=f"because of {number}"), *found]


def history(count: int, words: int = 800) -> list[Message]:
    return [TASK, *(message for number in range(count) for message in exchange(number, words))]


histories = st.lists(st.tuples(st.integers(0, 2_000), st.integers(0, 3), st.booleans()), min_size=1, max_size=12).map(
    lambda shapes: [
        TASK,
        *(
            message
            for number, (words, calls, told) in enumerate(shapes)
            for message in [*exchange(number, words, calls), *([Message("user", "go on")] if told or not calls else [])]
        ),
    ]
)


def is_whole(messages: list[Message]) -> bool:
    """Every call has its results behind it, in order, and every result its call."""
    wanted: list[str] = []
    for message in messages:
        if message.role == "tool":
            if not wanted or message.tool_call_id != wanted.pop(0):
                return False
        elif wanted:
            return False
        wanted += [call.id for call in message.tool_calls]
    return not wanted


@given(histories, st.lists(st.integers(0, 8_000), min_size=1, max_size=4), st.booleans())
def test_calls_and_results_stay_or_go_together_however_often_it_is_cut(
    own: list[Message], excesses: list[int], told: bool
) -> None:
    cut = Cut()
    for excess in excesses:
        before = cut
        planned = plan_cut(own, cut, excess, told=told)
        cut = Cut(planned.kept_from, note(own, planned, "a summary" if told else ""), planned.reduced)
        after = cut.apply(own)
        assert is_whole(after)
        assert after[0].content.startswith(TASK.content)
        assert after[-1].role == own[-1].role
        assert (after[-2].reasoning, after[-2].tool_calls) == (own[-2].reasoning, own[-2].tool_calls)
        assert cut.kept_from >= before.kept_from
        assert [m.role for m in after[1:]] == [m.role for m in own[len(own) - len(after) + 1 :]]


@given(histories, st.booleans())
def test_a_cut_holds_for_a_history_that_has_grown(own: list[Message], told: bool) -> None:
    cut = plan_cut(own, Cut(), 2_000, told=told)
    shorter = cut.apply(own)
    grown = cut.apply([*own, *exchange(99)])
    assert grown[: len(shorter)] == shorter  # byte for byte: a prefix cache loses once


def test_old_results_are_reduced_before_anything_is_left_out() -> None:
    own = history(10)
    cut = plan_cut(own, Cut(), 3_000, told=False)
    after = cut.apply(own)
    assert (cut.kept_from, len(after)) == (0, len(own))
    assert history_tokens(own) - history_tokens(after) >= 3_000
    assert "characters left out" in after[2].content
    assert after[-4:] == own[-4:]


def test_where_that_is_not_enough_the_oldest_exchanges_go_and_are_told_of() -> None:
    own = history(40)
    cut = plan_cut(own, Cut(), history_tokens(own) - 3_000, told=False)
    told = note(own, cut, "")
    assert cut.kept_from > 1
    assert "steps of your work" in told
    assert 'look({"page": 0}): page 0 word' in told
    assert history_tokens(Cut(cut.kept_from, told, cut.reduced).apply(own)) < 5_000


def test_what_somebody_tells_of_is_left_out_and_nothing_is_reduced() -> None:
    own = history(10)
    cut = plan_cut(own, Cut(), 3_000, told=True)
    assert cut.reduced == {}
    assert left_out(own, cut)[0].content == "step 0"
    assert "found: 17" in note(own, cut, "found: 17")


def test_one_result_that_is_too_long_by_itself_is_reduced_although_it_is_the_latest() -> None:
    own = [TASK, *exchange(0, words=50_000)]
    after = plan_cut(own, Cut(), 60_000, told=True).apply(own)
    assert history_tokens(own) - history_tokens(after) >= 59_000
    assert after[2].content.startswith("page 0 word")


def test_a_task_alone_is_left_alone() -> None:
    assert plan_cut([TASK], Cut(), 5_000, told=False) == Cut()
    assert note([TASK], Cut(), "") == ""


def test_data_is_reduced_to_its_shape() -> None:
    rows = [{"id": number, "name": "x" * 500, "tags": ["a"] * 50} for number in range(300)]
    short = shorten(json.dumps({"rows": rows, "total": 300}), 200)
    assert estimate_tokens(short) <= 200
    shape = json.loads(short.removeprefix("[only the shape of this] "))
    assert shape["total"] == 300
    assert shape["rows"][0]["id"] == 0
    assert shape["rows"][-1] == "… (298 more items)"


@given(st.text(max_size=3_000), st.integers(20, 200))
def test_a_shorter_text_is_about_as_long_as_asked_and_has_head_and_tail(text: str, most: int) -> None:
    short = shorten(text, most)
    assert short == text or len(short) < len(text) + 60
    assert short == text or (short[:10] == text[:10] and short[-5:] == text[-5:]) or short.startswith("[only")
