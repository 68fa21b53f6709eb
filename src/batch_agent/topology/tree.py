"""The tree of a reduction: which rows are reduced together, and in what order. Pure: no await, no model.

Rows arrive in any order and are grouped by index, so that groups depend only on the rows. A group is closed by the
first row that does not fit, and can be reduced while later rows are still in progress; the answers are the rows of the
next level. If everything fits one group there is one reduction, of all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from batch_agent.errors import SpecError

Shape = Literal["auto", "flat"] | int
KINDS = 4  # of indexes, by their remainder: a part of the tree, the two halves of a part, and what joins them


@dataclass(frozen=True, slots=True)
class Row:
    """What a reducer reads: one result, or the answer for several. All numbers are indexes of results."""

    text: str
    tokens: int
    first: int
    last: int
    covers: tuple[int, ...] = ()  # results whose content it includes
    failed: tuple[int, ...] = ()  # failed results
    lost: tuple[int, ...] = ()  # results whose part could not be reduced

    @property
    def count(self) -> int:
        return len(self.covers) + len(self.failed) + len(self.lost)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows to reduce together; ``merges``: they are answers themselves. ``last``: its answer is the final one.
    ``whole``: the part that was too long for one request, of which this is a half. ``joins``: the one whose halves it
    merges."""

    level: int
    number: int
    rows: tuple[Row, ...]
    last: bool
    merges: bool
    whole: Part | None = None
    half: int = 0
    joins: Part | None = None

    @property
    def index(self) -> int:
        """A number that no other part has. It is the same in every session, whichever part is ready first, so that a
        worker can finish the part while the pipeline is resumed. Numbers are dense: results are sorted by an array."""
        if self.joins is not None:
            return KINDS * self.joins.index + 3
        if self.whole is not None:
            return KINDS * self.whole.index + 1 + self.half
        return KINDS * ((2 * self.number + 1 << self.level) - 1)

    @property
    def name(self) -> str:
        return f"{self.level}.{self.number}" if self.whole is None else f"{self.whole.name}{'ab'[self.half]}"

    @property
    def divisible(self) -> bool:
        return len(self.rows) > (2 if self.merges else 1)

    @property
    def count(self) -> int:
        return sum(row.count for row in self.rows)

    def covered(self, text: str, tokens: int) -> Row:
        """Return the row of its answer."""
        return self._row(text, tokens, _joined(row.covers for row in self.rows), _joined(row.lost for row in self.rows))

    def lost(self, text: str, tokens: int) -> Row:
        """Return the row of its failure."""
        return self._row(text, tokens, (), tuple(sorted(_joined((*row.covers, *row.lost) for row in self.rows))))

    def _row(self, text: str, tokens: int, covers: tuple[int, ...], lost: tuple[int, ...]) -> Row:
        failed = _joined(row.failed for row in self.rows)
        return Row(text, tokens, self.rows[0].first, self.rows[-1].last, covers, failed, lost)


@dataclass(slots=True)
class _Level:
    waiting: dict[int, Row | None] = field(default_factory=dict)
    next: int = 0
    total: int | None = None
    group: list[Row] = field(default_factory=list)
    tokens: int = 0
    closed: int = 0  # groups


class Tree:
    """``room``: the tokens of rows that fit one reduction; None: no known limit. Each method returns the parts that can
    be reduced now."""

    def __init__(self, shape: Shape, room: int | None) -> None:
        self._fan_in = shape if isinstance(shape, int) else None
        self._room = room if shape == "auto" else None
        self._levels = [_Level()]
        self._halves: dict[Part, dict[int, Row]] = {}

    def add(self, index: int, row: Row | None) -> list[Part]:
        """Add a result, or None for one that is left out."""
        self._levels[0].waiting[index] = row
        return list(self._go_on(0))

    def end(self, total: int) -> list[Part]:
        """Set the total number of results, including those left out."""
        self._levels[0].total = total
        return list(self._go_on(0))

    def reduced(self, part: Part, row: Row) -> list[Part]:
        """Set the answer to a part, or its replacement."""
        if part.whole is not None:
            return self._join(part.whole, part.half, row)
        self._above(part.level).waiting[part.number] = row
        return list(self._go_on(part.level + 1))

    def split(self, part: Part) -> list[Part]:
        """Return the halves of a part that was too long for one request; their answers are merged."""
        middle = (len(part.rows) + 1) // 2
        parts: list[Part] = []
        for half, rows in enumerate((part.rows[:middle], part.rows[middle:])):
            if part.merges and len(rows) == 1:  # already an answer
                parts += self._join(part, half, rows[0])
            else:
                parts.append(Part(part.level, part.number, rows, False, part.merges, part, half))
        return parts

    def _join(self, whole: Part, half: int, row: Row) -> list[Part]:
        halves = self._halves.setdefault(whole, {})
        halves[half] = row
        if len(halves) < 2:
            return []
        del self._halves[whole]
        rows = (halves[0], halves[1])
        return [Part(whole.level, whole.number, rows, whole.last, True, whole.whole, whole.half, joins=whole)]

    def _above(self, level: int) -> _Level:
        if level + 1 == len(self._levels):
            self._levels.append(_Level())
        return self._levels[level + 1]

    def _go_on(self, level: int) -> Iterator[Part]:
        here = self._levels[level]
        while here.next in here.waiting:
            row = here.waiting.pop(here.next)
            here.next += 1
            if row is None:
                continue
            if here.group and not self._fits(level, row):
                yield self._close(level)
            here.group.append(row)
            here.tokens += row.tokens
        if here.next == here.total and here.group:
            yield from self._finish(level)

    def _fits(self, level: int, row: Row) -> bool:
        here = self._levels[level]
        if self._fan_in is not None:
            return len(here.group) < self._fan_in
        # Above the results, a group of one would make no progress.
        return self._room is None or here.tokens + row.tokens <= self._room or (level > 0 and len(here.group) < 2)

    def _close(self, level: int, *, last: bool = False) -> Part:
        here = self._levels[level]
        part = Part(level, here.closed, tuple(here.group), last, merges=level > 0)
        here.group, here.tokens = [], 0
        here.closed += 1
        return part

    def _finish(self, level: int) -> Iterator[Part]:
        part = self._close(level, last=self._levels[level].closed == 0)
        if not part.last:
            self._above(level).total = part.number + 1
        if part.merges and len(part.rows) == 1:  # already an answer
            yield from self.reduced(part, part.rows[0])
        else:
            yield part


def check_shape(shape: object) -> None:
    if shape not in ("auto", "flat") and (type(shape) is not int or shape < 2):
        raise SpecError(f"reduce_tree must be auto, flat or a number of rows above 1 (got {shape!r})")


def _joined(parts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(parts))
