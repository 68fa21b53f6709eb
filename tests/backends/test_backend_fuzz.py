"""Bodies that were good and then damaged: always a Reply or a BackendError, never another exception, never a hang."""

from __future__ import annotations

import asyncio
import random

import orjson
import pytest

from backends.chat_contract import in_pieces, whole
from backends.contract import CALLS, Say, ask
from backends.wire import Exchange, WireServer
from batch_agent.backends.http.faults import Faults, ServerError
from batch_agent.backends.http.wire import Naming
from batch_agent.backends.openai.chat import OpenAIBackend
from batch_agent.backends.openai.chat_answer import AnswerStream, read_answer
from batch_agent.errors import BackendError
from batch_agent.messages import Reply, ToolCall, Usage

FAULTS = Faults("POST http://host/v1/chat/completions")
SAYINGS = [
    Say("Hello, wörld. 😀", usage=Usage(12, 8, 5, 2)),
    Say("Let me look.", CALLS, usage=Usage(12, 8, 5, 2)),
    Say("", (ToolCall("c", "now", ""), *CALLS)),
    Say("Once upon a", cut=True),
]
DOCUMENTS = [orjson.dumps(whole(say)) for say in SAYINGS] + [
    orjson.dumps({"error": {"message": "busy", "code": 503, "param": None}})
]
STREAMS = [
    b"".join(b"data: " + orjson.dumps(part) + b"\n\n" for part in in_pieces(say)) + b"data: [DONE]\n\n"
    for say in SAYINGS
] + [b': ping\r\n\r\nevent: error\r\ndata: {"error": {"message": "x"}}\r\n\r\n']
SNIPPETS = [
    b"null",
    b"{}",
    b"[]",
    b'"',
    b"\n\n",
    b"data: ",
    b"[DONE]",
    b"\xff",
    b"-1",
    b"1e999",
    b"\\ud800",
    b"}",
    b"0",
]


def damaged(rng: random.Random, body: bytes) -> bytes:
    for _ in range(rng.randint(1, 4)):
        at, to = sorted((rng.randint(0, len(body)), rng.randint(0, len(body))))
        match rng.randrange(6):
            case 0:
                body = body[:at]
            case 1:
                body = body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :]
            case 2:
                body = body[:at] + rng.choice(SNIPPETS) + body[at:]
            case 3:
                body = body[:to] + body[at:to] + body[to:]
            case 4:
                body = body[:at] + body[to:]
            case 5:
                tokens = body.split(b":")
                tokens[rng.randrange(len(tokens))] = rng.choice(SNIPPETS)
                body = b":".join(tokens)
    return body


def outcome(read: object) -> str:
    try:
        reply = read()
    except BackendError as error:
        assert str(error).startswith(FAULTS.where)
        return type(error).__name__
    assert isinstance(reply, Reply)
    assert isinstance(reply.text, str)
    assert all(isinstance(f, str) for call in reply.tool_calls for f in (call.id, call.name, call.arguments))
    return "Reply"


def test_five_thousand_damaged_documents() -> None:
    rng = random.Random(20)
    outcomes = set()
    for _ in range(5000):
        body = damaged(rng, rng.choice(DOCUMENTS))
        outcomes.add(outcome(lambda body=body: read_answer(body, Naming([], FAULTS))))
    assert outcomes >= {"Reply", "BadResponse", "Truncated", "Unavailable"}


def test_five_thousand_damaged_streams() -> None:
    rng = random.Random(21)
    outcomes = set()
    for _ in range(5000):
        body = damaged(rng, rng.choice(STREAMS))
        seen: list[ToolCall] = []

        def read(body: bytes = body, seen: list[ToolCall] = seen) -> Reply:
            stream = AnswerStream(Naming([], FAULTS), seen.append, lambda: 0.0, [])
            at = 0
            while at < len(body):
                step = rng.choice((1, 7, 100, 5000))
                if stream.feed(body[at : at + step]):
                    break
                at += step
            reply = stream.finish()
            assert len(seen) == len(reply.tool_calls)
            assert set(seen) == set(reply.tool_calls)
            return reply

        outcomes.add(outcome(read))
    assert outcomes >= {"Reply", "BadResponse", "Truncated"}


def test_damaged_error_bodies_are_always_an_error() -> None:
    rng = random.Random(22)
    for _ in range(2000):
        body = damaged(rng, DOCUMENTS[-1])
        assert isinstance(FAULTS.answered(rng.choice((400, 429, 500)), {}, body), BackendError)
        assert isinstance(ServerError.in_body(body).message, str)


@pytest.mark.parametrize("streamed", [False, True])
async def test_three_hundred_damaged_answers_over_a_socket(streamed: bool) -> None:
    rng = random.Random(23)
    kind = b"text/event-stream" if streamed else b"application/json"

    async def serve(exchange: Exchange) -> None:
        body = rng.choice(STREAMS if streamed else DOCUMENTS)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind, len(body))
        await exchange.send(damaged(rng, head + body))
        exchange.writer.close()

    replies = 0
    async with WireServer(serve) as server, OpenAIBackend(server.url) as backend:
        for _ in range(300):
            async with asyncio.timeout(10):
                try:
                    replies += isinstance(await backend.infer(ask(), (lambda call: None) if streamed else None), Reply)
                except BackendError as error:
                    assert "POST http://127.0.0.1" in str(error)
    assert 0 < replies < 300
