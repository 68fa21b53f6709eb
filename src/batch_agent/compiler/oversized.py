"""Handles a row that does not fit the model's context: which field is too long, and what is sent instead.

The longest field is shortened, because it is nearly always the text that the task is about. It is cut to its head, or
into pieces, each of which becomes a request of its own. Each of them is marked as incomplete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from batch_agent.compiler.chunks import head, split
from batch_agent.compiler.tokens import ContextRoom, estimate_tokens

How = Literal["fail", "chunk", "truncate"]

# Tokens are estimates, and texts differ: a piece sized to fill the context would often be refused. With tools, the
# conversation also grows.
CAREFUL = 0.75
CAREFUL_WITH_TOOLS = 0.5
LEAST_TOKENS = 64  # a shorter piece is useless
MARK_TOKENS = 32  # the text around a piece


@dataclass(frozen=True, slots=True)
class Sizing:
    """The size limit of a row that is made to fit. ``max_tokens`` is the answer's limit, if set."""

    how: How
    limit: ContextRoom
    max_tokens: int | None = None
    tools: bool = False

    @property
    def room(self) -> int:
        """Return the token limit of a request, shared part included."""
        context, least = self.limit.model_max_context or 0, self.limit.min_response_tokens
        answer = max(least, min(self.max_tokens or 0, context // 2))
        return int((context - answer) * (CAREFUL_WITH_TOOLS if self.tools else CAREFUL))

    def fits(self, tokens: int) -> bool:
        return self.limit.room is None or tokens <= self.limit.room

    def cut(self, names: Sequence[str], texts: Mapping[str, str], tokens: int) -> list[dict[str, str]]:
        """Return the texts of the fields for each request that replaces one of ``tokens`` tokens; ``names`` are
        repeated as often as they occur in the task. Raises Oversized if cutting the longest field is not enough."""
        if not names:
            self.limit.check(tokens)
        name = longest(names, texts)
        text, times = texts[name], names.count(name)
        others = tokens - estimate_tokens(text) * times
        most = (self.room - others) // times - MARK_TOKENS
        if most < LEAST_TOKENS:
            self.limit.check(tokens, f"; cutting {name!r} is not enough, about {others:,} are without it")
        pieces = _headed(text, most) if self.how == "truncate" else _numbered(split(text, most))
        return [{**texts, name: piece} for piece in pieces]


def longest(names: Sequence[str], texts: Mapping[str, str]) -> str:
    """Return the field that takes the most room in the task."""
    return max(texts, key=lambda name: estimate_tokens(texts[name]) * names.count(name))


def _numbered(pieces: Sequence[str]) -> list[str]:
    return [f"[Part {number} of {len(pieces)}]\n{piece}" for number, piece in enumerate(pieces, start=1)]


def _headed(text: str, most: int) -> list[str]:
    kept = head(text, most)
    left = estimate_tokens(text[len(kept) :])
    return [f"{kept.rstrip()}\n[Cut here to fit: about {left:,} tokens more are left out.]"]
