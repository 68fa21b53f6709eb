"""A run's control socket: a Unix socket for its owner only, found through the run directory.

The socket is in a temporary directory, because the path of a run directory may be too long for a socket, or on a file
system without sockets. ``control.json`` in the run directory has its path; both are removed when the run ends. Requests
and answers are lines of JSON. ``watch`` and ``follow`` send a line for each change, until the client leaves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import shutil
from contextlib import suppress
from pathlib import Path
from typing import cast

from batch_agent.errors import BatchAgentError, SpecError
from batch_agent.files.results import from_json, to_json
from batch_agent.messages import JsonObject
from batch_agent.record.commits import to_its_end
from batch_agent.record.control import CONTROL
from batch_agent.record.private import private, socket_folder
from batch_agent.record.store import FOLLOWED_SECONDS
from batch_agent.run.control import Controls

logger = logging.getLogger("batch_agent")

EVERY = 1.0  # seconds between two lines of ``watch``
OFTEN = 0.25  # minimum seconds between two lines of ``follow``
LONGEST_REQUEST = 64 * 1024  # bytes
ROWS = 200  # running rows in an answer


class ControlSocket:
    def __init__(self, controls: Controls, run_dir: Path) -> None:
        self._controls = controls
        self._pointer = run_dir / CONTROL
        self._folder: Path | None = None
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    def prepare(self) -> None:
        """Create the socket's directory, and remove the one of a killed run. Blocks."""
        with suppress(OSError, ValueError):
            left = from_json(self._pointer.read_bytes())
            if isinstance(left, dict) and left.get("host") == platform.node():
                shutil.rmtree(Path(str(left["socket"])).parent, ignore_errors=True)
        self._folder = socket_folder()
        place = {"socket": str(self._folder / "control"), "pid": os.getpid(), "host": platform.node()}
        with open(self._pointer, "wb", opener=private) as file:
            file.write(to_json(place) + b"\n")

    async def listen(self) -> None:
        """Accept requests. If the socket cannot be created, the run continues without it."""
        assert self._folder is not None
        path = self._folder / "control"
        try:
            self._server = await asyncio.start_unix_server(self._serve, path, limit=LONGEST_REQUEST)
            path.chmod(0o600)
        except (OSError, AttributeError, NotImplementedError) as error:  # Windows has none
            logger.warning("this run cannot be controlled from outside: %s", error)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for client in self._clients:
                client.cancel()
            await to_its_end(asyncio.gather(*self._clients, return_exceptions=True))
            self._server = None

    def clean(self) -> None:
        """Remove the socket and ``control.json``. Blocks."""
        self._pointer.unlink(missing_ok=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # Clients

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._clients.add(task)
        try:
            while line := await reader.readline():
                await self._answer(line, writer)
        except (ConnectionError, ValueError, asyncio.CancelledError):  # client left, line too long, run ends
            pass
        finally:
            self._clients.discard(task)
            writer.close()

    async def _answer(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        try:
            request = from_json(line)
            if not isinstance(request, dict):
                raise SpecError("a request is a JSON object")
            if request.get("do") == "watch":
                await self._watch(writer)
            elif request.get("do") == "follow":
                await self._follow(_row(request), writer)
            else:
                await _send(writer, {"ok": True, **self._do(request)})
        except (BatchAgentError, ValueError) as error:
            await _send(writer, {"ok": False, "error": str(error)})

    def _do(self, request: JsonObject) -> JsonObject:
        controls = self._controls
        match request.get("do"):
            case "pause":
                controls.pause()
            case "resume":
                controls.resume()
            case "drain":
                controls.drain()
            case "cancel":
                asyncio.get_running_loop().call_soon(controls.cancel)  # so that the answer is sent first
            case "resize":
                inflight = request.get("inflight")
                if inflight is not None and not isinstance(inflight, int):
                    raise SpecError("resize needs a whole number above 0")
                controls.resize(inflight)
            case "cancel-row":
                controls.cancel_row(_row(request))
            case "retry-row":
                controls.retry_row(_row(request))
            case "rows":
                return {"rows": cast(list[object], controls.live_rows(ROWS))}  # type: ignore[dict-item]
            case "row":
                return {"row": controls.live_row(_row(request))}
            case "share":
                return {"socket": str(controls.serve())}
            case "status":
                pass
            case unknown:
                raise SpecError(f"unknown request {unknown!r}")
        return {"status": controls.status()}

    async def _watch(self, writer: asyncio.StreamWriter) -> None:
        while True:
            news: JsonObject = {"ok": True, "status": self._controls.status()}
            await _send(writer, {**news, "rows": [*self._controls.live_rows(ROWS)]})
            await asyncio.sleep(EVERY)

    async def _follow(self, row: str, writer: asyncio.StreamWriter) -> None:
        """Send the row each time it changes, while it is running."""
        before: JsonObject = {}
        looks = 0  # since a worker in another process reported the row
        while True:
            now = self._controls.live_row(row)
            looks = 0 if now else looks + 1
            if looks * OFTEN > FOLLOWED_SECONDS:
                raise SpecError(f"row {row} is not running")
            if now and now != before:
                await _send(writer, {"ok": True, "row": now})
                before = now
            await asyncio.sleep(OFTEN)


def _row(request: JsonObject) -> str:
    row = request.get("row")
    if isinstance(row, bool) or not isinstance(row, str | int) or row == "":
        raise SpecError("name a row, by its id or its index")
    return str(row)


async def _send(writer: asyncio.StreamWriter, answer: JsonObject) -> None:
    writer.write(to_json(answer) + b"\n")
    await writer.drain()
