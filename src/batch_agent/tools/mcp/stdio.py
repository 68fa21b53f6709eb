"""Transport of a session's messages over standard input and output of a server that is started for the session.

The server runs below a watcher (``guard.py``). When the session ends or this process dies, the server
and all its processes are killed. Lines have a size limit: the request that a longer line answers fails. Lines that are
not JSON-RPC are skipped.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp.types import INTERNAL_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter

from batch_agent.children import open_guarded
from batch_agent.errors import ToolError
from batch_agent.tools.mcp.address import McpServer

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
CHUNK_BYTES = 64 * 1024
STDERR_BYTES = 2000  # kept of standard error for messages
GRACE_SECONDS = 2.0  # for the server to end after its standard input was closed
# A server inherits only the variables that it needs to start, and no keys of other services.
INHERITED = (
    *("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "NODE_EXTRA_CA_CERTS"),
    *("SYSTEMROOT", "APPDATA", "LOCALAPPDATA", "USERPROFILE", "PATHEXT", "TEMP", "TMP"),
)
_ID_FIRST = re.compile(rb'\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d+)\s*,')
_ID_LAST = re.compile(rb'"id"\s*:\s*(\d+)\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')

Incoming = SessionMessage | Exception


class MessageLines:
    """Splits the output of a server into lines of limited length."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size_bytes = 0
        self._head = b""  # start of a line that is too long
        self._tail = b""

    def feed(self, data: bytes) -> list[SessionMessage]:
        """Return the messages that ``data`` completes."""
        *ends, rest = data.split(b"\n")
        found = []
        for end in ends:
            self._add(end)
            message = self._message()
            if message is not None:
                found.append(message)
        self._add(rest)
        return found

    def _add(self, part: bytes) -> None:
        self._size_bytes += len(part)
        if self._size_bytes <= MAX_MESSAGE_BYTES:
            self._parts.append(part)
            return
        if self._parts:
            self._head = b"".join(self._parts)[:200]
            self._parts = []
        self._head = self._head or part[:200]
        self._tail = (self._tail + part)[-200:]

    def _message(self) -> SessionMessage | None:
        size_bytes, line = self._size_bytes, b"".join(self._parts)
        head, tail = self._head, self._tail
        self._parts, self._size_bytes, self._head, self._tail = [], 0, b"", b""
        if size_bytes > MAX_MESSAGE_BYTES:
            answered = _ID_FIRST.match(head) or _ID_LAST.search(tail)
            if answered is None:
                return None
            why = f"the server's answer is longer than {MAX_MESSAGE_BYTES:,} bytes"
            error = ErrorData(code=INTERNAL_ERROR, message=why)
            return SessionMessage(JSONRPCError(jsonrpc="2.0", id=int(answered[1]), error=error))
        try:
            return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError:
            return None


class Stderr:
    """The end of a server's standard error, for messages."""

    def __init__(self) -> None:
        self._data = b""

    def add(self, data: bytes) -> None:
        self._data = (self._data + data)[-STDERR_BYTES:]

    def words(self) -> str:
        text = self._data.decode(errors="replace").strip()
        return f"; its standard error ends with: {text}" if text else ""


@asynccontextmanager
async def stdio_transport(
    server: McpServer, stderr: Stderr, on_end: Callable[[], None]
) -> AsyncIterator[tuple[MemoryObjectReceiveStream[Incoming], MemoryObjectSendStream[SessionMessage]]]:
    """Start the server and yield the streams of its messages. ``on_end`` is called when it closes its output."""
    async with _started(server) as process:
        said_all = anyio.Event()
        put, incoming = anyio.create_memory_object_stream[Incoming](0)
        outgoing, take = anyio.create_memory_object_stream[SessionMessage](0)
        try:
            async with anyio.create_task_group() as pipes:
                pipes.start_soon(_read, process, put, said_all, on_end)
                pipes.start_soon(_write, process, take)
                pipes.start_soon(_keep_errors, process, stderr, said_all)
                try:
                    yield incoming, outgoing
                finally:
                    with anyio.CancelScope(shield=True):
                        await _let_end(process)
                    pipes.cancel_scope.cancel()
        finally:
            for stream in (put, incoming, outgoing, take):
                stream.close()


@asynccontextmanager
async def _started(server: McpServer) -> AsyncIterator[Process]:
    environment = {name: value for name in INHERITED if (value := os.environ.get(name)) is not None}
    environment |= dict(server.environment)
    program = shutil.which(server.command[0], path=environment.get("PATH"))
    if program is None:
        beside = os.path.join(server.directory or ".", server.command[0])  # noqa: PTH118 - a command, not a path
        if os.sep not in server.command[0] or not os.access(beside, os.X_OK):
            raise ToolError(f"there is no command {server.command[0]!r}")
        program = server.command[0]
    command = [program, *server.command[1:]]
    async with AsyncExitStack() as extent:
        opened = open_guarded(command, cwd=server.directory, env=environment, stdin=PIPE, stdout=PIPE, stderr=PIPE)
        try:
            process = await extent.enter_async_context(opened)
        except (OSError, ValueError) as error:
            raise ToolError(f"the command cannot be started: {error}") from None
        yield process


async def _read(
    process: Process, put: MemoryObjectSendStream[Incoming], said_all: anyio.Event, on_end: Callable[[], None]
) -> None:
    assert process.stdout is not None
    lines = MessageLines()
    try:
        with put:
            while data := await process.stdout.read(CHUNK_BYTES):
                for message in lines.feed(data):
                    await put.send(message)
            with anyio.move_on_after(GRACE_SECONDS):  # calls fail when this ends; their error needs the standard error
                await said_all.wait()
    except (anyio.BrokenResourceError, OSError):
        pass  # the session is being closed
    finally:
        on_end()


async def _write(process: Process, take: MemoryObjectReceiveStream[SessionMessage]) -> None:
    assert process.stdin is not None
    with suppress(OSError), take:
        async for item in take:
            process.stdin.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
            await process.stdin.drain()


async def _keep_errors(process: Process, stderr: Stderr, said_all: anyio.Event) -> None:
    assert process.stderr is not None
    while data := await process.stderr.read(CHUNK_BYTES):
        stderr.add(data)
    said_all.set()


async def _let_end(process: Process) -> None:
    """Close standard input, which asks the server to end, and give it some time for that."""
    assert process.stdin is not None
    process.stdin.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(GRACE_SECONDS):
            await process.wait()
