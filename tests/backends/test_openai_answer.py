"""Answers of every dialect, read without a socket."""

from __future__ import annotations

from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_agent.backends.http.wire import Faults, Naming
from batch_agent.backends.openai.chat import AnswerStream, read_answer
from batch_agent.compiler.prices import find_prices
from batch_agent.errors import (
    BackendError,
    BadResponse,
    ContextOverflow,
    RateLimited,
    Rejected,
    Truncated,
    Unavailable,
)
from batch_agent.messages import Message, Reply, ToolCall, Usage

FAULTS = Faults("POST http://host/v1/chat/completions", ["sk-secret"])


def naming(turn: int) -> Naming:
    return Naming([Message("user", "Hello")] * turn, FAULTS)


def read(body: object, turn: int = 2) -> Reply:
    return read_answer(body if isinstance(body, bytes) else orjson.dumps(body), naming(turn))


def said(finish: object = "stop", usage: object = None, **message: object) -> dict:
    return {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish}], "usage": usage}


def call(name: object = "f", arguments: object = "{}", **fields: object) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **fields}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        (None, ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c", {"type": "image"}], "abc"),
    ],
)
def test_content_may_be_text_or_parts_or_nothing(content: object, text: str) -> None:
    assert read(said(content=content, tool_calls=None)).text == text


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept_apart_from_the_text(field: str) -> None:
    reply = read(said(content="hi", **{field: "hm"}))
    assert (reply.text, reply.reasoning) == ("hi", "hm")


def test_a_refusal_of_the_model_is_its_text() -> None:
    assert read(said(content=None, refusal="I will not.")).text == "I will not."


def test_arguments_may_be_an_object_and_may_be_missing() -> None:
    calls = [call(arguments={"a": [1]}, id="a"), call(arguments="", id="b"), call(arguments=None, id="c")]
    reply = read(said("tool_calls", content="", tool_calls=calls))
    assert [c.arguments for c in reply.tool_calls] == ['{"a":[1]}', "{}", "{}"]


def test_arguments_are_kept_as_the_model_wrote_them() -> None:
    written = '{ "a" : 1, '
    assert read(said("tool_calls", tool_calls=[call(arguments=written)])).tool_calls[0].arguments == written


def test_every_call_has_an_id_of_its_own_that_is_the_same_each_time() -> None:
    calls = [call(), call(id=None), call(id="x"), call(id="x"), call(id="call_7_1")]
    reply = read(said("tool_calls", tool_calls=calls), turn=7)
    ids = [c.id for c in reply.tool_calls]
    assert len(set(ids)) == 5
    assert ids[2] == "x"
    assert reply == read(said("tool_calls", tool_calls=calls), turn=7)
    other = read(said("tool_calls", tool_calls=[call(), call()]), turn=9)
    assert not {c.id for c in other.tool_calls} & set(ids)


def test_a_named_function_ends_with_stop_and_is_still_a_call() -> None:
    assert read(said("stop", content="", tool_calls=[call(id="a")])).tool_calls == (ToolCall("a", "f", "{}"),)


def test_the_old_function_call_is_a_call() -> None:
    reply = read(said("function_call", content=None, function_call={"name": "f", "arguments": "{}"}))
    assert [c.name for c in reply.tool_calls] == ["f"]


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        (None, Usage()),
        ({"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": None}, Usage(3, 0, 2, 0)),
        ({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": None}}, Usage(3)),
        (
            {
                "prompt_tokens": 3,
                "completion_tokens": 9,
                "prompt_tokens_details": {"cached_tokens": 1},
                "completion_tokens_details": {"reasoning_tokens": 4},
            },
            Usage(3, 1, 9, 4),
        ),
        (
            {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 5}},
            Usage(9, 4, cache_write_tokens=5),
        ),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"created_cache_tokens": 5}}, Usage(9, cache_write_tokens=5)),
        ({"prompt_tokens": "3", "completion_tokens": -1, "completion_tokens_details": []}, Usage()),
    ],
)
def test_usage_is_counted_where_it_is_told(usage: object, counted: Usage) -> None:
    assert read(said(usage=usage, content="x")).usage == counted


