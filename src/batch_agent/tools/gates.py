"""Gates that a call passes before it runs. Each gate has a FIFO queue.

A call that leaves a queue has used nothing. Leaving takes constant time, because thousands of calls may wait for one
slow tool and be cancelled at once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol


class Gate(Protocol):
    def enter_nowait(self) -> bool:
        """Enter if no waiting is needed and no call is in the queue. Returns whether it entered."""

    async def enter(self) -> None: ...

    def leave(self) -> None:
        """Leave the gate after the call has ended."""


class Line:
    def __init__(self) -> None:
        self._places: OrderedDict[asyncio.Future[None], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    async def wait(self, missed: Callable[[], None]) -> None:
        """Wait until called. ``missed`` is called if the waiter was called and cancelled at the same time."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._places[place] = None
        try:
            await place
        except BaseException:
            self._places.pop(place, None)
            if not place.cancelled():
                missed()
            raise

    def call_next(self) -> bool:
        """Call the first waiter. Returns False if there is none."""
        while self._places:
            place, _ = self._places.popitem(last=False)
            if not place.done():
                place.set_result(None)
                return True
        return False


class CallSlots:
    """Gate that limits the number of concurrent calls."""

    def __init__(self, limit: int) -> None:
        self._free = limit  # above 0 only if no call waits
        self._line = Line()

    def enter_nowait(self) -> bool:
        if self._free == 0:
            return False
        self._free -= 1
        return True

    async def enter(self) -> None:
        if not self.enter_nowait():
            await self._line.wait(self.leave)

    def leave(self) -> None:
        if not self._line.call_next():
            self._free += 1
