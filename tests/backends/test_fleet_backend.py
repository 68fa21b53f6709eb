"""A fleet keeps the contract of every backend."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from backends import test_openai_backend as chat
from backends.contract import BackendContract, Hang, Refuse, Say
from backends.wire import Exchange, WireServer, answer
from batch_agent import Fleet
from batch_agent.backends.base import Backend


class FleetPeer(chat.WirePeer):
    backend: Backend

    def __init__(self, server: WireServer) -> None:
        super().__init__(server)
        self.backend = Fleet([server.url])


class TestFleet(BackendContract):
    @asynccontextmanager
    async def peer(self, *script: Say | Refuse | Hang) -> AsyncIterator[FleetPeer]:
        steps = iter([chat.step_for(item) for item in script])

        async def serve(exchange: Exchange) -> None:
            if exchange.method == "GET":
                await answer({"object": "list", "data": [{"id": "test-model"}]})(exchange)
            else:
                await next(steps)(exchange)

        async with WireServer(serve) as server:
            peer = FleetPeer(server)
            async with peer.backend:
                yield peer
