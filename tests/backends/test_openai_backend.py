"""OpenAIBackend over a real socket: the contract, and what its wire looks like."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import UserDict

import orjson
import pytest
from tests.backends.chat_contract import ChatContract, in_pieces, whole

from batch_agent.backends.base import Capabilities, ModelRequest, RequestShape
from batch_agent.backends.http.wire import written
from batch_agent.backends.openai.chat import OpenAIBackend, Tail, message_json
from batch_agent.backends.openai.providers import Dialect
from batch_agent.backends.registry import open_backend
from batch_agent.errors import BadResponse, InternalError, Rejected, Timeout, Unavailable
from batch_agent.messages import Conversation, Document, Image, Message, Reply, ToolCall
from batch_agent.testing.contract.backend import CALLS, SEARCH, Say, ask
from batch_agent.testing.contract.wire import Exchange, Step, WireServer, answer, hang, stream

OK = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}]}


class TestOpenAIBackend(ChatContract):
    pass


async def body_of(shape: RequestShape, streamed: bool = False, **options: object) -> dict:
    async with WireServer(answer(OK)) as server, OpenAIBackend(server.url, **options) as backend:
        await backend.infer(ask(shape=shape), (lambda call: None) if streamed else None)
        return server.requests[0].json


async def infer(*script: Step, streamed: bool = False) -> Reply:
    async with WireServer(*script) as server, OpenAIBackend(server.url) as backend, asyncio.timeout(10):
        return await backend.infer(ask(), (lambda call: None) if streamed else None)


async def test_a_body_has_only_what_was_said() -> None:
    body = await body_of(RequestShape(model="m"))
    assert body == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    }


async def test_extra_body_has_the_last_word_and_no_key_comes_twice() -> None:
    async with WireServer(answer(OK)) as server, OpenAIBackend(server.url) as backend:
        shape = RequestShape(model="m", temperature=0.5, extra_body={"temperature": 1, "model": "n"})
        await backend.infer(ask(shape=shape))
        body = server.requests[0].body
    assert body.count(b'"temperature"') == body.count(b'"model"') == 1
    assert (orjson.loads(body)["temperature"], orjson.loads(body)["model"]) == (1, "n")


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("auto", "auto"),
        ("search", {"type": "function", "function": {"name": "search"}}),
        ({"type": "x"}, {"type": "x"}),
    ],
)
async def test_a_tool_is_chosen_by_its_name(choice: object, sent: object) -> None:
    assert (await body_of(RequestShape(model="m", tools=(SEARCH,), tool_choice=choice)))["tool_choice"] == sent


async def test_only_a_request_that_reports_tool_calls_is_streamed() -> None:
    assert "stream" not in await body_of(RequestShape(model="m"))
    body = await body_of(RequestShape(model="m"), streamed=True)
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    quiet = Capabilities(streaming=False)
    assert "stream" not in await body_of(RequestShape(model="m"), streamed=True, capabilities=quiet)


async def test_the_token_limit_has_the_name_that_the_server_knows() -> None:
    dialect = Dialect(max_tokens_field="max_completion_tokens")
    body = await body_of(RequestShape(model="m", max_tokens=5), dialect=dialect)
    assert body["max_completion_tokens"] == 5
    assert "max_tokens" not in body


CLOSED = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/B"}}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"B": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
}


@pytest.mark.parametrize(
    "schema",
    [
        CLOSED,
        CLOSED | {"required": []},
        {k: v for k, v in CLOSED.items() if k != "additionalProperties"},
        CLOSED | {"properties": {"a": CLOSED["properties"]["a"] | {"default": []}}},
        CLOSED | {"properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/B", "default": None}}}},
    ],
)
async def test_a_schema_goes_out_closed_and_strict_where_that_form_exists(schema: dict) -> None:
    body = await body_of(RequestShape(model="m", schema=schema, schema_name="answer"))
    assert body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": CLOSED, "strict": True},
    }


@pytest.mark.parametrize(
    "schema",
    [
        CLOSED | {"additionalProperties": {"type": "string"}},
        CLOSED | {"$defs": {"B": {"type": "string", "minLength": 3}}},
        {"type": "array", "items": {"type": "string"}},
        CLOSED | {"anyOf": [{"type": "object"}]},
        {"anyOf": [CLOSED, {"type": "null"}]},
        {"$ref": "#/$defs/B", "$defs": CLOSED["$defs"]},
        *(
            CLOSED | {"$defs": {"B": node}}
            for node in (
                {},
                {"description": "anything"},
                {"enum": ["a", "b"]},
                {"type": "array"},
                {"type": ["object", "null"]},
                {"$ref": "#/$defs/C", "enum": ["a"]},
            )
        ),
    ],
)
async def test_a_schema_without_a_strict_form_goes_out_as_it_is(schema: dict) -> None:
    body = await body_of(RequestShape(model="m", schema=schema, schema_name="answer"))
    assert body["response_format"]["json_schema"] == {"name": "answer", "schema": schema, "strict": False}


async def test_a_reference_with_a_description_keeps_both_in_strict_mode() -> None:
    described = {"$ref": "#/$defs/B", "description": "What it is."}
    body = await body_of(RequestShape(model="m", schema=CLOSED | {"properties": {"a": described}}))
    form = body["response_format"]["json_schema"]
    assert form["strict"] is True
    assert form["schema"]["properties"]["a"] == {"anyOf": [{"$ref": "#/$defs/B"}], "description": "What it is."}


async def test_a_turns_own_fields_stand_behind_the_messages_and_its_headers_beside_them() -> None:
    def tail(request: ModelRequest) -> Tail:
        return {"priority": request.priority, "user": "x"}, {"X-Request-Id": f"agent-{request.agent}"}

    shape = RequestShape(model="m", extra_body={"user": "mine"})
    talk = Conversation([Message("user", "Hello")])
    async with WireServer(answer(OK)) as server, OpenAIBackend(server.url, tail=tail) as backend:
        await backend.infer(ModelRequest(shape, talk, "job", priority=3, agent=7))
        await backend.infer(ModelRequest(shape, talk, "job", priority=2, agent=7))
    first, second = (exchange.body for exchange in server.requests)
    assert first.endswith(b'],"priority":3}')
    assert second == first.replace(b'"priority":3', b'"priority":2')
    assert server.requests[0].headers["X-Request-Id"] == "agent-7"
    assert server.requests[0].json["user"] == "mine", "the user's extra_body has the last word"


async def test_a_message_of_parts_is_sent_as_parts() -> None:
    picture, address = Image.of(b"png", "image/png"), Image("https://host/a.png")
    message = Message("user", ("Compare: half \ud83d", picture, address))
    assert orjson.loads(written(message_json(message)))["content"] == [
        {"type": "text", "text": "Compare: half �"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,cG5n"}},
        {"type": "image_url", "image_url": {"url": "https://host/a.png"}},
    ]
    paper = Document("data:application/pdf;base64,cGRm", name="a.pdf")
    assert message_json(Message("user", ("Read:", paper)))["content"][1] == {
        "type": "file",
        "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,cGRm"},
    }


@pytest.mark.parametrize(
    ("url", "formats"),
    [
        ("openai://", {"pdf"}),
        ("openai-batch://", {"pdf"}),
        ("openrouter://", {"pdf"}),
        ("azure://r/d?api=responses", {"pdf"}),
        ("azure://r/d", set()),
        ("anthropic://", {"pdf"}),
        ("anthropic://host:8000", set()),
        ("bedrock://us-east-1/m", {"pdf", "docx", "html"}),
        ("gemini://", set()),
        ("vllm://host", set()),
        ("http://host/v1", set()),
    ],
)
def test_a_backend_says_which_files_it_takes(url: str, formats: set[str]) -> None:
    backend, _ = open_backend(url, model="m", api_key="k", environ={})
    assert backend.capabilities.documents == formats


async def test_the_head_is_encoded_once_per_shape_and_forgotten_with_it() -> None:
    class Counted(UserDict):
        reads = 0

        def keys(self) -> object:
            Counted.reads += 1
            return super().keys()

    shape = RequestShape(model="m", extra_body=Counted(a=1))
    async with WireServer(answer(OK)) as server, OpenAIBackend(server.url) as backend:
        for _ in range(3):
            await backend.infer(ask(shape=shape))
        bodies = {request.body for request in server.requests}
        alive = weakref.ref(shape)
        del shape
        gc.collect()
    assert len(bodies) == 1
    assert Counted.reads == 1
    assert alive() is None


def test_reasoning_is_not_sent_back() -> None:
    assert "secret thought" not in str(message_json(Message("assistant", "x", reasoning="secret thought")))


async def test_a_body_of_several_megabytes_is_sent() -> None:
    async with WireServer(answer(OK)) as server, OpenAIBackend(server.url) as backend:
        conversation = Conversation([Message("user", "x" * 3_000_000)])
        assert (await backend.infer(ask(conversation=conversation))).text == "ok"
        assert len(server.requests[0].json["messages"][0]["content"]) == 3_000_000


async def test_a_server_that_does_not_stream_though_asked_is_understood() -> None:
    seen: list[ToolCall] = []
    async with WireServer(answer(whole(Say("x", CALLS)))) as server, OpenAIBackend(server.url) as backend:
        reply = await backend.infer(ask(), seen.append)
    assert tuple(seen) == reply.tool_calls == CALLS


async def test_a_streamed_connection_is_used_again() -> None:
    async with WireServer(stream(*in_pieces(Say("hello")))) as server, OpenAIBackend(server.url) as backend:
        for _ in range(5):
            await backend.infer(ask(), lambda call: None)
        assert server.connections == 1


async def test_a_stream_that_is_done_but_stays_open_does_not_hold_the_answer() -> None:
    async def stay(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for part in in_pieces(Say("hello")):
            await exchange.send(b"data: " + orjson.dumps(part) + b"\n\n")
        await exchange.send(b"data: [DONE]\n\n")
        await exchange.reader.readexactly(1)

    assert (await infer(stay, streamed=True)).text == "hello"


async def test_a_web_page_is_an_error_that_doubts_the_url() -> None:
    for streamed in (False, True):
        with pytest.raises(BadResponse, match="web page"):
            await infer(answer(b"<html>Welcome</html>", kind="text/html; charset=utf-8"), streamed=streamed)


async def test_models_that_are_no_list_are_an_error() -> None:
    async with WireServer(answer({"data": "x"})) as server, OpenAIBackend(server.url) as backend:
        with pytest.raises(BadResponse, match="list of models"):
            await backend.models()


async def test_asking_before_entering_is_a_bug_of_ours() -> None:
    with pytest.raises(InternalError, match="async with"):
        await OpenAIBackend("http://localhost:1/v1").infer(ask())


async def test_a_closed_port_says_that_nothing_listens() -> None:
    async with WireServer(hang) as server:
        url = server.url
    async with OpenAIBackend(url) as backend:
        with pytest.raises(Unavailable, match=r"POST http://127.0.0.1:\d+/v1/chat/completions: connection refused"):
            await backend.infer(ask())


async def test_an_unknown_host_says_so() -> None:
    async with OpenAIBackend("http://no-such-host.invalid/v1") as backend:
        with pytest.raises((Unavailable, Timeout), match="no-such-host"):
            await backend.infer(ask())


async def test_secrets_that_a_server_echoes_are_not_shown() -> None:
    async def echo(exchange: Exchange) -> None:
        await answer({"error": {"message": f"bad {orjson.dumps(exchange.headers).decode()}"}}, 400)(exchange)

    async with WireServer(echo) as server:
        backend = OpenAIBackend(server.url, api_key="sk-key-1", headers={"X-Token": "tok-2"})
        login = OpenAIBackend(f"http://user:pass-3@127.0.0.1:{server.port}/v1")
        for asked in (backend, login):
            async with asked:
                with pytest.raises(Rejected) as caught:
                    await asked.infer(ask())
            shown = str(caught.value) + repr(asked) + repr(asked._chat) + asked.name
            assert "[redacted]" in shown
            for secret in ("sk-key-1", "tok-2", "pass-3", "dXNlcjpwYXNzLTM="):
                assert secret not in shown
        assert server.requests[0].headers["Authorization"] == "Bearer sk-key-1"
        assert server.requests[1].headers["Authorization"] == "Basic dXNlcjpwYXNzLTM="
