"""An execution is one run of one call. It knows which agents need it, whether it waits at a gate, and its outcome.

Each agent has a PendingCall on its execution, which is cancelled when the last agent has abandoned it, or at its
timeout. Cancelling does not depend on the tool: waiting agents get an outcome at once. The gates are released when the
tool has stopped, or after ``ENDING_SECONDS`` if it does not stop.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from batch_agent.errors import SpecError
from batch_agent.messages import Attachment, Content, content_text, images_of
from batch_agent.tools.context import ToolContext
from batch_agent.value_type import value_type


class Gate(Protocol):
    """A gate that a call passes before it runs."""

    def enter_nowait(self) -> bool:
        """Enter if no waiting is needed and no call is in the queue. Returns whether it entered."""

    async def enter(self) -> None: ...

    def leave(self) -> None:
        """Leave the gate after the call has ended."""


class Line:
    """The FIFO queue of a gate. A call that leaves it has used nothing. Leaving takes constant time, because thousands
    of calls may wait for one slow tool and be cancelled at once."""

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


_SECONDS = {"s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60, "h": 3600, "hour": 3600, "day": 86400}
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*/\s*([a-z]+)\s*", re.IGNORECASE)
# After sleeping until a time, the clock may show slightly less because of rounding.
_TOLERANCE = 1e-6
SLACK_SECONDS = 0.005  # a call that is let through starts a little later


def calls_per_second(rate: object) -> float:
    """Return ``10``, ``"10/s"``, ``"100/min"`` or ``"5/hour"`` as calls per second."""
    value = math.nan
    if isinstance(rate, str):
        match = _RATE.fullmatch(rate)
        if match and (unit := match[2].lower()) in _SECONDS:
            value = float(match[1]) / _SECONDS[unit]
    elif isinstance(rate, int | float) and not isinstance(rate, bool):
        value = float(rate)
    if not (math.isfinite(value) and value > 0):
        raise SpecError(f'rate_limit is {rate!r}: give calls per second, as 10 or "10/s", "100/min", "5/hour"')
    return value


class Window:
    """The times of the latest starts; it has room for as many as may start at once. It reads no clock: each method
    takes the time."""

    def __init__(self, rate: float) -> None:
        calls = max(1, int(rate))
        self._seconds = calls / rate + SLACK_SECONDS
        self._starts = deque([-math.inf] * calls, calls)

    def delay(self, now: float, ahead: int = 0) -> float:
        """Return the seconds until a call with ``ahead`` calls before it may start; 0 means now."""
        windows, place = divmod(ahead, len(self._starts))
        due = max(now, self._starts[place] + self._seconds) + windows * self._seconds
        return due - now if due - now > _TOLERANCE else 0.0

    def take(self, now: float) -> None:
        self._starts.append(now)

    def put_back(self) -> None:
        """Undo the latest start."""
        self._starts.pop()
        self._starts.appendleft(-math.inf)


class RateGate:
    """Gate that admits calls in FIFO order at the rate. A call that leaves the queue uses nothing.

    With "10/s", ten calls start at once, and the next ones when these are a second old: at most ten start in any
    second. With "5/hour", one call starts now and the next in twelve minutes.
    """

    def __init__(self, rate: float) -> None:
        self._window = Window(rate)
        self._line = Line()
        self._timer: asyncio.TimerHandle | None = None  # set while a call waits

    def enter_nowait(self) -> bool:
        now = asyncio.get_running_loop().time()
        if self._line or self._window.delay(now) > 0:
            return False
        self._window.take(now)
        return True

    async def enter(self) -> None:
        if self.enter_nowait():
            return
        self._set_timer()
        try:
            await self._line.wait(self._missed)
        finally:
            if not self._line and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def expected_wait(self) -> float:
        """Return the seconds that a call would wait now."""
        return self._window.delay(asyncio.get_running_loop().time(), len(self._line))

    def leave(self) -> None:
        """Do nothing: a rate counts the starts of calls."""

    def _missed(self) -> None:
        self._window.put_back()
        self._open()

    def _set_timer(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._window.delay(loop.time()), self._due)

    def _due(self) -> None:
        self._timer = None
        self._open()

    def _open(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._line and self._window.delay(now) == 0:
            if self._line.call_next():
                self._window.take(now)
        if self._line:
            self._set_timer()


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
    """Cached results of tools for one run: an LRU cache with a limit in bytes. Pure."""

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
        """Return whether this is the first request for a prewarmed result. After that it counts as requested."""
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


# Each bucket is 2 % wider than the one before, so the error of a quantile is at most 1 %.
_LOG_STEP = math.log(1.02)
_SHORTEST = 1e-6
# Different calls of an undeclared tool that are remembered to recognise identical ones. This limits memory: with more
# calls, the number of calls that could have been saved is a lower bound.
_REMEMBERED = 100_000
# Reasons that are kept, and characters of each. A new reason replaces the least frequent one. Frequent reasons stay,
# but their counts may be too low.
REASONS = 16
REASON_CHARACTERS = 200


class Latency:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self._count = 0

    def add(self, seconds: float) -> None:
        self._buckets[round(math.log(max(seconds, _SHORTEST)) / _LOG_STEP)] += 1
        self._count += 1

    def quantile(self, share: float) -> float | None:
        """Return the time within which ``share`` of the calls ended; None without calls."""
        wanted = max(1, math.ceil(share * self._count))
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return math.exp(bucket * _LOG_STEP)
        return None


@dataclass(frozen=True, slots=True)
class ToolStatistics:
    """Statistics of one tool in one run. Latencies are seconds of runs, without waits for a rate limit or a thread."""

    name: str
    calls: int  # calls of models
    runs: int  # runs that were started
    shared: int  # calls answered by a run that another agent had started
    cache_hits: int
    failures: int  # failed runs, and calls with invalid arguments
    failure_reasons: tuple[tuple[str, int], ...]  # the most frequent messages of failures, with their counts
    p50: float | None
    p75: float | None
    p99: float | None
    saveable: int  # runs that declaring an undeclared tool would have saved
    prewarmed: int = 0  # runs started because an earlier run made the same call
    prewarm_hits: int = 0  # prewarmed runs whose call a model then made
    prewarm_misses: int = 0  # calls of a cacheable tool that were neither prewarmed nor cached

    @property
    def advice(self) -> str:
        """Return a sentence for the run's summary, or ""."""
        if not self.saveable:
            return ""
        times = "once" if self.saveable == 1 else f"{self.saveable:,} times"
        return (
            f"{self.name} ran {times} with arguments that it had run with before. If it only reads, declare it "
            f"with Tool.define(cacheable=True), or with effect='read' if its results change."
        )


