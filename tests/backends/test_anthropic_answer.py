"""Answers of Anthropic's wire: blocks, reasons to stop, counts, and what broken or sloppy servers send."""

from __future__ import annotations

import orjson
import pytest

from batch_agent.backends.anthropic.answer import AnswerStream, read_answer
from batch_agent.backends.anthropic.messages import WORDING
from batch_agent.backends.http.wire import Faults, Naming
from batch_agent.errors import BackendError, BadResponse, ContextOverflow, Rejected, Truncated
from batch_agent.messages import Reply, Sealed, ToolCall, Usage

TEXT = {"type": "text", "text": "Hello."}
CALL = {"type": "tool_use", "id": "a", "name": "search", "input": {"query": "x"}}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "sig"}
HIDDEN = {"type": "redacted_thinking", "data": "opaque"}
USAGE = {"input_tokens": 10, "cache_read_input_tokens": 60, "cache_creation_input_tokens": 30, "output_tokens": 5}


def naming() -> Naming:
    return Naming([], Faults("POST http://x", wording=WORDING))


def whole(*blocks: dict, stop: str | None = "end_turn", **more: object) -> Reply:
    document = {"type": "message", "content": list(blocks), "stop_reason": stop, "usage": USAGE, **more}
    return read_answer(orjson.dumps(document), naming())


def events_of(*blocks: dict, stop: str = "end_turn", closes: bool = True) -> list[dict]:
    events: list[dict] = [{"type": "message_start", "message": {"usage": USAGE | {"output_tokens": 1}}}]
    for index, block in enumerate(blocks):
        kind = block["type"]
        began = {name: part for name, part in block.items() if name not in ("text", "thinking", "signature", "input")}
        if kind == "tool_use":
            began["input"] = {}
        events.append({"type": "content_block_start", "index": index, "content_block": began})
        deltas = {
            "text": [{"type": "text_delta", "text": letter} for letter in block.get("text", "")],
            "thinking": [
                {"type": "thinking_delta", "thinking": block.get("thinking", "")},
                {"type": "signature_delta", "signature": block.get("signature", "")},
            ],
            "tool_use": [{"type": "input_json_delta", "partial_json": "".join(block.get("input", ""))}],
        }.get(kind, [])
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        if closes:
            events.append({"type": "content_block_stop", "index": index})
    events.append({"type": "message_delta", "delta": {"stop_reason": stop}, "usage": {"output_tokens": 5}})
    return [*events, {"type": "message_stop"}]


class Streamed:
    def __init__(self, *events: object) -> None:
        self.said: list[str] = []
        self.calls: list[ToolCall] = []
        self.stream = AnswerStream(naming(), self.calls.append, lambda: 0.0, self.said)
        self.done = [self.stream.feed(self.encoded(event)) for event in events]

    @staticmethod
    def encoded(event: object) -> bytes:
        return event if isinstance(event, bytes) else b"data: %b\n\n" % orjson.dumps(event)


def test_counts_of_the_cache_are_parts_of_the_prompt() -> None:
    counted = Usage(prompt_tokens=100, cached_tokens=60, completion_tokens=5, cache_write_tokens=30)
    assert whole(TEXT).usage == counted
    assert Streamed(*events_of(TEXT)).stream.finish().usage == counted
    assert whole(TEXT, usage={"output_tokens": 9, "output_tokens_details": {"thinking_tokens": 4}}).usage == Usage(
        completion_tokens=9, reasoning_tokens=4
    )
    assert whole(TEXT, usage={"input_tokens": None, "output_tokens": "many"}).usage == Usage()


@pytest.mark.parametrize("streamed", [False, True])
def test_thoughts_are_sealed_as_they_came_before_the_call_they_led_to(streamed: bool) -> None:
    blocks = [THOUGHT, HIDDEN, {"type": "text", "text": "\n\n"}, CALL]
    if streamed:
        written = [block | {"input": '{"query":"x"}'} if block is CALL else block for block in blocks]
        reply = Streamed(*events_of(*written, stop="tool_use")).stream.finish()
    else:
        reply = whole(*blocks, stop="tool_use")
    assert reply.reasoning == "Hm."
    assert reply.sealed == Sealed("anthropic", [THOUGHT, HIDDEN, CALL]), "but for text that the API would refuse"
    assert [(call.id, call.name, orjson.loads(call.arguments)) for call in reply.tool_calls] == [
        ("a", "search", {"query": "x"})
    ]


def test_text_and_calls_alone_need_no_seal() -> None:
    assert whole(TEXT, CALL, stop="tool_use").sealed is None
    cited = {"type": "text", "text": "So.", "citations": [{"type": "page_location", "cited_text": "so"}]}
    assert whole(cited).sealed == Sealed("anthropic", [cited])


