"""What requests of Anthropic's wire look like: blocks, their order, and cache marks."""

from __future__ import annotations

import orjson
import pytest

from batch_agent.backends.anthropic.messages import check_shape
from batch_agent.backends.anthropic.request import MessagesView, build_head
from batch_agent.backends.base import RequestShape
from batch_agent.errors import Rejected, SpecError
from batch_agent.messages import Conversation, Document, Image, Message, Sealed, ToolCall, ToolSpec

SEARCH = ToolSpec("search", "Search.", {"type": "object", "properties": {"query": {"type": "string"}}})
SHAPE = RequestShape("claude-sonnet-4-5", tools=(SEARCH,))
PLAIN = RequestShape("claude-sonnet-4-5")
SYSTEM, USER = Message("system", "Be brief."), Message("user", "Hello")
LONG = "word " * 1000  # about 1,250 tokens
CALLS = (ToolCall("a", "search", '{"query":"x"}'), ToolCall("b", "search", "{}"))
ANSWER = Message("assistant", "Let me look.", CALLS)
RESULTS = [Message("tool", f"about {c.id}", tool_call_id=c.id, tool_name=c.name) for c in CALLS]


def sent(*messages: Message, shape: RequestShape = SHAPE, is_last: bool = False) -> dict:
    return orjson.loads(build_head(shape, False).body(Conversation(messages).view(MessagesView), is_last=is_last))


def kinds(message: dict) -> list[str]:
    return [block["type"] for block in message["content"]]


def marks(body: dict) -> list[str]:
    """Where they are, in the order that the API reads a request in."""
    places = [("tool", block) for block in body.get("tools", ())]
    places += [("system", block) for block in body.get("system", ())]
    places += [
        (f"{place}.{number}", block)
        for place, message in enumerate(body["messages"])
        for number, block in enumerate(message["content"])
    ]
    return [where for where, block in places if "cache_control" in block]


def test_the_system_prompt_stands_apart_and_results_come_first_in_one_message_of_the_users() -> None:
    body = sent(SYSTEM, USER, ANSWER, *RESULTS, Message("user", "Mend it."))
    assert [block["text"] for block in body["system"]] == ["Be brief."]
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert kinds(body["messages"][1]) == ["text", "tool_use", "tool_use"]
    assert kinds(body["messages"][2]) == ["tool_result", "tool_result", "text"]
    assert body["messages"][2]["content"][0] == {"type": "tool_result", "tool_use_id": "a", "content": "about a"}


def test_results_come_first_even_where_something_was_said_before_them() -> None:
    body = sent(USER, ANSWER, Message("user", "By the way."), *RESULTS)
    assert kinds(body["messages"][2]) == ["tool_result", "tool_result", "text"]


def test_a_call_that_nobody_answered_is_answered() -> None:
    body = sent(USER, ANSWER, RESULTS[1], Message("user", "Go on."))
    answered = body["messages"][2]["content"]
    assert [block.get("tool_use_id") for block in answered] == ["b", "a", None]
    assert answered[1]["is_error"] is True
    closed = sent(USER, ANSWER, Message("user", "Go on."), Message("assistant", "Well."), USER)
    assert kinds(closed["messages"][2]) == ["tool_result", "tool_result", "text"]


def test_what_follows_itself_is_one_message_and_the_first_is_the_users() -> None:
    body = sent(USER, Message("user", "And?"), Message("assistant", "One."), Message("assistant", "Two."), USER)
    assert [(message["role"], len(message["content"])) for message in body["messages"]] == [
        ("user", 2),
        ("assistant", 2),
        ("user", 1),
    ]
    assert sent(Message("assistant", "I begin."), USER)["messages"][0]["role"] == "user"


def test_text_without_a_word_is_never_sent() -> None:
    blank = Message("tool", " \n", tool_call_id="a")
    body = sent(
        Message("system", "  "), Message("user", ("", "Hello", "\n")), Message("assistant", "\n", CALLS[:1]), blank
    )
    assert "system" not in body
    assert body["messages"][0]["content"] == [{"type": "text", "text": "Hello"}]
    assert kinds(body["messages"][1]) == ["tool_use"]
    assert body["messages"][2]["content"] == [{"type": "tool_result", "tool_use_id": "a"}]
    nothing = sent(USER, Message("assistant", ""), Message("user", "Say something."))
    assert [message["role"] for message in nothing["messages"]] == ["user"]
    assert sent(Message("user", ""))["messages"][0]["content"][0]["text"].strip()


def test_pictures_go_as_data_or_as_an_address() -> None:
    picture = Image.of(b"png", "image/png")
    body = sent(Message("user", ("What?", picture, Image("https://a.example/b.png"))))
    _, data, url = body["messages"][0]["content"]
    assert data["source"] == {"type": "base64", "media_type": "image/png", "data": "cG5n"}
    assert url["source"] == {"type": "url", "url": "https://a.example/b.png"}
    shown = sent(USER, Message("assistant", "", CALLS[:1]), Message("tool", ("seen", picture), tool_call_id="a"))
    assert kinds(shown["messages"][2]["content"][0]) == ["text", "image"]
    with pytest.raises(Rejected, match="image"):
        sent(Message("system", ("look", picture)), USER)


