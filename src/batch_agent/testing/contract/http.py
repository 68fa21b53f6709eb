"""The contract for a wire over HTTP. A class that inherits HttpContract gives a backend, the steps that play a script,
and what a request says. The server, its sockets and the rest of the peer are here.

The wire need not be SSE: a step writes any bytes (``Exchange.event`` writes one chunk of a chunked body). Set
``garbage`` and ``endless`` to a damaged and an endless piece of the wire's own stream.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import ClassVar

import orjson
import pytest

from batch_agent.backends.base import Backend
from batch_agent.errors import BackendError, BadResponse, Unavailable
from batch_agent.messages import ToolCall
from batch_agent.testing.contract.backend import CALLS, HALF, BackendContract, both, listener
from batch_agent.testing.contract.peer import BreakOff, Disconnect, ErrorInside, Hang, Heard, Item, Refuse, Say
from batch_agent.testing.contract.wire import STREAM_HEAD, Exchange, Step, WireServer, answer, hang

FLOOD_BYTES, FLOOD_PIECE = 128 * 1024 * 1024, 256 * 1024
WHOLE_HEAD = STREAM_HEAD.replace(b"text/event-stream", b"application/json")


def is_turn(exchange: Exchange) -> bool:
    """Return whether a request asks for a turn. This server accepts no lists of conversations."""
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
    models: object = {"object": "list", "data": [{"id": "test-model"}]}  # the answer to GET
    garbage: ClassVar[bytes] = b'data: {"broken\n\n'  # inserted among the events of a stream
    endless: ClassVar[bytes] = b'data: {"choices": "'  # begins a line that never ends

    @abstractmethod
    def backend(self, url: str) -> Backend:
        """Return a backend for ``http://127.0.0.1:port/v1``."""

    def keyed(self, url: str, key: str, headers: Mapping[str, str]) -> Backend:
        """Return a backend with this key and these headers. A class without it declares that it lacks "keys"."""
        raise NotImplementedError("implement keyed(), or declare lacks = {'keys'}")

    def key_header(self, key: str) -> tuple[str, str]:
        """Return the header that carries the key."""
        return "Authorization", f"Bearer {key}"

    @abstractmethod
    def say(self, item: Say, streamed: bool) -> Step:
        """Return the step of a complete answer; ``hold`` is an event to put among the parts of a ``stream``."""

    @abstractmethod
    def break_off(self, item: BreakOff, streamed: bool) -> Step: ...

    @abstractmethod
    def error_inside(self, item: ErrorInside, streamed: bool) -> Step: ...

    @abstractmethod
    def error_body(self, item: Refuse) -> object:
        """Return the JSON beside the status of a refusal."""

    @abstractmethod
    def hear(self, exchange: Exchange) -> Heard: ...

    @abstractmethod
    def history(self, exchange: Exchange) -> bytes:
        """Return the part of the body that is the conversation, so that a longer one begins with a shorter one."""

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

    @both
    async def test_an_answer_is_read_wherever_its_bytes_are_cut(self, streamed: bool) -> None:
        text = "naïve 🐟, 漢字"
        async with self.peer(Say(text, CALLS[:1]), piecemeal=True) as peer, asyncio.timeout(self.patience):
            reply = await peer.backend.infer(self.ask(), listener(streamed))
        if "text_beside_calls" not in self.lacks:
            assert reply.text == text, "bytes may be cut anywhere, also inside a character or an event"
        self.assert_calls(reply.tool_calls, CALLS[:1])

    async def test_a_damaged_event_of_a_stream_is_an_error(self) -> None:
        self.needs("garbage")
        async with self.peer(Say("Hello, world."), garbage=self.garbage) as peer, asyncio.timeout(self.patience):
            if not peer.backend.capabilities.streaming:
                return
            with pytest.raises(BadResponse):
                await peer.backend.infer(self.ask(), listener(True))

    @both
    async def test_an_answer_without_end_is_given_up(self, streamed: bool) -> None:
        self.needs("garbage")
        sent = 0

        async def flood(exchange: Exchange) -> None:
            nonlocal sent
            await exchange.send(STREAM_HEAD if streamed else WHOLE_HEAD)
            await exchange.event(self.endless)  # a line that never ends
            while sent < FLOOD_BYTES:
                await exchange.event(b"x" * FLOOD_PIECE)
                sent += FLOOD_PIECE
            exchange.writer.close()

        async with self._served(lambda: flood) as server, self.backend(server.url) as backend:
            if streamed and not backend.capabilities.streaming:
                return
            async with asyncio.timeout(6 * self.patience):
                with pytest.raises(BackendError):
                    await backend.infer(self.ask(), listener(streamed))
        assert sent < FLOOD_BYTES, f"{sent:,} bytes were read into memory: a server may never end its answer"

    async def test_a_streamed_answer_notes_that_it_has_begun_and_when_it_was_last_heard(self) -> None:
        request, begun = self.ask(), asyncio.Event()
        request.on_begin = begun.set
        asked_at = asyncio.get_running_loop().time()
        async with self.peer(Say("Hello, world.")) as peer:
            if not peer.backend.capabilities.streaming:
                return
            await peer.backend.infer(request, listener(True))
        assert begun.is_set(), "ModelRequest.on_begin is called when the answer begins"
        assert request.heard_at >= asked_at, (
            "ModelRequest.heard_at is the loop's time of the latest piece; without it a long answer looks like silence"
        )

    async def test_connections_are_used_again_and_closed_at_the_end(self) -> None:
        script: list[Item] = [Say("a"), Say("b"), Refuse(400), Say("c")]
        async with self._served(self._player(script)) as server, asyncio.timeout(self.patience):
            async with self.backend(server.url) as backend:
                for item in script:
                    try:
                        await backend.infer(self.ask(), listener(item is script[1]))
                    except BackendError:
                        assert item is script[2]
            if "kept_connections" not in self.lacks:
                assert server.connections == 1, f"{server.connections} connections for requests in turn"
            if server.open:
                await server.all_closed.wait()

    async def test_the_key_and_the_headers_are_sent_with_every_request(self) -> None:
        self.needs("keys")
        name, value = self.key_header("sk-contract")
        async with (
            self._served(self._player([Say("a"), Say("b")])) as server,
            self.keyed(server.url, "sk-contract", {"X-Team": "red"}) as backend,
        ):
            await backend.models()
            await backend.infer(self.ask())
            await backend.infer(self.ask(), listener(True))
        for exchange in server.requests:
            headers = {header.lower(): text for header, text in exchange.headers.items()}
            assert headers.get(name.lower()) == value, f"{exchange.method} {exchange.path} has no key"
            assert headers.get("x-team") == "red", f"{exchange.method} {exchange.path} lacks a header of the user"

    async def test_a_probe_of_a_closed_port_says_so_and_does_not_raise(self) -> None:
        async with self._closed() as backend:
            [endpoint] = backend.servers
            assert (await backend.probe(endpoint)).state != "up", "the port is closed"

    async def test_a_request_to_a_closed_port_finds_it_unavailable(self) -> None:
        async with self._closed() as backend:
            for listening in (None, listener(True)):
                with pytest.raises(Unavailable):
                    await backend.infer(self.ask(), listening)
            with suppress(BackendError):  # a backend may know its models without its server
                await backend.models()

    @asynccontextmanager
    async def _closed(self) -> AsyncIterator[Backend]:
        """Yield a backend whose server has closed."""
        async with WireServer(answer({})) as server:
            url = server.url
        async with self.backend(url) as backend, asyncio.timeout(self.patience):
            yield backend

    def _player(self, script: Sequence[Item]) -> Callable[[], Step]:
        """Return a function that gives the step of the next request."""
        steps = iter([self.play(item) for item in script])
        over = answer({"error": {"message": "this is one request more than the script has answers"}}, 400)
        return lambda: next(steps, over)

    @asynccontextmanager
    async def _served(
        self, next_step: Callable[[], Step], *, piecemeal: bool = False, garbage: bytes = b""
    ) -> AsyncIterator[WireServer]:
        async def serve(exchange: Exchange) -> None:
            if exchange.method == "GET":
                await answer(self.models)(exchange)
            elif is_turn(exchange):
                exchange.piecemeal, exchange.garbage = piecemeal, garbage
                await next_step()(exchange)
            else:
                await answer({"detail": "Not Found"}, 404)(exchange)

        async with WireServer(serve) as server:
            yield server

    @asynccontextmanager
    async def peer(self, *script: Item, piecemeal: bool = False, garbage: bytes = b"") -> AsyncIterator[HttpPeer]:
        async with self._served(self._player(script), piecemeal=piecemeal, garbage=garbage) as server:
            peer = HttpPeer(server, self.backend(server.url), self.hear, self.history)
            async with peer.backend:
                yield peer