class ToolTally:
    def __init__(self) -> None:
        self.calls = self.runs = self.shared = self.cache_hits = self.failures = self.saveable = 0
        self.prewarmed = self.prewarm_hits = self.prewarm_misses = 0
        self.latency = Latency()
        self._seen: set[int] = set()
        self._reasons: Counter[str] = Counter()

    def fail(self, reason: str) -> None:
        self.failures += 1
        reason = " ".join(reason[: 2 * REASON_CHARACTERS].split())[:REASON_CHARACTERS]
        if reason not in self._reasons and len(self._reasons) == REASONS:
            del self._reasons[min(self._reasons, key=self._reasons.__getitem__)]
        self._reasons[reason] += 1

    def compare(self, key: str) -> None:
        """Count a call that runs only because its tool is undeclared."""
        mark = hash(key)
        if mark in self._seen:
            self.saveable += 1
        elif len(self._seen) < _REMEMBERED:
            self._seen.add(mark)

    def statistics(self, name: str) -> ToolStatistics:
        counts: dict[str, Any] = {each: count for each, count in vars(self).items() if isinstance(count, int)}
        p50, p75, p99 = map(self.latency.quantile, (0.50, 0.75, 0.99))
        reasons = tuple(self._reasons.most_common())
        return ToolStatistics(name, failure_reasons=reasons, p50=p50, p75=p75, p99=p99, **counts)


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
    """Counts of a pool. ``waiting``: calls of agents that wait at gates. ``stuck``: cancelled calls that do not
    stop."""

    def __init__(self, on_waiting: Callable[[int], None] | None) -> None:
        self.waiting = self.stuck = 0
        self._on_waiting = on_waiting

    def wait(self, change: int) -> None:
        self.waiting += change
        if change and self._on_waiting is not None:
            self._on_waiting(self.waiting)


