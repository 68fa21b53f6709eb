"""Keeps at most one engine loaded between two runs of one program, for a limited time, if there is enough memory."""

from __future__ import annotations

import atexit
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

from batch_agent.backends.local.engine import LoadedEngine

_AVAILABLE = re.compile(r"MemAvailable:\s+(\d+) kB")


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
