"""How a run starts agents: it waits here until the dispatcher has room for another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from batch_agent.dispatch.row_channel import RowChannel

if TYPE_CHECKING:
    from batch_agent.dispatch.slots import Slots


class Feed:
    """The start of the agents of one run. Several runs may share a dispatcher. ``on_close`` is called when no new agent
    may start."""

    def __init__(self, slots: Slots, on_close: Callable[[], None]) -> None:
        self._slots = slots
        self._on_close = on_close
        self.closed = False  # no new agents from now on
        self.ended = False  # all inputs were read
        self.rows: int | None = None  # rows still to be started; None: unknown
        self.channel: RowChannel[object] | None = None  # set when the rows come from runs that share this dispatcher
        self.room: asyncio.Future[None] | None = None
        self.gate: asyncio.Future[None] | None = None  # waits for something else than room
        self.reading = False  # waits for its next input
        self.has_row = False  # has a row, which waits for room
        self.paced = False  # its inputs come only when an agent may start, so that it does not wait for room

    async def wait_room(self, is_over: Callable[[], object] = lambda: False) -> bool:
        """Wait until another agent may start. Returns False if none will: ``is_over`` is asked again after ``wake``."""
        while not self.closed and not is_over():
            if self.paced or self._slots.scheduler.has_room(self._slots.clock()):
                return True
            self.room = self._slots.loop.create_future()
            await self.room
        return False

    async def wait_gate(self, may_start: Callable[[], bool], is_over: Callable[[], object]) -> bool:
        """Wait until ``may_start`` returns True, which the end of another row may change. Returns False if no agent
        will start."""
        while not self._is_shut() and not is_over():
            if may_start():
                return True
            if self._is_shut():  # by ``may_start``
                break
            self.gate = self._slots.loop.create_future()
            self._slots.gated += 1
            try:
                await self.gate
            finally:
                self._slots.gated -= 1
        return False

    def _is_shut(self) -> bool:
        return self.closed

    def take_from(self, channel: RowChannel[object]) -> None:
        """Take rows from a channel. Rows that are not in the channel yet do not count as rows to come: they are made
        from rows that are counted already."""
        self.channel, self.rows = channel, 0

    @property
    def is_hungry(self) -> bool:
        """Return whether another agent would start if a slot were free."""
        if self.closed or self.ended or self.reading:
            return False
        return self.channel is None or self.has_row or self.channel.waiting > 0

    @property
    def is_fed(self) -> bool:
        """Return whether no further agent will start, as far as is known now."""
        return self.ended or self.reading or (self.channel is not None and self.room is None)

    def set_reading(self, reading: bool) -> None:
        """Set whether the feed waits for its next input, which may depend on results of this run."""
        self.reading = reading
        if reading and self._slots.waits:
            self._slots.loop.call_soon(self._slots.look_ahead)  # if it has to wait

    def expect(self, rows: int | None) -> None:
        self.rows = rows
        self._slots.look_ahead()

    def end(self) -> None:
        self.ended, self.rows = True, 0
        self._slots.look_ahead()

    def close(self) -> None:
        """Start no new agents. Running agents continue."""
        if not self.closed:
            self.closed = True
            self.wake()
            self._on_close()
            self._slots.forget(self)

    def wake(self) -> None:
        room, self.room = self.room, None
        if room is not None and not room.done():
            room.set_result(None)
        if self.gate is not None:
            self.open_gate()

    def open_gate(self) -> None:
        gate, self.gate = self.gate, None
        if gate is not None and not gate.done():
            gate.set_result(None)
