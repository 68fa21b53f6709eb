"""Answers of Anthropic's wire, damaged: always a Reply or a BackendError, never another exception."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import orjson

from backends.contract import CALLS, Say
from backends.test_anthropic_contract import in_pieces, whole
from backends.test_backend_fuzz import damaged
from batch_agent.backends.anthropic.answer import AnswerStream, read_answer
from batch_agent.backends.anthropic.messages import WORDING
from batch_agent.backends.anthropic.request import MessagesView, build_head
from batch_agent.backends.base import RequestShape
from batch_agent.backends.http.faults import Faults
from batch_agent.backends.http.wire import Naming
from batch_agent.errors import BackendError
from batch_agent.messages import Conversation, Message, Reply, ToolCall, Usage

SAYINGS = [
    Say("Hello, wörld. 😀", usage=Usage(12, 8, 5, 2), reasoning="Hm.", sealed="sig"),
    Say("Let me look.", CALLS, usage=Usage(12, 8, 5, 2)),
    Say("", (ToolCall("c", "now", ""), *CALLS), reasoning="Hm.", sealed="sig"),
    Say("Once upon a", cut=True),
]
DOCUMENTS = [orjson.dumps(whole(say)) for say in SAYINGS]
STREAMS = [b"".join(part for part in in_pieces(say) if isinstance(part, bytes)) for say in SAYINGS]


def naming() -> Naming:
    return Naming([], Faults("POST http://host/v1/messages", wording=WORDING))


def outcome(read: Callable[[], Reply]) -> str:
    try:
        reply = read()
    except BackendError as error:
        assert str(error).startswith("POST http://host/v1/messages")
        return type(error).__name__
    # What was read can be sent back, whatever it was.
    talk = Conversation([Message("user", "Hello"), reply.message()])
    orjson.loads(build_head(RequestShape("m"), False).body(talk.view(MessagesView), is_last=False))
    return "Reply"


def test_three_thousand_damaged_documents() -> None:
    rng = random.Random(30)
    bodies = (damaged(rng, rng.choice(DOCUMENTS)) for _ in range(3000))
    assert {outcome(partial(read_answer, body, naming())) for body in bodies} >= {"Reply", "BadResponse", "Truncated"}


def test_two_thousand_damaged_streams() -> None:
    rng = random.Random(31)

    def read(body: bytes) -> Reply:
        seen: list[ToolCall] = []
        stream = AnswerStream(naming(), seen.append, lambda: 0.0, [])
        size = rng.choice((7, 100, 5000))
        any(stream.feed(body[at : at + size]) for at in range(0, len(body), size))
        reply = stream.finish()
        assert sorted(call.id for call in seen) == sorted(call.id for call in reply.tool_calls)
        return reply

    bodies = (damaged(rng, rng.choice(STREAMS)) for _ in range(2000))
    assert {outcome(partial(read, body)) for body in bodies} >= {"Reply", "BadResponse", "Truncated"}