def test_a_file_is_a_document_block_with_its_name() -> None:
    paper = Document("data:application/pdf;base64,cGRm", name="a.pdf")
    assert sent(Message("user", ("Read.", paper)))["messages"][0]["content"][1] == {
        "type": "document",
        "source": {"type": "base64", "media_type": "application/pdf", "data": "cGRm"},
        "title": "a.pdf",
    }


def test_ids_of_other_wires_are_written_in_the_letters_that_the_api_takes() -> None:
    call = ToolCall("functions.search:0", "search", "{}")
    body = sent(USER, Message("assistant", "", (call,)), Message("tool", "x", tool_call_id=call.id))
    assert body["messages"][1]["content"][0]["id"] == "functions_search_0"
    assert body["messages"][2]["content"] == [
        {"type": "tool_result", "tool_use_id": "functions_search_0", "content": "x"}
    ]


def test_a_sealed_answer_goes_back_as_it_came() -> None:
    blocks = [
        {"type": "thinking", "thinking": "", "signature": "s"},
        {"type": "redacted_thinking", "data": "d"},
        {"type": "tool_use", "id": "a", "name": "search", "input": {"query": "x"}},
    ]
    body = sent(USER, Message("assistant", "", CALLS[:1], sealed=Sealed("anthropic", blocks)), RESULTS[0])
    assert body["messages"][1]["content"] == blocks


def test_a_system_message_in_the_middle_is_said_by_the_user() -> None:
    body = sent(SYSTEM, USER, Message("assistant", "Hello."), Message("system", "Now be long."))
    assert len(body["system"]) == 1
    assert body["messages"][2] == {"role": "user", "content": [{"type": "text", "text": "Now be long."}]}


def test_what_was_written_is_not_written_again() -> None:
    shared = Conversation([SYSTEM])
    one, two = (Conversation([Message("user", word)], shared) for word in ("one", "two"))
    views = [talk.view(MessagesView) for talk in (one, two)]
    assert views[0].system[0] is views[1].system[0]
    one.append(ANSWER)
    one.append(RESULTS[0])
    head = build_head(SHAPE, False)
    assert b"Let me look" not in head.body(two.view(MessagesView), is_last=False)


# Marks


def test_a_short_prefix_is_not_marked() -> None:
    assert marks(sent(SYSTEM, USER)) == []
    assert marks(sent(Message("system", LONG), USER, shape=RequestShape("claude-haiku-4-5"))) == []


def test_the_shared_prefix_is_marked_behind_its_last_block() -> None:
    assert marks(sent(Message("system", LONG), USER, shape=PLAIN)) == ["system"]
    described = ToolSpec("search", LONG, SEARCH.parameters)
    with_tools = RequestShape("claude-sonnet-4-5", tools=(SEARCH, described), tool_choice="none")
    body = sent(USER, shape=with_tools)
    assert marks(body) == ["tool"]
    assert "cache_control" in body["tools"][-1]


def test_a_row_of_one_turn_is_not_kept() -> None:
    assert marks(sent(SYSTEM, Message("user", LONG * 5), shape=PLAIN)) == []


def test_the_end_is_marked_where_another_turn_will_read_it_and_the_last_end_where_one_can_be_read() -> None:
    system = Message("system", LONG)
    assert marks(sent(system, USER)) == ["system", "0.0"]
    assert marks(sent(system, USER, ANSWER, *RESULTS)) == ["system", "0.0", "2.1"]
    assert marks(sent(system, USER, ANSWER, *RESULTS, is_last=True)) == ["system", "0.0"]
    longer = (system, USER, ANSWER, *RESULTS, Message("assistant", "", (ToolCall("c", "search", "{}"),)))
    assert marks(sent(*longer, Message("tool", "x", tool_call_id="c"))) == ["system", "2.1", "4.0"]


def test_but_for_marks_a_body_only_grows() -> None:
    talk = Conversation([USER], Conversation([Message("system", LONG)]))
    head, mark = build_head(SHAPE, False), b',"cache_control":{"type":"ephemeral"}'
    bodies = []
    for messages in ([], [ANSWER, *RESULTS], [Message("assistant", "Done."), Message("user", "And now?")]):
        for message in messages:
            talk.append(message)
        body = head.body(talk.view(MessagesView), is_last=False)
        assert body.count(mark) <= 4
        bodies.append(body.replace(mark, b"")[:-2])
    assert bodies[1].startswith(bodies[0])
    assert bodies[2].startswith(bodies[1])


# Options


