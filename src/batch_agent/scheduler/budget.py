"""The ledger of a run: what may still be spent, in tokens and in dollars.

Each call is reserved before it is sent, at the most that it can take, and settled when its answer is there. A call fits
while everything settled plus everything reserved plus the call itself stays within the limits. A call that does not fit
beside others may fit when they are settled, because answers mostly take less than the most. So the run is out of budget
only when a call does not fit with nothing in flight.

The ledger of a recorded run also has a lease: the amount up to which it may spend, on disk before it is reached. After
a kill the lease counts as spent, so the limits hold over any number of kills. To keep a kill from costing the rest of
the budget, calls in flight may take no more than a part of that rest (``AT_RISK``).

Waiting is ``dispatch.spending``'s part; here is no clock and no await.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from batch_agent.messages import Usage
from batch_agent.value_type import value_type

FIRST_ANSWER_TOKENS = 512  # expected of an answer before there was one, where max_tokens is not given
TEMPLATE_TOKENS = 64  # what a chat template adds to a prompt, until a server has counted more
# The same beside other calls, where the server has counted no prompt with this beginning: errors would add up.
UNKNOWN_TEMPLATE_TOKENS = 1024
LEASED_TEMPLATE_TOKENS = 256  # the same for a lease: what an unknown template may have beyond what is reserved for it
AT_RISK = 0.5  # of what is left: the most that several calls in flight of a recorded run may take
AHEAD = 0.25  # of what is in flight: leased beyond it, so that a call rarely waits for the disk
SMALL = 32  # part of what is left that a worker may lease for requests to come: one of so many
ROUNDING = 1e-9  # $ by which sums of floats may differ


@value_type
class Amount:
    tokens: int = 0
    cost: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.tokens + other.tokens, self.cost + other.cost)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.tokens - other.tokens, self.cost - other.cost)


NOTHING = Amount()
Learnt: TypeAlias = tuple[int, ...]
"""What an estimator knows after its calls: answers counted, tokens of the longest answer and of the shortest prompt."""


class Ledger:
    """``spent`` is settled; with a resumed run it begins with what was spent before. ``lease`` is what may be spent in
    all, as it stands on disk; None for a run that is not recorded. ``others`` is what other workers of the run have
    spent, and ``others_open`` what they may spend beyond that."""

    __slots__ = ("_open", "lease", "max_cost", "max_tokens", "others", "others_open", "reserved", "spent")

    def __init__(self, *, max_tokens: int | None = None, max_cost: float | None = None) -> None:
        self.max_tokens = max_tokens
        self.max_cost = max_cost
        self.spent = Amount()
        self.reserved = Amount()
        self.others = self.others_open = NOTHING
        self.lease: Amount | None = None
        self._open = 0

    @property
    def in_flight(self) -> int:
        return self._open

    def short(self, amount: Amount, *, beside: Amount = NOTHING) -> str | None:
        """Which limit leaves no room for this call, for people; None when it fits. ``beside`` will be sent before."""
        needed, spent = self.reserved + beside + amount + self.others_open, self.spent + self.others
        # Part of what is left that may be in flight.
        several = self._open or beside != NOTHING or self.others_open != NOTHING
        most = AT_RISK if self.lease is not None and several else 1.0
        if self.max_tokens is not None and needed.tokens > (self.max_tokens - spent.tokens) * most:
            return (
                f"max_total_tokens {self.max_tokens:,}: {spent.tokens:,} are spent, "
                f"and the next call may take {amount.tokens:,}"
            )
        if self.max_cost is not None and needed.cost > (self.max_cost - spent.cost) * most + ROUNDING:
            return (
                f"max_cost ${self.max_cost:g}: ${spent.cost:.4g} is spent, "
                f"and the next call may cost ${amount.cost:.2g}"
            )
        return None

    def covers(self, amount: Amount) -> bool:
        """Whether the lease covers this call too."""
        if self.lease is None:
            return True
        needed = self.spent + self.reserved + amount
        return needed.tokens <= self.lease.tokens and needed.cost <= self.lease.cost + ROUNDING

    def next_lease(self, waiting: Amount, more: Amount = NOTHING) -> Amount:
        """The lease to be written: what is spent and in flight, what waits to be sent, and a little ahead of it;
        ``more`` is what calls may take beyond what is reserved for them. Never above the limits, if that is enough."""
        needed = self.spent + self.reserved + waiting
        ahead = Amount(math.ceil(self.reserved.tokens * AHEAD), self.reserved.cost * AHEAD) + more
        tokens, cost = needed.tokens + ahead.tokens, needed.cost + ahead.cost
        if self.max_tokens is not None:
            tokens = max(needed.tokens, min(tokens, self.max_tokens))
        if self.max_cost is not None:
            cost = max(needed.cost, min(cost, self.max_cost))
        return Amount(tokens, cost)

    def ahead_of(self, lately: Amount) -> Amount:
        """What a worker of a shared run leases beyond what is in flight: twice what it spent since it last did, but a
        small part of what is left, because it is lost if the worker dies."""
        spent, tokens, cost = self.spent + self.others, 2 * lately.tokens, 2 * lately.cost
        if self.max_tokens is not None:
            tokens = min(tokens, max(0, self.max_tokens - spent.tokens) // SMALL)
        if self.max_cost is not None:
            cost = min(cost, max(0.0, self.max_cost - spent.cost) / SMALL)
        return Amount(tokens, cost)

    def reserve(self, amount: Amount) -> None:
        self.reserved += amount
        self._open += 1

    def settle(self, reserved: Amount, spent: Amount) -> None:
        self._open -= 1
        # Sums of floats drift: with nothing in flight, nothing is reserved.
        self.reserved = self.reserved - reserved if self._open else Amount()
        self.spent += spent


@dataclass(frozen=True, slots=True)
class Counted:
    """The beginning of a prompt: its bytes, and the most tokens that it can have, as a server counted them."""

    prompt_bytes: int
    tokens: int


class Estimator:
    """What a call takes, learnt from the calls before.

    For a limit in all, the most that it can take (``bound``): no token is shorter than a byte, so a prompt has no more
    tokens than its beginning was counted to have and one for each further byte. For a limit by the minute, the most
    that is likely (``most``): of n prompts in any order, the last is the densest with a chance of one in n, and it may
    then have a token for each byte.

    An answer has ``max_tokens`` at most. Where that is not given nothing bounds it, and it is expected to be as long as
    the longest before.
    """

    __slots__ = ("_answers", "_counted", "_densest", "_least", "_longest", "_template_tokens")

    def __init__(self) -> None:
        self._answers = 0  # that the server has counted
        self._longest = 0  # of them, in tokens
        self._least = 0  # tokens of the shortest prompt; a template has no more
        self._counted = 0  # prompts that the server has counted
        self._densest = 0.0  # tokens per byte, 1 at most
        self._template_tokens = TEMPLATE_TOKENS

    @property
    def learnt(self) -> Learnt:
        return self._answers, self._longest, self._least

    def start(self, learnt: Learnt) -> None:
        """Begin with what an earlier session has learnt."""
        if len(learnt) == 3:
            self._answers, self._longest, self._least = learnt

    def bound(self, prompt_bytes: int, known: Counted | None, max_tokens: int | None, *, alone: bool) -> Usage:
        """``known`` is a beginning of the prompt that was counted before; ``alone``: no other call is in flight. None
        of the prompt is expected to be cached."""
        if known is None and self._least:
            prompt = prompt_bytes + max(TEMPLATE_TOKENS, self._least)
        elif known is None:
            prompt = prompt_bytes + (TEMPLATE_TOKENS if alone else UNKNOWN_TEMPLATE_TOKENS)
        else:
            prompt = min(prompt_bytes + UNKNOWN_TEMPLATE_TOKENS, known.tokens + prompt_bytes - known.prompt_bytes)
        # Of n answers the last is the longest with a chance of one in n.
        longest = self._longest + FIRST_ANSWER_TOKENS // max(1, self._answers)
        return Usage(prompt_tokens=prompt, completion_tokens=max_tokens or longest)

    def most(self, prompt_bytes: int, max_tokens: int | None) -> Usage:
        density = self._densest + (1 - self._densest) / max(1, self._counted)
        prompt = math.ceil(prompt_bytes * density) + self._template_tokens
        longest = self._longest if self._answers else FIRST_ANSWER_TOKENS
        return Usage(prompt_tokens=prompt, completion_tokens=max_tokens or longest)

    def learn(self, prompt_bytes: int, usage: Usage) -> None:
        if usage.prompt_tokens or usage.completion_tokens:
            self._answers += 1
            self._longest = max(self._longest, usage.completion_tokens)
        if usage.prompt_tokens:
            self._least = min(self._least or usage.prompt_tokens, usage.prompt_tokens)
        if prompt_bytes and usage.prompt_tokens:
            self._counted += 1
            self._densest = max(self._densest, min(1.0, usage.prompt_tokens / prompt_bytes))
            self._template_tokens = max(self._template_tokens, usage.prompt_tokens - prompt_bytes)


class TimeShare:
    """The seconds of a run shared among its calls: each second is divided evenly among those in flight.

    ``_each`` is what a call that was there from the start would have been given so far, so a call's share is the
    difference between its end and its beginning, however the number in flight changed meanwhile. Seconds without any
    call belong to nobody.
    """

    __slots__ = ("_at", "_each", "_open")

    def __init__(self) -> None:
        self._at = 0.0
        self._each = 0.0
        self._open = 0

    def begin(self, now: float) -> float:
        """Hand what this returns to ``end``."""
        self._advance(now)
        self._open += 1
        return self._each

    def end(self, begun: float, now: float) -> float:
        self._advance(now)
        self._open -= 1
        return self._each - begun

    def _advance(self, now: float) -> None:
        if self._open:
            self._each += (now - self._at) / self._open
        self._at = now
