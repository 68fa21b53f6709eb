"""What every Backend does, whatever its wire. A backend is done when a class that inherits BackendContract passes.

The concrete class implements ``peer``: a server (or a stand-in for one) that gives the answers it is told to give, in
the backend's own wire form, and a Backend that talks to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import pytest

from batch_agent.backends.base import Backend, ModelRequest, RequestShape
from batch_agent.errors import BackendError, ContextOverflow, RateLimited, Rejected, Truncated, Unavailable
from batch_agent.messages import Conversation, Message, ToolCall, ToolSpec, Usage

SEARCH = ToolSpec("search", "Search.", {"type": "object", "properties": {"query": {"type": "string"}}})
SHAPE = RequestShape(model="test-model", tools=(SEARCH,))
CALLS = (ToolCall("call_a", "search", '{"query":"x"}'), ToolCall("call_b", "search", '{"query":"}{"}'))


@dataclass(frozen=True)
class Say:
    """A complete answer. With ``hold`` the peer goes on after the first tool call only when the event is set."""

    text: str = ""
    calls: Sequence[ToolCall] = ()
    usage: Usage = field(default_factory=Usage)
    hold: asyncio.Event | None = None
    cut: bool = False  # ends at the token limit


@dataclass(frozen=True)
class Refuse:
    status: int
    message: str = "no"
    retry_after: str | None = None
    overflow: bool = False


@dataclass(frozen=True)
class Hang:
    """Begins an answer and never ends it."""


class Peer(Protocol):
    backend: Backend
    requests: Sequence[bytes]  # what the conversations looked like to the server, oldest first

    async def wait_until_asked(self) -> None:
        """Returns when the first request has arrived."""

    async def wait_until_left(self) -> None:
        """Returns when the server has noticed that the client gave a request up."""


def ask(*messages: Message, shape: RequestShape = SHAPE, conversation: Conversation | None = None) -> ModelRequest:
    if conversation is None:
        conversation = Conversation(messages or [Message("system", "Be brief."), Message("user", "Hello")])
    return ModelRequest(shape, conversation, "job-0")


class BackendContract:
    @asynccontextmanager
    async def peer(self, *script: Say | Refuse | Hang) -> AsyncIterator[Peer]:
        raise NotImplementedError
        yield

    async def test_a_plain_answer_is_a_reply_with_its_usage(self) -> None:
        usage = Usage(prompt_tokens=12, cached_tokens=8, completion_tokens=5, reasoning_tokens=2)
        async with self.peer(Say("Hello.", usage=usage)) as peer:
            reply = await peer.backend.infer(ask())
        assert (reply.text, reply.tool_calls, reply.usage) == ("Hello.", (), usage)

    async def test_several_tool_calls_of_one_answer_come_in_order(self) -> None:
        async with self.peer(Say("Let me look.", CALLS)) as peer:
            reply = await peer.backend.infer(ask())
        assert reply.tool_calls == CALLS
        assert reply.text == "Let me look."

    async def test_each_tool_call_is_reported_once_and_in_order_and_the_reply_has_the_same_values(self) -> None:
        seen: list[ToolCall] = []
        async with self.peer(Say("Let me look.", CALLS)) as peer:
            reply = await peer.backend.infer(ask(), seen.append)
        assert seen == list(CALLS)
        assert all(a is b for a, b in zip(seen, reply.tool_calls, strict=True))

    async def test_a_tool_call_is_reported_while_the_model_is_still_talking(self) -> None:
        reported = asyncio.Event()
        async with self.peer(Say(calls=CALLS, hold=reported)) as peer, asyncio.timeout(10):
            if not peer.backend.capabilities.streaming:
                pytest.skip("this backend does not stream")
            reply = await peer.backend.infer(ask(), lambda call: reported.set())
        assert len(reply.tool_calls) == 2

    async def test_a_streamed_answer_tells_its_usage_and_its_first_token(self) -> None:
        usage = Usage(prompt_tokens=12, completion_tokens=5)
        async with self.peer(Say("Hello.", usage=usage)) as peer:
            reply = await peer.backend.infer(ask(), lambda call: None)
        assert (reply.text, reply.usage) == ("Hello.", usage)
        assert not peer.backend.capabilities.streaming or (reply.first_token is not None and reply.first_token >= 0)

    @pytest.mark.parametrize("streamed", [False, True])
    async def test_cancelling_ends_the_request_at_the_server(self, streamed: bool) -> None:
        async with self.peer(Hang()) as peer, asyncio.timeout(10):
            task = asyncio.create_task(peer.backend.infer(ask(), (lambda call: None) if streamed else None))
            await peer.wait_until_asked()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await peer.wait_until_left()

    @pytest.mark.parametrize("streamed", [False, True])
    @pytest.mark.parametrize(
        ("refusal", "kind"),
        [
            (Refuse(429), RateLimited),
            (Refuse(500), Unavailable),
            (Refuse(503), Unavailable),
            (Refuse(400), Rejected),
            (Refuse(401), Rejected),
            (Refuse(404), Rejected),
            (Refuse(400, overflow=True), ContextOverflow),
        ],
    )
    async def test_a_refusal_is_an_error_of_its_type(
        self, refusal: Refuse, kind: type[BackendError], streamed: bool
    ) -> None:
        async with self.peer(refusal) as peer:
            with pytest.raises(BackendError) as caught:
                await peer.backend.infer(ask(), (lambda call: None) if streamed else None)
        assert type(caught.value) is kind
        assert caught.value.status == refusal.status

    async def test_the_wait_that_a_server_asks_for_is_on_the_error(self) -> None:
        async with self.peer(Refuse(429, retry_after="7")) as peer:
            with pytest.raises(RateLimited) as caught:
                await peer.backend.infer(ask())
        assert caught.value.retry_after == 7.0

    @pytest.mark.parametrize("streamed", [False, True])
    async def test_an_answer_that_was_cut_is_an_error_that_keeps_its_text(self, streamed: bool) -> None:
        async with self.peer(Say("Once upon a", cut=True)) as peer:
            with pytest.raises(Truncated) as caught:
                await peer.backend.infer(ask(), (lambda call: None) if streamed else None)
        assert caught.value.text == "Once upon a"

    async def test_the_next_turn_extends_the_conversation_byte_for_byte(self) -> None:
        async with self.peer(Say("", CALLS[:1]), Say("Done.")) as peer:
            request = ask()
            reply = await peer.backend.infer(request)
            request.conversation.append(Message("assistant", reply.text, reply.tool_calls))
            request.conversation.append(Message("tool", "found é “it”", tool_call_id=reply.tool_calls[0].id))
            await peer.backend.infer(request)
        first, second = peer.requests
        assert len(second) > len(first)
        assert second.startswith(first)

    async def test_agents_that_share_a_prefix_send_the_same_bytes_for_it(self) -> None:
        shared = Conversation([Message("system", "Be brief. é")])
        async with self.peer(Say("a"), Say("b")) as peer:
            for word in ("one", "two"):
                await peer.backend.infer(ask(conversation=Conversation([Message("user", word)], shared)))
        first, second = peer.requests
        assert first[: first.index(b"one")] == second[: second.index(b"two")]

    async def test_a_request_with_a_schema_is_answered(self) -> None:
        shape = RequestShape(model="test-model", schema={"type": "object", "properties": {"a": {"type": "integer"}}})
        async with self.peer(Say('{"a": 1}')) as peer:
            reply = await peer.backend.infer(ask(shape=shape))
        assert reply.text == '{"a": 1}'

    async def test_two_requests_at_once_get_each_its_answer(self) -> None:
        held = asyncio.Event()
        async with self.peer(Say("", CALLS[:1], hold=held), Say("second")) as peer, asyncio.timeout(10):
            first = asyncio.create_task(peer.backend.infer(ask(), lambda call: None))
            await peer.wait_until_asked()
            second = await peer.backend.infer(ask())
            held.set()
            assert (second.text, (await first).tool_calls) == ("second", CALLS[:1])

    async def test_it_stays_open_until_its_last_user_leaves_and_opens_again(self) -> None:
        async with self.peer(Say("a"), Say("b"), Say("c")) as peer:
            async with peer.backend:
                assert (await peer.backend.infer(ask())).text == "a"
            assert (await peer.backend.infer(ask())).text == "b"
        async with self.peer(Say("a")) as peer:
            await peer.backend.__aexit__(None, None, None)
            await peer.backend.__aenter__()
            assert (await peer.backend.infer(ask())).text == "a"

    async def test_the_models_are_listed_by_name(self) -> None:
        async with self.peer(Say("a")) as peer:
            assert "test-model" in await peer.backend.models()

    async def test_it_is_a_backend_and_has_a_name(self) -> None:
        async with self.peer(Say("a")) as peer:
            assert isinstance(peer.backend, Backend)
            assert peer.backend.name
