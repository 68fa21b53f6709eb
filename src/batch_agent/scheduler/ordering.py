"""Decides which waiting turn goes next, from what is expected of each agent (``TurnForecast``).

The agent with the fewest expected turns left goes first, because an agent that ends gives a result and frees its
context. This rule alone leaves the longest agents for last, and they then run with most slots idle. So when the number
of rows is known and the batch is ending, every other slot goes to the agent with the most turns left: half of the slots
work on the longest agents, and the other half delivers results early. When the work left per slot takes hardly longer
than the longest agent, that agent gets every slot: each of its waits would delay the end.

Requests that are not an agent's turn, such as summaries, have a queue of their own, which comes last. Interactive
requests have one that comes first.

Agents that have taken the same number of turns wait in one queue. The queues are compared when a slot is free, with the
estimates of that time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Generic, Literal, Self, TypeVar

from batch_agent.scheduler.numbers import N

if TYPE_CHECKING:
    from batch_agent.scheduler.server import Endpoint

ENDING = 1.7  # the batch is ending if the work left per slot takes at most this many times the longest remaining agent
FIRST_GUESS = 4  # minimum turns expected of an agent until one has ended


class AgentForecast:
    """The state of one agent."""

    __slots__ = (
        "answered_at",
        "certain_distance",
        "distance",
        "expected",
        "home",
        "key",
        "live",
        "model",
        "tokens",
        "turns",
    )

    def __init__(self, turns: int = 0, *, key: str = "", model: str = "") -> None:
        self.turns = turns  # turns taken when it last requested another
        self.key = key  # agents with the same key should share an endpoint
        self.model = model  # the model that it uses; "": any
        self.home: Endpoint | None = None  # the endpoint of its last answer, which has its prefix cached
        self.tokens = 0  # of that prefix
        self.expected = 0  # estimated tokens of its next prompt
        self.distance: int | None = None  # tokens of other contexts used between its last turn and this one
        self.certain_distance = 0  # ... without those of requests in flight
        self.live = False  # between the start and the end of an agent
        self.answered_at: float | None = None  # time of its last answer, until it requests the next turn


class TurnForecast:
    """Estimates the rest of an agent from the run so far: turns, seconds per turn, seconds between turns.

    After each turn an agent continues or ends. The share that continues after its n-th turn, among all agents that took
    it, gives the expected number of turns left after n turns. This is the Kaplan-Meier estimate: running agents count
    as much as finished ones. If all agents take the same number of turns, the estimate falls by one with each turn. If
    chance decides (geometric distribution), it stays the same. With a heavy tail it grows. Until the first agent has
    ended, all agents are expected to take twice as many turns as the furthest one.
    """

    def __init__(self) -> None:
        self.rows: int | None = None  # rows still to be started; None: unknown
        self.live_turns = 0.0  # sum of the expected turns of all live agents
        self.started = 0  # agents, in all
        # Indexed by turns taken; the last index is the most that any agent has taken.
        self._live = [0]
        self._went_on = [0]
        self._ended = [0]
        self._turns_left = [1.0]
        self._ends = 0
        self._learn_at = 1
        self._turn_count = self._rest_count = 0
        self._turn_seconds = self._rest_seconds = 0.0

    def start(self) -> None:
        self.started += 1
        self._live[0] += 1
        self.live_turns += self._turns_left[0]

    def go_on(self, progress: AgentForecast, turns: int, now: float) -> None:
        """Record that the agent has taken ``turns`` turns and requests the next one. A repeated call has no effect."""
        if progress.answered_at is not None:
            self._rest_count += 1
            self._rest_seconds += now - progress.answered_at
            progress.answered_at = None
        if turns <= progress.turns:
            return
        further = self._see(progress, turns)
        self._live[turns] += 1
        self.live_turns += self._turns_left[turns]
        progress.turns = turns
        if further:
            self._learn()

    def answered(self, progress: AgentForecast, seconds: float, now: float) -> None:
        self._turn_count += 1
        self._turn_seconds += seconds
        progress.answered_at = now

    def end(self, progress: AgentForecast, turns: int) -> None:
        """Record that the agent has ended. A turn that it requested and never got counts as its last."""
        turns = max(turns, progress.turns + 1)
        self._see(progress, turns)
        self._went_on[turns] -= 1
        self._ended[turns] += 1
        self._ends += 1
        if self._ends >= self._learn_at:
            self._learn_at = self._ends + int(N.small * self._ends) + 1
            self._learn()

    @property
    def turns_to_come(self) -> float:
        """Total expected turns, including those in flight; infinite if the number of rows is unknown."""
        return inf if self.rows is None else self.live_turns + self.rows * self._turns_left[0]

    def turns_left(self, turns: int) -> float:
        """Return the expected turns left of an agent that has taken ``turns``."""
        return self._turns_left[turns]

    @property
    def live(self) -> int:
        """Number of agents that have started and not ended."""
        return sum(self._live)

    @property
    def all_started(self) -> bool:
        """Whether every agent of the batch has started, and there are more than a few."""
        return self.rows == 0 and self.started > N.few

    @property
    def furthest(self) -> int:
        """The most turns that any agent has taken."""
        return len(self._live) - 1

    @property
    def seconds_per_turn(self) -> float:
        """Mean seconds of a request; 0 before the first answer."""
        return self._turn_seconds / self._turn_count if self._turn_count else 0.0

    @property
    def seconds_between_turns(self) -> float:
        """Mean seconds from an answer to the agent's next request."""
        return self._rest_seconds / self._rest_count if self._rest_count else 0.0

    def goes_on(self, turns: int) -> float:
        """Return the probability that an agent that has taken ``turns`` turns takes another one."""
        if not turns:
            return 1.0
        furthest = len(self._live) - 1
        if turns > furthest or not (resolved := self._went_on[turns] + self._ended[turns]):
            return 1.0 if not self._ends and turns < max(FIRST_GUESS, 2 * furthest) else 0.0
        return self._went_on[turns] / resolved

    def slack(self, turns: int, slots: int) -> float:
        """Return the ratio of the work left per slot to the remaining time of an agent that has taken ``turns``.

        The remaining time is how long the agent takes if it never waits for a slot. Infinite while the number of rows
        or the length of a turn is unknown.
        """
        if self.rows is None or not self._turn_seconds:
            return inf
        left = self._turns_left[turns]
        rest = self._rest_seconds / self._rest_count if self._rest_count else 0.0
        way = left + (left - 1) * rest * self._turn_count / self._turn_seconds  # in turns, like the work
        return (self.live_turns + self.rows * self._turns_left[0]) / slots / way

    def ending(self, turns: int, slots: int) -> bool:
        """Return whether an agent that has taken ``turns`` is among those that determine the end of the batch."""
        return self.slack(turns, slots) <= ENDING

    def _see(self, progress: AgentForecast, turns: int) -> bool:
        """Record that the agent continued up to ``turns``. Returns True if no agent was as far before."""
        before, live = progress.turns, self._live
        live[before] -= 1
        self.live_turns -= self._turns_left[before]
        further = turns >= len(live)
        while turns >= len(live):
            live.append(0)
            self._went_on.append(0)
            self._ended.append(0)
            self._turns_left.append(self._turns_left[-1])
        if turns == before + 1:  # the usual case
            self._went_on[turns] += 1
        else:
            for taken in range(before + 1, turns + 1):
                self._went_on[taken] += 1
        return further

    def _learn(self) -> None:
        furthest = len(self._live) - 1
        # No agent was seen beyond the furthest: expect the same number again or, once agents have ended, the mean
        # between ends.
        left = (sum(self._went_on) + self._ends) / self._ends if self._ends else float(furthest)
        self._turns_left[furthest] = left = max(1.0, left)
        for taken in range(furthest, 0, -1):
            goes_on = self._went_on[taken] / (self._went_on[taken] + self._ended[taken])
            self._turns_left[taken - 1] = left = 1.0 + goes_on * left
        self.live_turns = sum(live * left for live, left in zip(self._live, self._turns_left, strict=True))