@dataclass(slots=True, eq=False)
class Execution:
    name: str  # of its tool
    key: Key | None  # None: other calls may not join
    asked: float
    traffic: Traffic
    unasked: bool = False  # prewarmed, and no model has made the call yet
    context: ToolContext | None = None  # if its tool has such a parameter
    began: float | None = None  # time at which the tool's code was called; None until then
    end: ToolOutcome | Exception | None = None  # an exception is an internal error, raised in waiting agents
    interested: int = 0
    task: asyncio.Task[None] | None = None
    _clock: asyncio.TimerHandle | None = None  # timeout of the run; after cancelling, of the stop
    _cancelled: bool = False
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
            self.cancel()

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
        """Pass all gates if none of them requires waiting; otherwise pass none. Returns whether it passed."""
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

    def cancel(self) -> None:
        """Cancel its task once. A second cancellation would interrupt a tool that is cleaning up."""
        if self.task is not None and not self.task.done() and not self._cancelled:
            self._cancelled = True
            if self.context is not None:
                self.context.cancelled.set()
            self.task.cancel()
            self.set_clock(ENDING_SECONDS, self._does_not_stop)

    def finish(self, end: ToolOutcome | Exception) -> None:
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
    """The part of one agent in an execution."""

    __slots__ = ("_asked", "_execution", "_holds", "_joined", "_tell")

    def __init__(self, execution: Execution, asked: float, *, joined: bool = False) -> None:
        self._execution = execution
        self._asked = asked
        self._joined = joined
        self._holds = True
        self._tell: Callable[[ToolOutcome | Exception], None] | None = None
        execution.join()

    def on_end(self, tell: Callable[[ToolOutcome | Exception], None]) -> None:
        """Call ``tell`` once with the outcome of the call, or at once if it has ended; never if it is abandoned first.
        A failure of the tool is an outcome. An exception is an internal error."""
        self._tell = tell
        if self._execution.end is not None:
            self._told()
        else:
            self._execution.waiting[self._told] = None

    def _told(self) -> None:
        tell = self._tell
        self._tell = None
        end = self._execution.end
        if tell is None or end is None:
            return
        if self._joined and isinstance(end, ToolOutcome):
            end = replace(end, source="shared", seconds=end.seconds - (self._asked - self._execution.asked))
        tell(end)

    @property
    def has_begun(self) -> bool:
        """Whether the tool's code was called."""
        return self._execution.began is not None

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
        end = self._execution.end
        ended = self._execution.asked + end.seconds if isinstance(end, ToolOutcome) else now
        return max(0.0, ended - self._asked)

    def abandon(self) -> None:
        """End this agent's interest in the call. When the last agent leaves, a running call is cancelled."""
        if self._holds:
            self._holds = False
            self._tell = None
            self._execution.waiting.pop(self._told, None)
            self._execution.leave()


class EndedCall(PendingCall):
    """A call that needed no execution: its result was cached, or it is invalid."""

    __slots__ = ("_end",)

    def __init__(self, end: ToolOutcome) -> None:
        self._end = end

    def on_end(self, tell: Callable[[ToolOutcome | Exception], None]) -> None:
        tell(self._end)

    @property
    def has_begun(self) -> bool:
        return False

    def seconds(self, now: float) -> float:
        return self._end.seconds

    def abandon(self) -> None: ...
