"""The parent's side of the engine process: start it, send requests, detect its death, stop it.

No tasks: messages of the process arrive in callbacks of the event loop and resolve the futures that callers await. The
caller decides whether to restart it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from dataclasses import dataclass
from typing import Self, cast

import orjson

from batch_agent.backends.http.wire import written
from batch_agent.errors import BackendError, ContextOverflow, Rejected
from batch_agent.messages import JsonObject

STDERR_TAIL_BYTES = 4096
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
class Answer:
    text: str
    finish: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token: float | None


@dataclass(slots=True)
class _InFlight:
    answer: asyncio.Future[Answer]
    sent: float
    first_token: float | None = None


class EngineProcess(asyncio.SubprocessProtocol):
    """One process from ``start`` to its end. Afterwards ``alive`` stays False."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._in_flight: dict[int, _InFlight] = {}
        self._unread = bytearray()
        self._stderr = bytearray()
        self._fatal = ""
        self._ready: asyncio.Future[bool] = self._loop.create_future()  # False: the process ended before it was ready
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._process: asyncio.SubprocessTransport
        self._input: asyncio.WriteTransport

    @classmethod
    async def start(cls, program: str, config: JsonObject) -> Self:
        """Start the process with our import path and ``config``. It is still loading the model when this returns."""
        arguments = [orjson.dumps(sys.path).decode(), orjson.dumps({**config, "parent": os.getpid()}).decode()]
        # In its own session: Ctrl-C in the terminal is for us, so that requests in flight can finish.
        try:
            _, protocol = await asyncio.get_running_loop().subprocess_exec(
                cls, sys.executable, "-c", program, *arguments, start_new_session=True
            )
        except OSError as error:
            raise EngineDied(f"cannot be started: {error}") from error
        return protocol

    @property
    def alive(self) -> bool:
        return not self._ended.done()

    @property
    def pid(self) -> int:
        return self._process.get_pid()

    async def wait_ready(self) -> None:
        if not await asyncio.shield(self._ready):
            raise EngineDied(self._how_it_ended())

    async def ask(self, request: JsonObject) -> Answer:
        """Send a request and return its answer. Cancelling this cancels the request in the engine."""
        if not self.alive:
            raise EngineDied(self._how_it_ended())
        number = next(self._ids)
        entry = _InFlight(self._loop.create_future(), self._loop.time())
        self._in_flight[number] = entry
        self._send({"id": number, **request})
        try:
            return await entry.answer
        finally:
            if self._in_flight.pop(number, None) is not None:
                self._send({"cancel": number})

    async def close(self) -> None:
        """End the process and wait until it is gone."""
        self._process.close()
        await asyncio.shield(self._ended)

    def _send(self, message: JsonObject) -> None:
        if not self._input.is_closing():
            self._input.write(encode_line(message))

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._process = cast(asyncio.SubprocessTransport, transport)
        self._input = cast(asyncio.WriteTransport, self._process.get_pipe_transport(0))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self._stderr += data
            del self._stderr[:-STDERR_TAIL_BYTES]
            return
        self._unread += data
        *lines, rest = self._unread.split(b"\n")
        self._unread = rest
        for line in lines:
            self._receive(orjson.loads(line))

    def connection_lost(self, exc: Exception | None) -> None:
        self._process.close()
        self._ended.set_result(None)
        if not self._ready.done():
            self._ready.set_result(False)
        for entry in self._drain():
            entry.answer.set_exception(EngineDied(self._how_it_ended()))

    def _drain(self) -> list[_InFlight]:
        entries = [entry for entry in self._in_flight.values() if not entry.answer.done()]
        self._in_flight.clear()
        return entries

    def _receive(self, message: JsonObject) -> None:
        if "ready" in message:
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
        # Resending those would end the next process in the same way, and all other requests with it.
        for number in cast(list[int], message["suspects"]):
            if entry := self._in_flight.pop(number, None):
                entry.answer.set_exception(Rejected(f"the engine refused the schema's grammar: {self._fatal}"))

    def _how_it_ended(self) -> str:
        if self._fatal:
            return self._fatal
        code = self._process.get_returncode() or 0
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        tail = self._stderr.decode(errors="replace").strip().splitlines()
        return f"{how}: {tail[-1]}" if tail else how


def _settle(entry: _InFlight, message: JsonObject) -> None:
    if "error" in message:
        entry.answer.set_exception(ERRORS[str(message["error"])](str(message["message"])))
        return
    fields = cast(dict[str, int], message)
    entry.answer.set_result(
        Answer(
            text=str(message["text"]),
            finish=str(message["finish"]),
            prompt_tokens=fields["prompt_tokens"],
            cached_tokens=fields["cached_tokens"],
            completion_tokens=fields["completion_tokens"],
            first_token=entry.first_token,
        )
    )