@pytest.mark.parametrize(
    ("details", "counted"),
    [
        ({"cached_tokens": 1000}, Usage(1005, 1000)),
        ({"cached_tokens": 1000, "cache_write_tokens": 30}, Usage(1035, 1000, cache_write_tokens=30)),
        ({"cached_tokens": 0, "cache_write_tokens": 30}, Usage(35, 0, cache_write_tokens=30)),
    ],
)
def test_a_provider_that_counts_cached_input_apart_costs_what_it_costs(details: dict, counted: Usage) -> None:
    usage = read(said(usage={"prompt_tokens": 5, "prompt_tokens_details": details}, content="x")).usage
    assert usage == counted
    prices = find_prices({"input": 1.0, "cached": 0.1, "output": 1.0}, model="m", backend="b")
    assert prices is not None and prices.cost(usage) > 0


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (said("length", {"completion_tokens": 16}, content="Once"), Truncated, "16 tokens"),
        (said("length", tool_calls=[call(arguments='{"a')]), Truncated, "max_tokens"),
        (said("abort", content="Once"), BadResponse, "abort"),
        (said({"type": "abort"}, content="Once"), BadResponse, "abort"),
        (said("content_filter", content=""), Rejected, "content filter"),
        (said(None, content="Once"), BadResponse, "finish_reason"),
        (said("tool_calls", content=""), BadResponse, "has no tool call"),
        (said("tool_calls", tool_calls=[call(name=None)]), BadResponse, "without a name"),
        (said("tool_calls", tool_calls=["x"]), BadResponse, "tool call"),
        (said("tool_calls", tool_calls={"a": 1}), BadResponse, "not a list"),
        (said(content=5), BadResponse, "content"),
        ({"choices": []}, BadResponse, "no choices"),
        ({"choices": None}, BadResponse, "no choices"),
        ({"choices": [None]}, BadResponse, "no choices"),
        ({"choices": [{"finish_reason": "stop"}]}, BadResponse, "no message"),
        ({"choices": [{"error": {"code": 502, "message": "upstream"}}]}, Unavailable, "upstream"),
        ({"error": {"message": "busy sk-secret", "code": 503}}, Unavailable, r"busy \[redacted\]"),
        ({"error": {"message": "slow down", "type": "rate_limit_error"}}, RateLimited, "slow down"),
        ({"error": {"message": "no", "code": "429"}}, RateLimited, "no"),
        ({"error": {"message": "bad", "code": 400}}, Rejected, "bad"),
        ({"error": "strange"}, BadResponse, "strange"),
        ({"object": "error", "message": "The input is longer than the model's context"}, ContextOverflow, "longer"),
        (b"", BadResponse, "nothing"),
        (b"{", BadResponse, "not a JSON object"),
        (b"[]", BadResponse, "not a JSON object"),
        (b" <!DOCTYPE html>", BadResponse, "web page"),
        (b'{"choices": "\xff"}', BadResponse, "not a JSON object"),
        (b"[" * 100_000, BadResponse, "not a JSON object"),
    ],
)
def test_what_is_not_a_complete_answer_is_an_error(body: object, kind: type[BackendError], words: str) -> None:
    with pytest.raises(BackendError, match=words) as caught:
        read(body)
    assert type(caught.value) is kind
    assert "sk-secret" not in str(caught.value)
    assert str(caught.value).startswith("POST http://host/v1/chat/completions")
    assert len(str(caught.value)) < 700


# Streams


class Streamed:
    """An answer read from events, with what was reported on the way."""

    def __init__(self) -> None:
        self.seen: list[ToolCall] = []
        self.now = 10.0
        self.said: list[str] = []
        self.stream = AnswerStream(naming(2), self.seen.append, lambda: self.now, self.said)

    def events(self, *events: object) -> Streamed:
        for event in events:
            self.stream.feed(event if isinstance(event, bytes) else b"data: " + orjson.dumps(event) + b"\n\n")
        return self

    def reply(self) -> Reply:
        reply = self.stream.finish()
        assert list(reply.tool_calls) == self.seen
        assert all(a is b for a, b in zip(reply.tool_calls, self.seen, strict=True))
        return reply


def delta(finish: object = None, **fields: object) -> dict:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def part(arguments: object = "", **fields: object) -> dict:
    name = fields.pop("name", None)
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return delta(tool_calls=[{**fields, "function": function}])


END = delta("tool_calls")


