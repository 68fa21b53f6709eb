"""Base classes for readers of streamed answers, which the wires share: text so far, time of the first token, events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from batch_agent.backends.base import OnToolCall
from batch_agent.backends.http.wire import Naming, json_of, object_of
from batch_agent.errors import BadResponse
from batch_agent.http.sse import Event, EventTooLarge, SSEParser
from batch_agent.messages import JsonObject, Reply


class AnswerReader(ABC):
    """Reads one streamed answer. ``said`` receives the text piece by piece, for a caller that cancels; ``clock`` times
    the first piece."""

    def __init__(self, naming: Naming, on_tool_call: OnToolCall, clock: Callable[[], float], said: list[str]) -> None:
        self._naming, self._faults = naming, naming.faults
        self._on_tool_call = on_tool_call
        self._clock, self._sent_at = clock, clock()
        self._first_token: float | None = None
        self._said = said

    @abstractmethod
    def feed(self, chunk: bytes) -> bool:
        """Process a chunk. Returns True when the stream has ended. Reports each tool call as soon as it is complete."""

    @abstractmethod
    def finish(self) -> Reply:
        """Called at the end of the stream. Returns the answer, or raises the error that it is incomplete."""

    @property
    def _so_far(self) -> str:
        return "".join(self._said)

    def _begun(self) -> None:
        if self._first_token is None:
            self._first_token = self._clock() - self._sent_at

    def _broken(self, what: str) -> BadResponse:
        return self._faults.bad(what, text=self._so_far)

    def _unfinished(self) -> BadResponse:
        return self._broken("the stream stopped before the answer was complete")


# An answer of a million tokens has a million events. What an event leaves in memory is at most its data without the
# names of fields and the like, and at least a small object.
MOST_HELD_BYTES = 64 * 1024 * 1024
ENVELOPE_BYTES, LEAST_HELD_BYTES = 256, 48


class EventReader(AnswerReader):
    """Reads an answer in server-sent events. ``_done``: the rest of the stream does not matter. ``_held`` is an upper
    bound of the memory that the answer takes: a server that never ends its answer must not fill the memory."""

    def __init__(self, naming: Naming, on_tool_call: OnToolCall, clock: Callable[[], float], said: list[str]) -> None:
        super().__init__(naming, on_tool_call, clock, said)
        self._sse = SSEParser()
        self._done = False
        self._held = 0

    @abstractmethod
    def _event(self, name: str, event: JsonObject) -> None: ...

    def feed(self, chunk: bytes) -> bool:
        try:
            events = self._sse.feed(chunk)
        except EventTooLarge as error:
            raise self._broken(f"the stream has {error}") from None
        self._take(events)
        return self._done

    def _close(self) -> None:
        """Process what the end of the stream completes."""
        self._take(self._sse.close())

    def _take(self, events: list[Event]) -> None:
        for name, data in events:
            if self._done or data.strip() == b"[DONE]":
                self._done = True
                return
            if name == "error":
                raise self._faults.reported(json_of(data) or data.decode("utf-8", "replace"))
            size = len(data) - ENVELOPE_BYTES
            self._held += size if size > LEAST_HELD_BYTES else LEAST_HELD_BYTES
            self._event(name, object_of(data, self._faults))
        self._check_held()

    def _check_held(self) -> None:
        if self._held > MOST_HELD_BYTES:
            raise self._faults.bad(f"the answer does not end: it has more than {MOST_HELD_BYTES:,} bytes")
