"""Cached results of tools for one run: an LRU cache with a limit in bytes. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from batch_agent.messages import Content, content_text, images_of

CACHE_BYTES = 64 * 1024 * 1024
# Memory of an entry without its text: keys, the entry itself, the table.
_OVERHEAD_BYTES = 300

Key = tuple[str, str]  # the tool's name and the identity of the call


@dataclass(frozen=True, slots=True)
class _Entry:
    content: Content
    expires: float
    size_bytes: int


class ResultCache:
    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._unasked: set[Key] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key, now: float) -> Content | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if now >= entry.expires:
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        return entry.content

    def asked(self, key: Key) -> bool:
        """Return whether this is the first request for a prewarmed result, and mark it as requested."""
        if key not in self._unasked:
            return False
        self._unasked.remove(key)
        return True

    def put(self, key: Key, content: Content, now: float, ttl: float | None, *, unasked: bool = False) -> None:
        """Store a result for ``ttl`` seconds, or for the run. A result larger than the whole cache is not stored."""
        if key in self._entries:
            self._drop(key)
        images = sum(len(image.url) for image in images_of(content))
        size_bytes = len(content_text(content).encode()) + images + len(key[1]) + _OVERHEAD_BYTES
        if size_bytes > self._max_bytes:
            return
        while self._size_bytes + size_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))
        self._entries[key] = _Entry(content, math.inf if ttl is None else now + ttl, size_bytes)
        self._size_bytes += size_bytes
        if unasked:
            self._unasked.add(key)

    def _drop(self, key: Key) -> None:
        self._size_bytes -= self._entries.pop(key).size_bytes
        self._unasked.discard(key)