def test_a_call_is_reported_the_moment_its_object_closes() -> None:
    streamed = Streamed().events(part(index=0, id="a", name="f"), part('{"a": "}\\"', index=0), part('{"', index=0))
    assert streamed.seen == []
    streamed.events(part("}", index=0))
    assert streamed.seen == [ToolCall("a", "f", '{"a": "}\\"{"}')]
    streamed.events(part("\n", index=0), END)
    assert len(streamed.reply().tool_calls) == 1


def test_a_call_without_arguments_is_reported_when_the_answer_ends() -> None:
    streamed = Streamed().events(part(index=0, id="a", name="f"), part(index=1, id="b", name="g"), END)
    assert streamed.seen == []
    streamed.reply()
    assert [(c.name, c.arguments) for c in streamed.seen] == [("f", "{}"), ("g", "{}")]


ONE, TWO = '{"q":1}', '{"q":2}'


@pytest.mark.parametrize(
    "events",
    [
        [part(ONE, index=0, id="a", name="f"), part(TWO, index=0, id="b", name="f")],  # every index 0
        [part(ONE, id="a", name="f"), part(TWO, id="b", name="f")],  # no index
        [part(ONE, name="f"), part(TWO, name="f")],  # no index and no id
        [part(ONE, id="a", name="f"), part(TWO, id="a", name="f")],  # every id the same
        [part(ONE, index=0, id="a", name="f"), part(TWO, index=0, id="a", name="f")],
        [part(ONE, index=0, id="a", name="f"), part(TWO, index=1, id="a", name="f")],
        [
            *(part(text, id="a", name="f") for text in (ONE[:3], ONE[3:])),
            *(part(text, id="a", name="f") for text in (TWO[:3], TWO[3:])),
        ],
        [part({"q": 1}, index=0, name="f"), part({"q": 2}, index=1, name="f")],  # objects for text
        [
            part(ONE[:3], index=0, id="a", name="f"),
            part(ONE[3:], index=0, id="a", name="f"),
            part(TWO, id="b", name="f"),
        ],
        [
            delta(
                tool_calls=[
                    {"function": {"name": "f", "arguments": text}, "index": i} for i, text in enumerate([ONE, TWO])
                ]
            )
        ],
    ],
)
def test_two_calls_are_two_calls_in_every_dialect(events: list[object]) -> None:
    calls = Streamed().events(*events, END).reply().tool_calls
    assert [orjson.loads(c.arguments) for c in calls] == [{"q": 1}, {"q": 2}]
    assert {c.name for c in calls} == {"f"}
    assert len({c.id for c in calls}) == 2


def test_two_names_under_one_id_are_two_calls() -> None:
    calls = Streamed().events(part(id="a", name="f"), part(id="a", name="g"), END).reply().tool_calls
    assert [call.name for call in calls] == ["f", "g"]


@pytest.mark.parametrize("again", [ONE, "}", "\n", ""])
def test_a_call_that_is_told_once_more_at_its_end_is_one_call(again: str) -> None:
    streamed = Streamed().events(part(ONE, index=0, id="a", name="f"), part(again, index=0, id="a", name="f"), END)
    assert streamed.reply().tool_calls == (ToolCall("a", "f", ONE),)


def test_a_call_is_found_by_its_number_however_many_there_are() -> None:
    count = 500
    opened = [part('{"q":', index=n, id=f"call-{n}", name="f") for n in range(count)]
    closed = [part(f"{n}}}", index=n) for n in reversed(range(count))]
    calls = Streamed().events(*opened, *closed, END).stream.finish().tool_calls
    assert [(call.id, call.arguments) for call in calls] == [(f"call-{n}", f'{{"q":{n}}}') for n in range(count)]


def test_what_was_said_so_far_can_be_read_before_the_end() -> None:
    streamed = Streamed().events(delta(content="Once "), delta(content="upon"))
    assert streamed.said == ["Once ", "upon"]


