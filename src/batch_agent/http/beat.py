"""Reads many streams together, at the ticks of one clock, instead of one by one.

Every token of every stream would wake the event loop. A few streams are read as their events arrive. With more
streams, a connection that has delivered data is paused until the next beat, while the kernel buffers what arrives.
"""

from __future__ import annotations

import asyncio

FEW_STREAMS = 16
BEAT_SECONDS = 0.04


class Beat:
    """``streams`` is the number being read now; the connections update it."""

    __slots__ = ("_loop", "_resting", "streams")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._resting: list[asyncio.Transport] = []
        self.streams = 0

    def rest(self, transport: asyncio.Transport) -> None:
        """Stops reading from ``transport`` until the next beat, if there are many streams."""
        if self.streams <= FEW_STREAMS:
            return
        transport.pause_reading()
        self._resting.append(transport)
        if len(self._resting) == 1:
            now = self._loop.time()
            self._loop.call_at((now // BEAT_SECONDS + 1) * BEAT_SECONDS, self._go_on)

    def _go_on(self) -> None:
        resting, self._resting = self._resting, []
        for transport in resting:
            transport.resume_reading()  # no effect on a connection closed meanwhile