FIRST = -2  # instead of turns taken: the queue that is served before all others
LAST = -1  # instead of turns taken: the queue that is served when all others are empty
URGENT = 1.3  # the longest agent gets every slot if the work left per slot takes at most this many times as long

Waiting = TypeVar("Waiting", bound=Hashable)


class Queue(Generic[Waiting]):
    def __init__(self, forecast: TurnForecast) -> None:
        self._forecast = forecast
        self.lines: dict[int, OrderedDict[Waiting, int]] = {}  # by turns taken; without empty queues
        self._taken = 0
        self.size = 0  # turns that wait

    def __bool__(self) -> bool:
        return self.size > 0

    def add(self, waiting: Waiting, turns: int, *, first: bool = False) -> None:
        line = self.lines.get(turns)
        if line is None:
            line = self.lines[turns] = OrderedDict()
        line[waiting] = self._taken
        self.size += 1
        if first:
            line.move_to_end(waiting, last=False)

    def remove(self, waiting: Waiting, turns: int) -> None:
        line = self.lines[turns]
        del line[waiting]
        self.size -= 1
        if not line:
            del self.lines[turns]

    def first(self) -> Sequence[Waiting]:
        """Return the waiting interactive requests, in order."""
        return tuple(self.lines.get(FIRST, ()))

    def newest(self) -> Iterator[Waiting]:
        """Yield, for each number of turns taken, the turn that joined the queue last. Turns that failed are in front of
        new ones."""
        return (next(reversed(line)) for line in self.lines.values())

    def take(self, slots: int | None) -> Waiting:
        """Remove and return the next turn. The queue must not be empty. ``slots`` is the total number of slots."""
        self._taken += 1
        turns = self._next_line(slots)
        line = self.lines[turns]
        waiting, _ = line.popitem(last=False)
        self.size -= 1
        if not line:
            del self.lines[turns]
        return waiting

    def _next_line(self, slots: int | None) -> int:
        lines, forecast = self.lines, self._forecast
        if len(lines) == 1:
            return next(iter(lines))
        if FIRST in lines:
            return FIRST
        if self._taken % N.rarely == 0:
            oldest = min(lines, key=self._joined)
            if self._taken - self._joined(oldest) >= N.rarely:
                return oldest
        if LAST in lines:
            lines = {turns: line for turns, line in lines.items() if turns != LAST}
        if slots:  # it is 0 while every endpoint is down
            longest = max(lines, key=forecast.turns_left)
            slack = forecast.slack(longest, slots)
            if slack <= URGENT or (slack <= ENDING and self._taken % 2):
                return longest
        return min(lines, key=forecast.turns_left)

    def _joined(self, turns: int) -> int:
        """Return the number of grants when the first turn of this queue joined it."""
        return next(iter(self.lines[turns].values()))

    def is_urgent(self, slots: int | None) -> bool:
        """Return whether a turn that waits here determines the end of the batch."""
        turns = [turns for turns in self.lines if turns >= 0]
        if not slots or not turns:
            return False
        return self._forecast.slack(max(turns, key=self._forecast.turns_left), slots) <= URGENT


