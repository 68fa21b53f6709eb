"""A row that does not fit the model's context: which of its fields is too long, and what is sent instead.

The longest field gives way, because it is nearly always the one text that the task is about. It is cut to its head, or
into pieces, of which each makes a row of its own; every one of them says that it is not the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from batch_agent.compiler.budget import Budget, estimate_tokens
from batch_agent.compiler.chunks import head, split

How = Literal["fail", "chunk", "truncate"]

# Tokens are estimated, and some texts have more of them than others: a piece that is sized to fill the context would be
# refused as often as not. Where there are tools, the conversation grows from there.
CAREFUL = 0.75
CAREFUL_WITH_TOOLS = 0.5
LEAST_TOKENS = 64  # a piece that is shorter says nothing
MARK_TOKENS = 32  # the words around a piece


@dataclass(frozen=True, slots=True)
class Sizing:
    """How long a row may be that is made to fit. ``max_tokens`` is what an answer may have, where that is said."""

    how: How
    budget: Budget
    max_tokens: int | None = None
    tools: bool = False

    @property
    def room(self) -> int:
        """Tokens for a request, shared part included."""
        context, least = self.budget.model_max_context or 0, self.budget.min_response_tokens
        answer = max(least, min(self.max_tokens or 0, context // 2))
        return int((context - answer) * (CAREFUL_WITH_TOOLS if self.tools else CAREFUL))

    def fits(self, tokens: int) -> bool:
        return self.budget.room is None or tokens <= self.budget.room

    def cut(self, names: Sequence[str], texts: Mapping[str, str], tokens: int) -> list[dict[str, str]]:
        """The texts of the fields (``names``, as often as they stand in the task) for each request that is sent instead
        of the one of so many tokens. Raises Oversized where cutting the longest of them is not enough."""
        if not names:
            self.budget.check(tokens)
        name = longest(names, texts)
        text, times = texts[name], names.count(name)
        others = tokens - estimate_tokens(text) * times
        most = (self.room - others) // times - MARK_TOKENS
        if most < LEAST_TOKENS:
            self.budget.check(tokens, f"; cutting {name!r} is not enough, about {others:,} are without it")
        pieces = _headed(text, most) if self.how == "truncate" else _numbered(split(text, most))
        return [{**texts, name: piece} for piece in pieces]


def longest(names: Sequence[str], texts: Mapping[str, str]) -> str:
    """The field that takes most of the task, of at least one."""
    return max(texts, key=lambda name: estimate_tokens(texts[name]) * names.count(name))


def _numbered(pieces: Sequence[str]) -> list[str]:
    return [f"[Part {number} of {len(pieces)}]\n{piece}" for number, piece in enumerate(pieces, start=1)]


def _headed(text: str, most: int) -> list[str]:
    kept = head(text, most)
    left = estimate_tokens(text[len(kept) :])
    return [f"{kept.rstrip()}\n[Cut here to fit: about {left:,} tokens more are left out.]"]