@pytest.mark.parametrize(
    ("model", "limit"),
    [
        ("claude-3-haiku-20240307", 4096),
        ("claude-3-5-sonnet-latest", 8192),
        ("claude-sonnet-4-5-20250929", 16_000),
        ("claude-fable-5", 32_000),
        ("claude-novel-7", 16_000),
        ("smollm2", 4096),
    ],
)
def test_a_limit_of_tokens_is_always_sent(model: str, limit: int) -> None:
    assert sent(USER, shape=RequestShape(model))["max_tokens"] == limit
    assert sent(USER, shape=RequestShape(model, max_tokens=7))["max_tokens"] == 7
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 2000}}
    assert sent(USER, shape=RequestShape(model, extra_body=thinking))["max_tokens"] == limit + 2000


def test_choices_of_tools_have_the_words_of_the_api() -> None:
    def choice(value: object) -> object:
        return sent(USER, shape=RequestShape("m", tools=(SEARCH,), tool_choice=value)).get("tool_choice")  # type: ignore[arg-type]

    one_call = {"type": "auto", "disable_parallel_tool_use": True}
    assert choice(None) is None
    assert choice("required") == {"type": "any"}
    assert choice("none") == {"type": "none"}
    assert choice("search") == {"type": "tool", "name": "search"}
    assert choice(one_call) == one_call


def test_settings_of_the_output_stand_beside_the_schema_and_the_servers_tools_behind_ours() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}, "required": ["n"]}
    extra = {"output_config": {"effort": "low"}, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}
    body = sent(USER, shape=RequestShape("m", tools=(SEARCH,), schema=schema, extra_body=extra))
    assert body["output_config"]["effort"] == "low"
    assert body["output_config"]["format"]["schema"]["additionalProperties"] is False
    assert [tool["name"] for tool in body["tools"]] == ["search", "web_search"]
    with pytest.raises(SpecError, match="tools"):
        build_head(RequestShape("m", extra_body={"tools": "all"}), False)


def test_a_schema_without_a_form_is_told_in_words() -> None:
    shape = RequestShape("m", schema={"type": "array", "items": {"type": "integer"}})
    body = sent(SYSTEM, USER, shape=shape)
    assert "output_config" not in body
    assert body["system"][0]["text"] == "Be brief."
    assert '{"type":"array","items":{"type":"integer"}}' in body["system"][1]["text"]


@pytest.mark.parametrize(
    ("model", "options", "names"),
    [
        ("claude-sonnet-4-5", {"seed": 1}, "seed"),
        ("claude-sonnet-4-5", {"temperature": 1.5}, "temperature"),
        ("claude-sonnet-4-5", {"temperature": 0.5, "top_p": 0.5}, "top_p"),
        ("claude-sonnet-4-5", {"stop": ("\n",)}, "stop"),
        ("claude-sonnet-4-5", {"tools": (ToolSpec("a b", "", {}),)}, "a b"),
        ("claude-opus-4-8", {"temperature": 0.0}, "temperature"),
        ("claude-fable-5", {"top_p": 0.5}, "top_p"),
        ("anthropic/claude-sonnet-5", {"temperature": 0.0}, "temperature"),
    ],
)
def test_what_is_known_to_be_refused_is_refused_before_anything_is_sent(model: str, options: dict, names: str) -> None:
    with pytest.raises(SpecError, match=names):
        check_shape(RequestShape(model, **options), takes_sampling=True)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("claude-sonnet-4-5", {"temperature": 0.0}),
        ("claude-sonnet-4-5", {"temperature": 1, "stop": ("END",)}),
        ("claude-sonnet-5", {"temperature": 1}),
        ("smollm2", {"temperature": 1.5, "top_p": 0.5, "stop": ("\n",)}),
        ("claude-novel-7", {"temperature": 0.5}),
    ],
)
def test_what_only_the_server_knows_is_left_to_it(model: str, options: dict) -> None:
    check_shape(RequestShape(model, **options), takes_sampling=True)


def test_the_new_version_takes_no_sampling_even_at_its_defaults() -> None:
    shapes = [{"temperature": 1}, {"top_p": 1}, {"extra_body": {"top_k": 5}}]
    for options in shapes:
        with pytest.raises(SpecError, match="version=2023-06-01"):
            check_shape(RequestShape("claude-sonnet-4-5", **options), takes_sampling=False)  # type: ignore[arg-type]
    check_shape(RequestShape("claude-sonnet-4-5"), takes_sampling=False)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"max_tokens": 2000}, "max_tokens"),
        ({"temperature": 0.5}, "temperature"),
        ({"tools": (SEARCH,), "tool_choice": "required"}, "tool_choice"),
        ({"tools": (SEARCH,), "tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
def test_thinking_with_a_budget_excludes_what_the_api_says_it_does(options: dict, names: str) -> None:
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 2000}}
    with pytest.raises(SpecError, match=names):
        check_shape(RequestShape("claude-sonnet-4-5", extra_body=thinking, **options), takes_sampling=True)
    free = RequestShape("claude-sonnet-4-5", extra_body=thinking, tools=(SEARCH,), tool_choice="auto", max_tokens=4000)
    check_shape(free, takes_sampling=True)
