"""A gate in front of a server: it passes bytes on, or answers with bytes of its own."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Self


class Gate:
    """``garbage`` are the bytes that a connection gets instead of an answer; None: it is passed on to ``port``. With
    ``only`` that holds for requests that have these bytes in them. With ``tls`` the gate speaks TLS to its clients,
    except for garbage."""

    def __init__(self, port: int, *, only: bytes = b"", tls: ssl.SSLContext | None = None) -> None:
        self._port, self._only, self._tls = port, only, tls
        self.garbage: bytes | None = None
        self.spoilt = 0  # connections that got garbage
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        await self.close_connections()

    async def close_connections(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(OSError, asyncio.CancelledError):  # a cancelled one would be reported by its server
                await self._serve(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._tls is not None and self.garbage is None:
            await writer.start_tls(self._tls)
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._port)
        answers = asyncio.ensure_future(_pass_on(inner_reader, writer))
        try:
            while data := await reader.read(65536):
                if self.garbage is not None and self._only in data:
                    self.spoilt += 1
                    answers.cancel()
                    writer.write(self.garbage)
                    await writer.drain()
                    return
                inner_writer.write(data)
        finally:
            answers.cancel()
            inner_writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
