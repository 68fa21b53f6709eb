"""Budgets of requests and tokens by the minute: what an endpoint may still be sent, and when it may be sent more.

A budget that the user gives (``rpm``, ``tpm``) holds for every minute, wherever it begins: what was used leaves the
count a minute after it was used, and for tokens that is when the answer was complete, because nobody knows when in
between the provider counts them. What a provider's headers say holds until the moment they name: so many are left,
less what was sent since, and then all of them again.

A request is counted when it gets its slot. Its tokens are reserved before it leaves, as many as it may take at the
most as far as is known, and settled when it ends. One that is larger than a whole budget goes alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from batch_agent.messages import Allowance, Quota, Usage
from batch_agent.scheduler.retry import LONGEST_RETRY_AFTER

MINUTE = 60.0
SLACK = 0.5  # seconds: requests arrive later than they leave, and not all of them equally late


class Budget:
    """One kind of thing that may be used up."""

    __slots__ = ("_full", "_left", "_limit", "_open", "_period", "_resets_at", "_told_at", "_used", "_window", "taken")

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit  # a minute, as the user says
        self._window: deque[tuple[float, int]] = deque()  # when it leaves the count, how much
        self._used = 0  # in the window
        self._open = 0  # reserved, and not settled
        self.taken = 0  # in all, ever, as much as it may have been
        self._full: int | None = None  # as the provider says
        self._left: int | None = None  # what ``taken`` may come to until ``_resets_at``
        self._resets_at = inf
        self._period = MINUTE
        self._told_at = -inf  # what had been taken when the request left whose answer told it

    def free_at(self, amount: int, now: float) -> float:
        """When so much may be taken; ``now`` or earlier: at once."""
        return max(self._free_of_window(amount, now), self._free_of_quota(amount, now))

    def _free_of_window(self, amount: int, now: float) -> float:
        if self._limit is None:
            return now
        window = self._window
        while window and window[0][0] <= now:
            self._used -= window.popleft()[1]
        over = self._used + self._open + amount - self._limit
        if over <= 0 or not (self._used or self._open):
            return now
        for leaves_at, used in window:
            over -= used
            if over <= 0:
                return leaves_at
        return window[-1][0] if window and not self._open else inf  # something must be settled first

    def _free_of_quota(self, amount: int, now: float) -> float:
        if self._left is None:
            return now
        if now >= self._resets_at and self._full is not None:
            self._left, self._resets_at = self.taken + self._full, now + self._period + SLACK
        if now >= self._resets_at or self.taken + amount <= self._left or not amount:
            return now
        whole = self._full is not None and amount > self._full and self.taken + self._full <= self._left
        return now if whole else self._resets_at

    def take(self, amount: int, now: float) -> None:
        """Used, and settled at once."""
        self.reserve(amount)
        self.settle(amount, amount, now)

    def reserve(self, amount: int) -> None:
        self.taken += amount
        if self._limit is not None:
            self._open += amount

    def unreserve(self, amount: int) -> None:
        self.taken -= amount
        if self._limit is not None:
            self._open -= amount

    def settle(self, reserved: int, used: int, now: float) -> None:
        self.taken += max(0, used - reserved)  # not less: what was told since may count it either way
        if self._limit is not None:
            self._open -= reserved
            self._used += used
            self._window.append((now + MINUTE + SLACK, used))

    def untake(self, amount: int) -> None:
        """The latest that was taken was not used after all."""
        self.taken -= amount
        if self._window:
            leaves_at, used = self._window.pop()
            self._used -= amount
            self._window.append((leaves_at, used - amount))

    def learn(self, allowance: Allowance, taken: int | None, on_its_way: int, now: float) -> None:
        """The provider told it in answer to a request before which, itself included, so much had been taken; None:
        nobody counted, and all that is on its way may have left since."""
        if allowance.limit is not None:
            self._full = allowance.limit
        if allowance.remaining is None:
            return
        if not _is_soon(allowance):
            self._left = None
            return
        if taken is None:
            taken = self.taken - on_its_way
            older = self._left is not None and taken + allowance.remaining > self._left
        else:
            older = taken < self._told_at
            self._told_at = max(self._told_at, taken)
        if older and now < self._resets_at:
            return
        resets_in = MINUTE if allowance.resets_in is None else allowance.resets_in
        self._period = max(self._period, resets_in) if self._left is not None else resets_in
        self._left, self._resets_at = taken + allowance.remaining, now + resets_in + min(SLACK, resets_in)


@dataclass(frozen=True, slots=True)
class Lease:
    """What one request took: what it was expected to use, and what each budget had given out by then."""

    expected: Usage
    taken: Mapping[str, int]


NOTHING = Usage()


class Rates:
    """The budgets of one endpoint."""

    __slots__ = ("_budgets", "_expected")

    def __init__(self, rpm: int | None = None, tpm: int | None = None) -> None:
        given = {"requests": rpm, "tokens": tpm}
        self._budgets = {kind: Budget(limit) for kind, limit in given.items() if limit is not None}
        self._expected = NOTHING  # of the latest request

    @property
    def counts_tokens(self) -> bool:
        return len(self._budgets) > ("requests" in self._budgets)

    def free_at(self, now: float) -> float:
        """When a request like the latest may be sent; ``now`` or earlier: at once."""
        return self._free_at(self._expected, now, 1)

    def _free_at(self, expected: Usage, now: float, requests: int) -> float:
        # What is asked for is checked anew at that time, so the latest of them is near enough.
        return max(
            (budget.free_at(_amount(kind, expected, requests), now) for kind, budget in self._budgets.items()),
            default=now,
        )

    def begin(self, now: float) -> Lease:
        """A request has its slot; it is taken to be like the latest."""
        self.count(now)
        return self._reserve(self._expected)

    def count(self, now: float) -> None:
        if (requests := self._budgets.get("requests")) is not None:
            requests.take(1, now)

    def _reserve(self, expected: Usage) -> Lease:
        for kind, budget in self._budgets.items():
            budget.reserve(_amount(kind, expected, 0))
        return Lease(expected, {kind: budget.taken for kind, budget in self._budgets.items()})

    def reserve(self, lease: Lease, expected: Usage, now: float) -> Lease | None:
        """What the request will really take, in place of what it was taken for; None: it has to wait until
        ``free_at``, or until others are settled."""
        self._expected = expected
        self._unreserve(lease)
        if self._free_at(expected, now, 0) > now:
            self._reserve(lease.expected)
            return None
        # Its place is where it got its slot: others that did so since may have been reserved for before it.
        more = {kind: _amount(kind, expected, 0) - _amount(kind, lease.expected, 0) for kind in lease.taken}
        moved = {kind: taken + more[kind] for kind, taken in lease.taken.items()}
        return Lease(expected, {**self._reserve(expected).taken, **moved})

    def _unreserve(self, lease: Lease) -> None:
        for kind in lease.taken:
            self._budgets[kind].unreserve(_amount(kind, lease.expected, 0))

    def settle(self, lease: Lease, used: Usage | None, now: float) -> None:
        """The request has ended. None: nobody knows what it used."""
        for kind in lease.taken:  # budgets that became known since are not its own
            if kind != "requests":
                reserved = _amount(kind, lease.expected, 0)
                self._budgets[kind].settle(reserved, reserved if used is None else _amount(kind, used, 0), now)

    def unsend(self, lease: Lease, now: float) -> None:
        """It was answered without the endpoint."""
        self.settle(lease, NOTHING, now)
        if "requests" in lease.taken:
            self._budgets["requests"].untake(1)

    def learn(self, quota: Quota, lease: Lease | None, inflight: int, used: Usage, now: float) -> None:
        """What an answer or a refusal told, while ``inflight`` others are on their way."""
        if self._expected == NOTHING:
            self._expected = used
        for kind, allowance in _allowances(quota).items():
            budget = self._budgets.setdefault(kind, Budget())
            taken = None if lease is None else lease.taken.get(kind)
            budget.learn(allowance, taken, inflight * _amount(kind, self._expected, 1), now)


def _amount(kind: str, usage: Usage, requests: int) -> int:
    if kind == "requests":
        return requests
    if kind == "tokens":
        return usage.prompt_tokens + usage.completion_tokens
    return usage.prompt_tokens - usage.cached_tokens if kind == "prompt_tokens" else usage.completion_tokens


def _allowances(quota: Quota) -> dict[str, Allowance]:
    told = {
        "requests": quota.requests,
        "tokens": quota.tokens,
        "prompt_tokens": quota.prompt_tokens,
        "completion_tokens": quota.completion_tokens,
    }
    return {kind: allowance for kind, allowance in told.items() if allowance is not None}


def is_spent(quota: Quota | None) -> bool:
    """Whether a refusal was for a budget that is waited for, and not for what is in flight."""
    return quota is not None and any(each.remaining == 0 and _is_soon(each) for each in _allowances(quota).values())


def _is_soon(allowance: Allowance) -> bool:
    """A budget of a day that is spent is no reason to wait in silence: people are to read what the server says."""
    return allowance.resets_in is None or allowance.resets_in <= LONGEST_RETRY_AFTER
