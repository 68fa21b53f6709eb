"""Estimates the cost of a batch elsewhere: at every provider and model with a known price, and on a GPU by the hour.

All numbers are estimates: tokens from the length of the prompts, answers from ``max_tokens`` or a guess, prices from
the table of ``genai-prices``. Quality is not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from batch_agent.agent.dryrun import DryRun
from batch_agent.backends.batch import PRICE as BATCH_PRICE
from batch_agent.backends.schemes import SCHEMES
from batch_agent.compiler.prices import HOUR, Prices, priced_models
from batch_agent.errors import SpecError
from batch_agent.files.results import from_json
from batch_agent.messages import JsonObject
from batch_agent.observe.text import amount, clock, dollars, harmless
from batch_agent.record.rundir import SUMMARY

SHOWN = 5  # number of cheapest models shown for each provider
NO_TABLE = "no prices are known: pip install genai-prices, which has the prices of public providers"


@dataclass(frozen=True, slots=True)
class Offer:
    """The estimated cost at one provider, in $. ``batch`` is the cost at its batch API; None if this package does not
    use one."""

    provider: str
    model: str
    prefix_cached: float
    nothing_cached: float
    batch: float | None


@dataclass(frozen=True, slots=True)
class GpuOffer:
    """Estimated time and $ on a GPU that is paid by the hour. ``speed`` is None if unknown."""

    per_hour: float
    tokens: int  # uncached prompt tokens and answer tokens
    speed: float | None  # of these tokens, per second

    @property
    def seconds(self) -> float | None:
        return None if self.speed is None else self.tokens / self.speed

    @property
    def cost(self) -> float | None:
        return None if self.seconds is None else self.seconds * self.per_hour / HOUR

    def speed_for(self, cost: float) -> float:
        """Return the tokens per second above which the GPU costs less than ``cost``."""
        return self.tokens * self.per_hour / HOUR / cost if cost else float("inf")

    def to_json(self) -> JsonObject:
        return {
            "gpu_hour": self.per_hour,
            "tokens": self.tokens,
            "tokens_per_second": self.speed,
            "seconds": self.seconds,
            "cost": self.cost,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Prints as a table. ``offers`` are those whose name contains ``only``, the cheapest first."""

    offers: Sequence[Offer]
    gpu: GpuOffer | None
    answer_tokens: str
    only: str = ""
    models: frozenset[str | None] = frozenset()  # models of the plan
    cost: float | None = None  # of the plan itself, with the prefix cached

    @classmethod
    def of(
        cls, plans: Sequence[DryRun], *, only: str = "", gpu_price: float | None = None, gpu_speed: float | None = None
    ) -> Comparison:
        """Return the comparison for all stages of a batch. Raises SpecError without the number of rows."""
        if any(plan.prompt_tokens is None or plan.uncached_tokens is None for plan in plans):
            raise SpecError("the cost cannot be compared: the number of rows is unknown")
        offers = [_offer(provider, model, prices, plans) for provider, model, prices in priced_models()]
        given = next((plan.prepared.prices for plan in plans if plan.prepared.spec.prices is not None), None)
        if given is not None and given.tiers:
            offers.append(_offer("given", "prices", given, plans))
        found = [offer for offer in offers if only.lower() in f"{offer.provider}/{offer.model}".lower()]
        gpu = None if gpu_price is None else GpuOffer(gpu_price, _gpu_tokens(plans), gpu_speed)
        answers = " and ".join(dict.fromkeys(f"{plan.answer_tokens:,}" for plan in plans))
        offers = sorted(found, key=lambda offer: offer.prefix_cached)
        own = [plan.cost[0] for plan in plans if plan.cost is not None]
        models = frozenset(plan.prepared.model for plan in plans)
        return cls(tuple(offers), gpu, answers, only, models, sum(own) if len(own) == len(plans) else None)

    def to_json(self) -> JsonObject:
        return {
            "estimates": True,
            "offers": [asdict(offer) for offer in self.offers],
            "gpu": None if self.gpu is None else self.gpu.to_json(),
        }

    def __str__(self) -> str:
        lines = [
            "Cost of this batch elsewhere. All numbers are estimates: tokens from the length of the prompts, one",
            f"turn per row (with tools two), answers of {self.answer_tokens} tokens, list prices of genai-prices.",
            "",
        ]
        shown = self.offers if self.only else list(self._cheapest())
        if shown:
            lines += _table([("model", "prefix cached", "nothing cached", "batch API"), *map(_cells, shown)])
        else:
            lines.append(f"  no model with a known price matches {self.only!r}" if self.only else f"  {NO_TABLE}")
        if len(shown) < len(self.offers):
            left = len(self.offers) - len(shown)
            lines.append(f"  {left:,} more: --compare-only TEXT shows those whose name has TEXT in it, --json all")
        if self.gpu is not None:
            lines += ["", *self._gpu_lines(self.gpu)]
        return "\n".join(lines)

    __repr__ = __str__

    def _cheapest(self) -> Iterable[Offer]:
        by_provider: dict[str, int] = {}
        for offer in self.offers:
            by_provider[offer.provider] = by_provider.get(offer.provider, 0) + 1
            if by_provider[offer.provider] <= SHOWN or offer.model in self.models:
                yield offer

    def _gpu_lines(self, gpu: GpuOffer) -> Iterable[str]:
        head = f"  a GPU at ${gpu.per_hour:g} an hour, {amount(gpu.tokens)} tokens with the prefix cached: "
        if gpu.cost is not None and gpu.seconds is not None and gpu.speed is not None:
            yield f"{head}{dollars(gpu.cost)} in {clock(gpu.seconds)} at {gpu.speed:,.0f} tokens a second"
        else:
            yield f"{head}give --gpu-speed, in tokens a second or as the directory of a run that was measured"
        against = [] if self.cost is None else [("this plan", self.cost)]
        against += [(_name(offer), offer.prefix_cached) for offer in self.offers[:1]]
        for name, cost in against:
            yield f"  cheaper than {name} from {gpu.speed_for(cost):,.0f} tokens a second on"


