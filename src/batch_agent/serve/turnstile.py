"""Which line starts next: fair shares between tenants, then the earliest deadline, and people before lines.

A batch asks for its next line and waits here. One task grants lines while the dispatcher has room for another one, no
interactive request waits, here or in the queue that an engine reports, and fewer lines are in flight than the
``Governor`` allows. Then the tenant with the fewest tokens for its share goes first; among its batches the one with the
earliest deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, isinf

from batch_agent.backends.base import Load
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.scheduler.server import Endpoint
from batch_agent.serve.governor import Governor

PENDING = 8  # lines that were granted and have not asked for a slot yet
TICK_SECONDS = 0.2  # between two looks at conditions that are not reported
SOON = 8  # iterations of the event loop in which a run asks for its next line
FIRST_GUESS = 256  # tokens of a line beside those of its text, until lines of its batch were answered
LEARN = 0.2  # the weight of the latest line in the tokens per line
QUEUE_SECONDS = 10.0  # that a reading of an engine's queue counts, if no other follows
URGENT_SHARE = 0.25  # of the slots, for lines that would miss their deadline


@dataclass(slots=True, eq=False)
class TenantAccount:
    """What a tenant has used. ``used``: tokens divided by its share, counted from the least of all at its start."""

    share: float = 1.0
    tokens_per_day: int | None = None
    used: float = 0.0
    today: int = 0
    inflight: int = 0
    pledged: float = 0.0  # tokens that its lines in flight will use
    tokens: int = 0  # in all, since this process started

    @property
    def has_tokens(self) -> bool:
        return self.tokens_per_day is None or self.today < self.tokens_per_day

    @property
    def may_start(self) -> bool:
        return self.tokens_per_day is None or self.today + self.pledged < self.tokens_per_day


@dataclass(slots=True, eq=False)
class Entrant:
    """A batch that runs. ``deadline`` is in unix seconds, ``left`` the lines that are not done."""

    batch: str
    tenant: str
    deadline: float
    left: Callable[[], int] = field(default=lambda: 0)
    waiting: asyncio.Future[bool] | None = None
    size: int = 0  # bytes of the line that waits
    closed: bool = False
    away: bool = False  # it does not ask for its next line yet
    inflight: int = 0
    answered: int = 0
    per_line: float = 0.0  # tokens
    began: float = 0.0  # loop time of its first grant
    granted: float = 0.0  # tokens that were counted for its latest line

    def expected(self) -> float:
        """Return the tokens that its next line will use."""
        return self.per_line if self.answered else self.size / 4 + FIRST_GUESS


class Turnstile:
    """``now`` returns unix seconds. ``blocked`` returns why no line may start at all, or "". ``travels``: processes of
    other machines may ask a line that is granted; all lines together take no more than the slots of this process."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        governor: Governor,
        *,
        now: Callable[[], float],
        blocked: Callable[[], str] = lambda: "",
        travels: bool = False,
    ) -> None:
        self._dispatcher, self.governor, self._now, self._blocked = dispatcher, governor, now, blocked
        self._travels = travels
        self._feed = dispatcher.feed(lambda: None)
        self._feed.reading = True  # it has no rows of its own
        self._changed, self._idle = asyncio.Event(), asyncio.Event()
        self._pending = 0
        self.accounts: dict[str, TenantAccount] = {}
        self.entrants: dict[str, Entrant] = {}
        self.inflight = 0
        self.spent: dict[str, int] = {}  # tokens by tenant that are not in the catalog yet
        self.why = ""  # why lines wait, for people
        self._queued: dict[str, float] = {}  # by endpoint: loop time at which its engine last had a queue
        self.resting = False  # the process is ending: no further line starts

    # The engines' queues: what ``poll_load`` reads

    in_gaps = False

    async def read(self, endpoint: Endpoint, load: Load) -> None:
        """Take what an engine reports."""
        if load.waiting:
            self._queued[endpoint.name] = asyncio.get_running_loop().time()
        elif self._queued.pop(endpoint.name, None) is not None:
            self.touch()

    def may_wait_in_engine(self) -> bool:
        """Return whether an interactive request was sent, and an engine has a queue in which it may be."""
        if not self.governor.active:
            return False
        since = asyncio.get_running_loop().time() - QUEUE_SECONDS
        endpoints = self._dispatcher.scheduler.endpoints
        return any(each.inflight and self._queued.get(each.name, -inf) > since for each in endpoints)

    # Batches

    def enter(self, entrant: Entrant) -> None:
        self.entrants[entrant.batch] = entrant
        account = self.account(entrant.tenant)
        active = {each.tenant for each in self.entrants.values() if each is not entrant}
        if entrant.tenant not in active and active:  # it has no claim to what it left unused before
            account.used = max(account.used, min(self.account(name).used for name in active))
        self.touch()

    def leave(self, entrant: Entrant) -> None:
        self.close(entrant)
        self.entrants.pop(entrant.batch, None)
        self.touch()

    def close(self, entrant: Entrant) -> None:
        """Grant the batch no further line."""
        entrant.closed = entrant.away = True
        if entrant.waiting is not None and not entrant.waiting.done():
            entrant.waiting.set_result(False)
        entrant.waiting = None

    def account(self, tenant: str) -> TenantAccount:
        account = self.accounts.get(tenant)
        if account is None:
            account = self.accounts[tenant] = TenantAccount()
        return account

    def set_terms(self, terms: Mapping[str, tuple[float, int | None]], used_today: Mapping[str, int]) -> None:
        """Set share and daily tokens of each tenant, and what each used today."""
        for name, (share, tokens) in terms.items():
            account = self.account(name)
            account.share, account.tokens_per_day = share, tokens
        for name, account in self.accounts.items():
            account.today = used_today.get(name, 0) + self.spent.get(name, 0)
        self.touch()

    async def wait_turn(self, entrant: Entrant, size: int) -> bool:
        """Wait until the next line of a batch, of ``size`` bytes, may start. Returns False if it shall not."""
        if entrant.closed or self.resting:
            return False
        entrant.size = size
        waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        entrant.waiting = waiting
        if self._all_ask() and self._has_room() and self._has_slot() and self.choose() is entrant:
            self._grant(entrant)
            return True
        self.touch()
        try:
            return await waiting
        finally:
            if entrant.waiting is waiting:
                entrant.waiting = None

    def sent(self, entrant: Entrant) -> None:
        """A granted line has its slot."""
        self._pending = max(0, self._pending - 1)
        self.touch()

    def ended(self, entrant: Entrant, tokens: int, expected: float, *, sent: bool) -> None:
        """A granted line has ended, after ``tokens``; ``expected`` were counted when it was granted."""
        if not sent:
            self._pending = max(0, self._pending - 1)
        account = self.account(entrant.tenant)
        account.inflight -= 1
        entrant.inflight -= 1
        self.inflight -= 1
        if not self.inflight:
            self._idle.set()
        account.used += (tokens - expected) / account.share
        account.pledged -= expected
        if tokens:
            entrant.answered += 1
            entrant.per_line += (tokens - entrant.per_line) * max(LEARN, 1 / entrant.answered)
            self.spend(entrant.tenant, tokens)
        self.touch()

    def spend(self, tenant: str, tokens: int) -> None:
        """Count tokens of a tenant: of lines, or of its interactive requests."""
        account = self.account(tenant)
        account.today += tokens
        account.tokens += tokens
        self.spent[tenant] = self.spent.get(tenant, 0) + tokens

    def take_spent(self) -> dict[str, int]:
        spent, self.spent = self.spent, {}
        return spent

    async def wait_idle(self) -> None:
        """Wait until no line is in flight."""
        while self.inflight:
            self._idle.clear()
            await self._idle.wait()

    def rest(self) -> None:
        """Grant no further line: the process is ending."""
        self.resting = True
        for entrant in tuple(self.entrants.values()):
            self.close(entrant)

    # Granting

    def touch(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Grant lines until cancelled."""
        ticking = asyncio.create_task(self._tick())
        try:
            while await self._feed.wait_room():
                self._feed.reading = True
                if len(self.entrants) > 1 and await self._wait_for_all():
                    continue
                entrant = self.choose()
                if entrant is None or (self._pending and not self._has_slot()):
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                self._grant(entrant)
                await asyncio.sleep(0)
        finally:
            ticking.cancel()
            self._feed.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.touch()

    async def _wait_for_all(self) -> bool:
        """Wait for a batch that was just granted a line: it may ask for the next one, and be the first again. Returns
        whether the last slot was taken meanwhile."""
        for _ in range(SOON):
            if self._all_ask():
                break
            await asyncio.sleep(0)
        return not self._has_room()

    def _all_ask(self) -> bool:
        """Return whether every batch that has lines left to start asks for its next one."""
        return all(each.waiting is not None or each.away for each in self.entrants.values())

    def _has_slot(self) -> bool:
        """Return whether a slot is free beside those that granted lines will take."""
        scheduler = self._dispatcher.scheduler
        return scheduler.slots is None or scheduler.inflight + self._pending < scheduler.slots

    def _has_room(self) -> bool:
        return self._dispatcher.scheduler.has_room(asyncio.get_running_loop().time())

    def choose(self) -> Entrant | None:
        """Return the batch whose line starts next; None if no line may start now."""
        self.why = ""
        waiting = [each for each in self.entrants.values() if each.waiting is not None and not each.waiting.done()]
        slots = self._dispatcher.scheduler.slots  # 0 in an outage: then one line is the trial
        full = self._travels and slots is not None and self.inflight >= max(1, slots)
        if not waiting or self._pending >= PENDING or full:
            return None
        if why := self._blocked():
            self.why = why
            return None
        within = [each for each in waiting if self.account(each.tenant).may_start]
        if not within:
            self.why = "the tokens of this day are used up"
            return None
        now, governor = asyncio.get_running_loop().time(), self.governor
        limit = governor.limit(now)
        if (limit is not None and self.inflight >= limit) or self.may_wait_in_engine():
            late = [each for each in within if self.is_late(each)]
            if not late or slots is None or self.inflight >= URGENT_SHARE * slots:
                self.why = "interactive requests come first"
                return None
            governor.give_up(f"{len(late)} batches would miss their deadline")
            within = late
        elif governor.waits:
            self.why = "interactive requests come first"
            return None
        first = min(within, key=lambda each: self.account(each.tenant).used)
        own = [each for each in within if each.tenant == first.tenant]
        return min(own, key=lambda each: each.deadline)

    def _grant(self, entrant: Entrant) -> None:
        waiting, account = entrant.waiting, self.account(entrant.tenant)
        assert waiting is not None
        entrant.waiting = None
        entrant.granted = entrant.expected()
        account.used += entrant.granted / account.share
        account.pledged += entrant.granted
        for one in (account, entrant, self):
            one.inflight += 1
        self._pending += not self._travels
        if not entrant.began:
            entrant.began = asyncio.get_running_loop().time()
        waiting.set_result(True)

    # Estimates

    def seconds_left(self, entrant: Entrant) -> float:
        """Return the seconds until a batch is done, at its rate so far; infinite if that is unknown."""
        if not entrant.answered or not entrant.began:
            return inf
        seconds = asyncio.get_running_loop().time() - entrant.began
        return entrant.left() * max(seconds, 0.001) / entrant.answered

    def is_late(self, entrant: Entrant) -> bool:
        left = self.seconds_left(entrant)
        remains = entrant.deadline - self._now()
        return remains < left if not isinf(left) else remains < TICK_SECONDS * 50
