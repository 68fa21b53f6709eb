"""A flight is one run of one call. It knows which agents need it, whether it waits at a gate, and its outcome.

Each agent has a PendingCall on its flight. The flight is cancelled when the last agent has abandoned it, or at its
timeout. Cancelling does not depend on the tool: waiting agents get an outcome at once. The gates are released when the
tool has stopped, or after ``ENDING_SECONDS`` if it does not stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from batch_agent.messages import Attachment
from batch_agent.tools.cache import Key
from batch_agent.tools.context import ToolContext
from batch_agent.tools.gates import Gate
from batch_agent.tools.rate import RateGate
from batch_agent.value_type import value_type

Source = Literal["run", "shared", "cache"]

ENDING_SECONDS = 5.0  # for a cancelled call to stop, before the run continues without it


@value_type
class ToolOutcome:
    """The outcome of a call. ``text`` and ``images`` are for the model; ``seconds`` is from request to outcome."""

    text: str
    ok: bool
    source: Source
    seconds: float
    images: tuple[Attachment, ...] = ()


class Traffic:
    """Counts of a pool: agents' calls ``waiting`` at gates, and cancelled calls that do not stop (``stuck``)."""

    def __init__(self, on_waiting: Callable[[int], None] | None) -> None:
        self.waiting = self.stuck = 0
        self._on_waiting = on_waiting

    def wait(self, change: int) -> None:
        self.waiting += change
        if change and self._on_waiting is not None:
            self._on_waiting(self.waiting)


@dataclass(slots=True, eq=False)
class Flight:
    name: str  # of its tool
    key: Key | None  # None: other calls may not join
    asked: float
    traffic: Traffic
    unasked: bool = False  # prewarmed, and no model has made the call yet
    context: ToolContext | None = None  # if its tool has such a parameter
    began: float = 0.0  # time at which it had passed the gates
    end: ToolOutcome | Exception | None = None  # an exception is an internal error, raised in waiting agents
    interested: int = 0
    task: asyncio.Task[None] | None = None
    _clock: asyncio.TimerHandle | None = None  # timeout of the run; after cancelling, of the stop
    _given_up: bool = False
    _stuck: bool = False
    _held: list[Gate] = field(default_factory=list)
    _waits: bool = False
    waiting: dict[Callable[[], None], None] = field(default_factory=dict)  # callbacks at the end, in order

    def join(self) -> None:
        self.interested += 1
        if self._waits:
            self.traffic.wait(1)

    def leave(self) -> None:
        self.interested -= 1
        if self._waits:
            self.traffic.wait(-1)
        if self.interested == 0 and self.end is None:
            self.give_up()

    async def pass_gates(self, gates: tuple[Gate, ...]) -> None:
        for gate in gates[len(self._held) :]:  # all gates, or none if it has already passed them
            if not gate.enter_nowait():
                if not self._waits:
                    self._waits = True
                    self.traffic.wait(self.interested)
                await gate.enter()
            self._held.append(gate)
        self._wait_ends()

    def pass_nowait(self, gates: tuple[Gate, ...]) -> bool:
        """Pass all gates if none requires waiting, else none. Returns whether it passed."""
        # A rate comes last: a used call of the rate cannot be returned.
        for gate in sorted(gates, key=lambda gate: isinstance(gate, RateGate)):
            if not gate.enter_nowait():
                self._let_go()
                return False
            self._held.append(gate)
        return True

    def set_clock(self, seconds: float, over: Callable[[], None]) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._clock = asyncio.get_running_loop().call_later(seconds, over)

    def give_up(self) -> None:
        """Cancel its task once. A second cancellation would interrupt a tool that is cleaning up."""
        if self.task is not None and not self.task.done() and not self._given_up:
            self._given_up = True
            if self.context is not None:
                self.context.cancelled.set()
            self.task.cancel()
            self.set_clock(ENDING_SECONDS, self._does_not_stop)

    def land(self, end: ToolOutcome | Exception) -> None:
        self.end = end
        for tell in tuple(self.waiting):
            tell()
        self.waiting.clear()
        self._wait_ends()

    def task_ended(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
        if self._stuck:
            self.traffic.stuck -= 1
        self._let_go()

    def _does_not_stop(self) -> None:
        self._stuck = True
        self.traffic.stuck += 1
        self._let_go()

    def _let_go(self) -> None:
        while self._held:
            self._held.pop().leave()

    def _wait_ends(self) -> None:
        if self._waits:
            self._waits = False
            self.traffic.wait(-self.interested)


class PendingCall:
    """One agent's part in a flight."""

    __slots__ = ("_asked", "_flight", "_holds", "_joined", "_tell")

    def __init__(self, flight: Flight, asked: float, *, joined: bool = False) -> None:
        self._flight = flight
        self._asked = asked
        self._joined = joined
        self._holds = True
        self._tell: Callable[[ToolOutcome | Exception], None] | None = None
        flight.join()

    def on_end(self, tell: Callable[[ToolOutcome | Exception], None]) -> None:
        """Call ``tell`` once with the outcome of the call, or at once if it has ended; never if it is abandoned first.
        A failure of the tool is an outcome. An exception is an internal error."""
        self._tell = tell
        if self._flight.end is not None:
            self._told()
        else:
            self._flight.waiting[self._told] = None

    def _told(self) -> None:
        tell, self._tell, end = self._tell, None, self._flight.end
        if tell is None or end is None:
            return
        if self._joined and isinstance(end, ToolOutcome):
            end = replace(end, source="shared", seconds=end.seconds - (self._asked - self._flight.asked))
        tell(end)

    async def wait(self) -> ToolOutcome:
        """Return the outcome of the call. Cancelling the wait does not cancel the call."""
        return await self.ended()

    def ended(self) -> asyncio.Future[ToolOutcome]:
        ended: asyncio.Future[ToolOutcome] = asyncio.get_running_loop().create_future()

        def tell(end: ToolOutcome | Exception) -> None:
            if not ended.done():
                ended.set_exception(end) if isinstance(end, Exception) else ended.set_result(end)

        self.on_end(tell)
        return ended

    def seconds(self, now: float) -> float:
        """Return the seconds from this agent's request until now, or until the end of the call."""
        end = self._flight.end
        ended = self._flight.asked + end.seconds if isinstance(end, ToolOutcome) else now
        return max(0.0, ended - self._asked)

    def abandon(self) -> None:
        """End this agent's interest in the call. When the last agent leaves, a running call is cancelled."""
        if self._holds:
            self._holds = False
            self._tell = None
            self._flight.waiting.pop(self._told, None)
            self._flight.leave()
