"""``--compare`` and its flags: the cost of a plan at other providers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Protocol

from batch_agent.engine.run.comparison import Comparison, measured_speed
from batch_agent.errors import SpecError


class Comparable(Protocol):
    """The plan of a run or of a pipeline."""

    def compare(
        self, *, only: str = "", gpu_price: float | None = None, tokens_per_second: float | None = None
    ) -> Comparison: ...


def comparison_of(options: argparse.Namespace, plan: Comparable) -> Comparison | None:
    """Return the comparison that the command line asks for, or None."""
    if not wants_comparison(options):
        return None
    only, price, speed = options.compare_only or "", options.gpu_price, options.gpu_speed
    if speed is not None and price is None:
        raise SpecError("--gpu-speed needs --gpu-price, the price of the GPU in dollars per hour")
    return plan.compare(only=only, gpu_price=price, tokens_per_second=None if speed is None else _speed(speed))


def wants_comparison(options: argparse.Namespace) -> bool:
    """Return whether a comparison is wanted. Raises SpecError without --dry-run."""
    given = [name for name in ("compare", "compare_only", "gpu_price", "gpu_speed") if getattr(options, name)]
    if given and not options.dry_run:
        raise SpecError(f"--{given[0].replace('_', '-')} is for --dry-run, which sends nothing")
    return bool(given)


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        return measured_speed(Path(text))
    if not 0 < speed < float("inf"):
        raise SpecError("--gpu-speed must be a number of tokens per second above 0")
    return speed
