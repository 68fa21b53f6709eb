"""Agents on real sockets for the tests of the swarm: each records what it is asked, and answers as it is told to."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from batch_agent.swarm import AgentEndpoint

Body = dict[str, Any]
Answer = Callable[["Asked"], "Body | web.Response | Awaitable[Body | web.Response]"]


@dataclass
class Asked:
    path: str
    body: Body
    headers: dict[str, str] = field(repr=False)
    close: Callable[[], None] = field(repr=False, compare=False)  # breaks its connection

    @property
    def prompts(self) -> list[str]:
        """Its prompts, in whatever form they came."""
        if "messages" in self.body:
            messages = self.body["messages"]
            conversations = messages if messages and isinstance(messages[0], list) else [messages]
            return [conversation[-1]["content"] for conversation in conversations]
        prompt = self.body.get("prompt", self.body.get("input"))
        return prompt if isinstance(prompt, list) else [prompt]


class Agent:
    """Answers every wire of a pool by saying each prompt again, unless ``answer`` says something else (None: as usual).
    ``context`` is what it tells of its model; ``has_batch`` whether it takes lists of conversations."""

    def __init__(
        self, answer: Answer | None = None, *, name: str = "", context: int | None = 8192, has_batch: bool = False
    ) -> None:
        self._answer = answer
        self.name = name
        self.context = context
        self.has_batch = has_batch
        self.asked: list[Asked] = []
        self.model_questions = 0
        self.tells_models = asyncio.Event()
        self.tells_models.set()
        self.inflight = self.peak = 0
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def endpoint(self) -> AgentEndpoint:
        return AgentEndpoint("127.0.0.1", self.port, {"node": self.name} if self.name else {})

    @property
    def connections(self) -> int:
        assert self._runner is not None and self._runner.server is not None
        return len(self._runner.server.connections)

    @property
    def prompts(self) -> list[str]:
        return [prompt for asked in self.asked for prompt in asked.prompts]

    async def start(self) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_get("/v1/models", self._models)
        paths = ["/generate", "/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
        if self.has_batch:
            paths.append("/v1/chat/completions/batch")
        for path in paths:
            app.router.add_post(path, self._post)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        self.model_questions += 1
        await self.tells_models.wait()
        if self.context is None:
            return web.json_response({"error": "no such page"}, status=404)
        card = {"id": "openai/gpt-oss-120b", "object": "model", "max_model_len": self.context}
        return web.json_response({"object": "list", "data": [{"id": "another", "max_model_len": 1}, card]})

    async def _post(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        body = orjson.loads(await request.read())
        asked = Asked(request.path, body, dict(request.headers), request.transport.abort)
        self.asked.append(asked)
        self.inflight += 1
        self.peak = max(self.peak, self.inflight)
        try:
            said = None if self._answer is None else self._answer(asked)
            if isinstance(said, Awaitable):
                said = await said
            if isinstance(said, web.Response):
                return said
            return web.json_response(answer(asked, self.name) if said is None else said)
        finally:
            self.inflight -= 1


def answer(asked: Asked, name: str = "") -> Body:
    """What a well-behaved server says to it: each prompt once more."""
    texts = [f"{name}<{prompt}>" for prompt in asked.prompts]
    n = asked.body.get("n", 1)
    if asked.path == "/generate":
        return {"response": texts[0]}
    if asked.path == "/v1/embeddings":
        return {"data": [{"index": i, "embedding": [float(len(t)), 1.0]} for i, t in enumerate(asked.prompts)]}
    texts = [text for text in texts for _ in range(n)]
    usage = {"prompt_tokens": 10 * len(asked.prompts), "completion_tokens": 5 * len(texts)}
    if asked.path == "/v1/completions":
        choices = [{"index": i, "text": text, "finish_reason": "stop"} for i, text in enumerate(texts)]
    else:
        choices = [
            {"index": i, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            for i, text in enumerate(texts)
        ]
    return {"choices": choices, "usage": usage}


def refuse(status: int, message: str = "no") -> web.Response:
    return web.json_response({"error": {"message": message, "type": "BadRequestError"}}, status=status)


async def hang(asked: Asked) -> Body:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


@asynccontextmanager
async def agents(*given: Agent) -> AsyncIterator[list[AgentEndpoint]]:
    async with AsyncExitStack() as stack:
        for agent in given:
            await agent.start()
            stack.push_async_callback(agent.stop)
        yield [agent.endpoint for agent in given]


class CountedSockets:
    """Servers that answer a pool and count their open connections, idle ones included. They close none themselves."""

    def __init__(self) -> None:
        self.peak = self.accepted = 0
        self._open: set[asyncio.StreamWriter] = set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._open.add(writer)
        self.peak = max(self.peak, sum(map(_is_open, self._open)))
        try:
            while head := await self._head(reader):
                length = re.search(rb"content-length: (\d+)", head)
                await reader.readexactly(int(length[1]) if length else 0)
                await asyncio.sleep(0.001)
                body = b'{"response": "x", "choices": [{"index": 0, "text": "x", "message": {"content": "x"}}]}'
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        finally:
            self._open.discard(writer)
            writer.close()

    async def _head(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return (await reader.readuntil(b"\r\n\r\n")).lower()
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""

    @asynccontextmanager
    async def serve(self, count: int) -> AsyncIterator[list[AgentEndpoint]]:
        async with AsyncExitStack() as stack:
            servers = [
                await stack.enter_async_context(await asyncio.start_server(self, "127.0.0.1", 0)) for _ in range(count)
            ]
            yield [AgentEndpoint("127.0.0.1", server.sockets[0].getsockname()[1]) for server in servers]


def _is_open(writer: asyncio.StreamWriter) -> bool:
    """Whether the client has it open, as the kernel knows it: the event loop may not have read that it was closed."""
    with socket.fromfd(writer.get_extra_info("socket").fileno(), socket.AF_INET, socket.SOCK_STREAM) as connection:
        try:
            return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except ConnectionError:
            return False


@asynccontextmanager
async def silent() -> AsyncIterator[AgentEndpoint]:
    """A server that takes every connection and says nothing: the kernel accepts them, and nobody reads."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield AgentEndpoint("127.0.0.1", listening.getsockname()[1])


def dead() -> AgentEndpoint:
    """Where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return AgentEndpoint("127.0.0.1", free.getsockname()[1])
