"""What a run saved, with the way each saving was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from batch_agent.observe.metrics import Statistics
from batch_agent.observe.text import amount, share


@dataclass(frozen=True, slots=True)
class Saving:
    name: str
    value: float
    text: str
    how: str


def savings(statistics: Statistics) -> list[Saving]:
    """Return the savings that are not zero."""
    return [saving for saving in _all(statistics) if saving.value > 0]


def _all(statistics: Statistics) -> Iterator[Saving]:
    usage = statistics.usage
    yield Saving(
        "cached_prompt_tokens",
        usage.cached_tokens,
        f"{amount(usage.cached_tokens)} prompt tokens, {share(usage.cached_tokens, usage.prompt_tokens)}, cached",
        "reported by the engine",
    )
    at_hand = statistics.tool_shared + statistics.tool_cached
    yield Saving(
        "coalesced_tool_calls",
        at_hand,
        f"{at_hand:,} of {statistics.tool_calls:,} tool calls",
        "results shared or cached",
    )
    tokens = statistics.saved.prompt_tokens + statistics.saved.completion_tokens
    yield Saving(
        "response_cache_answers",
        statistics.cache_hits,
        f"{statistics.cache_hits:,} of {statistics.turns:,} answers, {amount(tokens)} tokens",
        "from the response cache, tokens as first reported",
    )
