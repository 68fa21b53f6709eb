"""The contract for a wire over HTTP: a class that inherits HttpContract gives a backend, the steps that play a script,
and what a request says; the server, its sockets and the rest of the peer are here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import orjson

from backends.contract import HALF, BackendContract, both, listener
from backends.peer import BreakOff, Disconnect, ErrorInside, Hang, Heard, Item, Refuse, Say
from backends.wire import Exchange, Step, WireServer, answer, hang
from batch_agent.backends.base import Backend
from batch_agent.messages import ToolCall


def is_turn(exchange: Exchange) -> bool:
    """A server need not take lists of conversations; this one does not."""
    return exchange.method == "POST" and not exchange.path.endswith("/batch")


class HttpPeer:
    def __init__(
        self,
        server: WireServer,
        backend: Backend,
        hear: Callable[[Exchange], Heard],
        history: Callable[[Exchange], bytes],
    ) -> None:
        self.backend = backend
        self._server = server
        self._hear = hear
        self._history = history

    @property
    def _asked(self) -> list[Exchange]:
        return [exchange for exchange in self._server.requests if is_turn(exchange)]

    @property
    def requests(self) -> list[bytes]:
        return [self._history(exchange) for exchange in self._asked]

    @property
    def heard(self) -> list[Heard]:
        return [self._hear(exchange) for exchange in self._asked]

    async def wait_until_asked(self) -> None:
        await self._server.asked.wait()

    async def wait_until_left(self) -> None:
        await self._server.client_gone.wait()


class HttpContract(BackendContract):
    models: object = {"object": "list", "data": [{"id": "test-model"}]}  # what GET is answered

    @abstractmethod
    def backend(self, url: str) -> Backend:
        """For ``http://127.0.0.1:port/v1``."""

    @abstractmethod
    def say(self, item: Say, streamed: bool) -> Step:
        """A complete answer; ``hold`` is an event to put among the parts of a ``stream``."""

    @abstractmethod
    def break_off(self, item: BreakOff, streamed: bool) -> Step: ...

    @abstractmethod
    def error_inside(self, item: ErrorInside, streamed: bool) -> Step: ...

    @abstractmethod
    def error_body(self, item: Refuse) -> object:
        """The JSON beside the status of a refusal."""

    @abstractmethod
    def hear(self, exchange: Exchange) -> Heard: ...

    @abstractmethod
    def history(self, exchange: Exchange) -> bytes:
        """The part of the body that is the conversation, so that a longer one begins with the shorter."""

    def play(self, item: Item) -> Step:
        async def step(exchange: Exchange) -> None:
            streamed = self.hear(exchange).streamed
            if isinstance(item, Hang):
                await hang(exchange)
            elif isinstance(item, Disconnect):
                exchange.writer.close()
            elif isinstance(item, Refuse):
                headers = {"Retry-After": item.retry_after} if item.retry_after else {}
                await answer(self.error_body(item), item.status, headers)(exchange)
            elif isinstance(item, BreakOff):
                await self.break_off(item, streamed)(exchange)
            elif isinstance(item, ErrorInside):
                await self.error_inside(item, streamed)(exchange)
            else:
                if not streamed and item.hold is not None:
                    await item.hold.wait()
                await self.say(item, streamed)(exchange)

        return step

    @both
    async def test_half_of_a_surrogate_pair_in_an_answer_is_read(self, streamed: bool) -> None:
        call = ToolCall("call_a", "search", '{"query":"\\ud83d"}')
        async with self.peer(Say(HALF, [call])) as peer:
            reply = await peer.backend.infer(self.ask(), listener(streamed))
        assert reply.text == HALF.replace("\ud83d", "\ufffd")
        assert [orjson.loads(call.arguments) for call in reply.tool_calls] == [{"query": "\ufffd"}]

    @asynccontextmanager
    async def peer(self, *script: Item) -> AsyncIterator[HttpPeer]:
        steps = iter([self.play(item) for item in script])
        over = answer({"error": {"message": "this is one request more than the script has answers"}}, 400)

        async def serve(exchange: Exchange) -> None:
            if exchange.method == "GET":
                await answer(self.models)(exchange)
            elif is_turn(exchange):
                await next(steps, over)(exchange)
            else:
                await answer({"detail": "Not Found"}, 404)(exchange)

        async with WireServer(serve) as server:
            peer = HttpPeer(server, self.backend(server.url), self.hear, self.history)
            async with peer.backend:
                yield peer
