"""Connects the engine process to one event loop: starts or attaches it, sends requests, detects its death, detaches it.

There are no tasks: messages of the process arrive in callbacks of the event loop and resolve the futures that callers
await. The caller decides whether to restart the process.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self, cast

import orjson

from batch_agent.backends.http.wire import written
from batch_agent.backends.local.engine import LoadedEngine, start_engine
from batch_agent.blocking import in_thread
from batch_agent.errors import BackendError, ContextOverflow, Rejected
from batch_agent.messages import JsonObject

ENGINE_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from batch_agent.backends.local.child import main; main()"
)
ERRORS: dict[str, type[BackendError]] = {"context": ContextOverflow, "invalid": Rejected}


def encode_line(message: JsonObject) -> bytes:
    """Return the line that the process reads."""
    return written(message) + b"\n"


class EngineDied(Exception):
    """The process ended with requests in flight, or before it was ready; the message says how."""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    text: str
    finish: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token: float | None


@dataclass(slots=True)
class _InFlight:
    answer: asyncio.Future[EngineAnswer]
    sent: float
    first_token: float | None = None


class EngineProcess(asyncio.Protocol):
    """The connection of one event loop to an engine, from ``start`` or ``attach`` to its end or to ``detach``."""

    def __init__(self, engine: LoadedEngine) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._in_flight: dict[int, _InFlight] = {}
        self._fatal = ""
        self._ready: asyncio.Future[bool] = self._loop.create_future()  # False: the process ended before it was ready
        if engine.ready:
            self._ready.set_result(True)
        self._output: asyncio.ReadTransport
        self._input: asyncio.WriteTransport
        self._closed: asyncio.Future[None] = self._loop.create_future()  # nothing more is read
        self._input_closed: asyncio.Future[None] = self._loop.create_future()
        self._detached = False

    @classmethod
    async def start(cls, program: str, config: JsonObject) -> Self:
        """Start the process. It is still loading the model when this returns. Cancelled, it ends what it started."""
        starting = start_engine(program, config)
        try:
            return await cls.attach(await asyncio.shield(asyncio.wrap_future(starting)))
        except OSError as error:
            raise EngineDied(f"cannot be started: {error}") from error
        except BaseException:
            starting.add_done_callback(_end_started)
            raise

    @classmethod
    async def attach(cls, engine: LoadedEngine) -> Self:
        """Connect to a running process. Its own pipes stay open after ``detach``."""
        self = cls(engine)
        assert engine.process.stdin is not None and engine.process.stdout is not None
        writable = os.fdopen(os.dup(engine.process.stdin.fileno()), "wb", 0)
        self._input, _ = await self._loop.connect_write_pipe(lambda: _Input(self._input_closed), writable)
        try:
            output = os.fdopen(os.dup(engine.process.stdout.fileno()), "rb", 0)
            self._output, _ = await self._loop.connect_read_pipe(lambda: self, output)
        except BaseException:
            self._input.close()
            raise
        return self

    @property
    def alive(self) -> bool:
        return not self._closed.done()

    @property
    def pid(self) -> int:
        return self._engine.process.pid

    async def wait_ready(self) -> None:
        if not await asyncio.shield(self._ready):
            raise EngineDied(self._fatal)

    async def ask(self, request: JsonObject) -> EngineAnswer:
        """Send a request and return its answer. Cancelling this cancels the request in the engine."""
        if not self.alive:
            raise EngineDied(self._fatal)
        number = next(self._engine.ids)
        entry = _InFlight(self._loop.create_future(), self._loop.time())
        self._in_flight[number] = entry
        self._send({"id": number, **request})
        try:
            return await entry.answer
        finally:
            if self._in_flight.pop(number, None) is not None:
                self._send({"cancel": number})

    async def detach(self) -> LoadedEngine:
        """Disconnect and return the engine. Requests in flight are cancelled and fail."""
        self._detached = True
        for number in self._in_flight:
            self._send({"cancel": number})
        self._input.close()  # sends what was written before
        self._output.close()
        await asyncio.shield(self._closed)
        await asyncio.shield(self._input_closed)
        return self._engine

    def kill(self) -> None:
        """End the process without waiting for requests."""
        self._engine.end()

    async def close(self) -> None:
        """End the process and wait until it has ended."""
        try:
            await self.detach()
        finally:  # also if this is cancelled
            await in_thread(self._engine.end)

    def _send(self, message: JsonObject) -> None:
        if not self._input.is_closing():
            self._input.write(encode_line(message))

    # Called by asyncio

    def data_received(self, data: bytes) -> None:
        unread = self._engine.unread
        unread += data
        *lines, rest = unread.split(b"\n")
        unread[:] = rest
        for line in lines:
            self._receive(orjson.loads(line))

    def connection_lost(self, exc: Exception | None) -> None:
        """The process ended, or we detached."""
        self._closed.set_result(None)
        self._input.close()
        if not self._ready.done():
            self._ready.set_result(False)
        entries = [entry for entry in self._in_flight.values() if not entry.answer.done()]
        self._in_flight.clear()
        if self._detached:
            self._fatal = "the run disconnected from it"
        else:
            self._fatal = self._fatal or self._engine.how_it_ended()
            self._engine.end()
        for entry in entries:
            entry.answer.set_exception(EngineDied(self._fatal))

    def _receive(self, message: JsonObject) -> None:
        if "ready" in message:
            self._engine.ready = True
            self._ready.set_result(True)
        elif "fatal" in message:
            self._last_words(message)
        elif (entry := self._in_flight.get(cast(int, message["id"]))) is None or entry.answer.done():
            return
        elif "first" in message:
            entry.first_token = self._loop.time() - entry.sent
        else:
            del self._in_flight[cast(int, message.pop("id"))]
            _settle(entry, message)

    def _last_words(self, message: JsonObject) -> None:
        self._fatal = str(message["fatal"]).strip()
        if "grammar" not in self._fatal:
            return
        # If they were sent again, the next process would die in the same way, with all other requests.
        for number in cast(list[int], message["suspects"]):
            if entry := self._in_flight.pop(number, None):
                entry.answer.set_exception(Rejected(f"the engine refused the schema's grammar: {self._fatal}"))


def _end_started(starting: Future[LoadedEngine]) -> None:
    if starting.exception() is None:
        starting.result().end()


class _Input(asyncio.BaseProtocol):
    def __init__(self, closed: asyncio.Future[None]) -> None:
        self._closed = closed

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)


def _settle(entry: _InFlight, message: JsonObject) -> None:
    if "error" in message:
        entry.answer.set_exception(ERRORS[str(message["error"])](str(message["message"])))
        return
    entry.answer.set_result(EngineAnswer(first_token=entry.first_token, **cast("dict[str, Any]", message)))
