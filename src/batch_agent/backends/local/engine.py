"""An engine process with its pipes. It belongs to no event loop, so that it can outlive one.

``EngineProcess`` (``backend``) connects it to an event loop. ``EngineKeeper`` holds it while no run uses it.
"""

from __future__ import annotations

import atexit
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import orjson

from batch_agent.messages import JsonObject

STDERR_TAIL_BYTES = 4096

_AVAILABLE = re.compile(r"MemAvailable:\s+(\d+) kB")


@dataclass(slots=True, eq=False)
class LoadedEngine:
    process: subprocess.Popen[bytes]
    stderr: IO[bytes]  # a file, because no task reads a pipe between two runs
    owner: int = field(default_factory=os.getpid)
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    unread: bytearray = field(default_factory=bytearray)  # the start of an incomplete line
    ready: bool = False

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def memory_bytes(self) -> int | None:
        """Return the memory that the process uses, in bytes, or None if it is unknown."""
        try:
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return None
        return pages * os.sysconf("SC_PAGE_SIZE")

    def end(self) -> None:
        """Kill the process and wait until it has ended. Blocks until its memory is freed."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.stderr):
            if pipe is not None:
                pipe.close()

    def how_it_ended(self) -> str:
        code = self.process.wait()
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        if self.stderr.closed:
            return how
        size = self.stderr.seek(0, os.SEEK_END)
        self.stderr.seek(max(0, size - STDERR_TAIL_BYTES))
        tail = self.stderr.read().decode(errors="replace").strip().splitlines()
        return f"{how}: {tail[-1]}" if tail else how


def start_engine(program: str, config: JsonObject) -> Future[LoadedEngine]:
    """Start the process with this program's import path and ``config``. A separate thread starts the process and waits
    for its end, because the system kills the process when the thread that started it ends. A run may be in a thread
    that ends with the run."""
    started: Future[LoadedEngine] = Future()
    arguments = [orjson.dumps(sys.path).decode(), orjson.dumps({**config, "parent": os.getpid()}).decode()]

    def accompany() -> None:
        stderr = tempfile.TemporaryFile()  # noqa: SIM115  the engine closes it
        try:
            # In its own session it gets no Ctrl-C from the terminal: this process may drain the requests in flight.
            process = subprocess.Popen(
                [sys.executable, "-c", program, *arguments],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            stderr.close()
            started.set_exception(error)
            return
        started.set_result(LoadedEngine(process, stderr))
        process.wait()

    threading.Thread(target=accompany, daemon=True).start()
    return started


def _available_bytes() -> int | None:
    try:
        found = _AVAILABLE.search(Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024


class EngineKeeper:
    """Holds the idle engine. ``key`` identifies the options that an engine was started with."""

    def __init__(self, available: Callable[[], int | None] = _available_bytes) -> None:
        """``available`` returns the free memory in bytes, or None if it is unknown."""
        self._available = available
        self._lock = threading.Lock()
        self._idle: tuple[str, LoadedEngine, threading.Timer] | None = None

    def take(self, key: str) -> LoadedEngine | None:
        """Return the idle engine of that key, or None. Does not block."""
        with self._lock:
            idle = self._idle
        if idle is None or idle[0] != key or not idle[1].alive:
            return None
        taken = self._remove(idle[1])
        return None if taken is None else taken[1]

    def keep(self, key: str, engine: LoadedEngine, seconds: float) -> None:
        """Keep an idle engine for that time, and end the engine that was kept before. If ``seconds`` is 0, or if there
        is not enough memory, end the engine instead."""
        if seconds <= 0 or not engine.ready or not engine.alive or not self._fits(engine):
            engine.end()
            return
        timer = threading.Timer(seconds, self._expire, (engine,))
        timer.daemon = True
        before = self._remove()
        with self._lock:
            self._idle = key, engine, timer
        timer.start()
        if before is not None:
            before[1].end()

    def release(self) -> bool:
        """End the idle engine; return whether there was one."""
        idle = self._remove()
        if idle is not None:
            idle[1].end()
        return idle is not None

    def _fits(self, engine: LoadedEngine) -> bool:
        """Return whether the engine uses no more memory than is still free."""
        used, available = engine.memory_bytes(), self._available()
        return used is None or available is None or available >= used

    def _expire(self, engine: LoadedEngine) -> None:
        idle = self._remove(engine)
        if idle is not None:
            engine.end()

    def _remove(self, only: LoadedEngine | None = None) -> tuple[str, LoadedEngine, threading.Timer] | None:
        with self._lock:
            idle = self._idle
            if idle is None or (only is not None and idle[1] is not only):
                return None
            self._idle = None
        idle[2].cancel()
        return idle if idle[1].owner == os.getpid() else None  # after a fork, the engine belongs to the parent


KEPT = EngineKeeper()
atexit.register(KEPT.release)


def release_models() -> bool:
    """Unload the idle model of earlier runs on ``local://`` and free its memory; return whether there was one. A model
    that a run is using stays loaded."""
    return KEPT.release()
