"""Bodies that were good and then damaged: always a Reply or a BackendError, never another exception, never a hang."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
import pytest
from tests.backends import chat_contract, test_anthropic_contract

from batch_agent.backends.anthropic import answer as messages_answer
from batch_agent.backends.anthropic.messages import WORDING
from batch_agent.backends.anthropic.request import MessagesView, build_head
from batch_agent.backends.base import RequestShape
from batch_agent.backends.http.wire import Faults, Naming, ServerError
from batch_agent.backends.openai import chat
from batch_agent.backends.openai.chat import OpenAIBackend
from batch_agent.errors import BackendError
from batch_agent.messages import Conversation, Message, Reply, ToolCall, Usage
from batch_agent.testing.contract.backend import CALLS, Say, ask
from batch_agent.testing.contract.wire import Exchange, WireServer, dumped

WHERE = "POST http://host/v1"
SAYINGS = [
    Say("Hello, wörld. 😀", usage=Usage(12, 8, 5, 2), reasoning="Hm.", sealed="sig"),
    Say("Let me look.", CALLS, usage=Usage(12, 8, 5, 2)),
    Say("", (ToolCall("c", "now", ""), *CALLS), reasoning="Hm.", sealed="sig"),
    Say("Once upon a", cut=True),
]
CHAT = (chat, chat_contract, Faults(WHERE))
MESSAGES = (messages_answer, test_anthropic_contract, Faults(WHERE, wording=WORDING))
ERROR = orjson.dumps({"error": {"message": "busy", "code": 503, "param": None}})
wires = pytest.mark.parametrize(("wire", "server", "faults"), [CHAT, MESSAGES], ids=["chat", "messages"])


def documents(server: Any) -> list[bytes]:
    return [*(orjson.dumps(server.whole(say)) for say in SAYINGS), ERROR]


def streams(server: Any) -> list[bytes]:
    """What a server of this wire streams, and an error alone."""
    parts = [
        [part if isinstance(part, bytes) else b"data: " + dumped(part) + b"\n\n" for part in server.in_pieces(say)]
        for say in SAYINGS
    ]
    ping = b': ping\r\n\r\nevent: error\r\ndata: {"error": {"message": "x"}}\r\n\r\n'
    return [*(b"".join(each) + b"data: [DONE]\n\n" for each in parts), ping]


SNIPPETS = (
    *(b"null", b"{}", b"[]", b'"', b"\n\n", b"data: ", b"[DONE]", b"\xff", b"-1", b"1e999", b"\\ud800", b"}", b"0"),
)


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


def outcome(read: Callable[[], Reply]) -> str:
    try:
        reply = read()
    except BackendError as error:
        assert str(error).startswith(WHERE)
        return type(error).__name__
    assert isinstance(reply.text, str)
    assert all(isinstance(f, str) for call in reply.tool_calls for f in (call.id, call.name, call.arguments))
    # What was read can be sent back, whatever it was.
    talk = Conversation([Message("user", "Hello"), reply.message()])
    orjson.loads(build_head(RequestShape("m"), False).body(talk.view(MessagesView), is_last=False))
    return "Reply"


@wires
def test_four_thousand_damaged_documents(wire: Any, server: Any, faults: Faults) -> None:
    rng, good = random.Random(20), documents(server)
    bodies = (damaged(rng, rng.choice(good)) for _ in range(4000))
    outcomes = {outcome(partial(wire.read_answer, body, Naming([], faults))) for body in bodies}
    assert outcomes >= {"Reply", "BadResponse", "Truncated"}


@wires
def test_a_thousand_damaged_streams(wire: Any, server: Any, faults: Faults) -> None:
    rng, good = random.Random(21), streams(server)

    def read(body: bytes) -> Reply:
        seen: list[ToolCall] = []
        stream = wire.AnswerStream(Naming([], faults), seen.append, lambda: 0.0, [])
        size = rng.choice((1, 7, 100, 5000))
        any(stream.feed(body[at : at + size]) for at in range(0, len(body), size))
        reply = stream.finish()
        assert sorted(call.id for call in seen) == sorted(call.id for call in reply.tool_calls)
        return reply

    bodies = (damaged(rng, rng.choice(good)) for _ in range(1000))
    assert {outcome(partial(read, body)) for body in bodies} >= {"Reply", "BadResponse", "Truncated"}


def test_damaged_error_bodies_are_always_an_error() -> None:
    rng = random.Random(22)
    for _ in range(2000):
        body = damaged(rng, ERROR)
        assert isinstance(Faults(WHERE).answered(rng.choice((400, 429, 500)), {}, body), BackendError)
        assert isinstance(ServerError.in_body(body).message, str)


@pytest.mark.parametrize("streamed", [False, True])
async def test_three_hundred_damaged_answers_over_a_socket(streamed: bool) -> None:
    rng = random.Random(23)
    kind = b"text/event-stream" if streamed else b"application/json"
    good = streams(chat_contract) if streamed else documents(chat_contract)

    async def serve(exchange: Exchange) -> None:
        body = rng.choice(good)
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
