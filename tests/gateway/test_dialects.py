"""The three dialects without a socket: what is read of a request, and what an answer looks like."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batch_agent.backends.anthropic.request import MessagesView
from batch_agent.backends.openai.chat import ChatView
from batch_agent.backends.openai.responses import ItemView
from batch_agent.gateway.chat import ChatDialect
from batch_agent.gateway.client_request import ClientDialect, ClientRequest, Envelope, RequestReader
from batch_agent.gateway.messages import MessagesDialect
from batch_agent.gateway.responses import ResponsesDialect
from batch_agent.messages import Conversation, Image, JsonObject, Message, Reply, ToolCall, Usage

PICTURE = "data:image/png;base64,iVBORw0KGgo="
ENVELOPE = Envelope("abc", 7, "m")
CHAT, RESPONSES, MESSAGES = ChatDialect(), ResponsesDialect(), MessagesDialect()
CONVERSATION = [
    Message("system", "Be brief."),
    Message("user", ("What is this?", Image(PICTURE))),
    Message("assistant", "Let me look.", (ToolCall("a", "look", '{"at":1}'), ToolCall("b", "look", '{"at":2}'))),
    Message("tool", "a cat", (), "a"),
    Message("tool", "a dog", (), "b"),
    Message("assistant", "A cat and a dog."),
    Message("user", "Thanks."),
]
TOOL: JsonObject = {"type": "object", "properties": {"at": {"type": "integer"}}}


def read(dialect: ClientDialect, body: JsonObject) -> ClientRequest:
    return RequestReader().read(dialect, body, "m")


def chat_body() -> JsonObject:
    tool = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": TOOL}}
    return {"messages": Conversation(CONVERSATION).view(ChatView).own, "tools": [tool], "max_completion_tokens": 9}


def responses_body() -> JsonObject:
    tool = {"type": "function", "name": "look", "description": "Look.", "parameters": TOOL}
    return {"input": Conversation(CONVERSATION).view(ItemView).own, "tools": [tool], "max_output_tokens": 9}


def messages_body() -> JsonObject:
    view = Conversation(CONVERSATION).view(MessagesView)
    return {
        "system": [json.loads(block) for block in view.system],
        "messages": json.loads(b"[%b]" % view.messages(marks_last=True, marks_end=True)),
        "tools": [{"name": "look", "description": "Look.", "input_schema": TOOL}],
        "max_tokens": 9,
    }


@pytest.mark.parametrize(
    ("dialect", "body"),
    [(CHAT, chat_body()), (RESPONSES, responses_body()), (MESSAGES, messages_body())],
    ids=["chat", "responses", "messages"],
)
def test_what_our_backends_write_is_read_as_it_was(dialect: ClientDialect, body: JsonObject) -> None:
    request = read(dialect, {**body, "temperature": 0.5, "stream": True})
    assert list(request.messages) == CONVERSATION
    assert not request.lost
    shape = request.shape
    assert (shape.model, shape.max_tokens, shape.temperature) == ("m", 9, 0.5)
    assert [(tool.name, tool.description, tool.parameters) for tool in shape.tools] == [("look", "Look.", TOOL)]
    assert request.stream


@pytest.mark.parametrize(
    ("dialect", "choices"),
    [
        (CHAT, {"auto": "auto", "required": "required", "look": {"type": "function", "function": {"name": "look"}}}),
        (RESPONSES, {"none": "none", "required": "required", "look": {"type": "function", "name": "look"}}),
        (
            MESSAGES,
            {
                "auto": {"type": "auto"},
                "required": {"type": "any"},
                "none": {"type": "none"},
                "look": {"type": "tool", "name": "look"},
            },
        ),
    ],
)
def test_the_choice_of_a_tool_has_one_form(dialect: ClientDialect, choices: JsonObject) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "input": "hi"}
    for name, choice in choices.items():
        assert read(dialect, {**body, "tool_choice": choice}).shape.tool_choice == name


REPLY = Reply(
    "Looking.",
    (ToolCall("a", "look", '{"at":1}'), ToolCall("b", "patch", '{"input":"*** text"}')),
    Usage(prompt_tokens=100, cached_tokens=60, completion_tokens=20, reasoning_tokens=5, cache_write_tokens=10),
    reasoning="Hm.",
    finish_reason="tool_calls",
)


def written(dialect: ClientDialect, reply: Reply, body: JsonObject | None = None) -> tuple[Any, list[Any]]:
    """The document, and the events' names and data."""
    asked = body or {"messages": [{"role": "user", "content": "hi"}], "input": "hi"}
    request = read(dialect, {**asked, "stream_options": {"include_usage": True}})
    document = dialect.document(reply, request, ENVELOPE)
    stream = b"".join(dialect.events(document, request)).decode()
    datas = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    return document, [json.loads(data) for data in datas if data != "[DONE]"]