class ResidentFirst(Queue[Waiting]):
    """A queue in which agents with evicted contexts come last. They need more of the engine, and would delay agents
    that can continue at once. One in a few grants goes to them, and every grant if they determine the end of the
    batch."""

    def __init__(self, forecast: TurnForecast, is_evicted: Callable[[Waiting], bool]) -> None:
        super().__init__(forecast)
        self._is_evicted = is_evicted
        self._evicted: Queue[Waiting] = Queue(forecast)
        self._late: set[Waiting] = set()  # turns in ``_evicted``

    def add(self, waiting: Waiting, turns: int, *, first: bool = False) -> None:
        if self._is_evicted(waiting):
            self._late.add(waiting)
            self.size += 1
            self._evicted.add(waiting, turns, first=first)
        else:
            super().add(waiting, turns, first=first)

    def remove(self, waiting: Waiting, turns: int) -> None:
        if waiting in self._late:
            self._late.remove(waiting)
            self.size -= 1
            self._evicted.remove(waiting, turns)
        else:
            super().remove(waiting, turns)

    def newest(self) -> Iterator[Waiting]:
        yield from super().newest()
        yield from self._evicted.newest()

    def take(self, slots: int | None) -> Waiting:
        late = self._evicted
        if not late.size:
            return super().take(slots)
        if self.lines and self._taken % N.few and not late.is_urgent(slots):
            return super().take(slots)
        self._taken += 1
        self.size -= 1
        waiting = late.take(slots)
        self._late.remove(waiting)
        return waiting


