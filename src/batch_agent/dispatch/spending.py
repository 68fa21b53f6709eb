"""What calls cost, and whether the next one may be made: ``scheduler.budget`` made awaitable.

A call is reserved here after it has its slot and before it is sent. Where it does not fit beside those in flight it
waits for them to settle, in order, and meanwhile nobody else gets a slot. A call that does not fit with nothing in
flight ends its agent as Interrupted and the run starts no more of them: that is what out of budget means. Calls on
their way are never cut off, by no limit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from pydantic_core import to_json

from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.compiler.budget import content_bytes, size_bytes
from batch_agent.compiler.plan import tool_text
from batch_agent.compiler.prices import Prices
from batch_agent.errors import BackendError, Interrupted
from batch_agent.messages import Usage
from batch_agent.scheduler.budget import Amount, Estimator, Ledger, TimeShare
from batch_agent.spec import BatchSpec

NOTHING = Amount()
MESSAGE_BYTES = 16  # a role, an id and the marks that a template writes around a message or a call


@dataclass(slots=True, eq=False)
class Call:
    """One request from its reservation to its settlement."""

    spending: Spending
    prices: Prices | None = None
    prompt_bytes: int = 0
    max_tokens: int | None = None
    amount: Amount = NOTHING  # reserved for it
    share: float = 0.0  # of the run's seconds, when it began
    settled: bool = False

    def settle(self, usage: Usage, *, cached: bool = False) -> float | None:
        """The answer is there. Its cost in $, if that is known."""
        return self.spending.settle(self, usage, cached=cached)

    def fail(self, error: BackendError | None = None) -> float | None:
        """The request broke off or was cancelled. Nothing happens if it is settled already."""
        return None if self.settled else self.spending.fail(self, error)


class Spending:
    """``on_short`` is told whether a request waits for others to be settled. ``on_exhausted`` is told, once, which
    limit ended the run. ``on_time_up`` is called when that is a limit on time: from then on every request is refused,
    and agents that wait for something else first should end with ``refusal()``."""

    def __init__(
        self,
        spec: BatchSpec,
        prices: Prices | None,
        on_short: Callable[[bool], None],
        on_exhausted: Callable[[str], None],
        on_time_up: Callable[[], None] | None = None,
    ) -> None:
        self.exhausted = ""  # which limit, for people
        self.refused = 0  # calls that a limit kept from being sent
        self._prices = prices
        self._on_short = on_short
        self._on_exhausted = on_exhausted
        self._on_time_up = on_time_up
        self._per_second = prices.per_second if prices is not None else 0.0
        # What costs by the clock is limited by the clock.
        max_cost = None if self._per_second else spec.max_cost
        self._ledger = Ledger(max_tokens=spec.max_total_tokens, max_cost=max_cost)
        self._counting = spec.max_total_tokens is not None or max_cost is not None
        self._max_wall_time, self._max_cost = spec.max_wall_time, spec.max_cost
        self._time_limit = ""
        self._estimator = Estimator()
        self._measuring = False  # somebody asks what calls will take
        self._shares = TimeShare()
        self._prices_of: WeakKeyDictionary[RequestShape, Prices | None] = WeakKeyDictionary()
        self._shape_bytes: WeakKeyDictionary[RequestShape, int] = WeakKeyDictionary()
        self._waiters: deque[tuple[Call, asyncio.Future[None]]] = deque()
        self.time_is_up = False
        self._timer: asyncio.TimerHandle | None = None
        self._before = NOTHING
        self._started: float | None = None
        self._closed: float | None = None

    @property
    def per_second(self) -> float:
        """What the run costs by the clock, $ a second."""
        return self._per_second

    def so_far(self) -> tuple[int, float | None]:
        """Tokens and $ spent since the start; None where no price is known."""
        spent = self._ledger.spent - self._before
        if self._per_second:
            return spent.tokens, self._seconds() * self._per_second
        return spent.tokens, None if self._prices is None else spent.cost

    def _seconds(self) -> float:
        if self._started is None:
            return 0.0
        return (self._closed or asyncio.get_running_loop().time()) - self._started

    def start(self, spent: Amount = NOTHING) -> None:
        """The clock starts; ``spent`` is what earlier sessions of the run spent."""
        self._started = asyncio.get_running_loop().time()
        self._ledger.spent = self._before = spent
        limits: list[tuple[float, str]] = []
        if self._max_wall_time is not None:
            limits.append((self._max_wall_time, f"max_wall_time, {self._max_wall_time:g} s, is over"))
        if self._max_cost is not None and self._per_second:
            left = (self._max_cost - spent.cost) / self._per_second
            limits.append((max(0.0, left), f"max_cost ${self._max_cost:g} is spent on GPU time"))
        if limits:
            seconds, self._time_limit = min(limits)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._stop_the_clock)

    def close(self) -> None:
        """The clock stops."""
        self._closed = asyncio.get_running_loop().time()
        if self._timer is not None:
            self._timer.cancel()

    def set_prices(self, shapes: Iterable[RequestShape], prices: Prices | None) -> None:
        """Sets what requests of these shapes cost: those of a run inside may go to another model."""
        for shape in shapes:
            self._prices_of[shape] = prices

    def reserve_nowait(self, request: ModelRequest) -> Call | None:
        """The reservation of a request that need not wait for others; None: use ``reserve``."""
        if self._counting or self.time_is_up or self._per_second:
            return None
        prices = self._prices_of.get(request.shape, self._prices)
        return Call(self, prices, self._prompt_bytes(request) if self._measuring else 0)

    async def reserve(self, request: ModelRequest) -> Call:
        """Wait until the request fits the budget. Raises Interrupted when it does not."""
        prices = self._prices_of.get(request.shape, self._prices)
        call = Call(self, prices, self._prompt_bytes(request), request.shape.max_tokens)
        if self._counting:
            await self._wait(call)
        elif self.time_is_up:
            raise self.refusal()
        if self._per_second:
            call.share = self._shares.begin(asyncio.get_running_loop().time())
        return call

    def settle(self, call: Call, usage: Usage, *, cached: bool = False) -> float | None:
        """The answer is there. What it cost, in $, where that is known."""
        cost = call.prices.cost(usage) if call.prices is not None else None
        spent = _amount(usage, cost)
        if not cached:
            self._estimator.learn(call.prompt_bytes, usage)  # also while nobody asks: a budget may become known
            if self._counting and not spent.tokens:  # a server that counts nothing must not make a budget endless
                spent = call.amount
        seconds = self._finish(call, spent)
        return seconds * self._per_second if self._per_second else cost

    def fail(self, call: Call, error: BackendError | None = None) -> float | None:
        """The request broke off or was cancelled. One that was refused or never arrived costs nothing, nor does one
        that another request has paid for. What anything else cost is mostly unknown: then its reservation counts as
        spent."""
        if error is not None and error.usage is not None:
            return self.settle(call, error.usage)
        free = error is not None and (error.status is not None or error.unreached or error.paid_elsewhere)
        self._finish(call, NOTHING if free else call.amount)
        return None

    def _finish(self, call: Call, spent: Amount) -> float:
        call.settled = True
        if self._counting:
            self._ledger.settle(call.amount, spent)
            self._serve()
        else:
            self._ledger.spent += spent
        return self._shares.end(call.share, asyncio.get_running_loop().time()) if self._per_second else 0.0

    async def _wait(self, call: Call) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((call, turn))
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:  # granted in the moment it was given up
                self._ledger.settle(call.amount, NOTHING)
            self._serve()
            raise

    def _serve(self) -> None:
        """Everybody who waits and can be told now, in order."""
        waiters = self._waiters
        while waiters:
            call, turn = waiters[0]
            if not turn.done() and not self._answer(call, turn):
                break
            waiters.popleft()
        self._on_short(bool(waiters))

    def _answer(self, call: Call, turn: asyncio.Future[None]) -> bool:
        """Yes or no to one who waits; False when it has to go on waiting."""
        if self.time_is_up:
            turn.set_exception(self.refusal())
            return True
        amount = self._expected(call)  # now, because calls that ended meanwhile have told something
        short = self._ledger.short(amount)
        if short and self._ledger.in_flight:
            return False
        if short:
            turn.set_exception(self._refused(short))
        else:
            call.amount = amount
            self._ledger.reserve(amount)
            turn.set_result(None)
        return True

    def expect(self, request: ModelRequest) -> Usage:
        """What the call takes at the most, as far as that can be told: for budgets by the minute."""
        self._measuring = True
        return self._estimator.most(self._prompt_bytes(request), request.shape.max_tokens)

    def _expected(self, call: Call) -> Amount:
        alone = not self._ledger.in_flight
        expected = self._estimator.expect(call.prompt_bytes, call.max_tokens, alone=alone)
        return _amount(expected, call.prices.cost(expected) if call.prices is not None else None)

    def refusal(self) -> Interrupted:
        """What an agent ends with whose next call comes after the run's time is up."""
        return self._refused(self._time_limit)

    def _refused(self, limit: str) -> Interrupted:
        self.refused += 1
        self._exhaust(limit)
        return Interrupted(f"the run is out of budget: {limit}")

    def _exhaust(self, limit: str) -> None:
        if not self.exhausted:
            self.exhausted = limit
            self._on_exhausted(limit)

    def _stop_the_clock(self) -> None:
        self.time_is_up = True
        self._exhaust(self._time_limit)
        self._serve()
        if self._on_time_up is not None:
            self._on_time_up()

    def _prompt_bytes(self, request: ModelRequest) -> int:
        size = self._shape_bytes.get(request.shape)
        if size is None:
            size = self._shape_bytes[request.shape] = _shape_bytes(request.shape)
        for message in request.conversation.messages:
            size += MESSAGE_BYTES + content_bytes(message.content)
            for call in message.tool_calls:
                size += MESSAGE_BYTES + size_bytes(call.name) + size_bytes(call.arguments)
        return size


def _shape_bytes(shape: RequestShape) -> int:
    """Tools, and a schema that the server keeps: providers write it into the prompt too."""
    schema = 0 if shape.schema is None else len(to_json(shape.schema))
    return schema + sum(size_bytes(tool_text(tool)) for tool in shape.tools)


def _amount(usage: Usage, cost: float | None) -> Amount:
    return Amount(usage.prompt_tokens + usage.completion_tokens, cost or 0.0)
