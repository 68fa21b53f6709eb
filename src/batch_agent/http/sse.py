"""Parses server-sent events incrementally: bytes in, ``(event name, data)`` out.

Pure, and independent of the data's meaning. Lines are split in bytes, so a chunk may end anywhere, even inside a UTF-8
sequence or between CR and LF. Data stay bytes: the JSON parser checks the encoding.
"""

from __future__ import annotations

Event = tuple[str, bytes]

BOM = b"\xef\xbb\xbf"


class EventTooLarge(ValueError):
    """One event exceeds the limit: a server that never ends a line must not fill the memory."""


class SSEParser:
    __slots__ = ("_after_cr", "_at_start", "_data", "_limit", "_line", "_name", "_size")

    def __init__(self, max_event_bytes: int = 16 * 1024 * 1024) -> None:
        self._limit = max_event_bytes
        self._line: list[bytes] = []  # pieces of an unfinished line
        self._data: list[bytes] = []  # data lines of an unfinished event
        self._size = 0  # bytes in both
        self._name = ""
        self._after_cr = False
        self._at_start = True

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that this chunk completes."""
        if whole := self._whole_events(chunk):
            return whole
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        if b"\r" in chunk:
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = chunk.split(b"\n")
        events: list[Event] = []
        if lines:
            if self._line:
                self._line.append(lines[0])
                self._size -= sum(map(len, self._line[:-1]))
                lines[0] = b"".join(self._line)
                self._line.clear()
            for line in lines:
                self._take(line, events)
        if rest:
            self._line.append(rest)
            self._grow(len(rest))
        return events

    def _whole_events(self, chunk: bytes) -> list[Event]:
        """Fast path for nearly every chunk: complete events of one data line each. Returns [] for anything else."""
        if self._line or self._data or self._name or self._after_cr:
            return []
        if not chunk.startswith(b"data: ") or not chunk.endswith(b"\n\n") or len(chunk) > self._limit:
            return []
        events = chunk[6:-2].split(b"\n\ndata: ")
        if chunk.count(b"\n") != 2 * len(events) or b"\r" in chunk:
            return []
        self._at_start = False
        return [("", data) for data in events]

    def close(self) -> list[Event]:
        """Called at the end of the stream. A missing blank line or line break at the end is tolerated."""
        events = self.feed(b"\n") if self._line else []
        self._dispatch(events)
        return events

    def _take(self, line: bytes, events: list[Event]) -> None:
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(BOM)
        if not line:
            self._dispatch(events)
        elif line.startswith(b"data:"):
            self._add_data(line[6:] if line.startswith(b" ", 5) else line[5:])
        elif not line.startswith(b":"):
            field, _, value = line.partition(b":")
            if field == b"event":
                self._name = value.removeprefix(b" ").decode("utf-8", "replace")
            elif field == b"data":
                self._add_data(b"")

    def _add_data(self, value: bytes) -> None:
        self._data.append(value)
        self._grow(len(value) + 1)

    def _grow(self, count: int) -> None:
        self._size += count
        if self._size > self._limit:
            raise EventTooLarge(f"an event of more than {self._limit:,} bytes")

    def _dispatch(self, events: list[Event]) -> None:
        if self._data:
            events.append((self._name, self._data[0] if len(self._data) == 1 else b"\n".join(self._data)))
            self._data.clear()
        self._name = ""
        self._size = 0