Place = TypeVar("Place", bound=Hashable)


class Parking(Generic[Waiting, Place]):
    """Turns that wait for one endpoint although others may be free.

    Each place has a queue of its own, so these turns do not block others. A place is an endpoint, or the name of a
    model that no free endpoint serves. A turn stops waiting once that costs more than recomputing the prefix.
    """

    def __init__(self, forecast: TurnForecast) -> None:
        self._forecast = forecast
        self._lines: dict[Place, Queue[Waiting]] = {}  # without empty queues
        self.parked: dict[Waiting, tuple[Place, int, int]] = {}  # place, turns taken, and the number of its entry
        self.names: dict[str, None] = {}  # the places that are model names
        self._counts: dict[Place, int] = {}
        self._dues: list[tuple[float, int, Waiting]] = []
        self._numbers = 0

    def __len__(self) -> int:
        return len(self.parked)

    def __contains__(self, place: Place) -> bool:
        return place in self._lines

    def waiting(self, place: Place) -> int:
        return self._counts.get(place, 0)

    def park(self, waiting: Waiting, turns: int, place: Place, due: float = inf) -> None:
        line = self._lines.get(place)
        if line is None:
            line = self._lines[place] = Queue(self._forecast)
            if isinstance(place, str):
                self.names[place] = None
        line.add(waiting, turns)
        self._counts[place] = self._counts.get(place, 0) + 1
        self._numbers += 1
        self.parked[waiting] = place, turns, self._numbers
        if due < inf:
            heappush(self._dues, (due, self._numbers, waiting))

    def take(self, place: Place, slots: int | None) -> Waiting | None:
        """Remove and return the next turn that waits for this place, or None."""
        line = self._lines.get(place)
        if line is None:
            return None
        waiting = line.take(slots)
        self._forget(waiting)
        return waiting

    def remove(self, waiting: Waiting) -> None:
        place, turns, _ = self.parked[waiting]
        self._lines[place].remove(waiting, turns)
        self._forget(waiting)

    def impatient(self, now: float) -> Waiting | None:
        """Remove and return a turn that has waited long enough, or None."""
        if self.due > now:
            return None
        _, _, waiting = heappop(self._dues)
        self.remove(waiting)
        return waiting

    @property
    def due(self) -> float:
        """When the next turn will have waited long enough; infinite if none will."""
        while self._dues:
            due, number, waiting = self._dues[0]
            parked = self.parked.get(waiting)
            if parked is not None and parked[2] == number:
                return due
            heappop(self._dues)
        return inf

    def _forget(self, waiting: Waiting) -> None:
        place, _, _ = self.parked.pop(waiting)
        self._counts[place] -= 1
        if not self._counts[place]:
            del self._counts[place], self._lines[place]
            if isinstance(place, str):
                del self.names[place]


UNKNOWN_SECONDS = 15.0  # length of a pin while no agent has returned from a tool, or tools take no time


