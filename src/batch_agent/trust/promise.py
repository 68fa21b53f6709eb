"""A promise about a table: at most a stated share of its rows is wrong, with 95 % confidence.

Rows of a random order (the audit) are answered by people who do not see the models' answers. Each threshold of doubt
makes another table: rows above it are sent on (to people, or to the next model), the others keep their answer. ``Walk``
tests these tables one after the other, from 'all rows are sent on' down. Each test is at the full level, because their
order is fixed before the first audited answer is seen, and each holds at every look (``trust.anytime``). So the
audit may stop after any row, and the row at which it stops may depend on all that was seen.

Not here: which rows people get (``trust.review``), where it is recorded (``record.promise``).
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeVar

from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject
from batch_agent.trust.anytime import ERROR, at_most, prior_b, refuted
from batch_agent.trust.gold import ALL, OUTPUT, GoldField, field_of, fields_in
from batch_agent.trust.intervals import finite
from batch_agent.trust.require import read_requirements

T = TypeVar("T")
GRID = 20  # thresholds beside 'all rows are sent on'
ALL_SENT, ALL_KEPT = -1.0, 1.0  # thresholds: no doubt is at most the first, each one is at most the last
FIXED_GRID = 100  # the same for an audit whose size is fixed: more thresholds cost no confidence there
FIXED_STEP = 6  # times the square root of the rows of a table: the rows of an audit whose size is fixed
FIRST_STEP = 1.5  # times the rows after which a sample without a wrong row shows the promise
LONGEST = 64  # characters of a text that two people can be expected to write equally
PEOPLE_ERROR = 0.02
TWICE = 30  # rows that two people judged, from which on their own error is measured
FORM = "promise is FIELD.accuracy >= SHARE, such as label.accuracy >= 0.96, or all.accuracy >= 0.96"


@dataclass(frozen=True, slots=True)
class Promise:
    """A promise. ``text`` is what the user wrote, ``field`` the field of the answers, or ``all``. ``share``: the least
    share of rows that is right."""

    text: str
    field: str
    share: Fraction

    def most_wrong(self, rows: int) -> Fraction:
        """Return how many rows may be wrong."""
        return (1 - self.share) * rows

    @property
    def prior_b(self) -> float:
        return prior_b(float(self.share))


def read_promise(text: str) -> Promise:
    """Return the promise that a text states. Raises SpecError."""
    wanted = re.sub(r"^\s*(all)\s*(>=|≥)", r"\1.accuracy >=", text)
    try:
        (found,) = read_requirements(wanted)
    except SpecError as error:
        raise SpecError(str(error).replace("require: ", "promise: ", 1).partition(". What can be")[0]) from None
    if found.metric != "accuracy" or found.operator != ">=":
        raise SpecError(f"promise: {text!r} is not about the accuracy from below: {FORM}")
    if not 0 < found.number < 1:
        raise SpecError(f"promise: {text!r}: the share is above 0 and below 1")
    return Promise(text.strip(), found.field, Fraction(re.split(">=|≥", wanted)[1].strip()))


def promised_fields(
    promise: Promise, schema: JsonObject | None, tolerance: Mapping[str, float] | None = None
) -> tuple[Promise, Mapping[str, GoldField]]:
    """Return the promise with its field, and the fields that people judge. Raises SpecError for a field whose right
    value two people may write in different ways."""
    names, field = fields_in(schema), promise.field
    if not field:
        if len(names) > 1:
            raise SpecError(
                f"promise: {promise.text!r}: an answer has {len(names)} fields: name one of {', '.join(names)}, or all"
            )
        field = names[0] if names else OUTPUT
    wanted = (names or [OUTPUT]) if field == ALL and ALL not in names else [field]
    found: dict[str, GoldField] = {}
    for name in wanted:
        try:
            each = field_of(schema, name)
        except SpecError as error:
            raise SpecError(str(error).replace("gold: ", f"promise: {promise.text!r}: ", 1)) from None
        given = (tolerance or {}).get(each.name)
        found[each.name] = replace(each, tolerance=given)
        if why := _unfit(found[each.name]):
            more = f"; {ALL} means every field: promise one field instead" if field == ALL else ""
            raise SpecError(f"promise: {promise.text!r}: {each.name} is {why}{more}")
    return replace(promise, field=field if field == ALL else next(iter(found))), found


def _unfit(each: GoldField) -> str:
    if each.kind in ("class", "boolean", "integer"):
        return ""
    if each.kind == "number":
        return (
            "" if each.tolerance is not None else "a number: say with tolerance how far a right answer may be from it"
        )
    longest = each.schema.get("maxLength")
    if each.kind == "text":
        if isinstance(longest, int) and longest <= LONGEST:
            return ""
        return (
            "free text, of which several are right: give the field an enum, or a maxLength of at most "
            f"{LONGEST} characters"
        )
    return "a list or an object, of which several are right: promise one of its fields"


def first_step(promise: Promise, pilot: int | None) -> int:
    """Return how many rows are audited before anything is decided."""
    return max(pilot or 0, math.ceil(FIRST_STEP * math.log(ERROR) / math.log(float(promise.share))))


def fixed_size(promise: Promise, rows: int) -> int:
    """Return the number of rows of an audit that decides only at its end. With more rows, more answers of the last
    model are paid; with fewer, the threshold must be more careful."""
    return min(rows, max(first_step(promise, None), math.ceil(FIXED_STEP * math.sqrt(rows))))


def most_wrong_of(wrong: int, drawn: int, rows: int, error: float = ERROR) -> int:
    """Return the largest number of wrong rows of a table that an audit of a fixed size does not refute. The bound is
    exact."""
    return rows - round(rows * finite(drawn - wrong, drawn, rows, 1 - 2 * error).low)


def grid(doubts: Iterable[float], steps: int = GRID) -> tuple[float, ...]:
    """Return the thresholds for these doubts: one at which all rows are sent on, and ``steps`` quantiles, the last of
    which keeps every row that has a doubt. Equal thresholds are listed once."""
    known = sorted(doubts)
    if not known:
        return ALL_SENT, ALL_KEPT
    quantiles = (known[math.ceil(len(known) * step / steps) - 1] for step in range(1, steps))
    return ALL_SENT, *sorted({each for each in quantiles if each < ALL_KEPT}), ALL_KEPT


def band(thresholds: Sequence[float], doubt: float | None) -> int:
    """Return the place of the first threshold at which a row keeps its answer; the number of thresholds if there is
    none."""
    return len(thresholds) if doubt is None else bisect_left(thresholds, doubt)


def people_error(differed: int, twice: int, given: float = PEOPLE_ERROR) -> float:
    """Return the share of repaired rows that count as wrong: half of the share in which two people differed, once two
    people have judged 30 rows; before that, ``given``."""
    return differed / (2 * twice) if twice >= TWICE else given


def outcomes_in_order(outcomes: Iterable[T | None]) -> Iterator[T]:
    """Yield the outcomes of the audit's rows in the order of the audit, up to the first row that is still open. Rows
    behind it do not count yet: rows that take long are often the hard ones."""
    for each in outcomes:
        if each is None:
            return
        yield each


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables that the thresholds make of a run. ``rows``: number of all rows. ``sent``: number of rows that are
    sent on at each threshold. ``lost``: number of rows that are wrong at each threshold whatever the audit shows,
    because they have no answer at the end."""

    promise: Promise
    rows: int
    sent: Sequence[int]
    lost: Sequence[int]
    error: float  # of people on rows that they repair
    by_people: bool = True  # rows are sent on to people, not to another model
    before: int = 0  # rows of the order before the audit, which another prompt was tried on
    before_wrong: float = 0.0  # of these, as far as it is known

    @classmethod
    def of_bands(
        cls,
        promise: Promise,
        bands: Sequence[int],
        error: float,
        lost: Sequence[int] | None = None,
        *,
        by_people: bool = True,
    ) -> Tables:
        """Return the tables. ``bands``: number of rows in each band; the last band has the rows that no threshold
        keeps."""
        left, sent = sum(bands), []
        for count in bands[:-1]:
            left -= count
            sent.append(left)
        return cls(promise, sum(bands), sent, lost or [0] * len(sent), error, by_people)

    @property
    def allowed(self) -> float:
        """The share of rows that may be wrong."""
        return 1 - float(self.promise.share)

    def sent_wrong(self, place: int) -> float:
        """Return how many rows count as wrong apart from those that are kept: the rows without an answer at the end,
        and a part of those that are sent on."""
        lost, sent = self.lost[place], self.sent[place]
        return lost + self.error * max(0, sent - lost) + self.before_wrong

    def most(self) -> list[int]:
        """Return, for each threshold, how many of the kept rows may be wrong; negative if the promise fails even when
        all of them are right."""
        error = Fraction(str(self.error))
        allowed = self.promise.most_wrong(self.rows) - Fraction(str(self.before_wrong))
        pairs = zip(self.sent, self.lost, strict=True)
        return [math.floor(allowed - error * max(0, sent - lost) - lost) for sent, lost in pairs]


