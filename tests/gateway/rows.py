"""A gateway on a real socket, and a row that asks a backend straight, for the tests of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp

from batch_agent.backends.base import Backend, ModelRequest
from batch_agent.backends.registry import open_backend
from batch_agent.dispatch.dispatcher import ModelCall
from batch_agent.errors import BackendError
from batch_agent.gateway.client_request import ClientRequest
from batch_agent.gateway.gateway import Gateway
from batch_agent.gateway.live import LiveAnswer
from batch_agent.messages import Conversation, JsonObject, Reply


class BackendRow:
    """Asks ``backend``; ``asked`` has what it was asked."""

    model = "m"

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.asked: list[ClientRequest] = []

    @property
    def wires(self) -> frozenset[str]:
        return self.backend.wires

    async def models(self) -> Sequence[str]:
        return await self.backend.models()

    async def answer(self, request: ClientRequest, live: LiveAnswer | None = None) -> Reply:
        self.asked.append(request)
        asked = ModelRequest(request.shape, Conversation(request.messages), "row", client=request.client_body)
        if live is not None:
            live.follow(asked)
        call = ModelCall(self.backend, asked, None if live is None else lambda call: None)
        try:
            return await call.send("")
        except BackendError as error:
            if (usable := call.instead(error)) is None:
                raise
            return usable


class FixedRow:
    """Gives one answer, or raises one error, after ``wait``."""

    model = "m"
    wires: frozenset[str] = frozenset()

    def __init__(self, end: Reply | Exception, wait: asyncio.Event | None = None, seconds: float = 0.0) -> None:
        self.end, self.wait, self.seconds = end, wait, seconds
        self.waiting = asyncio.Event()
        self.left = asyncio.Event()

    async def models(self) -> Sequence[str]:
        return []

    async def answer(self, request: ClientRequest, live: LiveAnswer | None = None) -> Reply:
        self.waiting.set()
        try:
            await asyncio.sleep(self.seconds)
            if self.wait is not None:
                await self.wait.wait()
        finally:
            self.left.set()
        if isinstance(self.end, Exception):
            raise self.end
        return self.end


@asynccontextmanager
async def gateway_to(url: str) -> AsyncIterator[tuple[Gateway, str, BackendRow]]:
    """A gateway, the key of a row, and the row, which asks the server at ``url``."""
    async with open_backend(url)[0] as backend, Gateway() as gateway:
        row = BackendRow(backend)
        yield gateway, gateway.admit(row), row


async def post(gateway: Gateway, key: str, path: str, body: object, **headers: str) -> tuple[int, JsonObject]:
    head = {"Authorization": f"Bearer {key}", **headers}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{gateway.url}{path}", json=body, headers=head) as answer,
    ):
        return answer.status, await answer.json()