@given(
    st.dictionaries(st.text(max_size=5), st.lists(st.text('"\\\\{}[]x', max_size=8), max_size=3), max_size=3),
    st.lists(st.integers(0, 80), max_size=8),
    st.sampled_from(["", " ", "\n", "}", "{}"]),
)
def test_a_call_is_the_same_wherever_its_fragments_are_cut(value: dict, cuts: list[int], rest: str) -> None:
    arguments = orjson.dumps(value).decode()
    text = arguments + rest
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    fragments = [text[a:b] for a, b in pairwise(bounds)]
    streamed = Streamed().events(part(index=0, id="a", name="f"), *(part(f, index=0) for f in fragments))
    assert streamed.seen == [ToolCall("a", "f", arguments)]
    assert streamed.events(END).reply().tool_calls == (ToolCall("a", "f", arguments),)


def test_a_call_behind_the_finish_reason_is_not_lost() -> None:
    reply = Streamed().events(END, part(index=0, id="a", name="f")).reply()
    assert reply.tool_calls == (ToolCall("a", "f", "{}"),)


def test_broken_arguments_reach_the_tool_as_they_are() -> None:
    calls = Streamed().events(part('{"a": ', index=0, name="f"), part("[1]", index=1, name="g"), END).reply().tool_calls
    assert [c.arguments for c in calls] == ['{"a": ', "[1]"]


def test_the_pieces_of_several_calls_may_alternate() -> None:
    streamed = Streamed().events(
        part('{"a"', index=0, id="a", name="f"),
        part("{", index=1, id="b", name="g"),
        part(":1}", index=0),
        part('"b":2}', index=1),
    )
    assert [c.name for c in streamed.seen] == ["f", "g"]
    reply = streamed.events(END).reply()
    assert [c.arguments for c in reply.tool_calls] == ['{"a":1}', '{"b":2}']


@pytest.mark.parametrize("finish", ["LENGTH", "max_output_tokens", "insufficient_system_resource"])
def test_a_finish_that_is_no_end_is_an_error_however_it_is_spelt(finish: str) -> None:
    body = orjson.dumps({"choices": [{"message": {"content": "half"}, "finish_reason": finish}]})
    with pytest.raises((Truncated, BadResponse)) as caught:
        read_answer(body, naming(1))
    assert caught.value.text == "half"


@pytest.mark.parametrize("finish", ["length", "abort", "content_filter"])
def test_a_call_that_the_answers_end_cut_is_not_reported(finish: str) -> None:
    streamed = Streamed().events(part('{"a"', index=0, id="a", name="f"), delta(finish))
    with pytest.raises(BackendError):
        streamed.reply()
    assert streamed.seen == []


def test_text_reasoning_usage_and_the_first_token_of_a_stream() -> None:
    streamed = Streamed().events(delta(role="assistant", content=""), b": ping\n\n")
    streamed.now = 10.5
    streamed.events(delta(reasoning_content="hm"))
    streamed.now = 11.0
    streamed.events(delta(content="a"), delta(content="b"), delta("stop"))
    streamed.events({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}, b"data: [DONE]\n\n")
    assert streamed.reply() == Reply("ab", (), Usage(3, 0, 2), "hm", first_token=0.5)


def test_an_end_without_done_is_an_end() -> None:
    assert Streamed().events(delta(content="a"), delta("stop")).reply().text == "a"


def test_done_needs_no_line_end_and_nothing_counts_after_it() -> None:
    streamed = Streamed().events(delta("stop", content="a"))
    assert streamed.stream.feed(b"data: [DONE]") is False
    assert streamed.reply().text == "a"
    streamed = Streamed().events(delta("stop", content="a"))
    assert streamed.stream.feed(b"data: [DONE]\n\ndata: garbage\n\ndata: mo") is True
    assert streamed.reply().text == "a"


def test_choices_beside_the_first_and_unknown_events_are_passed_over() -> None:
    second = {"choices": [{"index": 1, "delta": {"content": "no"}, "finish_reason": "length"}]}
    dispatch = b'event: tool_call_dispatch\ndata: {"choice_index":0,"tool_call":{"index":0}}\n\n'
    streamed = Streamed().events(second, dispatch, {}, {"choices": None}, delta(content="yes"), delta("stop"))
    assert streamed.reply().text == "yes"


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ({"error": {"message": "worker died", "code": 503}}, Unavailable),
        ({"error": {"message": "too many", "type": "rate_limit_exceeded"}}, RateLimited),
        ({"object": "error", "message": "maximum context length is 5", "code": 400}, ContextOverflow),
        (b'event: error\ndata: {"message": "x", "code": 500}\n\n', Unavailable),
        (b"event: error\ndata: it broke\n\n", BadResponse),
        (b"data: {nonsense\n\n", BadResponse),
        (b"data: 3\n\n", BadResponse),
        (delta(content=3), BadResponse),
        (delta(tool_calls=3), BadResponse),
        (delta(tool_calls=[3]), BadResponse),
        (b"data: " + b"x" * 17_000_000, BadResponse),
    ],
)
def test_an_error_inside_a_stream_is_an_error(event: object, kind: type[BackendError]) -> None:
    streamed = Streamed().events(delta(content="Once"))
    with pytest.raises(BackendError) as caught:
        streamed.events(event)
    assert type(caught.value) is kind


