"""The clock of a run's events, and their way to the sinks, one at a time or many at once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from batch_agent.events import Event, ListSink, Sink, TypedSink


class Clock:
    """Does not advance until it is started."""

    def __init__(self) -> None:
        self._epoch = time.time()
        self._time: Callable[[], float] = float

    def start(self) -> None:
        self._time = asyncio.get_running_loop().time
        self._epoch = time.time() - self._time()

    def __call__(self) -> float:
        return self._epoch + self._time()

    def at(self, time: float) -> float:
        """Return the wall-clock time at this time of the event loop."""
        return self._epoch + time


logger = logging.getLogger("batch_agent")

MOST_HELD = 256  # events
HELD_SECONDS = 1.0


class Sinks:
    """A sink that passes events to all others. A sink that raises gets no more events, and does not affect the run."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self._handlers: dict[type, list[tuple[Sink, Sink]]] = {}  # by type of event: each sink, and what to call

    def add(self, sink: Sink) -> None:
        self._set([*self._sinks, sink])

    def __call__(self, event: Event) -> None:
        handlers = self._handlers.get(type(event))
        if handlers is None:
            handlers = self._handlers[type(event)] = self._handlers_of(type(event))
        for sink, handle in handlers:
            try:
                handle(event)
            except Exception:
                logger.exception("a sink of events raised an exception and gets no more events")
                self._set([other for other in self._sinks if other is not sink])

    def _set(self, sinks: list[Sink]) -> None:
        self._sinks, self._handlers = sinks, {}

    def _handlers_of(self, kind: type) -> list[tuple[Sink, Sink]]:
        found = [(sink, sink.handlers.get(kind) if isinstance(sink, TypedSink) else sink) for sink in self._sinks]
        return [(sink, handle) for sink, handle in found if handle is not None]


class Held(TypedSink):
    """A sink that collects events and passes many of them at once to others. In a loop over many events, a sink needs a
    fraction of the CPU time that it needs between two turns of agents, because its code stays in the processor's cache.
    Events are held for a second at most. Create it inside the event loop."""

    def __init__(self) -> None:
        self.handlers = {}
        self._sinks: list[ListSink] = []
        self._events: list[Event] = []
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, sink: ListSink) -> None:
        self._sinks.append(sink)
        self.handlers = {**self.handlers, **dict.fromkeys(sink.handlers, self._hold)}

    def flush(self) -> None:
        """Pass on all held events."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        events, self._events = self._events, []
        for sink in tuple(self._sinks):
            try:
                sink.take(events)
            except Exception:
                logger.exception("a sink of events raised an exception and gets no more events")
                self._sinks.remove(sink)

    def _hold(self, event: Event) -> None:
        self._events.append(event)
        if len(self._events) >= MOST_HELD:
            self.flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(HELD_SECONDS, self.flush)