def measured_speed(run: Path) -> float:
    """Return the uncached tokens per second of a recorded run. Raises SpecError if it has not ended."""
    try:
        summary = from_json((run / SUMMARY).read_bytes())
    except (OSError, ValueError):
        summary = None
    tokens = summary.get("tokens") if isinstance(summary, dict) else None
    seconds = summary.get("seconds") if isinstance(summary, dict) else None
    if not isinstance(tokens, dict) or not isinstance(seconds, int | float) or not seconds:
        raise SpecError(f"--gpu-speed: {run} is neither a number nor the directory of a run that has ended")
    counts = {name: value for name, value in tokens.items() if isinstance(value, int)}
    return (counts.get("prompt", 0) - counts.get("cached", 0) + counts.get("completion", 0)) / seconds


def _offer(provider: str, model: str, prices: Prices, plans: Sequence[DryRun]) -> Offer:
    costs = [cost for plan in plans if (cost := plan.cost_at(prices)) is not None]
    cached = sum(cost[0] for cost in costs)
    uncached = sum(cost[1] for cost in costs)
    return Offer(provider, model, cached, uncached, BATCH_PRICE * uncached if f"{provider}-batch" in SCHEMES else None)


def _gpu_tokens(plans: Iterable[DryRun]) -> int:
    return sum((plan.uncached_tokens or 0) + (plan.agents or 0) * plan.answer_tokens for plan in plans)


def _name(offer: Offer) -> str:
    return harmless(f"{offer.provider}/{offer.model}", 60)


def _cells(offer: Offer) -> tuple[str, str, str, str]:
    batch = "" if offer.batch is None else dollars(offer.batch)
    return _name(offer), dollars(offer.prefix_cached), dollars(offer.nothing_cached), batch


def _table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        name, *numbers = row
        cells = [f"{number:>{width}}" for number, width in zip(numbers, widths[1:], strict=True)]
        yield f"  {name:<{widths[0]}}  {'  '.join(cells)}".rstrip()