@pytest.mark.parametrize("events", [[], [b"data: [DONE]\n\n"], [delta(content="Once")], [b'data: {"choices": [']])
def test_a_stream_that_only_stops_is_an_error(events: list[object]) -> None:
    with pytest.raises(BadResponse):
        Streamed().events(*events).reply()


# A call that is told whole before its deltas (NVIDIA Dynamo)


def dispatched(call_id: str, arguments: str, index: int = 0, choice: int = 0) -> bytes:
    told = {"index": index, "id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return b"event: tool_call_dispatch\ndata: " + orjson.dumps({"choice_index": choice, "tool_call": told}) + b"\n\n"


def in_deltas(call_id: str, *pieces: str, index: int = 0) -> bytes:
    first = {"index": index, "id": call_id, "function": {"name": "f", "arguments": pieces[0]}}
    rest = [{"index": index, "function": {"arguments": piece}} for piece in pieces[1:]]
    return b"".join(
        b"data: " + orjson.dumps({"choices": [{"index": 0, "delta": {"tool_calls": [item]}}]}) + b"\n\n"
        for item in [first, *rest]
    )


ASKED = '{"x":1}'
CALLED = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    "told",
    [
        dispatched("a", '{"x":1}')
        + in_deltas("a", '{"x":1}')
        + dispatched("b", "{}", 1)
        + in_deltas("b", "{}", index=1),
        dispatched("a", '{"x":1}')
        + dispatched("b", "{}", 1)
        + in_deltas("a", "", '{"x"', ":1}")
        + in_deltas("b", "{}", index=1),
        in_deltas("a", '{"x":1}') + dispatched("a", '{"x":1}') + in_deltas("b", "{}", index=1),
        in_deltas("a", '{"x"') + dispatched("a", '{"x":1}') + in_deltas("a", ":1}") + dispatched("b", "{}", 1),
        dispatched("a", '{"x":1}')
        + in_deltas("a", '{"x":1}')
        + dispatched("b", "{}", 0)
        + in_deltas("b", "{}", index=0),
        dispatched("z", "{}", choice=1) + in_deltas("a", '{"x":1}') + in_deltas("b", "{}", index=1),
    ],
)
def test_a_call_that_comes_whole_and_in_deltas_is_one_call(told: bytes) -> None:
    reported: list[ToolCall] = []
    stream = AnswerStream(naming(1), reported.append, lambda: 0.0, [])
    stream.feed(told + CALLED)
    assert reported == [ToolCall("a", "f", '{"x":1}'), ToolCall("b", "f", "{}")]
    assert stream.finish().tool_calls == tuple(reported)


def test_a_call_that_is_told_whole_is_reported_before_its_deltas_come() -> None:
    reported: list[ToolCall] = []
    stream = AnswerStream(naming(1), reported.append, lambda: 0.0, [])
    stream.feed(dispatched("a", '{"x":1}'))
    assert [call.id for call in reported] == ["a"]


@pytest.mark.parametrize("delta", [{"content": "x" * 5_000}, {"reasoning_content": "x" * 5_000}])
def test_an_answer_that_never_ends_is_given_up_before_it_fills_the_memory(delta: dict[str, str]) -> None:
    pieces: list[str] = []
    stream = AnswerStream(naming(1), lambda _: None, lambda: 0.0, pieces)
    events = b"data: %b\n\n" % orjson.dumps({"choices": [{"index": 0, "delta": delta}]}) * 100
    with pytest.raises(BadResponse, match="does not end"):
        for _ in range(400):
            stream.feed(events)
    assert sum(map(len, pieces)) <= 80_000_000