class Walk:
    """The tests of the tables, in their order. Rows are added in the order of the audit. ``passed`` is the last
    threshold whose table keeps the promise, or None; ``next`` is the threshold that further rows work for, None after
    the last one. ``fixed``: number of rows of an audit whose size was fixed before its first row. Nothing is decided
    before the end of such an audit, so that a bound for one look is enough, which is tighter."""

    def __init__(self, tables: Tables, error: float = ERROR, fixed: int | None = None) -> None:
        self.tables = tables
        self.error = error
        self.most = tables.most()
        self.fixed = fixed
        self.drawn = 0
        self.wrong = [0] * len(self.most)
        self.seen = [0] * (len(self.most) + 1)  # audited rows in each band
        self.seen_wrong = [0] * (len(self.most) + 1)
        self.passed: int | None = None
        self._place, self._b = 0, tables.promise.prior_b
        self.drawn_from = tables.rows - tables.before
        self._go_on()

    @property
    def next(self) -> int | None:
        return self._place if self._place < len(self.most) else None

    def add(self, band: int, *, wrong: bool, sent_wrong: bool = False) -> None:
        """Count an audited row. ``wrong``: its answer is wrong if the row keeps it. ``sent_wrong``: the row is wrong if
        it is sent on."""
        self.drawn += 1
        self.seen[band] += 1
        if wrong:
            self.seen_wrong[band] += 1
            for place in range(band, len(self.wrong)):
                self.wrong[place] += 1
        if sent_wrong:
            for place in range(min(band, len(self.wrong))):
                self.wrong[place] += 1
        self._go_on()

    def _go_on(self) -> None:
        if self.fixed is not None and self.drawn != self.fixed:
            return
        while self._place < len(self.most):
            most = self.most[self._place]
            if most >= 0:
                if not self.refutes(self._place, most + 1):
                    return
                self.passed = self._place
            self._place += 1  # a table that people's own error alone makes too wrong is not tested

    def refutes(self, place: int, bad: int) -> bool:
        if bad > self._could_be_wrong(place):
            return True
        if self.fixed is not None:
            return bad > self._at_most(place)
        return refuted(bad, self.wrong[place], self.drawn, self.drawn_from, self._b, self.error)

    def _at_most(self, place: int) -> int:
        if self.fixed is not None:
            return most_wrong_of(self.wrong[place], self.drawn, self.drawn_from, self.error)
        return at_most(self.wrong[place], self.drawn, self.drawn_from, self._b, self.error)

    def _could_be_wrong(self, place: int) -> int:
        """Return how many rows the audit could find wrong: only the kept ones if people repair the others, else all."""
        return self.tables.rows - self.tables.sent[place] if self.tables.by_people else self.tables.rows

    def bound(self, place: int, now: Tables | None = None) -> float:
        """Return the upper bound of the share of wrong rows of a table. ``now``: the tables at this moment, in which
        not all repairs are done; None: as if all were done."""
        tables = self.tables
        kept = min(self._at_most(place), self._could_be_wrong(place))
        if place == self.passed:
            kept = min(kept, self.most[place])  # it was refuted at an earlier look, which is enough
        return (kept + (now or tables).sent_wrong(place)) / tables.rows if tables.rows else 0.0

    def measured(self, place: int) -> float:
        """Return the share of wrong rows of a table that the audit has measured."""
        tables = self.tables
        shown = self.wrong[place] / self.drawn if self.drawn else 0.0
        return shown + (tables.sent_wrong(place) / tables.rows if tables.rows else 0.0)
