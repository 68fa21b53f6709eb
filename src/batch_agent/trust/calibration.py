"""Calibration: how often rows were right, by how much their answers were doubted. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import JsonValue

from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject
from batch_agent.trust.gold import ALL
from batch_agent.trust.intervals import Interval, clopper_pearson

BINS = 5


class Bin(NamedTuple):
    """The rows whose doubt is between ``low`` and ``high``. In a bin without rows, all other numbers are None."""

    low: float | None
    high: float | None
    rows: int
    right: int

    @property
    def accuracy(self) -> float | None:
        return self.right / self.rows if self.rows else None

    @property
    def interval(self) -> Interval | None:
        """The exact two-sided 95 % interval of the accuracy of rows like these."""
        return clopper_pearson(self.right, self.rows) if self.rows else None

    def to_json(self) -> JsonObject:
        interval: JsonValue = None if self.interval is None else [*self.interval]
        told: JsonObject = {"low": self.low, "high": self.high, "rows": self.rows, "right": self.right}
        return told | {"accuracy": self.accuracy, "interval": interval}

    def __str__(self) -> str:
        if self.low is None or self.high is None or self.interval is None:
            return "no rows"
        span = f"doubt {self.low:.2f} to {self.high:.2f}"
        low, high = self.interval
        return f"{span}: {self.right:,} of {self.rows:,} right, {self.accuracy:.2f} ({low:.2f} to {high:.2f})"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Five bins for each field, and five for ``all``, where a row counts with the largest doubt of its fields with
    gold. The bins have the same number of rows, as far as equal doubts allow it. ``unknown``: number of rows with gold
    whose doubt is unknown."""

    fields: Mapping[str, tuple[Bin, ...]]
    all: tuple[Bin, ...]
    unknown: int = 0

    def __getitem__(self, name: str) -> tuple[Bin, ...]:
        return self.all if name == ALL and ALL not in self.fields else self.fields[name]

    def to_json(self) -> JsonObject:
        fields: JsonObject = {name: [each.to_json() for each in bins] for name, bins in self.fields.items()}
        return {"fields": fields, "all": [each.to_json() for each in self.all], "unknown": self.unknown}

    def __str__(self) -> str:
        lines = []
        for name, bins in (*self.fields.items(), *([(ALL, self.all)] if len(self.fields) > 1 else [])):
            lines += [name, *(f"  {each}" for each in bins if each.rows)]
        if self.unknown:
            lines.append(
                f"{self.unknown:,} {'row with gold has' if self.unknown == 1 else 'rows with gold have'} no doubt"
            )
        return "\n".join(lines)

    __repr__ = __str__


def calibration(fields: Mapping[str, Iterable[tuple[float | None, bool]]]) -> Calibration:
    """Return the calibration of fields, and of ``all``, from the doubt of each row and whether it was right. Raises
    SpecError if no row has a doubt."""
    pairs = {name: [*rows] for name, rows in fields.items()}
    known = {name: [(doubt, right) for doubt, right in rows if doubt is not None] for name, rows in pairs.items()}
    if not any(known.values()):
        raise SpecError("calibration: no row with gold has a doubt: run with doubt=True")
    bins = {name: tuple(_bins(rows)) for name, rows in known.items()}
    whole = bins.pop(ALL)
    return Calibration(bins, whole, len(pairs[ALL]) - len(known[ALL]))


def _bins(rows: Sequence[tuple[float, bool]]) -> Iterable[Bin]:
    """Yield five bins. Rows with the same doubt are in the same bin."""
    ordered = sorted(rows)
    doubts = [doubt for doubt, _ in ordered]
    begin = 0
    for number in range(1, BINS + 1):
        end = len(ordered) * number // BINS
        if number < BINS and 0 < end < len(ordered) and doubts[end - 1] == doubts[end]:
            end = max(begin, bisect_left(doubts, doubts[end]))
        some = ordered[begin:end]
        if some:
            yield Bin(some[0][0], some[-1][0], len(some), sum(right for _, right in some))
        else:
            yield Bin(None, None, 0, 0)
        begin = end
