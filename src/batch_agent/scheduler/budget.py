"""The ledger of a run: the remaining budget, in tokens and in dollars.

Before a call is sent, the most that it can use is reserved. When its answer arrives, the reservation is settled. A call
fits if everything settled, everything reserved and the call itself stay within the limits. A call that does not fit
beside others may fit after they are settled, because most answers use less than was reserved. So the run is out of
budget only if a call does not fit with nothing in flight.

The ledger of a recorded run also has an advance: the amount up to which it may spend. The advance is on disk before
that amount is reached. After a kill the advance counts as spent, so the limits hold over any number of kills. To keep a
kill from costing the rest of the budget, calls in flight may use only a part of that rest (``AT_RISK``).

``dispatch.spending`` does the waiting; this module has no clock and no await.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from batch_agent.messages import Usage
from batch_agent.money import dollars, limit_dollars
from batch_agent.value_type import value_type

FIRST_ANSWER_TOKENS = 512  # expected tokens of an answer before the first one, without max_tokens
# The same for calls beside others: the first answers of a run are unknown together, and their errors would add up.
UNKNOWN_ANSWER_TOKENS = 16_384
TEMPLATE_TOKENS = 64  # tokens that a chat template adds to a prompt, until a server has counted more
# The same for calls beside others, if the server has counted no prompt with this prefix: errors would add up.
UNKNOWN_TEMPLATE_TOKENS = 1024
# Tokens of a picture or file per expected token, for calls beside others, until a server has counted one.
UNKNOWN_WEIGHT = 64
LEAST_BYTES_PER_TOKEN = 8  # text has at least one token in this many bytes; the rest of a prompt is files
ADVANCE_TEMPLATE_TOKENS = 256  # the same for an advance: what an unknown template may add to a reservation
AT_RISK = 0.5  # part of the rest that several calls in flight of a recorded run may use
AHEAD = 0.25  # part of the amount in flight that is advanced in addition, so that a call rarely waits for the disk
SMALL = 32  # a worker may take 1/32 of the rest in advance for coming requests
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
"""Statistics of an estimator: number of answers, tokens of the longest answer, tokens of the shortest prompt; number of
prompts with pictures or files, and 1,000 times the most tokens per expected token among these."""


class Ledger:
    """``spent`` is the settled amount; a resumed run starts with what earlier sessions spent. ``advance`` is the total
    that may be spent, as written on disk; None for a run without a record. ``others`` is what other workers of the run
    have spent, and ``others_open`` what they may spend in addition."""

    def __init__(self, *, max_tokens: int | None = None, max_cost: float | None = None) -> None:
        self.max_tokens = max_tokens
        self.max_cost = max_cost
        self.spent = Amount()
        self.reserved = Amount()
        self.others = self.others_open = NOTHING
        self.advance: Amount | None = None
        self.in_flight = 0

    def short(self, amount: Amount, *, beside: Amount = NOTHING, others_open: Amount = NOTHING) -> str | None:
        """Return a message about the limit that this call would exceed, or None. ``beside`` is the amount that is sent
        first; ``others_open`` is the amount that other workers hold."""
        needed, spent = self.reserved + beside + amount + others_open, self.spent + self.others
        # Part of the rest that may be in flight.
        several = self.in_flight or beside != NOTHING or others_open != NOTHING
        most = AT_RISK if self.advance is not None and several else 1.0
        if self.max_tokens is not None and needed.tokens > (self.max_tokens - spent.tokens) * most:
            return (
                f"max_total_tokens {self.max_tokens:,}: {spent.tokens:,} are spent, "
                f"and the next call may take {amount.tokens:,}"
            )
        if self.max_cost is not None and needed.cost > (self.max_cost - spent.cost) * most + ROUNDING:
            return (
                f"max_cost {limit_dollars(self.max_cost)}: {dollars(spent.cost)} is spent, "
                f"and the next call may cost {dollars(amount.cost)}"
            )
        return None

    def covers(self, amount: Amount) -> bool:
        """Return whether the advance also covers this call."""
        if self.advance is None:
            return True
        needed = self.spent + self.reserved + amount
        return needed.tokens <= self.advance.tokens and needed.cost <= self.advance.cost + ROUNDING

    def next_advance(self, waiting: Amount, more: Amount = NOTHING) -> Amount:
        """Return the advance to write: what is spent, what is in flight, what waits to be sent, and a little more.
        ``more`` is what calls may use beyond their reservations. The advance stays within the limits if that is enough
        for these calls."""
        needed = self.spent + self.reserved + waiting
        ahead = Amount(math.ceil(self.reserved.tokens * AHEAD), self.reserved.cost * AHEAD) + more
        tokens, cost = needed.tokens + ahead.tokens, needed.cost + ahead.cost
        if self.max_tokens is not None:
            tokens = max(needed.tokens, min(tokens, self.max_tokens))
        if self.max_cost is not None:
            cost = max(needed.cost, min(cost, self.max_cost))
        return Amount(tokens, cost)

    def ahead_of(self, lately: Amount) -> Amount:
        """Return what a worker of a shared run reserves in advance beyond what is in flight: twice what it spent since
        its last advance, but only a small part of what is left, because it is lost if the worker dies."""
        spent, tokens, cost = self.spent + self.others, 2 * lately.tokens, 2 * lately.cost
        if self.max_tokens is not None:
            tokens = min(tokens, max(0, self.max_tokens - spent.tokens) // SMALL)
        if self.max_cost is not None:
            cost = min(cost, max(0.0, self.max_cost - spent.cost) / SMALL)
        return Amount(tokens, cost)

    def reserve(self, amount: Amount) -> None:
        self.reserved += amount
        self.in_flight += 1

    def settle(self, reserved: Amount, spent: Amount) -> None:
        self.in_flight -= 1
        # Sums of floats drift. With nothing in flight, nothing is reserved.
        self.reserved = self.reserved - reserved if self.in_flight else Amount()
        self.spent += spent


@dataclass(frozen=True, slots=True)
class Counted:
    """A prefix of a prompt that a server has counted: its bytes, an upper bound of its tokens, and the usual tokens of
    the pictures and files in it."""

    prompt_bytes: int
    tokens: int
    attached: int = 0


class Estimator:
    """Estimates what a call uses, from earlier calls.

    For a total limit it returns the most that a call can use (``bound``). A token has at least one byte. So a prompt
    has at most the counted tokens of its prefix, plus one per further byte. For a limit per minute it returns the most
    that is likely (``most``): among n prompts in random order, the last has the most tokens per byte with probability
    1/n, and may then have one token per byte.

    Nothing bounds the tokens of pictures and files: each model counts them in its own way, and the server may fetch
    them. ``attached`` is the usual number for them. They are expected to take as many times that number as the worst so
    far, plus a margin for calls beside others. So until a server has counted one, a limit lets few of them out at once.

    An answer has at most ``max_tokens``. Without that option it is expected to be as long as the longest so far. A call
    with several ``choices`` has several answers.
    """

    def __init__(self) -> None:
        self.answers = 0  # number of answers that the server has counted
        self.longest = 0  # tokens of the longest of them
        self.least = 0  # tokens of the shortest prompt; a template has no more
        self._counted = 0  # number of prompts that the server has counted
        self._densest = 0.0  # tokens per byte, at most 1
        self._template_tokens = TEMPLATE_TOKENS
        self.weighed = 0  # number of prompts with pictures or files that the server has counted
        self.heaviest = 1.0  # most tokens of pictures and files per expected token

    def start(self, learnt: Learnt) -> None:
        """Start with the statistics of an earlier session."""
        if len(learnt) >= 3:
            self.answers, self.longest, self.least = learnt[:3]
        if len(learnt) == 5:
            self.weighed, self.heaviest = learnt[3], max(1.0, learnt[4] / 1000)

    def bound(
        self,
        prompt_bytes: int,
        known: Counted | None,
        max_tokens: int | None,
        *,
        alone: bool,
        attached: int = 0,
        choices: int = 1,
    ) -> Usage:
        """Return the largest usage that a call can have. ``known`` is a prefix of the prompt that was counted before.
        ``alone``: no other call is in flight. It is assumed that no part of the prompt is cached."""
        if known is None and self.least:
            # The shortest prompt may have had a picture, which is counted below.
            template = min(self.least, UNKNOWN_TEMPLATE_TOKENS) if attached else self.least
            prompt = prompt_bytes + max(TEMPLATE_TOKENS, template)
        elif known is None:
            prompt = prompt_bytes + (TEMPLATE_TOKENS if alone else UNKNOWN_TEMPLATE_TOKENS)
        else:
            prompt = min(prompt_bytes + UNKNOWN_TEMPLATE_TOKENS, known.tokens + prompt_bytes - known.prompt_bytes)
            if attached:  # the counted prefix may contain pictures, which have no bytes
                prompt = known.tokens + prompt_bytes - known.prompt_bytes
                attached = max(0, attached - known.attached)
        if attached:
            margin = 0.0 if alone else (UNKNOWN_WEIGHT - 1) / max(1, self.weighed)
            prompt += math.ceil(attached * (self.heaviest + margin))
        # Among n answers, the last is the longest with probability 1/n.
        longest = self.longest + (FIRST_ANSWER_TOKENS if alone else UNKNOWN_ANSWER_TOKENS) // max(1, self.answers)
        return Usage(prompt_tokens=prompt, completion_tokens=(max_tokens or longest) * choices)

    def most(self, prompt_bytes: int, max_tokens: int | None, *, attached: int = 0, choices: int = 1) -> Usage:
        density = self._densest + (1 - self._densest) / max(1, self._counted)
        prompt = math.ceil(prompt_bytes * density + attached * self.heaviest) + self._template_tokens
        longest = self.longest if self.answers else FIRST_ANSWER_TOKENS
        return Usage(prompt_tokens=prompt, completion_tokens=(max_tokens or longest) * choices)

    def learn(self, prompt_bytes: int, usage: Usage, *, attached: int = 0, choices: int = 1) -> None:
        if usage.prompt_tokens or usage.completion_tokens:
            self.answers += 1
            self.longest = max(self.longest, -(-usage.completion_tokens // choices))
        if usage.prompt_tokens and (not self.least or usage.prompt_tokens < self.least):
            self.least = usage.prompt_tokens
        if prompt_bytes and usage.prompt_tokens and not attached:
            self._counted += 1
            self._densest = max(self._densest, min(1.0, usage.prompt_tokens / prompt_bytes))
            self._template_tokens = max(self._template_tokens, usage.prompt_tokens - prompt_bytes)

    def learn_attached(self, new_bytes: int, new_tokens: int, attached: int) -> None:
        """Learn from the part of a prompt that was counted for the first time, with pictures or files in it."""
        self.weighed += 1
        tokens = max(0, new_tokens - new_bytes // LEAST_BYTES_PER_TOKEN)
        self.heaviest = max(self.heaviest, tokens / attached)


class TimeShare:
    """Divides the seconds of a run evenly among the calls in flight.

    ``_each`` is the total share of a call that was in flight from the start. So a call's share is the difference of
    ``_each`` between its end and its beginning. Seconds without any call are not assigned.
    """

    def __init__(self) -> None:
        self._at = 0.0
        self._each = 0.0
        self._open = 0

    def begin(self, now: float) -> float:
        """Return a value to pass to ``end``."""
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
