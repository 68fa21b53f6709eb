"""ResponsesBackend over a real socket: the contract, and what its wire looks like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import orjson
import pytest
from tests.backends.responses_wire import as_bytes, document, events_of, hear_responses, refuse_wrong
from tests.backends.strict_mode import Refused

from batch_agent.backends.base import Backend, RequestShape
from batch_agent.backends.openai.providers import Dialect
from batch_agent.backends.openai.responses import ResponsesBackend, items_of
from batch_agent.errors import BackendError, BadResponse, RateLimited, Rejected, SpecError, Truncated, Unavailable
from batch_agent.messages import Document, Image, Message, Reply, Usage
from batch_agent.testing.contract.backend import CALLS, SEARCH, Say, ask, go_on
from batch_agent.testing.contract.http import HttpContract
from batch_agent.testing.contract.peer import BreakOff, ErrorInside, Heard, Refuse
from batch_agent.testing.contract.wire import Exchange, Step, WireServer, answer, half_of, stream

OPENAI = Dialect(strict_schemas=True, openai_models=True)


def strictly(step: Step) -> Step:
    """The step, for a request that the API would take."""

    async def judged(exchange: Exchange) -> None:
        try:
            refuse_wrong(exchange.json)
        except Refused as refusal:
            error = {"error": {"message": str(refusal), "type": "invalid_request_error", "param": None, "code": None}}
            return await answer(error, 400)(exchange)
        await step(exchange)

    return judged


def saying(say: Say) -> Step:
    async def step(exchange: Exchange) -> None:
        parts = as_bytes(events_of(say))
        await (stream(*parts, done=False) if exchange.json.get("stream") else answer(document(say)))(exchange)

    return strictly(step)


class TestResponsesBackend(HttpContract):
    refuses: ClassVar[frozenset[str]] = frozenset({"seed", "stop"})
    drops: ClassVar[frozenset[str]] = frozenset({"tool_name"})
    reserved: ClassVar[tuple[str, ...]] = ("input", "stream")
    combines = None

    def backend(self, url: str) -> Backend:
        return ResponsesBackend(url)

    def keyed(self, url: str, key: str, headers: Mapping[str, str]) -> Backend:
        return ResponsesBackend(url, api_key=key, headers=headers)

    def extra_body(self) -> dict[str, object]:
        return {"metadata": {"team": "é"}, "service_tier": "flex"}

    def say(self, item: Say, streamed: bool) -> Step:
        return strictly(stream(*as_bytes(events_of(item)), done=False) if streamed else answer(document(item)))

    def break_off(self, item: BreakOff, streamed: bool) -> Step:
        if streamed:
            return stream(*as_bytes(events_of(Say(item.text, cut=True)))[:-2], done=False, end=item.clean)
        return half_of(orjson.dumps(document(Say(item.text))), item.clean)

    def error_inside(self, item: ErrorInside, streamed: bool) -> Step:
        error = {"code": "server_error", "message": item.message}
        failed = document(Say(), [], "failed") | {"error": error}
        parts = [*events_of(Say(item.text, cut=True))[:-2], {"type": "response.failed", "response": failed}]
        return stream(*as_bytes(parts), done=False) if streamed else answer(failed)

    def error_body(self, item: Refuse) -> object:
        code = "context_length_exceeded" if item.overflow else None
        return {"error": {"message": item.message, "type": "invalid_request_error", "param": None, "code": code}}

    def hear(self, exchange: Exchange) -> Heard:
        return hear_responses(exchange.body)

    def history(self, exchange: Exchange) -> bytes:
        return exchange.body[exchange.body.index(b'"input":[') : -2]


async def told(step: Step, streamed: bool, dialect: Dialect = OPENAI) -> Reply:
    async with WireServer(step) as server, ResponsesBackend(server.url, dialect=dialect) as backend:
        return await backend.infer(ask(), (lambda call: None) if streamed else None)


async def body_of(shape: RequestShape, streamed: bool = False) -> dict:
    async with WireServer(saying(Say("ok"))) as server, ResponsesBackend(server.url, dialect=OPENAI) as backend:
        await backend.infer(ask(shape=shape), (lambda call: None) if streamed else None)
        return server.requests[0].json


async def test_nothing_is_stored_and_only_a_model_that_reasons_is_asked_for_its_reasoning() -> None:
    assert await body_of(RequestShape("gpt-4o")) == {
        "model": "gpt-4o",
        "store": False,
        "input": [
            {"type": "message", "role": "system", "content": "Be brief."},
            {"type": "message", "role": "user", "content": "Hello"},
        ],
    }
    assert (await body_of(RequestShape("o3-pro")))["include"] == ["reasoning.encrypted_content"]


async def test_tools_are_not_strict_since_that_is_what_leaving_it_out_would_mean() -> None:
    [tool] = (await body_of(RequestShape("gpt-4o", tools=(SEARCH,))))["tools"]
    assert tool == {
        "type": "function",
        "name": "search",
        "description": "Search.",
        "parameters": SEARCH.parameters,
        "strict": False,
    }


@pytest.mark.parametrize("streamed", [False, True])
async def test_reasoning_goes_back_before_the_call_that_it_led_to(streamed: bool) -> None:
    listener = (lambda call: None) if streamed else None
    first = Say("Let me look.", CALLS, reasoning="Where was it?", sealed="gAAAA-secret")
    shape = RequestShape("o3-pro", tools=(SEARCH,))
    server = WireServer(saying(first), saying(Say("Done.")))
    async with server, ResponsesBackend(server.url, dialect=OPENAI) as backend:
        request = ask(shape=shape)
        reply = await backend.infer(request, listener)
        go_on(request, reply, "here", "there")
        assert (await backend.infer(request, listener)).text == "Done."
    kinds = [item["type"] for item in server.requests[1].json["input"]]
    assert kinds == [
        *("message", "message", "reasoning", "message", "function_call", "function_call"),
        *("function_call_output", "function_call_output"),
    ]
    assert server.requests[1].json["input"][2]["encrypted_content"] == "gAAAA-secret"
    assert reply.reasoning == "Where was it?"


async def test_reasoning_without_its_key_is_not_sent_back() -> None:
    server = WireServer(saying(Say("", CALLS[:1], reasoning="Hm.")), saying(Say("Done.")))
    async with server, ResponsesBackend(server.url) as backend:
        request = ask()
        go_on(request, await backend.infer(request), "here")
        await backend.infer(request)
    assert [item["type"] for item in server.requests[1].json["input"]][2:] == ["function_call", "function_call_output"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_wrapped_answer_comes_out_of_its_wrapper(streamed: bool) -> None:
    shape = RequestShape("gpt-5", schema={"type": "array", "items": {"type": "integer"}}, schema_name="numbers")
    server = WireServer(saying(Say('{"answer": [1, 2]}')))
    async with server, ResponsesBackend(server.url, dialect=OPENAI) as backend:
        reply = await backend.infer(ask(shape=shape), (lambda call: None) if streamed else None)
    assert reply.text == "[1, 2]"
    form = server.requests[0].json["text"]["format"]
    assert (form["type"], form["name"], form["strict"]) == ("json_schema", "numbers", True)
    assert form["schema"]["properties"]["answer"]["items"] == {"type": "integer"}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, Truncated),
        ({"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, Rejected),
        ({"status": "incomplete", "incomplete_details": None}, BadResponse),
        ({"status": "failed", "error": {"code": "rate_limit_exceeded", "message": "slow down"}}, RateLimited),
        ({"status": "failed", "error": {"code": "server_error", "message": "oh"}}, Unavailable),
        ({"status": "failed", "error": None}, BadResponse),
        ({"status": "cancelled"}, BadResponse),
        ({"status": "queued"}, BadResponse),
        ({"output": None}, BadResponse),
    ],
)
async def test_an_answer_that_is_not_complete_is_an_error(changes: dict, kind: type, streamed: bool) -> None:
    end = document(Say("" if "output" in changes else "Once", usage=Usage(3, 0, 2))) | changes
    name = end["status"] if end["status"] in ("completed", "incomplete", "failed", "cancelled") else "completed"
    parts = [{"type": "response.created", "response": {}}, {"type": f"response.{name}", "response": end}]
    step = stream(*as_bytes(parts), done=False) if streamed else answer(end)
    with pytest.raises(BackendError) as caught:
        await told(step, streamed)
    assert type(caught.value) is kind


async def test_an_error_event_is_an_error_of_its_type() -> None:
    error = {"type": "error", "code": "rate_limit_exceeded", "message": "slow down", "param": None}
    with pytest.raises(RateLimited, match="slow down"):
        await told(stream(*as_bytes([{"type": "response.created", "response": {}}, error]), done=False), True)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_refusal_of_the_model_is_its_text(streamed: bool) -> None:
    part = {"type": "refusal", "refusal": "I cannot."}
    item = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [part]}
    end = document(Say(), [item])
    delta = {"type": "response.refusal.delta", "delta": "I cannot.", "output_index": 0}
    parts = [delta, {"type": "response.completed", "response": end}]
    reply = await told(stream(*as_bytes(parts), done=False) if streamed else answer(end), streamed)
    assert reply.text == "I cannot."


async def test_a_stream_whose_end_does_not_repeat_the_answer_is_read_from_its_items() -> None:
    parts = events_of(Say("Let me look.", CALLS))
    parts[-1] = {"type": "response.completed", "response": document(Say(), [])}
    reply = await told(stream(*as_bytes(parts), done=False), True)
    assert (reply.text, reply.tool_calls) == ("Let me look.", CALLS)


def test_pictures_and_files_are_parts_of_a_message() -> None:
    [item] = items_of(Message("user", ("Look:", Image("https://host/a.png"))))
    assert item["content"] == [
        {"type": "input_text", "text": "Look:"},
        {"type": "input_image", "image_url": "https://host/a.png", "detail": "auto"},
    ]
    paper = Document("data:application/pdf;base64,cGRm", name="a.pdf")
    [item] = items_of(Message("user", (paper,)))
    assert item["content"] == [
        {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,cGRm"}
    ]


def test_what_the_api_does_not_take_is_refused_before_anything_is_sent() -> None:
    backend = ResponsesBackend("http://host/v1", dialect=OPENAI)
    with pytest.raises(SpecError, match=r"stop.*no stop"):
        backend.check(RequestShape("gpt-4o", stop=("END",)))
    with pytest.raises(SpecError, match="input"):
        backend.check(RequestShape("gpt-4o", extra_body={"input": []}))
