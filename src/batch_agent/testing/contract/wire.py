"""A small server on a real socket, with full control of the bytes: it sends exactly what a test scripts."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import orjson

GARBAGE_EVENT = 3  # the event of a stream before which garbage is sent


@dataclass
class Exchange:
    """One request as it arrived, and the means to answer it. ``piecemeal`` sends every byte alone, those of an
    event in chunks of one byte; ``garbage`` is inserted in the middle of a stream."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader = field(repr=False)
    writer: asyncio.StreamWriter = field(repr=False)
    piecemeal: bool = False
    garbage: bytes = b""
    events: int = 0

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    async def send(self, data: bytes) -> None:
        for piece in _bytes_of(data) if self.piecemeal else (data,):
            self.writer.write(piece)
            await self.writer.drain()
            if self.piecemeal:
                await asyncio.sleep(0)

    async def event(self, data: bytes) -> None:
        self.events += 1
        if self.garbage and self.events == GARBAGE_EVENT:
            await self.send(b"%x\r\n%b\r\n" % (len(self.garbage), self.garbage))
        for piece in _bytes_of(data) if self.piecemeal else (data,):
            await self.send(b"%x\r\n%b\r\n" % (len(piece), piece))


def _bytes_of(data: bytes) -> Iterator[bytes]:
    return (data[place : place + 1] for place in range(len(data)))


Step = Callable[[Exchange], Awaitable[None]]


class WireServer:
    """Answers request n with step n of the script; the last step serves all that follow. ``open`` counts the open
    connections, ``connections`` all that were ever opened."""

    def __init__(self, *script: Step, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        self.script = list(script)
        self.requests: list[Exchange] = []
        self.connections = self.open = self.most_open = 0
        self._host, self._tls = host, tls
        self.asked = asyncio.Event()
        self.client_gone = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.all_closed = asyncio.Event()

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http{'s' if self._tls else ''}://{host}:{self.port}/v1"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connection, self._host, 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.all_closed.clear()
        self.connections += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            while not writer.is_closing():
                exchange = await _read_request(reader, writer)
                self.requests.append(exchange)
                self.asked.set()
                await self.script[min(len(self.requests), len(self.script)) - 1](exchange)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.client_gone.set()
        except asyncio.CancelledError:
            pass  # the test has ended
        finally:
            self.open -= 1
            self._tasks.discard(task)
            writer.close()
            if not self.open:
                self.all_closed.set()


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Exchange:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, path, _ = head[0].split(" ")
    headers = dict(line.split(": ", 1) for line in head[1:] if line)
    body = await reader.readexactly(int(headers.get("Content-Length", 0)))
    return Exchange(method, path, headers, body, reader, writer)


def dumped(value: object) -> bytes:
    """Return the value as JSON, also if a text has half of a surrogate pair, as some models write one."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value).encode()


def parsed(arguments: str) -> object:
    """Return the arguments of a call as a server parses them; {} for broken ones."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def answer(
    body: object = b"", status: int = 200, headers: dict[str, str] | None = None, kind: str = "application/json"
) -> Step:
    data = body if isinstance(body, bytes) else dumped(body)
    lines = {"Content-Type": kind, "Content-Length": str(len(data))} | (headers or {})
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    async def step(exchange: Exchange) -> None:
        await exchange.send(f"HTTP/1.1 {status} Status\r\n{head}\r\n".encode() + data)

    return step


def raw(data: bytes) -> Step:
    """Send these bytes and close the connection."""

    async def step(exchange: Exchange) -> None:
        await exchange.send(data)
        exchange.writer.close()

    return step


def half_of(body: bytes, clean: bool) -> Step:
    """Send half of a JSON document. Unless ``clean``, the connection closes before the promised length."""
    half = body[: len(body) // 2]
    if clean:
        return answer(half)
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return raw(head.encode() + half)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def stream(*parts: object, end: bool = True, done: bool = True) -> Step:
    """Each part is an event's JSON, bytes as they are, or an asyncio.Event to wait for; ``end`` is the proper end of
    the HTTP body, ``done`` that of the events."""

    async def step(exchange: Exchange) -> None:
        await exchange.send(STREAM_HEAD)
        for part in parts:
            if isinstance(part, asyncio.Event):
                await part.wait()
            else:
                await exchange.event(part if isinstance(part, bytes) else b"data: " + dumped(part) + b"\n\n")
        if done:
            await exchange.event(b"data: [DONE]\n\n")
        if end:
            await exchange.send(b"0\r\n\r\n")
        else:
            exchange.writer.close()

    return step


async def hang(exchange: Exchange) -> None:
    """Begin an answer and send nothing more. Returns when the client has left."""
    await exchange.send(STREAM_HEAD + b'10\r\ndata: {"choices"\r\n')
    await exchange.reader.readexactly(1)
