"""Which trace a row is, and whether it is kept. Pure.

Ids follow from the names of what they stand for, so that whoever sends a request and whoever writes its span need not
tell each other: the same run, row and turn have the same ids everywhere. A run's id is random, and so are these.

Every row is a trace of its own, linked to the run's: a trace with a million rows in it cannot be shown, and a row that
is not sampled costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b

logger = logging.getLogger("batch_agent")

FIRST_ROWS = 100  # that are kept where no sampler is named
LATER_SHARE = 0.01  # ... and the share of those after them
SAMPLED, NOT_SAMPLED = "01", "00"
_LOW, _STEP = 2**64 - 1, 0x9E3779B97F4A7C15


def trace_of_run(run: str) -> int:
    return _parts(run)[0] | _parts(run)[1]


def span_of_run(run: str) -> int:
    return _parts(run)[1]


def trace_of(run: str, index: int) -> int:
    """The lower half is mixed well (the finisher of splitmix64): samplers go by it."""
    upper, lower = _parts(run)
    lower = (lower + index * _STEP) & _LOW
    lower = ((lower ^ (lower >> 30)) * 0xBF58476D1CE4E5B9) & _LOW
    lower = ((lower ^ (lower >> 27)) * 0x94D049BB133111EB) & _LOW
    return upper | (lower ^ (lower >> 31))


def span_of_row(trace: int) -> int:
    """Of a row's ``trace``."""
    return trace & _LOW or 1


def span_of_turn(trace: int, turn: int) -> int:
    """Of a row's ``trace``. The step is odd, so no two turns have the same."""
    return (trace + turn * _STEP) & _LOW or 1


def span_of_call(run: str, index: int, turn: int, call_id: str) -> int:
    return _id(8, f"{run} {index} call {turn} {call_id}")


def traceparent(trace: int, span: int, *, sampled: bool) -> str:
    """The header of W3C's trace context."""
    return f"00-{trace:032x}-{span:016x}-{SAMPLED if sampled else NOT_SAMPLED}"


@lru_cache(maxsize=64)
def _parts(run: str) -> tuple[int, int]:
    """The upper half of the ids of a run's traces, where it belongs, and a number of its own."""
    return _id(8, f"{run} trace") << 64, _id(8, run)


def _id(size: int, name: str) -> int:
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=size).digest(), "big") or 1


class RowSampler:
    """Which rows are kept, as the standard variables say. A failed row is kept in any case, unless ``records`` is
    False: then nothing is."""

    def __init__(self, share: float | None = None, *, records: bool = True) -> None:
        """``share`` of all rows; None: the first ones, and then a few."""
        self.records = records
        self._bound = None if share is None else round(share * 2**64)
        self._later = round(LATER_SHARE * 2**64)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> RowSampler:
        """A row has no parent, so that the samplers that go by the parent are those behind them."""
        name = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower().removeprefix("parentbased_")
        match name:
            case "":
                return cls()
            case "always_on":
                return cls(1.0)
            case "always_off":
                return cls(0.0, records=False)
            case "traceidratio":
                return cls(_share(environ.get("OTEL_TRACES_SAMPLER_ARG", "")))
        logger.warning("OTEL_TRACES_SAMPLER=%s is not known here: the first %d rows are traced", name, FIRST_ROWS)
        return cls()

    def keeps(self, trace: int, index: int) -> bool:
        """Whether a row is kept before it is known how it ends. The same rule as that of the SDK's TraceIdRatioBased,
        so that services behind this one keep the same traces."""
        if self._bound is None:
            return index < FIRST_ROWS or trace % 2**64 < self._later
        return trace % 2**64 < self._bound


def _share(text: str) -> float:
    try:
        share = float(text or 1.0)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        logger.warning("OTEL_TRACES_SAMPLER_ARG=%s is no number from 0 to 1: every row is traced", text)
        return 1.0
    return share
