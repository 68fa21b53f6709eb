"""Events as lines of JSON, ``{"event": "TurnFinished", …}``; docs/events.md lists them.

Workers in other processes send their events as these lines. The file of events is written in a thread, so that a slow
disk does not slow a run. If it cannot be written, writing stops with a warning.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

from batch_agent.errors import explained
from batch_agent.events import SENT, Event
from batch_agent.files.results import from_json, to_json

logger = logging.getLogger("batch_agent")

MOST_WAITING = 100_000  # events; more are dropped while the disk is too slow
PATIENCE = 5.0  # seconds that the end of a run waits for the disk


def event_json(event: Event) -> bytes:
    """Return one event as a line, without its line end."""
    return b'{"event":"%b",' % type(event).__name__.encode() + to_json(event)[1:]


def read_events(lines: bytes, run: str) -> Iterator[Event]:
    """Yield the events that a worker sent, as those of this run. Others are ignored: anyone who can write to the record
    can write them."""
    kinds = _sent_kinds()
    for line in lines.split(b"\n"):
        try:
            match from_json(line):
                case {"event": str(name), **fields} if name in kinds:
                    yield kinds[name].validate_python({**fields, "run": run})
                case _:
                    raise ValueError("it is none that workers send")
        except ValueError as error:
            logger.warning("an event of a worker cannot be read: %s", error)


@cache
def _sent_kinds() -> dict[str, TypeAdapter[Event]]:
    return {kind.__name__: TypeAdapter(kind) for kind in SENT}


class EventLines:
    """Writes events to a file. ``close`` writes the remaining ones."""

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
