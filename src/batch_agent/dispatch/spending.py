"""Tracks what calls cost and decides whether the next one may be sent: an awaitable ``scheduler.budget``.

A call reserves its cost here after it got its slot and before it is sent. If it does not fit beside the calls in
flight, it waits in order until they settle, and no other request gets a slot meanwhile. A call that does not fit with
nothing in flight means that the run is out of budget: its agent ends as Interrupted, and no more agents start. A limit
never cancels calls in flight.

A recorded run sends a call only when its advance covers it (``scheduler.budget``). Each commit of the journal renews
the advance, so a call waits for a commit of its own only while earlier calls are still unanswered.

With a price per GPU-hour, running time is what is spent. It is recorded each second, and a little ahead: a call is sent
only in time that is recorded as spent. So kills cannot make a run longer than its budget.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal
from weakref import WeakKeyDictionary

from batch_agent.backends.base import Backend, ModelRequest, RequestShape
from batch_agent.compiler.prices import Prices
from batch_agent.dispatch.prompt_sizes import NOT_MEASURED, PromptSizes, RequestSize
from batch_agent.errors import BackendError, Interrupted, StoreError
from batch_agent.messages import Usage
from batch_agent.money import dollars, limit_dollars
from batch_agent.observe.statistics import Statistics
from batch_agent.record.store import Spent
from batch_agent.scheduler.budget import (
    ADVANCE_TEMPLATE_TOKENS,
    FIRST_ANSWER_TOKENS,
    NOTHING,
    Amount,
    Estimator,
    Learnt,
    Ledger,
    TimeShare,
)
from batch_agent.scheduler.row_budget import RowBudget, StageRows
from batch_agent.scheduler.server import Standby
from batch_agent.spec import BatchSpec

TICK = 1.0  # seconds between two records of running time
PAID_AHEAD = 1.25  # seconds of running time that are recorded as spent before they have passed


@dataclass(slots=True, eq=False)
class Call:
    """One request from its reservation to its settlement."""

    spending: Spending
    prices: Prices | None
    request: ModelRequest
    size: RequestSize = NOT_MEASURED
    amount: Amount = NOTHING  # reserved for the call
    bought: bool = False  # paid in an earlier session, whose ledger contains it
    alone: float = 0.0  # part of the budget that is reserved for it if it is sent alone
    share: float = 0.0  # share of the run's seconds, when the call began
    settled: bool = False

    def fail(self, error: BackendError | None = None) -> None:
        """Settle a call that failed or was cancelled. Does nothing if it is already settled."""
        if not self.settled:
            self.spending.fail(self, self.request, error)


class Spending:
    """What calls cost, and whether the next one may be sent. ``on_short`` is called with whether a request waits for
    others to settle. ``on_exhausted`` is called once with the limit that ended the run. ``on_time_up`` is called if
    that is a time limit: every later request is refused, and agents that wait for something else should end with
    ``refusal()``."""

    def __init__(
        self,
        spec: BatchSpec,
        prices: Prices | None,
        on_short: Callable[[bool], None],
        on_exhausted: Callable[[str], None],
        on_time_up: Callable[[], None] | None = None,
    ) -> None:
        self.exhausted = ""  # the exhausted limit, in words
        self.refused = 0  # calls that a limit prevented
        self._prices = prices
        self._on_short = on_short
        self._on_exhausted = on_exhausted
        self._on_time_up = on_time_up
        self._per_second = prices.per_second if prices is not None else 0.0
        # A cost by the hour is limited through time.
        max_cost = None if self._per_second else spec.max_cost
        self._ledger = Ledger(max_tokens=spec.max_total_tokens, max_cost=max_cost)
        self._limited = spec.max_total_tokens is not None or max_cost is not None
        self._timed = bool(self._per_second) and spec.max_cost is not None
        self.rows = RowBudget() if self._limited else None  # which rows may start; None: all
        self._counting = self._limited or self._timed
        self._max_wall_time, self._max_cost = spec.max_wall_time, spec.max_cost
        self._time_limit = ""
        self._estimator = Estimator()
        self._sizes = PromptSizes()
        self._measuring = False  # an observer needs estimates of calls
        # No limit, no price of time, no rate limit: nothing is reserved, and answers are only counted.
        self.is_free = not (self._counting or self._per_second)
        self._tokens, self._cost = 0, 0.0  # spent since the start
        self._shares = TimeShare()
        self._has_prices = prices is not None
        self._prices_of: WeakKeyDictionary[RequestShape, Prices | None] = WeakKeyDictionary()
        self._waiters: deque[tuple[Call, asyncio.Future[None]]] = deque()
        self.time_is_up = False
        self._wall_timer: asyncio.TimerHandle | None = None
        self._cost_timer: asyncio.TimerHandle | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._paid_until = math.inf  # loop time up to which running time is recorded as spent
        self._is_shared = False
        self.time_alone = 0.0  # $ of running time before this run was shared
        self._earlier: Spent | None = None  # what earlier sessions spent
        self._commit: Callable[[], None] | None = None
        self._claimed = NOTHING  # spent when an advance was last claimed
        self._rows_claimed = NOTHING  # spent when a share for rows was last claimed
        self._broken: StoreError | None = None  # reason why no advance can be obtained any more
        self._started: float | None = None
        self._closed: float | None = None

    @property
    def per_second(self) -> float:
        """Return the cost of running time, in $ per second."""
        return self._per_second

    def so_far(self) -> tuple[int, float | None]:
        """Return tokens and $ spent since the start; None if no price is known."""
        if self._per_second:
            return self._tokens, self._seconds() * self._per_second
        return self._tokens, None if self._prices is None and not self._cost else self._cost

    def counted(self, statistics: Statistics, *, whole: bool) -> Statistics:
        """Return the statistics of the ``whole`` run, with the cost of running time and what earlier sessions have
        spent. Statistics of a stage are returned unchanged."""
        if not whole:
            return statistics
        if self._per_second:
            statistics = replace(statistics, cost=self.so_far()[1])
        if (before := self._earlier) is not None and before.tokens:
            statistics = replace(statistics, earlier_tokens=before.tokens, earlier_cost=before.cost)
        return statistics

    def _seconds(self) -> float:
        if self._started is None:
            return 0.0
        return (self._closed or asyncio.get_running_loop().time()) - self._started

    def start(
        self,
        earlier: Spent | None = None,
        learnt: Learnt | None = None,
        commit: Callable[[], None] | None = None,
        *,
        shared: bool = False,
    ) -> None:
        """Start the clock. ``earlier``: what earlier sessions of the run have spent; ``learnt``: their call statistics.
        ``commit`` requests a new share of the budget, which this worker may spend; None: the run has no record.
        ``shared``: other workers have shares too."""
        loop = asyncio.get_running_loop()
        if learnt is not None:
            self._estimator.start(learnt)
        self._started = loop.time()
        self._earlier = earlier
        if earlier is not None:
            self._ledger.others = Amount(earlier.tokens, earlier.cost or 0.0)
        self._is_shared = shared
        if shared and self.rows is not None:
            self.rows.allowance = 0.0
        if commit is not None and self._counting:
            self._commit = commit
            self._ledger.advance = NOTHING if self._limited else None
        if self._max_wall_time is not None:
            words = f"max_wall_time, {self._max_wall_time:g} s, is over"
            self._wall_timer = loop.call_later(self._max_wall_time, self._stop_the_clock, words)
        if self._timed:
            self._start_timers()

    def _start_timers(self) -> None:
        """Begin to count running time."""
        if not self._is_shared:
            self._stop_in((self._max_cost or 0.0) - self._ledger.others.cost)
        if self._commit is not None:
            self._paid_until = asyncio.get_running_loop().time()
            self._tick()

    def is_time_spent(self, before: Spent) -> bool:
        """Return whether earlier sessions have spent the whole budget on running time."""
        return self._timed and (before.cost or 0.0) >= (self._max_cost or 0.0)

    def _stop_in(self, left: float) -> None:
        """Stop when running time has cost ``left`` $ from now on."""
        if self._cost_timer is not None:
            self._cost_timer.cancel()
        words = f"max_cost {limit_dollars(self._max_cost or 0.0)} is spent on GPU time"
        seconds = max(0.0, left / self._per_second)
        if not seconds and self._cost_timer is None:  # earlier sessions spent it: only what is recorded is delivered
            self.time_is_up, self._time_limit, seconds, self.is_free = True, words, TICK, False
        self._cost_timer = asyncio.get_running_loop().call_later(seconds, self._stop_the_clock, words)

    def _tick(self) -> None:
        """Record the running time once per second, also while no call begins or ends."""
        if self._commit is not None and self._broken is None and not self._is_shared:  # a worker reports it anyway
            self._commit()
            self._ticker = asyncio.get_running_loop().call_later(TICK, self._tick)

    def share(self, commit: Callable[[], None]) -> None:
        """Share the budget from now on: other workers have joined the run. ``commit`` requests a new share."""
        self._is_shared = True
        if self.rows is not None:
            self.rows.allowance = 0.0
        self.time_alone = self._seconds() * self._per_second
        if self._counting:
            self._commit = commit
            self._ledger.advance = self._ledger.spent + self._ledger.reserved if self._limited else None

    @property
    def is_alone(self) -> bool:
        """Whether this worker is the only one, and the run counts a budget or running time."""
        return not self._is_shared and self._started is not None and (self.has_advance or bool(self._per_second))

    @property
    def time_limit(self) -> float | None:
        """The $ that running time may cost in all sessions and workers."""
        return self._max_cost if self._per_second else None

    def claim_own_time(self) -> tuple[float, float, float]:
        """Return the $ that the running time of the only worker has cost, what is recorded of that and ahead of it, and
        what is to be recorded."""
        used = self._seconds() * self._per_second
        if not self._timed:
            return used, used, used
        held = max(used, (self._paid_until - (self._started or 0.0)) * self._per_second)
        return used, held, max(held, used + PAID_AHEAD * self._per_second)

    def grant_own_time(self, held: float) -> None:
        """Running time of the only worker is recorded as spent up to ``held`` $."""
        if self._timed and self._started is not None:
            self._paid_until = self._started + held / self._per_second
            self._serve()

    def grant_time(self, sent: float, paid: float, left: float) -> None:
        """Set how long the run may continue: running time is recorded as spent for ``paid`` $ from the loop time
        ``sent`` on, and ``left`` $ remain."""
        if self._timed:
            self._paid_until = sent + paid / self._per_second
            self._stop_in(left + paid - (asyncio.get_running_loop().time() - sent) * self._per_second)
            self._serve()

    def close(self) -> None:
        """Stop the clock."""
        self._closed = asyncio.get_running_loop().time()
        for timer in filter(None, (self._wall_timer, self._cost_timer, self._ticker)):
            timer.cancel()

    # Claims

    def _ask_advance(self) -> Amount:
        """Return the advance to ask for. Until it is granted, the smaller of it and the present advance holds."""
        ledger = self._ledger
        assert ledger.advance is not None
        asked = self._advance_for(self._awaited())
        ledger.advance = Amount(min(asked.tokens, ledger.advance.tokens), min(asked.cost, ledger.advance.cost))
        return asked

    def _advance_for(self, waiting: Amount) -> Amount:
        known = bool(self._estimator.answers)
        template = Usage(prompt_tokens=0 if known else ADVANCE_TEMPLATE_TOKENS)
        more = _amount(template, None if self._prices is None else self._prices.most(template))
        return self._ledger.next_advance(waiting, more)

    def claim(self) -> tuple[Amount, Amount, Amount, Amount, bool]:
        """Return five values for the table of shares: what this worker has spent; the part of its advance that it
        keeps; the advance that it asks for; the least useful growth; and whether that is useful only while no other
        worker holds any.

        Nothing is kept ahead while a call waits: two workers that each hold half of what they need would wait for each
        other. A worker with nothing in flight keeps nothing either: others wait for what it may still spend.
        """
        ledger, want = self._ledger, self._ask_advance()
        assert ledger.advance is not None
        used, first = ledger.spent + ledger.reserved, self._awaited(most=1)
        ahead = ledger.ahead_of(ledger.spent - self._claimed)
        self._claimed = ledger.spent
        if first == NOTHING and ledger.in_flight:
            return ledger.spent, ledger.advance, want + ahead, NOTHING, False
        alone = not ledger.in_flight and (first == NOTHING or ledger.others_open == NOTHING)
        if first == NOTHING:  # it does not fit beside what others hold: does it fit without that?
            first = self._awaited(most=1, beside_others=False)
            want = self._advance_for(first)
        ledger.advance = used
        return ledger.spent, used, used if first == NOTHING else want + ahead, first, alone

    @property
    def has_advance(self) -> bool:
        """Whether the run has a limit that its advances must keep."""
        return self._ledger.advance is not None

    @property
    def limits(self) -> tuple[int | None, float | None]:
        """The most that all workers together may spend, in tokens and $."""
        return self._ledger.max_tokens, self._ledger.max_cost

    def granted(self, advance: Amount, others: Amount, others_open: Amount) -> None:
        """Set the advance that this worker holds from now on, and what the others have spent and hold."""
        self._ledger.advance, self._ledger.others, self._ledger.others_open = advance, others, others_open
        self._serve()

    def learnt(self) -> Learnt | None:
        """Return the statistics of answers, for a later session; None before the first answer."""
        known = self._estimator
        if not known.answers:
            return None
        return known.answers, known.longest, known.least, known.weighed, math.ceil(1000 * known.heaviest)

    def fail_all(self, error: StoreError) -> None:
        """Refuse every call that would need a new share of the budget: none can be recorded any more."""
        if self._ledger.advance is not None or self._timed:
            self._broken = error
            self._serve()

    def _awaited(self, most: int | None = None, *, beside_others: bool = True) -> Amount:
        """Return the sum of the first ``most`` waiting calls, as far as they fit the limits beside what other workers
        hold."""
        total, ledger = NOTHING, self._ledger
        others = ledger.others_open if beside_others else NOTHING
        for call, turn in islice(self._waiters, most):
            if not turn.done():
                amount = self._bound(call, alone=not ledger.in_flight and total == others == NOTHING)
                if ledger.short(amount, beside=total, others_open=others):
                    break
                total += amount
        return total

    # Calls

    def set_terms(self, shapes: Iterable[RequestShape], prices: Prices | None, backend: Backend) -> None:
        """Set the prices and the length of answers for requests of these shapes. A nested run may use another model."""
        self._has_prices = self._has_prices or prices is not None
        for shape in shapes:
            self._prices_of[shape] = prices
            self._sizes.limit(shape, backend.answer_limit(shape))

    def reserve_nowait(self, request: ModelRequest) -> Call | None:
        """Return a reservation if the request need not wait; None: use ``reserve``."""
        if self._counting or self.time_is_up or self._per_second:
            return None
        return Call(self, self._prices_for(request), request, self._sizes.measure(request))

    def _prices_for(self, request: ModelRequest) -> Prices | None:
        """Return the prices of the model that the request is sent to."""
        if request.standby is not None:
            return request.standby.prices
        return self._prices_of.get(request.shape, self._prices)

    async def reserve(self, request: ModelRequest, *, bought: bool = False) -> Call:
        """Wait until the request fits the budget. Raises Interrupted if it never will. ``bought``: an earlier session
        paid for the answer, and its ledger contains it."""
        call = Call(self, self._prices_for(request), request, self._sizes.measure(request), bought=bought)
        if self._counting and not bought:
            await self._wait(call)
        elif self.time_is_up:
            raise self.refusal()
        if self._per_second:
            call.share = self._shares.begin(asyncio.get_running_loop().time())
        return call

    def settle(
        self,
        call: Call | None,
        request: ModelRequest | None,
        usage: Usage,
        cached: bool = False,
        standby: Standby | None = None,
    ) -> float | None:
        """Settle an answered request with its reservation; if that is None, nothing is limited, and the request is only
        counted. ``standby``: the standby that answered it. Returns its cost in $; None if it is unknown."""
        if call is not None:
            if call.request.standby is not standby:  # its second request was answered
                call.request.standby = standby
                call.prices = self._prices_for(call.request)
            return self._settle(call, usage, cached)
        if request is None:
            return None
        if standby is not None:
            prices = standby.prices
        else:
            prices = self._prices_of.get(request.shape, self._prices) if self._has_prices else None
        cost = None if prices is None else prices.cost(usage)
        answer, prompt, known = usage.completion_tokens, usage.prompt_tokens, self._estimator
        self._tokens += max(prompt, usage.cached_tokens + usage.cache_write_tokens) + answer
        self._cost += cost or 0.0
        if not cached and (prompt or answer):  # a budget may be set later, by a session that resumes the run
            known.answers += 1
            if answer > known.longest:
                known.longest = answer
            if prompt and (prompt < known.least or not known.least):
                known.least = prompt
        return cost

    def _settle(self, call: Call, usage: Usage, cached: bool) -> float | None:
        cost = call.prices.cost(usage) if call.prices is not None else None
        spent = _amount(usage, cost)
        if not cached:  # also without an observer: a budget may be set later
            size = call.size
            self._estimator.learn(size.prompt_bytes, usage, attached=size.attached, choices=size.choices)
            if size.prompt_bytes:
                self._learn(call, usage)
            if self._limited and not spent.tokens:  # a server that reports no usage must not make a budget endless
                spent = call.amount
        seconds = self._finish(call, spent)
        return seconds * self._per_second if self._per_second else cost

    def _learn(self, call: Call, usage: Usage) -> None:
        new = self._sizes.learn(call.request, call.size, usage)
        if new.attached:
            self._estimator.learn_attached(new.prompt_bytes, new.tokens, new.attached)

    def fail(self, call: Call | None, request: ModelRequest | None, error: BackendError | None = None) -> float | None:
        """Settle a failed or cancelled call. It costs nothing if it was refused, never arrived, or was paid by another
        request. In all other cases its cost is mostly unknown, and the reservation counts as spent. Returns the cost in
        $; None if it is unknown."""
        if error is not None and error.usage is not None:
            return self.settle(call, request, error.usage, standby=None if request is None else request.standby)
        if call is None:
            return None
        free = error is not None and (error.status is not None or error.unreached or error.paid_elsewhere)
        self._finish(call, NOTHING if free else call.amount)
        return None

    def _finish(self, call: Call, spent: Amount) -> float:
        call.settled = True
        if not call.bought:
            self._tokens += spent.tokens
            self._cost += spent.cost
            if self._counting:
                self._ledger.settle(call.amount, spent)
                if self.rows is not None:
                    part = self._part(spent)
                    self.rows.pay(call.request.run, call.request.agent, part, max(0.0, call.alone - part))
                self._serve()
        return self._shares.end(call.share, asyncio.get_running_loop().time()) if self._per_second else 0.0

    # Rows

    def _part(self, amount: Amount) -> float:
        """Return an amount as a part of the budget."""
        tokens, cost = self.limits
        return max(amount.tokens / tokens if tokens else 0.0, amount.cost / cost if cost else 0.0)

    def part(self, usages: Iterable[Usage], cost: float | None) -> float:
        """Return the part of the budget that was spent on answers with this usage and this cost in $."""
        total = sum((_amount(usage, None) for usage in usages), NOTHING)
        return self._part(total + Amount(0, cost or 0.0))

    def guess(self, shape: RequestShape, prompt: int, turns: float) -> float:
        """Return the estimated cost of a row as a part of the budget, from the tokens of its first prompt."""
        answer = min(shape.max_tokens or FIRST_ANSWER_TOKENS, FIRST_ANSWER_TOKENS)
        usage, prices = Usage(prompt, completion_tokens=answer), self._prices_of.get(shape, self._prices)
        return turns * self._part(_amount(usage, None if prices is None else prices.cost(usage)))

    def may_start(self, stage: StageRows, before: float) -> bool:
        """Return whether a row may start. ``before`` is its cost in earlier sessions. If it may not, and no row runs
        whose end could change that, the run is out of budget."""
        rows, ledger = self.rows, self._ledger
        spent = ledger.spent - self._rows_claimed if self._is_shared else ledger.spent + ledger.others
        if rows is None or rows.fits(stage, self._part(spent), before):
            return True
        if not rows.is_idle(stage) or (self._is_shared and not rows.decided):
            return False
        if not stage.patient:
            self.exhaust(self._too_dear(rows.cost(stage)))
        return stage.patient  # its answer may be paid for already; else the ledger refuses its call

    def claim_rows(self) -> tuple[float, float, float, float]:
        """Return what this worker of a shared run claims for its rows (``RowBudget.claim``)."""
        assert self.rows is not None
        self._rows_claimed = self._ledger.spent
        return self.rows.claim(self._part(self._ledger.spent + self._ledger.others))

    def ask_for_rows(self) -> None:
        """Ask the other workers soon for a share of the budget, if there are any: a row waits for it."""
        if self._is_shared and self._commit is not None:
            self._commit()

    def _too_dear(self, part: float) -> str:
        """Return a message about the limit that leaves no room for a row. ``part`` is the part of the budget that the
        row costs."""
        tokens, cost = self.limits
        spent = self._ledger.spent + self._ledger.others
        if cost is None or (tokens is not None and spent.tokens * cost > spent.cost * tokens):
            assert tokens is not None
            return (
                f"max_total_tokens {tokens:,}: {spent.tokens:,} are spent, and a row takes about {part * tokens:,.0f}"
            )
        words = f"{dollars(spent.cost)} is spent, and a row costs about {dollars(part * cost)}"
        return f"max_cost {limit_dollars(cost)}: {words}"

    async def _wait(self, call: Call) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((call, turn))
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:  # granted in the moment in which it was cancelled
                self._ledger.settle(call.amount, NOTHING)
            self._serve()
            raise

    def _serve(self) -> None:
        """Answer the waiting calls in order, as far as possible now."""
        waiters, lacks = self._waiters, ""
        while waiters and not lacks:
            call, turn = waiters[0]
            lacks = "" if turn.done() else self._answer(call, turn)
            if not lacks:
                waiters.popleft()
        self._on_short(lacks == "room")

    def _answer(self, call: Call, turn: asyncio.Future[None]) -> Literal["", "room", "advance"]:
        """Grant or refuse a waiting call. If neither is possible yet, return what it must wait for."""
        if self.time_is_up:
            turn.set_exception(self.refusal())
            return ""
        in_flight, others = self._ledger.in_flight, self._ledger.others_open != NOTHING
        # Computed now, because calls that ended meanwhile improved the estimate.
        amount = self._bound(call, alone=not (in_flight or others))
        limit = self._ledger.short(amount, others_open=self._ledger.others_open)
        if limit and in_flight:
            return "room"
        if limit and others:  # other workers return what they do not spend
            return "advance"
        if limit:
            turn.set_exception(self._refused(limit))
        elif self._broken is not None:
            turn.set_exception(self._broken)
        elif asyncio.get_running_loop().time() > self._paid_until or not self._ledger.covers(amount):
            assert self._commit is not None
            self._commit()
            return "advance"
        else:
            call.amount = amount
            if self.rows is not None:
                call.alone = self._part(self._bound(call, alone=True))
            self._ledger.reserve(amount)
            turn.set_result(None)
        return ""

    def expect(self, request: ModelRequest) -> Usage:
        """Return the most that the call is expected to use, for rate limits."""
        self._measuring, self.is_free = True, False
        size = self._sizes.measure(request)
        return self._estimator.most(size.prompt_bytes, size.max_tokens, attached=size.attached, choices=size.choices)

    def _bound(self, call: Call, *, alone: bool) -> Amount:
        size, known = call.size, self._sizes.known(call.request)
        most = self._estimator.bound(
            size.prompt_bytes, known, size.max_tokens, alone=alone, attached=size.attached, choices=size.choices
        )
        return _amount(most, call.prices.most(most) if call.prices is not None else None)

    def refusal(self) -> Interrupted:
        """Return the error for an agent whose next call would come after the run's time limit."""
        return self._refused(self._time_limit)

    def _refused(self, limit: str) -> Interrupted:
        self.refused += 1
        self.exhaust(limit)
        return Interrupted(f"the run is out of budget: {limit}")

    def add_reason(self, told: str) -> None:
        """Append ``told`` to the message about the limit that ended the run."""
        self.exhausted = f"{self.exhausted}; {told}"

    def exhaust(self, limit: str) -> None:
        """Start no more agents, because a limit leaves no room for the next call, here or at another worker."""
        if not self.exhausted:
            self.exhausted = limit
            self._on_exhausted(limit)

    def _stop_the_clock(self, limit: str) -> None:
        self.time_is_up, self._time_limit, self.is_free = True, limit, False
        self.exhaust(limit)
        self._serve()
        if self._on_time_up is not None:
            self._on_time_up()


def _amount(usage: Usage, cost: float | None) -> Amount:
    """Return the tokens and cost of a call. A server may report more cached tokens than prompt tokens."""
    prompt = max(usage.prompt_tokens, usage.cached_tokens + usage.cache_write_tokens)
    return Amount(prompt + usage.completion_tokens, cost or 0.0)