def test_a_chat_answer() -> None:
    document, events = written(CHAT, REPLY)
    message = document["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Looking.", "Hm.")
    assert [call["id"] for call in message["tool_calls"]] == ["a", "b"]
    assert document["usage"]["prompt_tokens_details"]["cached_tokens"] == 60
    assert document["choices"][0]["finish_reason"] == "tool_calls"
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert [call["index"] for delta in deltas for call in delta.get("tool_calls", [])] == [0, 1]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Looking."
    assert (events[-1]["choices"], events[-1]["usage"]) == ([], document["usage"])
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_messages_answer() -> None:
    document, events = written(MESSAGES, REPLY)
    assert [block["type"] for block in document["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert document["content"][2]["input"] == {"at": 1}
    assert document["stop_reason"] == "tool_use"
    counts = {"input_tokens": 30, "cache_read_input_tokens": 60, "cache_creation_input_tokens": 10}
    assert document["usage"] == {**counts, "output_tokens": 20}
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [event["type"] for event in events] == ["message_start", *block * 4, "message_delta", "message_stop"]
    assert events[-2]["usage"]["output_tokens"] == 20


def test_a_responses_answer_and_a_tool_that_takes_text() -> None:
    patch: JsonObject = {"type": "custom", "name": "patch", "format": {"type": "grammar", "definition": "start: x"}}
    body: JsonObject = {"input": "hi", "tools": [patch, {"type": "web_search"}]}
    assert "start: x" in read(RESPONSES, body).shape.tools[0].description
    document, events = written(RESPONSES, REPLY, body)
    kinds = [item["type"] for item in document["output"]]
    assert kinds == ["reasoning", "message", "function_call", "custom_tool_call"]
    assert document["output"][3]["input"] == "*** text"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    item = ["output_item.added", "output_item.done"]
    assert [name for name in names if name in item] == item * 4
    assert names[:2] == ["created", "in_progress"]
    assert events[-1] == {"type": "response.completed", "response": document, "sequence_number": len(events) - 1}
    back = read(RESPONSES, {**body, "input": [*document["output"]]}).messages
    assert list(back) == [Message("assistant", "Looking.", REPLY.tool_calls, reasoning="Hm.")]


def test_an_answer_that_was_cut_says_so_in_each_dialect() -> None:
    cut = Reply("half", finish_reason="length")
    assert written(CHAT, cut)[0]["choices"][0]["finish_reason"] == "length"
    assert written(MESSAGES, cut)[0]["stop_reason"] == "max_tokens"
    document, events = written(RESPONSES, cut)
    assert document["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-1]["type"] == "response.incomplete"


def test_a_question_is_the_same_in_another_session_and_another_one_is_not() -> None:
    first = messages_body() | {"metadata": {"user_id": "session-1"}, "stream": True}
    first["system"] = [{"type": "text", "text": "x-anthropic-billing-header: 1"}, *first["system"]]  # type: ignore[misc]
    again = messages_body() | {"metadata": {"user_id": "session-2"}}
    assert read(MESSAGES, first).head == read(MESSAGES, again).head
    assert list(read(MESSAGES, first).messages) == CONVERSATION
    for change in ({"temperature": 0.5}, {"top_k": 3}, {"max_tokens": 10}, {"thinking": {"type": "adaptive"}}):
        assert read(MESSAGES, again | change).head != read(MESSAGES, again).head


def test_what_messages_cannot_hold_makes_another_question() -> None:
    heads = set()
    for sound in ("a", "b"):
        part: JsonObject = {"type": "input_audio", "input_audio": {"data": sound}}
        heads.add(read(CHAT, {"messages": [{"role": "user", "content": [part]}]}).head)
    assert len(heads) == 2


def test_tools_of_a_namespace_are_called_by_both_names_and_come_back_as_they_were() -> None:
    space: JsonObject = {"type": "namespace", "name": "gh", "tools": [{"type": "function", "name": "list"}]}
    body: JsonObject = {"input": "hi", "tools": [space]}
    assert [tool.name for tool in read(RESPONSES, body).shape.tools] == ["gh__list"]
    call = ToolCall("a", "gh__list", "{}")
    document, _ = written(RESPONSES, Reply("", (call,)), body)
    [item] = document["output"]
    assert (item["namespace"], item["name"]) == ("gh", "list")
    [message] = read(RESPONSES, {**body, "input": [item]}).messages
    assert message.tool_calls == (call,)
