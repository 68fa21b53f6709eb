"""Rate limits per minute: what may still be sent to an endpoint, and when more may be sent.

A limit that the user sets (``rpm``, ``tpm``) holds for every window of a minute. Usage leaves the count a minute after
it happened. For tokens that is when the answer was complete, because the provider may count them at any time before.
Values from a provider's headers hold until the reset time that they name: the remaining amount, minus what was sent
since, and then the full amount again.

A provider may say nothing about its limit, and refuse every request when it is used up. Then the limit is learnt from
what the provider took before (``LearntRate``).

A request is counted when it gets its slot. Before it leaves, the most tokens that it is known to need are reserved.
When it ends, the reservation is settled. A request that is larger than a whole limit is sent alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

from batch_agent.messages import Allowance, Quota, Usage
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.retry import LONGEST_RETRY_AFTER

MINUTE = N.minute
SLACK = N.slack


class RateWindow:
    """The limit of one kind of usage."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit  # per minute, set by the user
        self.share: int | None = None  # part of the limit that this process may use; None: all of it
        self._window: deque[tuple[float, int]] = deque()  # when it leaves the count, amount
        self._used = 0  # sum of the window
        self._open = 0  # reserved and not settled
        self._full: int | None = None  # the provider's limit
        self._left: int | None = None  # remaining after the request whose answer reported it, until ``_resets_at``
        self._resets_at = inf
        self._period = MINUTE
        self._reports: dict[int, int] = {}  # what answers reported as remaining, by the number of the request
        self._newest: Departure | None = None  # the newest of these requests
        self._least: float = inf  # the smallest reported remainder without request numbers
        self._since: dict[int, int] = {}  # usage of requests that the reports may not include, by number
        self._taken = 0  # sum of ``_since``

    def allot(self, share: int | None) -> None:
        """Set the part of the user's limit that this process may use; None means the whole limit."""
        self.share = share

    def used(self, now: float) -> int:
        """Return the usage of the last minute, including reservations."""
        self._drop_old(now)
        return self._used + self._open

    def _drop_old(self, now: float) -> None:
        window = self._window
        while window and window[0][0] <= now:
            self._used -= window.popleft()[1]

    def fill(self, until: float) -> None:
        """Count the user's whole limit as used until that time."""
        if self.limit is not None:
            self._used += self.limit
            self._window.append((until, self.limit))

    def free_at(self, amount: int, now: float) -> float:
        """Return when ``amount`` may be taken; ``now`` or earlier means at once."""
        return max(self._free_of_window(amount, now), self._free_of_quota(amount, now))

    def _free_of_window(self, amount: int, now: float) -> float:
        if self.limit is None:
            return now
        self._drop_old(now)
        window, limit = self._window, self.limit if self.share is None else min(self.share, self.limit)
        over = self._used + self._open + amount - limit
        if over <= 0 or (limit == self.limit and not (self._used or self._open)):
            return now
        for leaves_at, used in window:
            over -= used
            if over <= 0:
                return leaves_at
        # Else a reservation must be settled first, or the share must grow.
        return window[-1][0] if window and not self._open and limit == self.limit else inf

    def _free_of_quota(self, amount: int, now: float) -> float:
        if self._left is None:
            return now
        if now >= self._resets_at and self._full is not None:
            self._left, self._resets_at = self._full, now + self._period + SLACK
            self._since.clear()
            self._reports.clear()
            self._taken, self._least = 0, inf
        if now >= self._resets_at or self._taken + amount <= self._left or not amount:
            return now
        whole = self._full is not None and amount > self._full <= self._left and not self._taken
        return now if whole else self._resets_at

    def take(self, number: int, amount: int, now: float) -> None:
        """Count usage of the request ``number`` without a reservation."""
        self.reserve(number, amount)
        self.settle(number, amount, amount, now)

    def reserve(self, number: int, amount: int) -> None:
        self._note(number, amount)
        if self.limit is not None:
            self._open += amount

    def unreserve(self, number: int, amount: int) -> None:
        self._note(number, None)
        if self.limit is not None:
            self._open -= amount

    def settle(self, number: int, reserved: int, used: int, now: float) -> None:
        if number in self._since or used > reserved:  # a later report already includes the rest
            self._note(number, used - reserved)
        if self.limit is not None:
            self._open -= reserved
            self._used += used
            self._window.append((now + MINUTE + SLACK, used))

    def untake(self, number: int, amount: int) -> None:
        """Undo the latest ``take``."""
        self._note(number, None)
        if self._window:
            leaves_at, used = self._window.pop()
            self._used -= amount
            self._window.append((leaves_at, used - amount))

    def renumber(self, number: int, later: int, amount: int) -> None:
        """Give a request that leaves later a later number."""
        self._note(number, None)
        self._note(later, amount)

    def _note(self, number: int, more: int | None) -> None:
        """Add ``more`` to the usage that request ``number`` has had since the last report; None removes the request."""
        if more is None:
            self._taken -= self._since.pop(number, 0)
        else:
            self._since[number] = self._since.get(number, 0) + more
            self._taken += more

    def learn(self, allowance: Allowance, sent: Departure | None, on_its_way: int, now: float) -> None:
        """Learn from the provider's report in the answer to request number ``sent``. None: the request left before
        requests were counted, so that all requests in flight (``on_its_way``) may have left after it.

        Requests that left together arrive in any order, so a report may not include requests that left shortly before.
        Among the reports of such requests, the one with the smallest remainder includes all of them that have reported.
        """
        if allowance.limit is not None:
            self._full = allowance.limit
        if allowance.remaining is None:
            return
        if not _is_soon(allowance):
            self._left = None
            return
        is_over = now >= self._resets_at
        if is_over:
            self._reports.clear()
        if sent is None:
            self._least = allowance.remaining if is_over else min(self._least, allowance.remaining)
            left = int(self._least) + self._taken - on_its_way
            if self._newest is not None and self._left is not None and left > self._left and not is_over:
                return
        else:
            if self._newest is None or sent.number > self._newest.number:
                self._newest = sent
                self._forget_up_to(sent.arrived)
            elif sent.number <= self._newest.arrived and not is_over:
                return  # newer reports include it
            self._reports[sent.number] = allowance.remaining
            self._note(sent.number, None)
            left = min(self._reports.values())
        resets_in = MINUTE if allowance.resets_in is None else allowance.resets_in
        self._period = max(self._period, resets_in) if self._left is not None else resets_in
        if self._newest is not None and allowance.resets_in is None:  # it is counted for a minute since it arrived
            resets_at = self._newest.at + MINUTE + SLACK
        else:
            resets_at = now + resets_in + min(SLACK, resets_in)
        self._left, self._resets_at = left, resets_at

    def _forget_up_to(self, number: int) -> None:
        """Remove requests that the newest report includes for certain."""
        while self._since and (first := next(iter(self._since))) <= number:
            self._note(first, None)
        for told in [told for told in self._reports if told <= number]:
            del self._reports[told]


