"""Writes the timeline of a run to its directory, and keeps its control socket open.

Samples are taken after events, at most one per second, and written in the thread of the commits. If the timeline cannot
be written, it is stopped with a warning; the run continues.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from batch_agent.messages import JsonObject
from batch_agent.observe.metrics import Recorder
from batch_agent.record.commits import to_its_end
from batch_agent.record.store import Store
from batch_agent.record.timeline import TimelineFiles
from batch_agent.run.control import Controls
from batch_agent.run.control_socket import ControlSocket

logger = logging.getLogger("batch_agent")

EVERY = 1.0  # seconds between two writes
STATUS_EVERY = 5.0  # seconds between two writes of the run's metrics


class TimelineWriter:
    """Writes what ``recorder`` collects. ``run`` is sampled, and controlled by the control socket if there is one."""

    _store: Store | None = None
    _files: TimelineFiles | None = None
    _socket: ControlSocket | None = None
    _timer: asyncio.TimerHandle | None = None
    _writing: asyncio.Future[None] | None = None
    _sampled = _told = 0.0  # times of the event loop

    def __init__(self, recorder: Recorder, run: Controls, *, socket: bool) -> None:
        self._recorder = recorder
        self._run = run
        self._has_socket = socket

    def _wait(self) -> None:
        """Schedule the next write, because something has happened."""
        self._recorder.on_event = None
        self._timer = asyncio.get_running_loop().call_later(EVERY, self._tick)

    async def begin(self, store: Store, run_dir: Path, header: JsonObject, at: float) -> None:
        self._store = store
        files = TimelineFiles(run_dir)
        self._socket = ControlSocket(self._run, run_dir) if self._has_socket else None

        def prepare() -> None:
            files.begin(header, at)
            if self._socket is not None:
                self._socket.prepare()

        try:
            await self._in_thread(store, prepare)
        except OSError as error:
            logger.warning("the run is recorded, but without a timeline or control: %s", error)
            self._socket = None
            return
        self._files = files
        self._tick()
        if self._socket is not None:
            await self._socket.listen()

    async def end(self) -> None:
        """Write what is left. Call it before the record is closed. A cancellation does not interrupt this."""
        self._recorder.on_event = None
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is not None:
            await self._socket.close()
        if self._store is None:
            return
        if self._files is not None:
            await to_its_end(self._in_thread(self._store, self._writer(last=True)))
        if self._socket is not None:
            await to_its_end(self._in_thread(self._store, self._socket.clean))

    def _in_thread(self, store: Store, function: Callable[[], None]) -> asyncio.Future[None]:
        return asyncio.get_running_loop().run_in_executor(store.commits, function)

    def _tick(self) -> None:
        self._timer = None
        if self._files is None or self._store is None:
            return
        if self._writing is not None and not self._writing.done():
            self._wait()
            return
        self._recorder.on_event = self._wait
        self._writing = self._in_thread(self._store, self._writer())
        self._writing.add_done_callback(self._written)

    def _writer(self, *, last: bool = False) -> Callable[[], None]:
        """Return a function that writes everything collected so far."""
        files, now = self._files, asyncio.get_running_loop().time()
        assert files is not None
        lines, spans = self._recorder.take()
        if last or now - self._sampled >= files.interval:
            lines.append(self._run.sample())
            self._sampled = now
        status = None
        if last or now - self._told >= STATUS_EVERY:
            status = self._run.status()
            self._told = now
        return lambda: files.write(lines, spans, status)

    def _written(self, writing: asyncio.Future[None]) -> None:
        if not writing.cancelled() and (error := writing.exception()) is not None:
            logger.warning("the timeline of the run stops here: %s", error)
            self._files = self._recorder.on_event = None
