"""ScriptedBackend keeps the contract of backends: what runs on it runs on a real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

from tests.backends.chat_contract import chat_history, hear_chat

from batch_agent import testing
from batch_agent.testing import Cut, Fail, Request, ScriptedBackend, StreamError, ToolUse
from batch_agent.testing.contract.backend import BackendContract
from batch_agent.testing.contract.peer import BreakOff, Disconnect, ErrorInside, Hang, Heard, Item, Refuse, Say
from batch_agent.testing.replies import ScriptedReply
from batch_agent.testing.wire import CHUNK_CHARACTERS


def scripted(item: Item) -> ScriptedReply:
    match item:
        case Say():
            calls = tuple(ToolUse(call.name, call.arguments, call.id) for call in item.calls)
            finish = "length" if item.cut else None
            return testing.Say(item.text, calls, reasoning=item.reasoning, finish_reason=finish, usage=item.usage)
        case Refuse(status, message):
            param = "input_tokens" if item.overflow else None
            headers = {"Retry-After": item.retry_after} if item.retry_after else {}
            return Fail(status, {"error": {"message": message, "param": param}}, headers)
        case Hang():
            return testing.Hang()
        case Disconnect():
            return Cut(after_chunks=0)
        case BreakOff(text, clean, calls):
            begun = scripted(Say(text, calls))
            assert isinstance(begun, testing.Say)
            return Cut(begun, after_chunks=_chunks(text, *(call.arguments for call in calls)), clean=clean)
        case ErrorInside(text, status, message):
            return StreamError(message, status, answer=testing.Say(text), after_chunks=_chunks(text))


def _chunks(*texts: str) -> int:
    """Those that say this and no more; the first names the role, and that of a call its tool."""
    return len(texts) - sum(-len(text) // CHUNK_CHARACTERS for text in texts)


class ScriptedPeer:
    def __init__(self, script: tuple[Item, ...]) -> None:
        self._script = iter(script)
        self._asked = asyncio.Event()
        self.backend = ScriptedBackend(self._answer)

    async def _answer(self, request: Request) -> ScriptedReply:
        item = next(self._script)
        self._asked.set()
        if isinstance(item, Say) and item.hold is not None:
            await item.hold.wait()
        return scripted(item)

    @property
    def requests(self) -> list[bytes]:
        return [chat_history(asked.raw) for asked in self.backend.requests]

    @property
    def heard(self) -> list[Heard]:
        return [hear_chat(asked.raw) for asked in self.backend.requests]

    async def wait_until_asked(self) -> None:
        await self._asked.wait()

    async def wait_until_left(self) -> None:
        assert self.backend.inflight == 0


class TestScriptedBackend(BackendContract):
    model: ClassVar[str] = "scripted"
    drops: ClassVar[frozenset[str]] = frozenset({"tool_name"})
    lacks: ClassVar[frozenset[str]] = frozenset({"sealed", "holding"})
    combines = None

    @asynccontextmanager
    async def peer(self, *script: Item) -> AsyncIterator[ScriptedPeer]:
        peer = ScriptedPeer(script)
        async with peer.backend:
            yield peer