# Seconds at most in which every request is refused, also one alone, if a limit per minute is used up. That ends
# within a minute, but the trial that shows it may wait for a slot.
LONGEST_DROUGHT = 90.0
RAISED = 1 / 50  # part by which it is raised after a minute without a refusal; doubles each minute
DOUBTED = 1 / 4  # the same until a refusal has confirmed it, after one more request and then after each short wait


class LearntRate:
    """The limit of requests per minute of a provider that does not state it. ``limit`` is None until it is known. It is
    in doubt until a request beyond it was refused, because an outage looks the same. After that it is raised a little
    after each minute at the limit, and a refusal lowers it to what the provider accepted."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self._leave: deque[float] = deque()  # when each request that was not refused leaves the count
        self._estimate, self._spread = 0, 0.0
        self._doubted, self._raised_by, self._raise_at, self._raise_after = True, 0.0, inf, MINUTE
        self._lowered_at = -inf

    def take(self, now: float) -> None:
        self._leave.append(now + MINUTE + SLACK)

    def refused(self) -> None:
        """Remove a refused request from the count."""
        if self._leave:
            self._leave.pop()

    def used(self, now: float) -> int:
        while self._leave and self._leave[0] <= now:
            self._leave.popleft()
        return len(self._leave)

    def dry_up(self, answers: int, seconds: float, now: float) -> bool:
        """Estimate the limit when the provider begins to refuse every request: it is the number that the provider
        accepted in a minute. If requests were not counted so far, ``answers`` is their number, for requests sent within
        ``seconds``. Returns False if they are too few for an estimate."""
        counted = self.used(now)
        self._estimate, self._spread = counted or answers, 0.0 if counted else seconds
        return self._estimate >= N.learnt  # a server that takes fewer may be full of others' requests

    def learn(self, free_at: float) -> None:
        """Use the estimate as the limit: the provider has refused everything for a while, and accepts requests again
        from ``free_at`` on. If the provider counts in sliding minutes, it accepts requests again only as slowly as it
        did before."""
        self.limit, self._estimate = self._estimate or self.limit, 0
        self._doubted, self._raised_by = True, 0.0
        # Before that the count has requests that the provider may have forgotten.
        self._raise_at = free_at + SLACK + (self._spread or MINUTE)
        if self._spread and self.limit is not None:
            pace, self._spread = self._spread / self.limit, 0.0
            self._leave.clear()
            self._leave.extend(free_at + SLACK + pace * number for number in range(self.limit))

    def is_spent(self, sent_at: float, now: float, *, certain: bool = True) -> bool:
        """Return whether a refusal means that the limit is used up. The limit is then lowered to what was accepted.
        ``certain``: False if as many requests were in flight as the server accepts at once; then the refusal confirms
        nothing."""
        used = self.used(now)
        if self.limit is None or used < N.full * self.limit:
            return False
        if self._doubted and not certain:
            return True
        if sent_at > self._lowered_at:  # requests that were in flight together tell the same
            self._raise_after *= 2
            self._doubted, self._raised_by = False, RAISED
        self.limit, self._lowered_at, self._raise_at = max(1, min(used, self.limit)), now, now + self._raise_after
        return True

    def free_at(self, now: float) -> float:
        """Return when a request may be sent; ``now`` or earlier means at once."""
        if self.limit is None or self.used(now) < self.limit:
            return now
        if now >= self._raise_at:
            self.limit += ceil(self._raised_by * self.limit) or 1
            self._raised_by = 2 * self._raised_by or DOUBTED
            self._raise_at = now + (N.short_wait if self._doubted else self._raise_after)
            return now
        return min(self._leave[len(self._leave) - self.limit], self._raise_at)


class Departure(NamedTuple):
    """When a request left, and its number in the order of sending. Requests with numbers up to ``arrived`` left at
    least ``SLACK`` seconds earlier, and so arrive first."""

    number: int
    arrived: int
    at: float


@dataclass(frozen=True, slots=True)
class Reservation:
    """The reservation of one request: its expected usage, its limits, and when it left."""

    expected: Usage
    sent: Departure
    kinds: frozenset[str]

    @property
    def number(self) -> int:
        return self.sent.number


NOTHING = Usage()


class Rates:
    def __init__(self, rpm: int | None = None, tpm: int | None = None) -> None:
        self._windows: dict[str, RateWindow] = {}
        self.limit(rpm, tpm)
        self._expected = NOTHING  # usage of the latest request
        self._number = 0  # number of the latest request that left
        self._leaving: deque[tuple[float, int]] = (
            deque()
        )  # requests of the last moment: when they left, and their number
        self._arrived = 0  # all up to this number have left before that
        self.learnt: LearntRate | None = None  # once a provider has refused every request

    def is_spent(self, sent_at: float, now: float, *, certain: bool) -> bool:
        """Return whether a refused request shows that the learnt limit is used up. The request is no longer counted."""
        if self.learnt is None:
            return False
        self.learnt.refused()
        return self.learnt.is_spent(sent_at, now, certain=certain)

    def limit(self, rpm: int | None, tpm: int | None) -> None:
        """Set the user's limits per minute; None removes one. The usage of the last minute still counts."""
        for kind, limit in (("requests", rpm), ("tokens", tpm)):
            if limit is not None or kind in self._windows:
                self._windows.setdefault(kind, RateWindow()).limit = limit

    @property
    def shared(self) -> dict[str, RateWindow]:
        """The windows with a limit set by the user, by kind."""
        return {kind: window for kind, window in self._windows.items() if window.limit is not None}

    def expected(self, kind: str) -> int:
        """Return how much of a window a request is expected to use: as much as the latest request."""
        return max(1, _amount(kind, self._expected, 1))

    def fill(self, until: float) -> None:
        """Count the user's limits as used until that time, because an earlier process may have used them."""
        for window in self._windows.values():
            window.fill(until)

    @property
    def counts_tokens(self) -> bool:
        return len(self._windows) > ("requests" in self._windows)

    def free_at(self, now: float) -> float:
        """Return when a request with the usage of the latest one may be sent; ``now`` or earlier means at once."""
        learnt = now if self.learnt is None else self.learnt.free_at(now)
        return max(learnt, self._free_at(self._expected, now, 1))

    def _free_at(self, expected: Usage, now: float, requests: int) -> float:
        # All limits are checked again at that time, so the latest of these times is sufficient.
        windows = (window.free_at(_amount(kind, expected, requests), now) for kind, window in self._windows.items())
        return max(windows, default=now)

    def begin(self, now: float) -> Reservation:
        """Count a request that has its slot. Its usage is assumed to be that of the latest request."""
        sent = self._depart(now)
        self._count(sent.number, now)
        if self.learnt is not None:
            self.learnt.take(now)
        return self._reserve(self._expected, sent)

    def _depart(self, now: float) -> Departure:
        """Return the departure of a request that leaves now."""
        self._number += 1
        while self._leaving and self._leaving[0][0] <= now - SLACK:
            self._arrived = self._leaving.popleft()[1]
        self._leaving.append((now, self._number))
        return Departure(self._number, self._arrived, now)

    def count_again(self, reservation: Reservation, now: float) -> None:
        """Count a request again because it leaves later than it was counted. Counting it twice is safer than counting
        it too early."""
        self._count(reservation.number, now)

    def _count(self, number: int, now: float) -> None:
        if (requests := self._windows.get("requests")) is not None:
            requests.take(number, 1, now)

    def _reserve(self, expected: Usage, sent: Departure) -> Reservation:
        for kind, window in self._windows.items():
            if kind != "requests":
                window.reserve(sent.number, _amount(kind, expected, 0))
        return Reservation(expected, sent, frozenset(self._windows))

    def unreserve(self, reservation: Reservation) -> Reservation:
        """Return the reservation without its expected usage, for a request that waits for permission: many requests
        that each hold a part would block each other."""
        for kind in reservation.kinds - {"requests"}:
            self._windows[kind].unreserve(reservation.number, _amount(kind, reservation.expected, 0))
        return Reservation(NOTHING, reservation.sent, reservation.kinds)

    def reserve(self, reservation: Reservation, expected: Usage, now: float) -> Reservation | None:
        """Reserve the expected usage of a request that has no reservation, and return it with the next number: the
        request leaves now. Returns None if it must wait until ``free_at``, or until others are settled."""
        self._expected = expected
        if self._free_at(expected, now, 0) > now:
            return None
        sent = self._depart(now)
        if (requests := self._windows.get("requests")) is not None:
            requests.renumber(reservation.number, sent.number, 1)
        return self._reserve(expected, sent)

    def settle(self, reservation: Reservation, used: Usage | None, now: float) -> None:
        """Replace the reserved amount by what the request used; None: unknown."""
        for kind in reservation.kinds - {"requests"}:  # not limits that became known later
            reserved = _amount(kind, reservation.expected, 0)
            spent = reserved if used is None else _amount(kind, used, 0)
            self._windows[kind].settle(reservation.number, reserved, spent, now)

    def unsend(self, reservation: Reservation, now: float) -> None:
        """Release everything for a request that was answered without the endpoint."""
        self.settle(reservation, NOTHING, now)
        if "requests" in reservation.kinds:
            self._windows["requests"].untake(reservation.number, 1)

    def learn(self, quota: Quota, reservation: Reservation | None, inflight: int, used: Usage, now: float) -> None:
        """Learn the limits that an answer or a refusal reported while ``inflight`` other requests were in flight."""
        if self._expected == NOTHING:
            self._expected = used
        for kind, allowance in _allowances(quota).items():
            window = self._windows.setdefault(kind, RateWindow())
            sent = None if reservation is None or kind not in reservation.kinds else reservation.sent
            window.learn(allowance, sent, inflight * _amount(kind, self._expected, 1), now)


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
    """Return whether a refusal was for a rate limit that resets soon, and not for requests in flight."""
    return quota is not None and any(each.remaining == 0 and _is_soon(each) for each in _allowances(quota).values())


def _is_soon(allowance: Allowance) -> bool:
    """Return whether the limit resets soon. If it does not, as with a spent limit per day, the request fails and the
    user sees the server's message."""
    return allowance.resets_in is None or allowance.resets_in <= LONGEST_RETRY_AFTER
