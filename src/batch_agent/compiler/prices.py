"""Computes what a run's tokens, or its hours, cost.

Prices come from the spec, or else from the table of the optional package ``genai-prices``, which knows public providers
by their address. Nothing is guessed: a server that is not in the table has no price, whatever its model is called. The
table is read once into plain numbers, because its own arithmetic is too slow for every call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from batch_agent.errors import SpecError
from batch_agent.messages import Usage

MILLION = 1_000_000
HOUR = 3600.0
FORMS = (
    "{'input': 0.15, 'cached': 0.075, 'cache_write': 0.2, 'output': 0.6} in $ per million tokens, "
    "or {'gpu_hour': 2.5, 'gpus': 4}; {'people': 0.25} beside them is $ per judgement"
)
PEOPLE = "people"  # $ per judgement, which no request of a model costs
PER_TOKEN = ("input", "cached", "cache_write", "output")
# Providers of the table that have a scheme here, and its name.
IN_TABLE = {
    **{name: name for name in ("openai", "anthropic", "groq", "mistral", "deepseek", "together", "fireworks")},
    **{"openrouter": "openrouter", "google": "gemini", "aws": "bedrock", "azure": "azure"},
}
NOT_TEXT = re.compile(r"image|audio|realtime|transcri|tts|embed|moderation|whisper|live|^ft:|translate|guard", re.I)


class _Priced(Protocol):
    """The attributes of a model in the table that are used here."""

    id: str

    def get_prices(self, at: datetime) -> object: ...


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """$ per million tokens, for requests of more than ``above`` prompt tokens."""

    input: float
    cached: float
    cache_write: float
    output: float
    above: int = 0


@dataclass(frozen=True, slots=True)
class Prices:
    """Either ``tiers`` of token prices, the dearest last, or ``per_second`` for servers that are paid by time."""

    source: str  # origin of the prices, for display
    tiers: tuple[TokenPrices, ...] = ()
    per_second: float = 0.0

    def times(self, factor: float) -> Prices:
        tiers = tuple(
            TokenPrices(factor * t.input, factor * t.cached, factor * t.cache_write, factor * t.output, t.above)
            for t in self.tiers
        )
        return Prices(f"{factor:g} x {self.source}", tiers, self.per_second)

    def cost(self, usage: Usage) -> float:
        """Return the cost of one call's tokens in $. The size of the prompt decides the tier."""
        rates = None
        for tier in self.tiers:
            if rates is None or usage.prompt_tokens > tier.above:
                rates = tier
        if rates is None:
            return 0.0
        fresh = max(0, usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens)
        prompt = fresh * rates.input + usage.cached_tokens * rates.cached + usage.cache_write_tokens * rates.cache_write
        return (prompt + usage.completion_tokens * rates.output) / MILLION

    def most(self, usage: Usage) -> float:
        """Return the highest possible cost of a call with these tokens, in $: the whole prompt at its dearest price,
        which may be that of a cache write, in the dearest tier for prompts up to this size."""
        dearest = 0.0
        for place, tier in enumerate(self.tiers):
            if place == 0 or usage.prompt_tokens > tier.above:
                prompt = usage.prompt_tokens * max(tier.input, tier.cached, tier.cache_write)
                dearest = max(dearest, prompt + usage.completion_tokens * tier.output)
        return dearest / MILLION


def find_prices(given: Mapping[str, float] | None, *, model: str | None, backend: str) -> Prices | None:
    """Return the prices of this model at this backend; None if unknown. Raises SpecError for invalid given prices."""
    if given is not None and given.keys() != {PEOPLE}:
        return _given({name: price for name, price in given.items() if name != PEOPLE})
    return None if model is None else _from_table(model, backend)


def _given(given: Mapping[str, float]) -> Prices:
    for name, value in given.items():
        if name not in (*PER_TOKEN, "gpu_hour", "gpus"):
            raise SpecError(f"prices: there is no {name!r}; give {FORMS}")
        if not math.isfinite(value) or value < 0:
            raise SpecError(f"prices: {name} is {value:g}, and a price is a number from 0 up")
    tokens = given.keys() & set(PER_TOKEN)
    if "gpu_hour" in given:
        if tokens:
            raise SpecError("prices: gpu_hour and prices per token exclude each other; give one of the two")
        gpus = given.get("gpus", 1)
        return Prices(f"${given['gpu_hour']:g} per GPU-hour on {gpus:g}", per_second=given["gpu_hour"] * gpus / HOUR)
    if "gpus" in given or not {"input", "output"} <= tokens:
        raise SpecError(f"prices: give {FORMS}")
    # Without other prices, all prompt tokens cost the same.
    fresh = given["input"]
    rates = TokenPrices(fresh, given.get("cached", fresh), given.get("cache_write", fresh), given["output"])
    return Prices("the prices given", (rates,))


def _from_table(model: str, backend: str) -> Prices | None:
    try:
        from genai_prices.data_snapshot import get_snapshot  # optional, and takes half a second to import
    except ImportError:
        return None
    # Providers are identified by host; the scheme of openai://api.openai.com is ours.
    address = "https://" + backend.partition("://")[2]
    try:
        provider, info = get_snapshot().find_provider_model(model, None, None, address)
    except LookupError:
        return None
    return _prices(provider.id, info)


def priced_models() -> Iterator[tuple[str, str, Prices]]:
    """Yield provider, model and prices of each text model in the table whose provider has a scheme here. Yields nothing
    if the table is not installed."""
    try:
        from genai_prices.data_snapshot import get_snapshot
    except ImportError:
        return
    for provider in get_snapshot().providers:
        for info in provider.models if provider.id in IN_TABLE else ():
            if getattr(info, "deprecated", None) or NOT_TEXT.search(info.id):
                continue
            if (prices := _prices(provider.id, info)) is not None:
                yield IN_TABLE[provider.id], info.id, prices


def _prices(provider: str, info: _Priced) -> Prices | None:
    table = info.get_prices(datetime.now(tz=UTC))
    names = ("input", "cache_read", "cache_write", "output")
    tiers = _tiers(*(getattr(table, f"{name}_mtok", None) for name in names))
    return Prices(f"genai-prices, {provider} {info.id}", tiers) if tiers else None


def _tiers(fresh: object, cached: object, cache_write: object, output: object) -> tuple[TokenPrices, ...]:
    if fresh is None or output is None:
        return ()
    cached, written = (fresh if price is None else price for price in (cached, cache_write))
    starts = {0} | {tier.start for price in (fresh, cached, written, output) for tier in getattr(price, "tiers", ())}
    return tuple(
        TokenPrices(_rate(fresh, start), _rate(cached, start), _rate(written, start), _rate(output, start), above=start)
        for start in sorted(starts)
    )


def _rate(price: object, start: int) -> float:
    """Return the table's price for prompts just above ``start``: a number, or a base price with higher tiers."""
    rate = getattr(price, "base", price)
    for tier in getattr(price, "tiers", ()):
        if tier.start <= start:
            rate = tier.price
    return float(str(rate))
