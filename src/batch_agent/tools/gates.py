"""What a call passes before it runs. In front of each gate is a line: first come, first served.

Who leaves a line has used nothing, and leaving costs the same however long it is: thousands may wait for one slow tool,
and all be given up at once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol


class Gate(Protocol):
    def enter_nowait(self) -> bool:
        """Goes through, if that is possible without waiting and without overtaking anybody."""

    async def enter(self) -> None: ...

    def leave(self) -> None:
        """What went through is over."""


class Line:
    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places: OrderedDict[asyncio.Future[None], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    async def wait(self, missed: Callable[[], None]) -> None:
        """Until called. ``missed`` is for one who was called and, cancelled in the same moment, does not come."""
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
        """Whether there was somebody to call."""
        while self._places:
            place, _ = self._places.popitem(last=False)
            if not place.done():
                place.set_result(None)
                return True
        return False


class Slots:
    """Lets a number of calls be inside at once."""

    __slots__ = ("_free", "_line")

    def __init__(self, limit: int) -> None:
        self._free = limit  # not 0 only while nobody waits
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
