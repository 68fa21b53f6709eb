"""A sink that writes each event as a line of JSON, ``{"event": "TurnFinished", …}``; docs/events.md lists them.

Lines are collected in memory and written in a thread, so that a slow disk does not slow a run. If the file cannot be
written, writing stops with a warning.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
from pathlib import Path

from pydantic_core import to_json

from batch_agent.errors import explained
from batch_agent.events import Event

logger = logging.getLogger("batch_agent")

MOST_WAITING = 100_000  # events; more are dropped while the disk is too slow
PATIENCE = 5.0  # seconds that the end of a run waits for the disk


def event_json(event: Event) -> bytes:
    """Return one event as a line, without its line end."""
    return to_json({"event": type(event).__name__, **dataclasses.asdict(event)}, inf_nan_mode="null")


class EventLines:
    """``close`` writes the remaining events."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        with explained(f"events: cannot write {self._path}"):
            self._file = self._path.open("ab")
        self._waiting: queue.Queue[Event | None] = queue.Queue(MOST_WAITING)
        self._dropped = 0
        self._writer = threading.Thread(target=self._write_all, name="batch-agent events", daemon=True)
        self._writer.start()

    def __call__(self, event: Event) -> None:
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        try:
            self._waiting.put(None, timeout=PATIENCE)
        except queue.Full:
            self._dropped += MOST_WAITING
        self._writer.join(PATIENCE)
        if self._dropped:
            logger.warning("%s: %d events were dropped, because the disk was too slow", self._path, self._dropped)

    def _write_all(self) -> None:
        with self._file as file:
            try:
                while (event := self._waiting.get()) is not None:
                    file.write(event_json(event) + b"\n")
                    if self._waiting.empty():
                        file.flush()
            except OSError as error:
                logger.warning("events are no longer written to %s: %s", self._path, error)
