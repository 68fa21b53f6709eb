"""Which line starts next: tenants have fair shares; among the lines of a tenant, the earliest deadline is first; people
go before lines.

One task starts lines. A line starts only while the dispatcher has room, no interactive request waits (here or in a
queue that an engine reports), and fewer lines are in flight than the ``Governor`` allows. It is taken from the tenant
that has used the fewest tokens for its share, and there from the batch with the earliest deadline.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from math import inf, isinf

from batch_agent.backends.base import Load
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.policy import Question
from batch_agent.scheduler.server import Endpoint
from batch_agent.serve.governor import Governor
from batch_agent.serve.ledger import TokenLedger

PENDING = 32  # lines that were started and have not asked for a slot yet
TICK_SECONDS = 0.2  # between two looks at conditions that are not reported
FIRST_GUESS = 256  # tokens of a line beside those of its text, until lines of its batch were answered
LINE_WEIGHT = 0.2  # the weight of the latest line in the tokens per line
QUEUE_SECONDS = 10.0  # that a reading of an engine's queue counts, if no other follows
FRESH_SECONDS = 0.25  # that a request may wait for the engine's next step
MOST_FRESH = 1024  # times of requests that are kept
GROUP = 0.25  # of the limit beside people: lines start together when that many may start
HOLD_SECONDS = 0.2  # that a line waits for others to start with
URGENT_SHARE = 0.25  # of the slots, for lines that would miss their deadline
YOUNG_SECONDS = 5.0  # that a line has been in flight at most, if its request is taken back when people come


@dataclass(slots=True, eq=False)
class TenantAccount:
    """The account of a tenant. ``used``: tokens divided by the tenant's share. A new account starts at the lowest value
    of all accounts."""

    share: float = 1.0
    used: float = 0.0
    inflight: int = 0
    tokens: int = 0  # in all, since this process started
    longest: int = 0  # tokens of its longest answer
    done: Counter[str] = field(default_factory=Counter)  # lines since this process started, by outcome


@dataclass(slots=True, eq=False, kw_only=True)
class StartedLine:
    """A line that was started. ``sent_at``: loop time at which its request was sent, or 0. ``taken_back``: its request
    was cancelled once because people came."""

    sent_at: float = 0.0
    endpoint: str = ""  # to which it was sent
    question: Question | None = None  # that was sent
    taken_back: bool = False


class LineSource(ABC):
    """A running batch. ``name`` is its id, ``deadline`` is in Unix seconds."""

    def __init__(self, name: str, tenant: str, deadline: float) -> None:
        self.name = name
        self.tenant = tenant
        self.deadline = deadline
        self.closed = False  # no further line of it starts
        self.model = ""  # of the line that was offered
        self.inflight = 0
        self.answered = 0
        self.per_line = 0.0  # tokens
        self.began = 0.0  # loop time at which its first line started
        self.needs = 0, 0  # tokens of the day that the offered line needs, at least and at most
        self.reserved = 0  # tokens of the day that are reserved for the line that starts

    @property
    @abstractmethod
    def left(self) -> int:
        """The number of lines that are not done."""

    @abstractmethod
    def offer(self) -> int | None:
        """Return the size in bytes of the line that may start next; None if none may start now."""

    @abstractmethod
    def start(self, expected: float) -> None:
        """Start the line that was offered. The account of its tenant was charged ``expected`` tokens."""

    def started_lines(self) -> Iterable[StartedLine]:
        """Return the lines that were started, have not ended, and may be offered again."""
        return ()

    def close(self) -> None:
        """Start no further line."""
        self.closed = True

    def expected(self, size: int) -> float:
        """Return how many tokens the next line, of ``size`` bytes, is expected to use."""
        return self.per_line if self.answered else size / 4 + FIRST_GUESS


class LineScheduler:
    """Starts lines. ``now`` returns Unix seconds. ``blocked`` returns the reason why no line may start at all, or "".
    ``stopped`` returns whether no server can answer a model now. ``travels``: processes on other machines may run a
    line that was started; all lines together take no more than the slots of this process."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        governor: Governor,
        ledger: TokenLedger,
        *,
        now: Callable[[], float],
        blocked: Callable[[], str] = lambda: "",
        stopped: Callable[[str], object] = lambda model: False,
        travels: bool = False,
    ) -> None:
        self._dispatcher = dispatcher
        self.governor = governor
        self._now = now
        self._blocked = blocked
        self.ledger, ledger.changed = ledger, self.touch
        self.stopped, self._travels = stopped, travels
        self._flying: Counter[str] = Counter()  # lines in flight, by model
        self._unsent: Counter[str] = Counter()  # of these, lines that have not asked for a slot yet
        self._feed = dispatcher.feed(lambda: None)
        self._feed.reading = True  # it has no rows of its own
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self.accounts: dict[str, TenantAccount] = {}
        self.sources: dict[str, LineSource] = {}
        self.inflight = 0
        self.why = ""  # why lines wait, for people
        self._engines: set[str] = set()  # endpoints that report their load: they stop work that is taken back
        self._queued: dict[str, float] = {}  # by endpoint: loop time at which its engine last had a queue
        self._sends: dict[str, deque[float]] = {}  # by endpoint: loop times at which requests were sent, the latest
        self._free_since: float | None = None  # loop time at which lines could start beside people, and wait for others
        self.resting = False  # the process is ending: no further line starts

    # The engines' queues: what ``poll_load`` reads

    in_gaps = False

    async def read(self, endpoint: Endpoint, load: Load) -> None:
        """Note the load that an engine reports. Requests that were just sent are no queue: they wait for the engine's
        next step."""
        self._engines.add(endpoint.name)
        now = asyncio.get_running_loop().time()
        waiting = load.waiting
        sends = self._sends.get(endpoint.name, ())
        if waiting and (len(sends) < waiting or sends[-waiting] < now - FRESH_SECONDS):
            self._queued[endpoint.name] = now
        elif self._queued.pop(endpoint.name, None) is not None:
            self.touch()

    def note_sent(self, endpoint: str) -> None:
        """Note that a request was sent to an endpoint, for a line or for people."""
        sends = self._sends.get(endpoint)
        if sends is None:
            sends = self._sends[endpoint] = deque(maxlen=MOST_FRESH)
        sends.append(asyncio.get_running_loop().time())

    def may_wait_in_engine(self) -> bool:
        """Return whether an interactive request may be in the queue of an engine."""
        if not self.governor.active:
            return False
        since = asyncio.get_running_loop().time() - QUEUE_SECONDS
        endpoints = self._dispatcher.scheduler.endpoints
        return any(each.inflight and self._queued.get(each.name, -inf) > since for each in endpoints)

    def person_came(self) -> None:
        """Note that an interactive request has come. If it is the first after a pause, the youngest lines beyond the
        limit are cancelled at their engines, which have done the least work for them, and start again when there is
        room."""
        now = asyncio.get_running_loop().time()
        if self.governor.began(now, self.inflight) and (limit := self.governor.limit(now)) is not None:
            lines = chain.from_iterable(source.started_lines() for source in self.sources.values())
            young = sorted(filter(self._is_young, lines), key=lambda line: line.sent_at, reverse=True)
            chosen = young[: max(0, self._moving() - limit)]
            for line in chosen:
                line.taken_back = True
            self._dispatcher.endpoints.flights.withdraw(now, [line.question for line in chosen if line.question])
        self.touch()

    def _is_young(self, line: StartedLine) -> bool:
        """Return whether little work is lost if the request of a line is cancelled. No line is cancelled twice."""
        since = asyncio.get_running_loop().time() - YOUNG_SECONDS
        return line.endpoint in self._engines and line.sent_at > since and not line.taken_back

    # Batches

    def enter(self, source: LineSource) -> None:
        self.sources[source.name] = source
        account = self.account(source.tenant)
        active = {each.tenant for each in self.sources.values() if each is not source}
        if source.tenant not in active and active:  # it has no claim to what it left unused before
            account.used = max(account.used, min(self.account(name).used for name in active))
        self.touch()

    def leave(self, source: LineSource) -> None:
        source.close()
        self.sources.pop(source.name, None)
        self.touch()

    def account(self, tenant: str) -> TenantAccount:
        account = self.accounts.get(tenant)
        if account is None:
            account = self.accounts[tenant] = TenantAccount()
        return account

    def waits(self, model: str) -> bool:
        """Return whether no line for a model may start now, because its servers cannot answer and one line already
        tries them. Lines for other models must not wait behind it."""
        return self._flying[model] > 0 and bool(self.stopped(model))

    def _moving(self) -> int:
        """Return the number of lines in flight, without those that wait for a server to come back."""
        return self.inflight - sum(lines for model, lines in self._flying.items() if lines and self.stopped(model))

    def set_terms(self, tenant: str, share: float, tokens_per_day: int | None) -> None:
        self.account(tenant).share = share
        self.ledger.set_limit(tenant, tokens_per_day)
        self.touch()

    @property
    def _pending(self) -> int:
        return sum(lines for model, lines in self._unsent.items() if lines and not self.stopped(model))

    def sent(self, model: str = "") -> None:
        """Note that a line for a model has got its slot."""
        self._unsent[model] = max(0, self._unsent[model] - 1)
        self.touch()

    def ended(
        self,
        source: LineSource,
        tokens: int,
        expected: float,
        *,
        sent: bool,
        model: str = "",
        reserved: int = 0,
        lost: int = 0,
    ) -> None:
        """Note that a line has ended, and count its ``tokens``. ``expected`` tokens were charged when it was started,
        and ``reserved`` of the day. ``lost``: tokens of an answer that is no longer awaited."""
        self._flying[model] -= 1
        if not sent:
            self._unsent[model] = max(0, self._unsent[model] - 1)
        account = self.account(source.tenant)
        account.inflight -= 1
        source.inflight -= 1
        self.inflight -= 1
        if not self.inflight:
            self._idle.set()
        account.used += (tokens - expected) / account.share
        self.spend(source.tenant, tokens + lost, reserved)
        if tokens:
            source.answered += 1
            source.per_line += (tokens - source.per_line) * max(LINE_WEIGHT, 1 / source.answered)
        self.touch()

    def spend(self, tenant: str, tokens: int, reserved: int) -> None:
        """Count tokens that a tenant used for a line or an interactive request, in place of what was reserved."""
        self.account(tenant).tokens += tokens
        self.ledger.settle(tenant, reserved, tokens)

    async def wait_idle(self) -> None:
        """Wait until no line is in flight."""
        while self.inflight:
            self._idle.clear()
            await self._idle.wait()

    def drain(self) -> None:
        """Start no further line, because the process is ending."""
        self.resting = True
        for source in tuple(self.sources.values()):
            source.close()

    # Starting lines

    def touch(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Start lines until cancelled."""
        ticking = asyncio.create_task(self._tick())
        try:
            while await self._feed.wait_room():
                if not self.start_next():
                    self._changed.clear()
                    await self._changed.wait()
        finally:
            ticking.cancel()

    def close(self) -> None:
        """Start no further line, because the server has ended."""
        self._feed.close()

    def start_next(self) -> bool:
        """Start the next line. Returns False if none may start now."""
        scheduler = self._dispatcher.scheduler
        slots = scheduler.slots  # 0 in an outage: then one line is the trial
        pending = self._pending
        if pending and slots is not None and scheduler.inflight + pending >= slots:
            return False  # the free slots will be taken by lines that were started
        chosen = self._choose(slots)
        if chosen is None:
            return False
        source, size = chosen
        expected, account = source.expected(size), self.account(source.tenant)
        account.used += expected / account.share
        source.reserved = self.ledger.take(source.tenant, *source.needs)
        for one in (account, source, self):
            one.inflight += 1
        self._flying[source.model] += 1
        self._unsent[source.model] += not self._travels
        if not source.began:
            source.began = asyncio.get_running_loop().time()
        source.start(expected)
        return True

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.touch()

    def _choose(self, slots: int | None) -> tuple[LineSource, int] | None:
        """Return the batch whose line starts next, and the size of that line in bytes; None if no line may start
        now."""
        self.why = ""
        full = self._travels and slots is not None and self._moving() >= max(1, slots)
        if self._pending >= PENDING or full or self.resting:
            return None
        offered = [(each, size) for each in tuple(self.sources.values()) if (size := each.offer()) is not None]
        if not offered:
            return None
        if why := self._blocked():
            self.why = why
            return None
        within = [one for one in offered if self.ledger.may_take(one[0].tenant, *one[0].needs)]
        if not within:
            if all(self.ledger.is_used_up(one[0].tenant) for one in offered):
                self.why = "the tokens of this day are used up"
            return None
        governor = self.governor
        limit = governor.limit(asyncio.get_running_loop().time())
        if (limit is not None and self._moving() >= limit) or self.may_wait_in_engine():
            self._free_since = None
            late = [one for one in within if self.is_late(one[0])]
            if not late or slots is None or self.inflight >= URGENT_SHARE * slots:
                self.why = "interactive requests come first"
                return None
            governor.give_up(f"{len(late)} batches would miss their deadline")
            within = late
        elif governor.waits or (limit is not None and not self._has_group(limit)):
            self.why = "interactive requests come first"
            return None
        if len(within) == 1:
            return within[0]
        first = min(within, key=lambda one: self.account(one[0].tenant).used)[0]
        own = [one for one in within if one[0].tenant == first.tenant]
        return min(own, key=lambda one: one[0].deadline)

    def _has_group(self, limit: int) -> bool:
        """Return whether lines may start while people are there. Several start together, because a step with a prefill
        takes longer than one that only decodes."""
        now, free = asyncio.get_running_loop().time(), limit - self._moving()
        if self._free_since is None:
            self._free_since = now
        if free < GROUP * limit and now - self._free_since < HOLD_SECONDS:
            return False
        self._free_since = now - HOLD_SECONDS if free > 1 else None  # until the group is complete
        return True

    # Estimates

    def seconds_left(self, source: LineSource) -> float:
        """Return the seconds until a batch will be done at its rate so far; infinite if the rate is unknown."""
        if not source.answered or not source.began:
            return inf
        seconds = asyncio.get_running_loop().time() - source.began
        return source.left * max(seconds, 0.001) / source.answered

    def is_late(self, source: LineSource) -> bool:
        left = self.seconds_left(source)
        remains = source.deadline - self._now()
        return remains < left if not isinf(left) else remains < TICK_SECONDS * 50
