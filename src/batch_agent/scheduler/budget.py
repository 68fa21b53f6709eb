"""The ledger of a run: what may still be spent, in tokens and in dollars.

Each call is reserved before it is sent and settled when its answer is there. A call fits while everything settled plus
everything reserved plus the call itself stays within the limits, so what is spent exceeds a limit by no more than the
calls in flight exceeded what was reserved for them; and not at all where ``max_tokens`` bounds the answers.

A call that does not fit beside others may fit when they are settled, because estimates are made to be too high rather
than too low. So the run is out of budget only when a call does not fit with nothing in flight. Waiting for that moment
is ``engine.spending``'s part; here is no clock and no await.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from batch_agent.messages import Usage

FIRST_ANSWER_TOKENS = 512  # expected of an answer before there was one, where max_tokens is not given
TEMPLATE_TOKENS = 64  # what a chat template adds to a prompt, until a server has counted more
# The same beside other calls before the first answer: what all of them have too little would add up.
UNKNOWN_TEMPLATE_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Amount:
    tokens: int = 0
    cost: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.tokens + other.tokens, self.cost + other.cost)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.tokens - other.tokens, self.cost - other.cost)


class Ledger:
    """``spent`` is settled; with a resumed run it begins with what was spent before."""

    __slots__ = ("_open", "max_cost", "max_tokens", "reserved", "spent")

    def __init__(self, *, max_tokens: int | None = None, max_cost: float | None = None) -> None:
        self.max_tokens = max_tokens
        self.max_cost = max_cost
        self.spent = Amount()
        self.reserved = Amount()
        self._open = 0

    @property
    def in_flight(self) -> int:
        return self._open

    def short(self, amount: Amount) -> str | None:
        """Which limit leaves no room for this call, for people; None when it fits."""
        needed = self.spent + self.reserved + amount
        if self.max_tokens is not None and needed.tokens > self.max_tokens:
            return (
                f"max_total_tokens {self.max_tokens:,}: {self.spent.tokens:,} are spent, "
                f"and the next call takes about {amount.tokens:,}"
            )
        if self.max_cost is not None and needed.cost > self.max_cost:
            return (
                f"max_cost ${self.max_cost:g}: ${self.spent.cost:.4g} is spent, "
                f"and the next call costs about ${amount.cost:.2g}"
            )
        return None

    def reserve(self, amount: Amount) -> None:
        self.reserved += amount
        self._open += 1

    def settle(self, reserved: Amount, spent: Amount) -> None:
        self._open -= 1
        # Sums of floats drift: with nothing in flight, nothing is reserved.
        self.reserved = self.reserved - reserved if self._open else Amount()
        self.spent += spent


class Estimator:
    """What a call takes at most, as far as that can be told, and where it cannot, about what: learnt from the calls
    before.

    A prompt has no more tokens than bytes, and what the chat template adds. What is expected of it comes down from
    there to the densest prompt so far: of n prompts in any order, the last is the densest with a chance of one in n,
    and it may then be as dense as can be. An answer has ``max_tokens`` at most; where that is not given, about the mean
    of those before.
    """

    __slots__ = ("_answer_tokens", "_answered", "_answers", "_counted", "_densest", "_longest", "_template_tokens")

    def __init__(self) -> None:
        self._answered = False
        self._answers = 0  # that the server has counted
        self._answer_tokens = 0
        self._longest = 0  # of them, in tokens
        self._counted = 0  # prompts that the server has counted
        self._densest = 0.0  # tokens per byte, 1 at most
        self._template_tokens = TEMPLATE_TOKENS

    def expect(self, prompt_bytes: int, max_tokens: int | None, *, alone: bool) -> Usage:
        """``alone``: with no other call in flight. None of the prompt is expected to be cached."""
        density = self._densest + (1 - self._densest) / max(1, self._counted)
        template = self._template_tokens if alone or self._answered else UNKNOWN_TEMPLATE_TOKENS
        prompt = math.ceil(prompt_bytes * density) + template
        return Usage(prompt_tokens=prompt, completion_tokens=max_tokens or self.answer_tokens)

    def most(self, prompt_bytes: int, max_tokens: int | None) -> Usage:
        """For a budget that must not be passed for a moment: an answer is as long as the longest so far."""
        longest = self._longest if self._answers else FIRST_ANSWER_TOKENS
        prompt = self.expect(prompt_bytes, max_tokens, alone=True).prompt_tokens
        return Usage(prompt_tokens=prompt, completion_tokens=max_tokens or longest)

    @property
    def answer_tokens(self) -> int:
        return -(-self._answer_tokens // self._answers) if self._answers else FIRST_ANSWER_TOKENS

    def learn(self, prompt_bytes: int, usage: Usage) -> None:
        self._answered = True
        if usage.prompt_tokens or usage.completion_tokens:
            self._answers += 1
            self._answer_tokens += usage.completion_tokens
            self._longest = max(self._longest, usage.completion_tokens)
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
