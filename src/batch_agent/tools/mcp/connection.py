"""One session with an MCP server for all calls of a run.

The first call starts it. If a session ended, the next call starts a new one, after a pause that grows with each failed
start. If the session ends before the answer to a call, a read is repeated once. A write is not repeated: its outcome is
unknown, and the error says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

from mcp import Client, MCPError
from mcp.types import CONNECTION_CLOSED, PARSE_ERROR, CallToolResult, Implementation, RequestParamsMeta
from mcp.types import Tool as ToolOffer

from batch_agent.errors import ToolError, ToolFailed
from batch_agent.foreign import describe
from batch_agent.tools.base import Spawn
from batch_agent.tools.context import current_traceparent
from batch_agent.tools.mcp.address import McpServer
from batch_agent.tools.mcp.http import BROKEN, NOT_SENT, http_transport
from batch_agent.tools.mcp.stdio import Stderr, stdio_transport
from batch_agent.version import __version__

ENDING_SECONDS = 6.0  # for a session to end: longer than the time that a server has to stop
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a server is started again
PATIENCE = 4  # failed starts in a row; after that, calls fail at once until the pause is over
MAX_PAGES = 100  # of a server's list of tools
_OUTCOME_UNKNOWN = {CONNECTION_CLOSED, PARSE_ERROR, BROKEN}
_SESSION_GONE = "Session terminated"  # the SDK's message if the server no longer knows the session


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
        except Exception as error:  # the session broke, and its calls have failed
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
