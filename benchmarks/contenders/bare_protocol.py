"""The floor: the loop of ``agent_loop`` on a bare asyncio protocol that knows this one server and checks nothing.

It finds the end of an answer by the spelling of the server's headers and reads events through the chunks around them.
No client that must work elsewhere can be this cheap.
"""

from __future__ import annotations

import asyncio
from typing import cast
from urllib.parse import urlsplit

import orjson

from benchmarks.agent_loop import Message, StreamedMessage, run_agents
from benchmarks.workload import Review, Work, contend, request_body

LENGTH = b"content-length: "


class Bare(asyncio.Protocol):
    answer: asyncio.Future[bytes]
    transport: asyncio.Transport

    def __init__(self) -> None:
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data = data = self._data + data
        head = data.find(b"\r\n\r\n") + 4
        start = data.find(LENGTH, 0, head)
        if start < 0:
            complete = data.endswith(b"\r\n0\r\n\r\n")
        else:
            start += len(LENGTH)
            complete = len(data) - head == int(data[start : data.find(b"\r", start)])
        if complete:
            self._data = b""
            self.answer.set_result(data[head:])


async def run(work: Work) -> list[Review]:
    loop, place = asyncio.get_running_loop(), urlsplit(work.url)
    idle: list[Bare] = []

    async def ask(messages: list[Message]) -> Message:
        body = orjson.dumps(request_body(messages, tools=work.turns == 2, stream=work.stream))
        if idle:
            connection = idle.pop()
        else:
            _, connection = await loop.create_connection(Bare, place.hostname, place.port)
        connection.answer = loop.create_future()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: %d\r\n\r\n"
        connection.transport.write(head % len(body) + body)
        answer = await connection.answer
        idle.append(connection)
        if work.stream:
            return _streamed(answer)
        message: Message = orjson.loads(answer)["choices"][0]["message"]
        return message

    try:
        return await run_agents(work, ask)
    finally:
        for connection in idle:
            connection.transport.close()


def _streamed(answer: bytes) -> Message:
    streamed = StreamedMessage()
    for line in answer.split(b"\n"):
        if line.startswith(b"data: {"):
            streamed.add(orjson.loads(line[6:]))
    return streamed.message()


if __name__ == "__main__":
    contend(run)
