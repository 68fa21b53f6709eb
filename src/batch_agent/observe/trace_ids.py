"""Computes the trace ids of rows, and which rows are sampled. Pure.

Ids are derived from names, so that the sender of a request and the writer of its span need not communicate: the same
run, row and turn have the same ids everywhere. A run's id is random, and so are these.

Every row is a separate trace, linked to the run's trace: a trace with a million rows cannot be displayed, and a row
that is not sampled costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b

logger = logging.getLogger("batch_agent")

FIRST_ROWS = 100  # kept if no sampler is set
LATER_SHARE = 0.01  # ... and the fraction of later ones
ROWS_REMEMBERED = 4096  # rows in flight whose ids are computed only once
_LOW, _STEP = 2**64 - 1, 0x9E3779B97F4A7C15


def trace_of_run(run: str) -> int:
    return _parts(run)[0] | _parts(run)[1]


def span_of_run(run: str) -> int:
    return _parts(run)[1]


def trace_of(run: str, index: int) -> int:
    """Return the trace id of a row. Its lower half is well mixed (splitmix64), because samplers use it."""
    upper, lower = _parts(run)
    lower = (lower + index * _STEP) & _LOW
    lower = ((lower ^ (lower >> 30)) * 0xBF58476D1CE4E5B9) & _LOW
    lower = ((lower ^ (lower >> 27)) * 0x94D049BB133111EB) & _LOW
    return upper | (lower ^ (lower >> 31))


def span_of_row(trace: int) -> int:
    """Return the span id of a row with this ``trace``."""
    return trace & _LOW or 1


def span_of_turn(trace: int, turn: int) -> int:
    """Return the span id of a turn of a row. The step is odd, so no two turns have the same."""
    return (trace + turn * _STEP) & _LOW or 1


def span_of_call(run: str, index: int, turn: int, call_id: str) -> int:
    return _id(8, f"{run} {index} call {turn} {call_id}")


# The trace id of a row, whether it is sampled, and its traceparent headers (W3C) before and after the id of the span.
RowTrace = tuple[int, bool, str, str]


@lru_cache(maxsize=64)
def _parts(run: str) -> tuple[int, int]:
    """Return the upper half of the ids of a run's traces, and a number of the run."""
    return _id(8, f"{run} trace") << 64, _id(8, run)


def _id(size: int, name: str) -> int:
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=size).digest(), "big") or 1


class RowSampler:
    """Decides which rows are kept, from the standard variables. A failed row is kept in any case, unless ``records`` is
    False: then none is."""

    def __init__(self, share: float | None = None, *, records: bool = True) -> None:
        """``share`` of all rows; None: the first ones, and then a few."""
        self.records = records
        self._bound = None if share is None else round(share * 2**64)
        self._later = round(LATER_SHARE * 2**64)
        self.row = lru_cache(maxsize=ROWS_REMEMBERED)(self._row)  # a row's trace, from its run and index

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> RowSampler:
        """Create the sampler. A row has no parent, so parent-based samplers use their root sampler."""
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
        """Return whether to keep a row whose outcome is unknown. The rule is that of the SDK's TraceIdRatioBased, so
        that downstream services keep the same traces."""
        if self._bound is None:
            return index < FIRST_ROWS or trace % 2**64 < self._later
        return trace % 2**64 < self._bound

    def _row(self, run: str, index: int) -> RowTrace:
        trace = trace_of(run, index)
        sampled = self.keeps(trace, index)
        return trace, sampled, f"00-{trace:032x}-", "-01" if sampled else "-00"


def _share(text: str) -> float:
    try:
        share = float(text or 1.0)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        logger.warning("OTEL_TRACES_SAMPLER_ARG=%s is not a number from 0 to 1: every row is traced", text)
        return 1.0
    return share