@dataclass(frozen=True, slots=True)
class KvParts:
    """The parts of scheduling by an engine's KV cache. Each can be switched on and off alone. ``kvflow="auto"`` enables
    the parts with a measured gain (docs/kv.md), ``True`` all of them, ``False`` none."""

    admission: bool = True  # an agent whose context does not fit waits
    order: bool = True  # among ready agents, those whose context is probably still cached go first
    touch: bool = False  # an evicted context is computed again while the agent's tool runs
    keep_alive: bool = False  # the shared prefix is touched while all agents wait for tools and others use the engine
    pin: bool = False  # engines that support it keep the contexts of agents that wait for tools

    @classmethod
    def of(cls, kvflow: bool | Literal["auto"]) -> Self:
        """Return the parts that a value of the option ``kvflow`` switches on."""
        return cls() if kvflow == "auto" else cls(*(5 * [kvflow]))

    @property
    def any(self) -> bool:
        return self.admission or self.order or self.touch or self.keep_alive or self.pin


def pin_seconds(forecast: TurnForecast, turns: int) -> float:
    """Return how many seconds an engine should keep the context of an agent that has taken ``turns`` turns; 0: no pin.
    Without a pin, an engine evicts the least recently used context: it does not know that an agent in a tool wait will
    continue."""
    if forecast.goes_on(turns + 1) < N.mostly:
        return 0.0
    wait = forecast.seconds_between_turns
    if not wait:
        return UNKNOWN_SECONDS
    return N.much_slower * wait + N.short_wait


# Seconds for one token of a stream: 15 µs of our event loop, and about 30 of the server, which writes an event for it
# while its other requests wait (measured on vLLM and an H200).
TOKEN_SECONDS = 45e-6


class Streaming:
    """Decides whether to stream the answers of a run, so that tools can start before the answer is complete.

    The gain of streaming belongs to the agent: the time that its tools had run when the answer was complete. The cost
    is a little time of the server and of the event loop for each token, and all agents share both: while an event is
    written or read for one agent, the others in flight may have to wait. So a turn is worth streaming if its agent
    gains more than all agents together can lose. While other agents take each slot that becomes free
    (``Scheduler.is_crowded``), an agent that is ready sooner only waits longer, and nothing is streamed.

    A trial decides: enough answers are measured, of twice as many streamed turns, because some fail. While it pays,
    each further answer is added to the mean, in which older answers count less. Agents often move in waves, and a wave
    of last answers, which call no tool, is no reason to stop. When streaming does not pay, many turns are not streamed,
    and then there is another trial, because tools and answers may have changed. The caller measures each turn: this
    class has no clock.
    """

    def __init__(self) -> None:
        self._told: bool | None = None  # the last decision that was reported
        self._begin_trial()

    def _begin_trial(self) -> None:
        self._pays: bool | None = None  # None: on trial
        self._asked = 0  # turns streamed for the trial
        self._whole = 0  # turns since then that were not streamed
        self._answers = 0
        self._gained = self._cost = 0.0  # of those answers, in seconds

    def wants_next(self) -> bool:
        """Return whether to stream the next turn."""
        if self._pays:
            return True
        if self._whole >= N.rarely:  # also after a trial whose answers never arrived
            self._begin_trial()
        if self._pays is None and self._asked < 2 * N.enough:
            self._asked += 1
            return True
        self._whole += 1
        return False

    def learn(self, gained: float, tokens: int, inflight: int) -> tuple[bool, str] | None:
        """Learn from a complete streamed answer. ``gained``: seconds that its tools had already run at its end.
        ``inflight``: turns in flight. Returns a new decision with its reason, or None if the decision stays."""
        if self._pays is False:  # it was sent before streaming stopped
            return None
        self._answers += 1
        self._gained += gained
        self._cost += tokens * TOKEN_SECONDS * max(1, inflight)
        if self._answers < N.enough:
            return None
        gain, cost = self._gained / self._answers, self._cost / self._answers
        self._pays = gain > cost
        if self._answers >= N.rarely:  # all earlier ones count half
            self._answers //= 2
            self._gained /= 2
            self._cost /= 2
        if self._pays is self._told:
            return None
        self._told = self._pays
        verdict = "more" if self._pays else "no more"
        reason = f"early tools gain {gain:.2g} s per turn, {verdict} than the {cost:.2g} s that reading tokens costs"
        return self._pays, reason
