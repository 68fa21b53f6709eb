"""Conversations as chat messages, calls as text and back."""

from __future__ import annotations

import json

import pytest
from pydantic import JsonValue
from tests.backends.local.ebnf_sampler import sampler

from batch_agent.backends.base import RequestShape
from batch_agent.backends.local.backend import chat_messages, describe_tools, read_call, split_thinking
from batch_agent.backends.local.grammar import compile_turn
from batch_agent.errors import Rejected, SpecError
from batch_agent.messages import Image, Message, ToolCall, ToolSpec

ADD = ToolSpec(
    "add",
    "Adds.",
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"]},
)
NOTE = ToolSpec("note", "Notes.", {"type": "object", "properties": {"text": {"type": "string", "pattern": "x"}}})
ANSWER: dict[str, JsonValue] = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}


def choices(shape: RequestShape) -> set[str]:
    grammar = compile_turn(shape, 128).text
    assert grammar is not None
    texts = [sampler(grammar, seed).text() for seed in range(60)]
    calls = [read_call(text) for text in texts]
    for text, call in zip(texts, calls, strict=True):
        json.loads(text if call is None else call.arguments)
    return {"answer" if call is None else call.name for call in calls}


@pytest.mark.parametrize(
    ("choice", "possible"),
    [
        (None, {"add", "note", "answer"}),
        ("auto", {"add", "note", "answer"}),
        ("required", {"add", "note"}),
        ("none", {"answer"}),
        ("add", {"add"}),
        ({"type": "function", "function": {"name": "note"}}, {"note"}),
    ],
)
def test_the_tool_choice_decides_what_a_turn_can_be(choice: JsonValue, possible: set[str]) -> None:
    shape = RequestShape(model="m", tools=(ADD, NOTE), tool_choice=choice, schema=ANSWER)
    assert choices(shape) == possible


def test_a_choice_that_names_no_tool_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(SpecError, match="add, note"):
        compile_turn(RequestShape(model="m", tools=(ADD, NOTE), tool_choice="subtract"), 128)


def test_without_schema_and_tools_the_model_is_free() -> None:
    assert compile_turn(RequestShape(model="m"), 128).text is None
    assert compile_turn(RequestShape(model="m", tools=(ADD,), tool_choice="none"), 128).text is None


def test_a_schema_that_cannot_be_forced_is_left_to_validation_and_said() -> None:
    turn = compile_turn(RequestShape(model="m", schema={"type": "string", "pattern": "x"}), 128)
    assert turn.text is None
    assert turn.schema_unforced
    assert "pattern" in turn.unforced


def test_a_call_is_read_back_verbatim_and_rendered_again_as_it_was_written() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": ", \\"arguments\\": "}}</tool_call>'
    call = read_call(text)
    assert call is not None
    assert (call.name, call.arguments) == ("add", '{"a": 1, "b": ", \\"arguments\\": "}')
    assert chat_messages([Message("assistant", "", (call,))], "") == [{"role": "assistant", "content": text}]


@pytest.mark.parametrize("text", ["", "hello", '{"name": "add"}', "<tool_call>{}</tool_call>", "<tool_call>{"])
def test_text_that_is_no_call_is_an_answer(text: str) -> None:
    assert read_call(text) is None


def test_the_next_turn_extends_this_one() -> None:
    call = ToolCall("c1", "add", '{"a": 1}')
    first = [Message("system", "Be brief."), Message("user", "1+1?")]
    later = [*first, Message("assistant", "", (call,)), Message("tool", "2", tool_call_id="c1")]
    instructions = describe_tools([ADD])
    assert chat_messages(later, instructions)[:2] == chat_messages(first, instructions)
    assert chat_messages(later, instructions)[-1] == {
        "role": "user",
        "content": "<tool_response>\n2\n</tool_response>",
    }


def test_instructions_need_no_system_message_of_the_users() -> None:
    assert chat_messages([Message("user", "hi")], "Do.")[0] == {"role": "system", "content": "Do."}


def test_what_cannot_be_shown_is_refused_and_not_left_out() -> None:
    assert chat_messages([Message("user", ("a", "b"))], "") == [{"role": "user", "content": "ab"}]
    with pytest.raises(Rejected, match="does not accept images"):
        chat_messages([Message("user", ("a", Image("https://host/a.png")))], "")


def test_what_a_model_thought_before_its_answer_is_told_apart() -> None:
    assert split_thinking("<think>\nHm.\n</think>\n\nYes") == ("Hm.", "Yes")
    for text in ("Yes", "<think>cut", "a </think> b"):
        assert split_thinking(text) == ("", text)