def test_blocks_of_the_servers_own_tools_are_no_calls_and_go_back() -> None:
    search = {"type": "server_tool_use", "id": "srv", "name": "web_search", "input": {"query": "x"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "srv", "content": [{"type": "web_search_result"}]}
    reply = whole(search, found, TEXT)
    assert (reply.text, reply.tool_calls) == ("Hello.", ())
    assert reply.sealed == Sealed("anthropic", [search, found, TEXT])


def test_what_is_sealed_can_be_sent_back() -> None:
    odd = CALL | {"id": "functions.search:0"}
    reply = whole(THOUGHT, TEXT | {"citations": None}, odd, stop="tool_use")
    assert reply.tool_calls[0].id == "functions_search_0", "the API takes no other letters"
    assert reply.sealed == Sealed("anthropic", [THOUGHT, TEXT, odd | {"id": "functions_search_0"}])


@pytest.mark.parametrize("stop", ["end_turn", "stop_sequence"])
def test_a_good_reason_to_stop_makes_an_answer(stop: str) -> None:
    assert (whole(TEXT, stop=stop).text, whole(TEXT, stop=stop).finish_reason) == ("Hello.", stop)


@pytest.mark.parametrize(
    ("stop", "kind"),
    [
        ("max_tokens", Truncated),
        ("model_context_window_exceeded", ContextOverflow),
        ("refusal", Rejected),
        ("some_new_reason", BadResponse),
        (None, BadResponse),
    ],
)
def test_other_reasons_are_errors_that_keep_the_text(stop: str | None, kind: type[BackendError]) -> None:
    with pytest.raises(BackendError) as caught:
        whole(TEXT, stop=stop)
    assert type(caught.value) is kind
    assert caught.value.text == "Hello."
    assert caught.value.status is None
    if kind is not BadResponse:
        assert caught.value.usage is not None and caught.value.usage.completion_tokens == 5


def test_a_refusal_says_why_it_refuses() -> None:
    details = {"type": "refusal", "category": "bio", "explanation": "No recipes."}
    with pytest.raises(Rejected, match="bio: No recipes"):
        whole(stop="refusal", stop_details=details)


def test_calls_that_are_announced_and_missing_are_an_error() -> None:
    with pytest.raises(BadResponse, match="has no tool call"):
        whole(TEXT, stop="tool_use")


def test_a_call_that_the_limit_cut_is_not_reported() -> None:
    cut = CALL | {"input": '{"query": "x'}
    answer = Streamed(*events_of(cut, stop="max_tokens"))
    with pytest.raises(Truncated):
        answer.stream.finish()
    assert answer.calls == []
    blank = Streamed(*events_of(CALL | {"input": ""}, stop="max_tokens"))
    with pytest.raises(Truncated):
        blank.stream.finish()
    assert blank.calls == []


def test_a_call_without_arguments_is_reported_when_the_answer_ends_well() -> None:
    answer = Streamed(*events_of(CALL | {"input": ""}, stop="tool_use"))
    assert answer.calls == []
    reply = answer.stream.finish()
    assert [call.arguments for call in answer.calls] == ["{}"]
    assert reply.tool_calls[0] is answer.calls[0]


def test_arguments_that_came_with_the_opening_of_a_block_are_taken() -> None:
    begin = {"type": "content_block_start", "index": 0, "content_block": CALL}
    end = {"type": "message_delta", "delta": {"stop_reason": "tool_use"}}
    answer = Streamed(begin, {"type": "content_block_stop", "index": 0}, end)
    assert orjson.loads(answer.stream.finish().tool_calls[0].arguments) == {"query": "x"}


def test_blocks_that_are_never_closed_are_closed_by_the_end() -> None:
    answer = Streamed(*events_of(TEXT, closes=False))
    assert answer.stream.finish().text == "Hello."


def test_the_end_is_known_and_what_follows_it_is_not_read() -> None:
    answer = Streamed(*events_of(TEXT), b"data: [DONE]\n\n")
    assert answer.done[-2:] == [True, True]
    assert answer.stream.finish().text == "Hello."
    assert "".join(answer.said) == "Hello."


def test_a_missing_last_event_is_forgiven_and_a_missing_reason_is_not() -> None:
    assert Streamed(*events_of(TEXT)[:-1]).stream.finish().text == "Hello."
    with pytest.raises(BadResponse, match="before the answer was complete") as caught:
        Streamed(*events_of(TEXT)[:-2]).stream.finish()
    assert caught.value.text == "Hello."


def test_pings_and_events_of_other_kinds_are_passed_over() -> None:
    events = events_of(TEXT)
    odd = [{"type": "ping"}, b"event: ping\ndata: {}\n\n", {"type": "something_new"}]
    assert Streamed(events[0], *odd, *events[1:]).stream.finish().text == "Hello."


@pytest.mark.parametrize(
    ("kind", "status", "overload"),
    [("overloaded_error", 529, True), ("rate_limit_error", 429, True), ("api_error", 500, False)],
)
def test_an_error_inside_a_stream_has_the_type_of_its_status(kind: str, status: int, overload: bool) -> None:
    error = {"type": "error", "error": {"type": kind, "message": "busy"}}
    for event in (error, b"event: error\ndata: %b\n\n" % orjson.dumps(error)):
        with pytest.raises(BackendError, match="busy") as caught:
            Streamed(events_of(TEXT)[0], event)
        assert (caught.value.status, caught.value.overload) == (status, overload)
        assert caught.value.retryable


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b'{"content": "Hello"}', b'{"content": null, "stop_reason": "end_turn"}', b"\xff"]
)
def test_what_is_no_answer_is_a_bad_response(body: bytes) -> None:
    with pytest.raises(BadResponse):
        read_answer(body, naming())


@pytest.mark.parametrize(
    "event",
    [
        b"data: [1]\n\n",
        b"data: {\n\n",
        {"type": "content_block_delta", "index": 7, "delta": {"type": "text_delta", "text": "x"}},
        {"type": "content_block_delta", "index": 0, "delta": "x"},
    ],
)
def test_what_is_no_event_of_this_wire_is_a_bad_response(event: object) -> None:
    with pytest.raises(BadResponse):
        Streamed(events_of(TEXT)[0], event)


def test_odd_blocks_do_no_harm() -> None:
    reply = whole(TEXT, {"type": "text"}, {"type": None}, {"text": 5, "type": "text"})
    assert reply.text == "Hello."
    with pytest.raises(BadResponse, match="without a name"):
        whole({"type": "tool_use", "id": "a", "input": {}}, stop="tool_use")
