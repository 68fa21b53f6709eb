"""One session with an MCP server for all calls of a run.

The first call starts it. If a session ended, the next call starts a new one, after a pause that grows with each failed
start. If the session ends before the answer to a call, a read is repeated once. A write is not repeated: its outcome is
unknown, and the error says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, cast

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp import Client, MCPError, types
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp.types import (
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    PARSE_ERROR,
    CallToolResult,
    ErrorData,
    Implementation,
    JSONRPCError,
    RequestParamsMeta,
    jsonrpc_message_adapter,
)
from mcp.types import Tool as ToolOffer

from batch_agent.children import open_guarded
from batch_agent.errors import InputError, ToolError, ToolFailed
from batch_agent.files.pictures import read_image
from batch_agent.foreign import describe
from batch_agent.messages import Content, Image
from batch_agent.tools.base import Spawn
from batch_agent.tools.context import current_traceparent
from batch_agent.tools.mcp.address import McpServer
from batch_agent.version import __version__

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
        self._parts = []
        self._size_bytes = 0
        self._head = b""
        self._tail = b""
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
    """Start the server and yield the streams of its messages, over its standard input and output. ``on_end`` is called
    when it closes its output.

    The server runs below a watcher (``guard.py``). When the session ends or this process dies, the server and all its
    processes are killed. Lines have a size limit: the request that a longer line answers fails. Lines that are not
    JSON-RPC are skipped.
    """
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


ENDING_SECONDS = 6.0  # for a session to end: longer than the time that a server has to stop
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a server is started again
PATIENCE = 4  # failed starts in a row; after that, calls fail at once until the pause is over
MAX_PAGES = 100  # of a server's list of tools
_SESSION_GONE = "Session terminated"  # the SDK's message if the server no longer knows the session

# Codes of JSON-RPC errors that this module makes, outside the range of the protocol.
NOT_SENT = -31001
BROKEN = -31002
REFUSED = -31003
_OUTCOME_UNKNOWN = {CONNECTION_CLOSED, PARSE_ERROR, BROKEN}
CONNECT_TIMEOUT = 30.0
SHOWN_BYTES = 300
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)


@asynccontextmanager
async def open_client(
    server: McpServer, stderr: Stderr, on_end: Callable[[], None] = lambda: None
) -> AsyncIterator[Client]:
    """Open a session that is ready for calls. Raises ToolError if the server does not start or answer in time."""
    transport = http_transport(server) if server.url else stdio_transport(server, stderr, on_end)
    client = Client(transport, client_info=Implementation(name="batch-agent", version=__version__), cache=None)
    ready = False
    limit = asyncio.timeout(server.connect_timeout)
    try:
        async with limit, client:
            ready = True
            limit.reschedule(None)
            yield client
    except TimeoutError:
        if ready or not limit.expired():
            raise
        why = f"it did not answer within {server.connect_timeout:g} s"
        raise ToolFailed(f"the MCP server {server.label} is not usable: {why}{stderr.words()}") from None
    except Exception as error:
        if ready:
            raise
        raise ToolFailed(f"the MCP server {server.label} is not usable: {reason_of(error)}{stderr.words()}") from None


async def offers_of(client: Client) -> list[ToolOffer]:
    found: list[ToolOffer] = []
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if not cursor:
            return found
    raise ToolFailed(f"its list of tools has more than {MAX_PAGES} pages")


class Restarts:
    """The pauses before a server is started again. Pure."""

    def __init__(self) -> None:
        self._fruitless = 0  # starts in a row without an answered call, including the latest
        self._next_start = 0.0

    def pause(self, now: float) -> float:
        """Return the seconds until the next start, and count it. Raises ToolFailed after too many failures."""
        pause = max(0.0, self._next_start - now)
        if pause and self._fruitless > PATIENCE:
            raise ToolFailed(f"it failed {self._fruitless} times in a row, and is not started again for {pause:.0f} s")
        self._next_start = now + pause + min(LONGEST_PAUSE, FIRST_PAUSE * 2**self._fruitless)
        self._fruitless += 1
        return pause

    def answered(self) -> None:
        self._fruitless = 0


class McpConnection:
    """The session of one run. ``spawn`` starts the task that owns it."""

    def __init__(self, server: McpServer, spawn: Spawn) -> None:
        self._server = server
        self._spawn = spawn
        self._session: _Session | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._restarts = Restarts()

    async def ready(self) -> None:
        """Wait until there is a session. Raises ToolError."""
        await self._current().client()

    async def call(
        self, name: str, arguments: dict[str, Any], *, reads: bool, alive: Callable[[], None]
    ) -> CallToolResult:
        """Return the answer of the tool. Raises ToolError. ``alive`` is called when the server reports progress."""

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            alive()

        again = True
        while True:
            session = self._current()
            client = await session.client()
            try:
                trace = current_traceparent.get()
                meta = cast(RequestParamsMeta, {"traceparent": trace}) if trace else None
                result = await client.call_tool(name, arguments, progress_callback=on_progress, meta=meta)
            except MCPError as error:
                refused = error.code == NOT_SENT or error.message == _SESSION_GONE
                if not refused and error.code not in _OUTCOME_UNKNOWN:
                    raise ToolFailed(f"{name} failed: {error.message}") from None
                self._drop(session)
                if again and (refused or reads):
                    again = False
                    continue
                raise ToolFailed(self._broken(name, error, session, reads=reads or refused)) from None
            except (RuntimeError, ValueError) as error:  # the answer does not match the server's own schema
                raise ToolFailed(f"{name} failed: the server's answer is not valid: {describe(error)}") from None
            self._restarts.answered()
            return result

    async def close(self) -> None:
        """End the session, and the server if it was started for the session."""
        self._closed = True
        if self._session is not None:
            self._session.over.set()
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=ENDING_SECONDS)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=ENDING_SECONDS)

    def _current(self) -> _Session:
        """Return the current session, or a new one."""
        if self._closed:
            raise ToolFailed("the run has ended")
        session = self._session
        if session is None or session.over.is_set():
            try:
                pause = self._restarts.pause(asyncio.get_running_loop().time())
            except ToolFailed as error:
                raise ToolFailed(f"the MCP server {self._server.label} is not usable: {error}") from None
            session = self._session = _Session(self._server, pause)
            task = self._spawn(session.keep())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return session

    def _drop(self, session: _Session) -> None:
        session.over.set()
        if self._session is session:
            self._session = None

    def _broken(self, name: str, error: MCPError, session: _Session, *, reads: bool) -> str:
        why = f"{name} failed: the session with the MCP server {self._server.label} ended: {error.message}"
        why += session.stderr.words()
        if reads:
            return why
        return f"{why}. The outcome is unknown: the call may have taken effect, and it was not repeated"


class _Session:
    """One session with a server, owned by the task that runs ``keep``."""

    def __init__(self, server: McpServer, pause: float) -> None:
        self._server = server
        self._pause = pause
        self._ready: asyncio.Future[Client | ToolError] = asyncio.get_running_loop().create_future()
        self.stderr = Stderr()
        self.over = asyncio.Event()  # the session must not be used any more

    async def client(self) -> Client:
        # Shielded: a cancelled caller must not cancel the session of others.
        client = await asyncio.shield(self._ready)
        if isinstance(client, ToolError):
            raise client
        return client

    async def keep(self) -> None:
        try:
            await self._wait_for_start()
            if self.over.is_set():
                return
            async with open_client(self._server, self.stderr, self.over.set) as client:
                async with asyncio.timeout(self._server.connect_timeout):
                    await offers_of(client)  # the SDK checks results against the listed schemas
                self._ready.set_result(client)
                await self.over.wait()
        except ToolError as error:
            self._fail(error)
        except Exception as error:  # the session broke, and its calls have failed  # noqa: BLE001
            self._fail(ToolFailed(f"the MCP server {self._server.label} is not usable: {reason_of(error)}"))
        finally:
            self.over.set()
            self._fail(ToolFailed("the run has ended"))

    async def _wait_for_start(self) -> None:
        if self._pause:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause):
                    await self.over.wait()

    def _fail(self, error: ToolError) -> None:
        if not self._ready.done():
            self._ready.set_result(error)


def reason_of(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, MCPError):
        return error.message
    return str(error) if isinstance(error, ToolError) else describe(error)


# The SDK ends the whole session when one request fails. Here a failed request gets its own error instead:
# ``NOT_SENT`` if the server cannot have received it, ``BROKEN`` if it may have.
@asynccontextmanager
async def http_transport(server: McpServer) -> AsyncIterator[Any]:
    # The pool limits the time and the number of calls.
    timeout = httpx2.Timeout(CONNECT_TIMEOUT, read=None, pool=None)
    limits = httpx2.Limits(max_connections=None)
    async with (
        _Client(headers=dict(server.headers), timeout=timeout, limits=limits) as client,
        streamable_http_client(server.url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES) as streams,
    ):
        yield streams


class _Client(httpx2.AsyncClient):
    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        try:
            response = await super().send(request, **options)
        except _NEVER_SENT as error:
            return _failed(request, NOT_SENT, f"it is unreachable: {describe(error)}")
        except httpx2.TransportError as error:
            return _failed(request, BROKEN, f"the connection broke: {describe(error)}")
        kind = response.headers.get("content-type", "")
        if response.status_code >= 400 and response.status_code != 404 and not kind.startswith("application/json"):
            return await _refused(request, response)
        if isinstance(response.stream, httpx2.AsyncByteStream):
            response.stream = _Bounded(response.stream, kind)
        return response


async def _refused(request: httpx2.Request, response: httpx2.Response) -> httpx2.Response:
    """Return an error for an HTTP error answer that is not JSON-RPC."""
    head = b""
    try:
        async for part in response.aiter_bytes():
            head += part
            if len(head) >= SHOWN_BYTES:
                break
    except httpx2.TransportError:
        pass
    finally:
        await response.aclose()
    words = " ".join(head[:SHOWN_BYTES].decode(errors="replace").split())
    code = BROKEN if response.status_code >= 500 else REFUSED
    return _failed(request, code, f"HTTP {response.status_code}{f': {words}' if words else ''}")


def _failed(request: httpx2.Request, code: int, why: str) -> httpx2.Response:
    body = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": why}}
    headers = {"content-type": "application/json"}
    return httpx2.Response(400, headers=headers, content=json.dumps(body).encode(), request=request)


class _Bounded(httpx2.AsyncByteStream):
    """A body with a size limit. If it is too long or incomplete, it raises StreamError, as the SDK expects."""

    def __init__(self, inner: httpx2.AsyncByteStream, kind: str) -> None:
        self._inner = inner
        # Each event has its own limit: a stream of events may stay open for any time.
        self._max_bytes = None if kind.startswith("text/event-stream") else MAX_MESSAGE_BYTES

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size_bytes = 0
        try:
            async for part in self._inner:
                size_bytes += len(part)
                if self._max_bytes is not None and size_bytes > self._max_bytes:
                    raise httpx2.StreamError(f"the server's answer is longer than {self._max_bytes:,} bytes")
                yield part
        except httpx2.TransportError as error:
            raise httpx2.StreamError(f"the connection broke: {describe(error)}") from None

    async def aclose(self) -> None:
        await self._inner.aclose()


def content_of(name: str, result: types.CallToolResult) -> Content:
    """Return the result as text, which names its images, followed by the images. Raises ToolFailed if the tool reports
    a failure."""
    images: list[Image] = []
    parts = [_block(block, images) for block in result.content]
    if result.structured_content is not None and not _repeats(parts, result.structured_content):
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = "\n".join(parts)
    if result.is_error:
        raise ToolFailed(text or f"{name} failed and gave no reason")
    return (text, *images) if images else text or "(no output)"


def _block(block: types.ContentBlock, images: list[Image]) -> str:
    """Return the text for a block. An image that models accept is added to ``images``."""
    match block:
        case types.TextContent():
            return block.text
        case types.ImageContent():
            named = f"image {block.mime_type}, about {len(block.data) * 3 // 4} bytes"
            try:
                images.append(read_image(Image(f"data:{block.mime_type};base64,{block.data}")))
            except InputError as error:
                return f"[{named}, not shown: {error}]"
            return f"[{named}]"
        case types.AudioContent():
            return f"[audio {block.mime_type}, about {len(block.data) * 3 // 4} bytes, not shown]"
        case types.ResourceLink():
            return " ".join(["[link", *_described(block), f"{block.uri}]"])
        case types.EmbeddedResource(resource=types.TextResourceContents() as resource):
            return f"[resource {resource.uri}]\n{resource.text}"
        case types.EmbeddedResource(resource=types.BlobResourceContents() as resource):
            kind = resource.mime_type or "of unknown type"
            return f"[resource {resource.uri} {kind}, about {len(resource.blob) * 3 // 4} bytes, not shown]"
    return f"[{type(block).__name__}, not shown]"


def _described(link: types.ResourceLink) -> Iterator[str]:
    yield link.name
    if link.description:
        yield f"({link.description})"


def _repeats(parts: list[str], structured: object) -> bool:
    """Return whether the texts repeat the structured result, as the protocol recommends for older clients."""
    values = [_value(part) for part in parts]
    same = [structured]
    if isinstance(structured, dict) and structured.keys() == {"result"}:  # SDKs wrap other values like this
        same.append(structured["result"])
    return any(form in values or form in (values, parts) for form in same)


def _value(text: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value
