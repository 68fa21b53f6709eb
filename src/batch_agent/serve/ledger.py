"""Tokens of tenants by day: what was used, and what requests in flight may still use.

A request of a tenant with a limit reserves the most tokens that it may use before it is sent, and settles what it used
afterwards. What is reserved is on disk first: a ``hold`` of this process in the catalog, at least as large as all
reservations together. So requests that come at once do not pass the limit together, also those of several processes;
and after a kill, the hold counts as used until the day ends. Holds are changed by one writer, for all tenants and all
requests that wait at that time, in one transaction. Without a limit nothing is reserved, and tokens are only counted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from batch_agent.blocking import in_thread
from batch_agent.errors import StoreError
from batch_agent.serve.catalog import Catalog, Hold

logger = logging.getLogger("batch_agent")

COUNT_SECONDS = 0.25  # that used tokens may wait for the writer
AGAIN_SECONDS = 1.0  # after a write that failed
AHEAD = 256  # lines that a hold is enlarged for at once, at most
AHEAD_PART = 1 / 16  # of the tokens that are left, at most


class DayUsed(Exception):
    """The tokens of the day are not enough. ``for_now``: they would be enough without the requests in flight."""

    def __init__(self, *, for_now: bool) -> None:
        super().__init__()
        self.for_now = for_now


@dataclass(slots=True, eq=False)
class _Waiter:
    least: int
    most: int
    granted: asyncio.Future[int]


@dataclass(slots=True, eq=False)
class _Budget:
    """The tokens of one tenant. ``used``: what was used today, as the catalog had it last, with the holds of other
    processes."""

    limit: int | None = None
    used: int = 0
    settled: int = 0  # used, and not in the catalog yet
    reserved: int = 0  # by requests in flight of this process
    held: int = 0  # in the catalog for them
    ahead: int = 0  # that the next write adds for lines
    busy: bool = False  # lines have taken tokens since the latest write
    refused: int | None = None  # what lines asked for, and could not get
    waiters: list[_Waiter] = field(default_factory=list)

    @property
    def free(self) -> int:
        """The tokens of the hold that a request may reserve. Tokens that were used count as held until they are
        written."""
        return self.held - self.reserved - self.settled


class TokenLedger:
    """The tokens of all tenants. ``changed`` is called when lines that had no tokens may have some."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._owner = secrets.token_hex(8)
        self._budgets: dict[str, _Budget] = {}
        self._due = asyncio.Event()  # something is to be written soon
        self._urgent = asyncio.Event()  # someone waits for it
        self._writing = asyncio.Lock()
        self.changed: Callable[[], None] = lambda: None

    def set_limit(self, tenant: str, limit: int | None) -> None:
        """Set the number of tokens that a tenant may use in a day; None for no limit."""
        budget = self._budget(tenant)
        if budget.limit != limit:
            budget.limit, budget.refused = limit, None

    def limit(self, tenant: str) -> int | None:
        """Return the number of tokens that a tenant may use in a day; None for no limit."""
        return self._budget(tenant).limit

    def today(self, tenant: str) -> int:
        """Return the tokens that a tenant used today."""
        budget = self._budget(tenant)
        return budget.used + budget.settled

    def reserved(self, tenant: str) -> int:
        """Return the number of tokens that the tenant's requests in flight may still use."""
        return self._budget(tenant).reserved

    def is_used_up(self, tenant: str) -> bool:
        """Return whether a line waits for tokens and no request in flight may return some."""
        budget = self._budget(tenant)
        return budget.refused is not None and not budget.reserved

    # Before a request is sent

    async def reserve(self, tenant: str, least: int, most: int) -> int:
        """Reserve from ``least`` to ``most`` tokens for a request, and return their number; 0 without a limit. Raises
        DayUsed."""
        budget = self._budget(tenant)
        if budget.limit is None:
            return 0
        waiter = _Waiter(least, max(least, most), asyncio.get_running_loop().create_future())
        if least > budget.limit:
            raise DayUsed(for_now=False)
        budget.waiters.append(waiter)
        self._grant_waiters(budget)
        if not waiter.granted.done():
            self._wake(urgent=True)
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter in budget.waiters:
                budget.waiters.remove(waiter)
            elif waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None:
                self.settle(tenant, waiter.granted.result(), 0)
            raise

    def may_take(self, tenant: str, least: int, most: int) -> bool:
        """Return whether a line may start now. If not, more tokens are requested from the catalog."""
        budget = self._budget(tenant)
        if budget.limit is None or (budget.free >= least and not budget.waiters):
            return True
        if self._writing.locked():
            return False  # nothing is free while it is written, and ``changed`` is called after it
        if budget.refused is None or least < budget.refused:
            # More than was refused is not asked for again: the holds of other processes are unknown here.
            more = self._ahead(budget, most) if budget.refused is None else 0
            budget.ahead = max(budget.ahead, least, more)
            self._wake(urgent=True)
        return False

    def _ahead(self, budget: _Budget, most: int) -> int:
        """Return how many tokens to hold in advance for further lines, each of which may use ``most``."""
        left = (budget.limit or 0) - budget.used - budget.settled - budget.reserved
        return min(AHEAD * most, int(max(0, left) * AHEAD_PART))

    def take(self, tenant: str, least: int, most: int) -> int:
        """Reserve tokens for a line that may start, and return their number; 0 without a limit."""
        budget = self._budget(tenant)
        if budget.limit is None:
            return 0
        granted = max(least, min(most, budget.free))
        budget.reserved += granted
        budget.busy = True
        if budget.free < most:  # before it is used up
            budget.ahead = max(budget.ahead, self._ahead(budget, most))
            self._wake(urgent=True)
        return granted

    # After it

    def settle(self, tenant: str, reserved: int, used: int) -> None:
        """Replace what was reserved for a request by what it used."""
        budget = self._budget(tenant)
        budget.reserved -= reserved
        budget.settled += used
        budget.refused = None
        if reserved or used:
            self._wake(urgent=bool(budget.waiters))
            self.changed()

    # The writer

    async def run(self) -> None:
        """Write until cancelled. A failure is logged once, until a write succeeds."""
        failed = False
        while True:
            await self._due.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(COUNT_SECONDS):
                    await self._urgent.wait()
            try:
                await self.write()
                failed = False
                await asyncio.sleep(0)  # lines that may start now take their tokens before the next write
            except StoreError as error:
                if not failed:
                    logger.warning("tokens cannot be counted now: %s", error)
                failed = True
                await asyncio.sleep(AGAIN_SECONDS)

    async def write(self) -> None:
        """Write what was used, change the holds to what requests need, and read what other processes used. Raises
        StoreError; requests that wait for tokens raise it too."""
        async with self._writing:
            self._due.clear()
            self._urgent.clear()
            asked = dict[str, tuple[list[_Waiter], int, int]]()
            used = dict[str, int]()
            holds = list[Hold]()
            for name, budget in self._budgets.items():
                wanted = sum(waiter.most for waiter in budget.waiters)
                if wanted or budget.ahead or budget.held != budget.reserved:
                    # Lines may take what is free meanwhile, so it stays held. Without lines it is given back.
                    least = budget.reserved + (max(0, budget.free) if budget.busy else 0)
                    most = least + wanted + budget.ahead
                    holds.append(Hold(name, least, most, budget.limit))
                    asked[name] = [*budget.waiters], budget.ahead, most
                    budget.ahead = 0
                    budget.busy = False
                    budget.held = least
                if budget.settled:
                    used[name], budget.settled = budget.settled, 0
                    budget.used += used[name]
            try:
                counted = await in_thread(self._catalog.count_tokens, self._owner, used, holds)
            except BaseException as error:
                for name, tokens in used.items():
                    self._budgets[name].used -= tokens
                    self._budgets[name].settled += tokens
                if isinstance(error, StoreError):
                    for name, (waiters, *_) in asked.items():
                        self._refuse(self._budgets[name], waiters, error)
                raise
            for name, budget in tuple(self._budgets.items()):
                if budget.used != counted.used.get(name, 0):
                    budget.used = counted.used.get(name, 0)
                    budget.refused = None
                if name in asked:
                    budget.held = counted.held[name]
                    self._grant(budget, *asked[name])
            self.changed()

    async def close(self) -> None:
        """Count everything. Answers to requests in flight are no longer awaited, so that their reservations count as
        used."""
        for budget in self._budgets.values():
            budget.settled += budget.reserved
            budget.reserved = 0
        try:
            await self.write()
        except StoreError as error:
            logger.warning("the latest tokens were not counted: %s", error)

    def _grant(self, budget: _Budget, waiters: list[_Waiter], ahead: int, most: int) -> None:
        self._grant_waiters(budget)
        budget.busy = budget.busy or (ahead > 0 and budget.free > 0)  # lines take it after this write
        left = [waiter for waiter in waiters if waiter in budget.waiters]
        limit = budget.limit or 0
        for waiter in left:
            for_now = budget.used + budget.settled + waiter.least <= limit
            self._refuse(budget, [waiter], DayUsed(for_now=for_now))
        if ahead and budget.held < most:
            budget.refused = ahead if budget.refused is None else min(ahead, budget.refused)
        if budget.waiters or budget.ahead:
            self._wake(urgent=True)

    def _grant_waiters(self, budget: _Budget) -> None:
        for waiter in tuple(budget.waiters):
            free = budget.free
            if waiter.least <= free:
                budget.waiters.remove(waiter)
                granted = min(waiter.most, free)
                budget.reserved += granted
                if not waiter.granted.done():
                    waiter.granted.set_result(granted)

    def _refuse(self, budget: _Budget, waiters: list[_Waiter], error: Exception) -> None:
        for waiter in waiters:
            if waiter in budget.waiters:
                budget.waiters.remove(waiter)
            if not waiter.granted.done():
                waiter.granted.set_exception(error)

    def _budget(self, tenant: str) -> _Budget:
        budget = self._budgets.get(tenant)
        if budget is None:
            budget = self._budgets[tenant] = _Budget()
        return budget

    def _wake(self, *, urgent: bool) -> None:
        self._due.set()
        if urgent:
            self._urgent.set()
