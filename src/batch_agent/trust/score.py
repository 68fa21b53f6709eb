"""The score of a run: its answers against gold, per field, with exact intervals and bounds.

A failed row is wrong. An unfinished one is pending, and counts as wrong in intervals and bounds. A ``Scorer`` takes the
rows one by one and keeps counts, so that its memory does not grow with the number of rows; it keeps one number per row
only for the median error of a number.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Literal, NamedTuple

from pydantic import JsonValue

from batch_agent.messages import JsonObject
from batch_agent.trust.gold import ALL, Gold, GoldField, class_name
from batch_agent.trust.intervals import FEWEST_GROUPS, Interval, Median, Share, f1_of, grouped, median, share

MOST_CLASSES = 50  # different gold values up to which texts and integers are classes
MOST_ANSWERS = 1000  # different answers of a field of text that are counted one by one
LONGEST_CLASS = 64  # bytes
FAILED, OTHER = "(failed)", "(other)"
NORMAL = 1.959963984540054
DIGESTS = 1 << 128
COUNTED = "all rows of the table, counted"
RANDOM = "a random sample of the table"
CHOSEN = "rows that you chose: nothing follows for the others"

Basis = Literal["random", "counted", "chosen"]


class Estimate(NamedTuple):
    """A share. ``value`` is ``right`` / ``rows``, None if there are no rows. ``interval`` is two-sided; ``at_least``
    and ``at_most`` are one-sided bounds. All three are at 95 %, and None below 20 groups."""

    right: int
    rows: int
    value: float | None
    interval: Interval | None
    at_least: float | None
    at_most: float | None

    def to_json(self) -> JsonObject:
        return {"value": self.value, **_bounds_json(self.interval, self.at_least, self.at_most)}


@dataclass(frozen=True, slots=True)
class ClassScore:
    """The score of a class. ``rows``: rows with this class as gold. ``answers``: rows that were answered with it.
    ``right``: rows that are both."""

    rows: int
    answers: int
    right: int
    precision: Estimate
    recall: Estimate
    f1: Estimate

    def to_json(self) -> JsonObject:
        shares = {name: getattr(self, name).to_json() for name in ("precision", "recall", "f1")}
        return {"rows": self.rows, "answers": self.answers, "right": self.right, **shares}


@dataclass(frozen=True, slots=True)
class Approximate:
    """A number without an exact interval. ``interval``: from the normal distribution; None if there is none."""

    value: float
    interval: Interval | None = None

    def to_json(self) -> JsonObject:
        return {
            "value": self.value,
            "interval": None if self.interval is None else [*self.interval],
            "approximate": True,
        }


@dataclass(frozen=True, slots=True)
class NumberErrors:
    """How far a number is from its gold. A failed row has an infinite error, and is not in the two means."""

    median: Median | None
    mean: Approximate | None
    bias: Approximate | None

    def to_json(self) -> JsonObject:
        found: JsonObject = {"median_error": None, "mean_absolute_error": None, "bias": None}
        if self.median is not None:
            shown: list[JsonValue] = [_finite(end) for end in self.median.interval]
            most = _finite(self.median.at_most)
            found["median_error"] = {
                "value": _finite(self.median.value),
                "interval": shown,
                "bound": most,
                "at_most": most,
            }
        for name, value in (("mean_absolute_error", self.mean), ("bias", self.bias)):
            found[name] = None if value is None else value.to_json()
        return found


@dataclass(frozen=True, slots=True)
class FieldScore:
    """The score of one field, or of all: ``accuracy`` is ``right`` of ``rows``, the finished rows with gold."""

    rows: int
    right: int
    pending: int
    accuracy: float | None
    interval: Interval | None
    bound: float | None  # one-sided: the accuracy is at least this
    at_most: float | None
    coverage: Estimate
    majority: float | None = None  # share of the most frequent class: that of always giving it
    majority_class: str | None = None
    classes: Mapping[str, ClassScore] | None = None
    confusion: Mapping[str, Mapping[str, int]] | None = None  # gold → answer → rows
    macro_f1: Approximate | None = None
    errors: NumberErrors | None = None
    groups: int | None = None

    def to_json(self) -> JsonObject:
        found: JsonObject = {
            "rows": self.rows,
            "right": self.right,
            "pending": self.pending,
            "accuracy": self.accuracy,
            **_bounds_json(self.interval, self.bound, self.at_most),
            "majority": self.majority,
            "majority_class": self.majority_class,
            "coverage": self.coverage.value,
            "coverage_interval": _bounds_json(self.coverage.interval, None, None)["interval"],
            "coverage_bound": self.coverage.at_least,
            "classes": None if self.classes is None else {name: each.to_json() for name, each in self.classes.items()},
            "confusion": None if self.confusion is None else {name: {**row} for name, row in self.confusion.items()},
        }
        if self.macro_f1 is not None:
            found["macro_f1"] = self.macro_f1.to_json()
        if self.errors is not None:
            found |= self.errors.to_json()
        if self.groups is not None:
            found["groups"] = self.groups
        return found


@dataclass(frozen=True, slots=True)
class WrongRow:
    """A row with a wrong answer: its id, the wrong fields with gold and answer, and the doubt of the answer, if it is
    known. ``error``: why the row failed, if it did."""

    name: str
    index: int | None
    fields: Mapping[str, tuple[JsonValue, JsonValue]]
    doubt: float | None
    error: str | None
    input: object = None

    def to_json(self) -> JsonObject:
        wrong: JsonObject = {name: {"gold": gold, "answer": answer} for name, (gold, answer) in self.fields.items()}
        return {"id": self.name, "index": self.index, "fields": wrong, "doubt": self.doubt, "error": self.error}


@dataclass(frozen=True, slots=True)
class Score:
    """How many answers are right. ``score["mood"]`` is the score of one field; ``print(score)`` shows all fields."""

    fields: Mapping[str, FieldScore]
    all: FieldScore
    basis: Basis
    population: int | None
    pending: int
    excluded: int = 0
    looks: int | None = 0
    sealed: int = 0  # rows whose gold is kept unseen
    opened: bool = False  # these are the rows that were sealed
    by: Mapping[str, Mapping[str, FieldScore]] | None = None
    by_column: str | None = None
    groups_column: str | None = None
    notes: Sequence[str] = ()
    wrong: Sequence[WrongRow] | None = None
    unmet: Sequence[str] = ()  # what was required and is not met
    required: Sequence[JsonObject] = ()
    digests: Mapping[str, str] = field(default_factory=dict)  # of ids and gold, by field

    def __getitem__(self, name: str) -> FieldScore:
        if name == ALL and ALL not in self.fields:
            return self.all
        return self.fields[name]

    @property
    def sample(self) -> str:
        """Words that say which rows the score is about."""
        if self.basis == "counted":
            return COUNTED
        if self.basis == "chosen":
            return CHOSEN
        if self.looks:
            times = "once" if self.looks == 1 else f"{self.looks} times"
            return f"a random sample that was looked at {times} before"
        return RANDOM

    def to_json(self) -> JsonObject:
        found: JsonObject = {
            "fields": {name: each.to_json() for name, each in self.fields.items()},
            "all": self.all.to_json(),
            "sample": self.sample,
            "basis": self.basis,
            "population": self.population,
            "looks": self.looks,
            "excluded": self.excluded,
            "pending": self.pending,
            "sealed": self.sealed,
        }
        if self.by is not None:
            values: JsonObject = {
                value: {name: each.to_json() for name, each in fields.items()} for value, fields in self.by.items()
            }
            found["by"] = {"column": self.by_column, "values": values}
        if self.groups_column is not None:
            found["groups"] = self.groups_column
        if self.required:
            found["require"] = [*self.required]
        if self.notes:
            found["notes"] = [*self.notes]
        if self.wrong is not None:
            found["wrong"] = [row.to_json() for row in self.wrong]
        return found

    def __str__(self) -> str:
        from batch_agent.trust.shown import score_lines

        return "\n".join(score_lines(self))

    __repr__ = __str__


class _Marks:
    """Counts of one group of rows."""

    __slots__ = ("answered", "pairs", "pending", "pending_of", "right", "rows")

    def __init__(self) -> None:
        self.rows = self.right = self.answered = self.pending = 0
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.pending_of: Counter[str] = Counter()  # by class

    def copy(self) -> _Marks:
        marks = copy(self)
        marks.pairs = self.pairs.copy()
        marks.pending_of = self.pending_of.copy()
        return marks


class _Tally:
    """The counts of a field. ``each`` is None if the tally is that of all fields together."""

    def __init__(self, each: GoldField | None) -> None:
        self.field = each
        self.groups: dict[object, _Marks] = defaultdict(_Marks)
        self._golds: set[str] | None = None  # the classes so far; None: the field has none
        self._answers: set[str] = set()
        self._folded = False  # some answers were counted as other ones
        if each is not None and each.judge is None and each.kind not in ("number", "json"):
            self._golds = set(map(class_name, each.allowed))
            self._answers = set(self._golds)
        self._gold_seen: set[str] = set()
        is_number = each is not None and each.is_number
        self._errors: array[float] | None = array("d") if is_number else None
        self._sums = [0.0, 0.0, 0.0, 0.0, 0.0]  # of errors, absolute errors, their squares, and their number
        self._unfinished = 0

    def copy(self) -> _Tally:
        tally = copy(self)
        tally.groups = defaultdict(_Marks, {group: marks.copy() for group, marks in self.groups.items()})
        tally._golds = None if self._golds is None else {*self._golds}
        tally._answers = {*self._answers}
        tally._gold_seen = {*self._gold_seen}
        tally._errors = None if self._errors is None else self._errors[:]
        tally._sums = [*self._sums]
        return tally

    def add(
        self, group: object, gold: JsonValue, answer: JsonValue, state: tuple[bool, bool, bool], times: int
    ) -> None:
        """Count a row. ``state``: whether the row is ok, whether its answer is right, and whether it has an answer."""
        ok, is_right, answered = state
        marks = self.groups[group]
        marks.rows += times
        marks.right += is_right * times
        marks.answered += answered * times
        if self._golds is not None:
            pair = self._pair(gold, answer, ok=ok)
            if pair is not None:
                marks.pairs[pair] += times
        if self._errors is not None:
            for _ in range(times):
                self._errors.append(self._error(gold, answer))

    def skip(self, group: object, gold: JsonValue) -> None:
        """Count a pending row."""
        marks = self.groups[group]
        marks.pending += 1
        self._unfinished += 1
        if self._golds is not None:
            marks.pending_of[self._class(gold)] += 1

    def _pair(self, gold: JsonValue, answer: JsonValue, *, ok: bool) -> tuple[str, str] | None:
        assert self.field is not None and self._golds is not None
        name = self._class(gold)
        self._gold_seen.add(name)
        if name not in self._golds:
            too_long = len(name.encode("utf-8", "surrogatepass")) > LONGEST_CLASS
            if too_long or len(self._golds) >= max(MOST_CLASSES, len(self.field.allowed)) or self._folded:
                self._golds = None
                for marks in self.groups.values():
                    marks.pairs.clear()
                return None
            self._golds.add(name)
        if not ok:
            return name, FAILED
        said = self._class(answer)
        if said not in self._answers and said not in self._golds:
            if len(self._answers) >= MOST_ANSWERS:
                self._folded = True
                return name, OTHER
            self._answers.add(said)
        return name, said

    def _class(self, value: JsonValue) -> str:
        assert self.field is not None
        return self.field.label(value)

    def _error(self, gold: JsonValue, answer: JsonValue) -> float:
        if not _is_number(gold) or not _is_number(answer):
            return 0.0 if gold is None and answer is None else math.inf
        error = float(answer) - float(gold)  # type: ignore[arg-type]
        for place, value in enumerate((error, abs(error), error * error, 1.0)):
            self._sums[place] += value
        return abs(error)

    def score(self, frame: _Frame) -> FieldScore:
        counts = {group: (marks.right, marks.rows + marks.pending) for group, marks in self.groups.items()}
        covered = {group: (marks.answered, marks.rows + marks.pending) for group, marks in self.groups.items()}
        right, rows = _total(self.groups, "right"), _total(self.groups, "rows")
        found, coverage = frame.of_rows(counts), frame.of_rows(covered)
        scored = FieldScore(
            rows,
            right,
            _total(self.groups, "pending"),
            right / rows if rows else None,
            found.interval,
            found.at_least,
            found.at_most,
            coverage._replace(rows=rows, value=coverage.right / rows if rows else None),
            groups=len(self.groups) if frame.grouped else None,
        )
        scored = replace(scored, errors=self._number_errors(frame))
        return self._with_classes(scored, frame) if self._has_classes(rows) else scored

    def _has_classes(self, rows: int) -> bool:
        if self._golds is None or self.field is None or not rows:
            return False
        return self.field.kind in ("class", "boolean") or len(self._gold_seen) < rows or rows == 1

    def _with_classes(self, scored: FieldScore, frame: _Frame) -> FieldScore:
        assert self._golds is not None and self.field is not None
        names = sorted(self._golds, key=_in_order(self.field))
        known = {*names, FAILED}
        pairs: dict[object, Counter[tuple[str, str]]] = {}
        for group, marks in self.groups.items():
            folded: Counter[tuple[str, str]] = Counter()
            for (gold, said), count in marks.pairs.items():
                folded[gold, said if said in known else OTHER] += count
            pairs[group] = folded
        whole: Counter[tuple[str, str]] = sum(pairs.values(), Counter())
        pending = {group: marks.pending_of for group, marks in self.groups.items()}
        classes = {name: _class_score(name, pairs, pending, frame) for name in names if _appears(name, whole)}
        confusion: dict[str, dict[str, int]] = {
            gold: {said: whole[gold, said] for said in (*names, OTHER, FAILED) if whole[gold, said]}
            for gold in names
            if any(pair[0] == gold for pair in whole)
        }
        sizes = {name: sum(row.values()) for name, row in confusion.items()}
        most = max(sizes, key=lambda name: sizes[name]) if sizes else None
        scores = [each.f1.value or 0.0 for each in classes.values() if each.rows or each.answers]
        return replace(
            scored,
            classes=classes,
            confusion=confusion,
            majority=None if most is None else sizes[most] / sum(sizes.values()),
            majority_class=most,
            macro_f1=Approximate(sum(scores) / len(scores)) if scores else None,
        )

    def _number_errors(self, frame: _Frame) -> NumberErrors | None:
        if self._errors is None:
            return None
        total, absolute, squares, count, _ = self._sums
        middle = median(self._errors) if self._errors else None
        if middle is not None and frame.grouped:  # rows of a group are alike: order statistics do not hold
            middle = Median(middle.value, Interval(0.0, math.inf), math.inf)
        elif middle is not None and self._unfinished:
            bounds = median([*self._errors, *[math.inf] * self._unfinished])
            middle = Median(middle.value, bounds.interval, bounds.at_most)
        if not count:
            return NumberErrors(middle, None, None)
        return NumberErrors(middle, _mean(absolute, squares, count), _mean(total, squares, count))


class _Frame:
    """How shares are estimated: as those of a table that was counted, of a random sample, of groups, or of independent
    rows."""

    def __init__(self, basis: Basis, population: int | None, *, grouped: bool) -> None:
        self.basis, self.population = basis, population
        self.grouped = grouped and basis == "chosen"  # a random sample of the table is never widened

    def of_rows(self, counts: Mapping[object, tuple[int, int]]) -> Estimate:
        """Return a share of all rows. If they are a random sample of a table, the interval is that of the share in the
        table."""
        rows = sum(each[1] for each in counts.values())
        sampled = self.basis == "random" and self.population is not None and self.population >= rows
        return self._estimate(counts, self.population if sampled else None)

    def of_some(self, counts: Mapping[object, tuple[int, int]]) -> Estimate:
        """Return a share of rows whose number is not fixed in advance, such as the rows that were answered with a
        class."""
        return self._estimate(counts, None)

    def _estimate(self, counts: Mapping[object, tuple[int, int]], population: int | None) -> Estimate:
        right = sum(each[0] for each in counts.values())
        rows = sum(each[1] for each in counts.values())
        value = right / rows if rows else None
        found: Share | None
        if self.basis == "counted" and value is not None:
            return Estimate(right, rows, value, Interval(value, value), value, value)
        found = grouped(counts.values()) if self.grouped else share(right, rows, population)
        if found is None:
            return Estimate(right, rows, value, None, None, None)
        return Estimate(right, rows, value, found.interval, found.at_least, found.at_most)


class Scorer:
    """Takes rows with gold, and returns their score. ``grouped``: each row has a group. ``keeps_wrong``: wrong rows are
    stored for display."""

    def __init__(
        self,
        gold: Gold,
        *,
        by: str | None = None,
        groups: str | None = None,
        keeps_wrong: bool = False,
    ) -> None:
        self.gold = gold
        self._by_column, self._groups_column = by, groups
        self._tallies = self._new()
        self._by: dict[str, dict[str, _Tally]] = {}
        self._wrong: list[WrongRow] | None = [] if keeps_wrong else None
        self._digests: dict[str, int] = dict.fromkeys(gold.fields, 0)
        self.rows = self.pending = 0

    def copy(self) -> Scorer:
        """Return a scorer with the same rows, to which others can be added."""
        scorer = copy(self)
        scorer._tallies = {name: tally.copy() for name, tally in self._tallies.items()}
        scorer._by = {
            value: {name: tally.copy() for name, tally in tallies.items()} for value, tallies in self._by.items()
        }
        scorer._wrong = None if self._wrong is None else [*self._wrong]
        scorer._digests = dict(self._digests)
        return scorer

    def add(
        self,
        name: str,
        gold: Mapping[str, JsonValue],
        output: JsonValue,
        *,
        ok: bool = True,
        index: int | None = None,
        group: object = None,
        by: object = None,
        doubt: float | None = None,
        error: str | None = None,
        value: object = None,
    ) -> bool:
        """Count a finished row. Returns whether every field with gold is right."""
        answers = {each: self.gold.fields[each].take(output) if ok else None for each in gold}
        wrong = self.count(gold, answers, ok=ok, group=group, by=by)
        self.note(gold_digests(name, gold))
        if wrong and self._wrong is not None:
            self._wrong.append(WrongRow(name, index, wrong, doubt, error, value))
        return not wrong

    def count(
        self,
        gold: Mapping[str, JsonValue],
        answers: Mapping[str, JsonValue],
        *,
        ok: bool,
        group: object = None,
        by: object = None,
        times: int = 1,
    ) -> dict[str, tuple[JsonValue, JsonValue]]:
        """Count ``times`` equal rows, without their ids. Returns the wrong fields, with gold and answer."""
        wrong: dict[str, tuple[JsonValue, JsonValue]] = {}
        answered = ok
        outputs: dict[str, tuple[JsonValue, bool, bool]] = {}
        for each, right_value in gold.items():
            place, answer = self.gold.fields[each], answers[each]
            is_right = ok and place.right(answer, right_value)
            covered = ok and (answer is not None or right_value is None)
            answered = answered and covered
            outputs[each] = answer, is_right, covered
            if not is_right:
                wrong[each] = right_value, answer
        for tallies in self._places(by):
            for each, (answer, is_right, covered) in outputs.items():
                tallies[each].add(group, gold[each], answer, (ok, is_right, covered), times)
            tallies[ALL].add(group, None, None, (ok, not wrong, answered), times)
        self.rows += times
        return wrong

    def note(self, digests: Mapping[str, int]) -> None:
        """Add rows to the digests of ids and gold."""
        for each, number in digests.items():
            self._digests[each] = (self._digests[each] + number) % DIGESTS

    def skip(self, name: str, gold: Mapping[str, JsonValue], *, group: object = None, by: object = None) -> None:
        """Count a row that is not finished."""
        for tallies in self._places(by):
            for each, value in gold.items():
                tallies[each].skip(group, value)
            tallies[ALL].skip(group, None)
        self.note(gold_digests(name, gold))
        self.pending += 1

    def score(
        self,
        basis: Basis = "chosen",
        population: int | None = None,
        *,
        excluded: int = 0,
        sealed: int = 0,
        opened: bool = False,
        notes: Sequence[str] = (),
    ) -> Score:
        """Return the score. ``population``: number of rows of the table from which these rows were drawn at random."""
        complete = population is not None and population <= self.rows and not (self.pending or sealed)
        if basis == "random" and complete:
            basis = "counted"
        frame = _Frame(basis, population, grouped=self._groups_column is not None)
        part = _Frame(basis, None, grouped=self._groups_column is not None)
        fields = {name: tally.score(frame) for name, tally in self._tallies.items()}
        notes = [*notes]
        whole = fields.pop(ALL)
        if frame.grouped and whole.groups is not None and whole.groups < FEWEST_GROUPS:
            notes.append(
                f"no interval: the gold was collected in {whole.groups} groups of {self._groups_column}, and below "
                f"{FEWEST_GROUPS} groups an interval would be too narrow"
            )
        by = {
            value: {name: tally.score(part) for name, tally in tallies.items()}
            for value, tallies in sorted(self._by.items())
        }
        return Score(
            fields,
            whole,
            basis,
            population,
            self.pending,
            excluded,
            sealed=sealed,
            opened=opened,
            by=None if self._by_column is None else by,
            by_column=self._by_column,
            groups_column=self._groups_column,
            notes=notes,
            wrong=None if self._wrong is None else sorted(self._wrong, key=_certain_first),
            digests={name: f"{number:032x}" for name, number in self._digests.items()},
        )

    def _new(self) -> dict[str, _Tally]:
        return {**{name: _Tally(each) for name, each in self.gold.fields.items()}, ALL: _Tally(None)}

    def _places(self, by: object) -> Iterator[dict[str, _Tally]]:
        yield self._tallies
        if self._by_column is not None:
            value = "" if by is None else by if isinstance(by, str) else class_name(by)  # type: ignore[arg-type]
            if value not in self._by:
                self._by[value] = self._new()
            yield self._by[value]


def gold_text(value: JsonValue) -> str:
    """Return gold as text, in the form that is hashed."""
    return f"{type(value).__name__}:{class_name(value)}"


def gold_digests(name: str, gold: Mapping[str, JsonValue]) -> dict[str, int]:
    """Return one number per field for an id and its gold. The sum of these numbers identifies a set of rows, in any
    order."""
    found = {}
    for each, value in gold.items():
        text = f"{len(name)}:{name}{gold_text(value)}"
        made = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        found[each] = int.from_bytes(made)
    return found


def _class_score(
    name: str,
    pairs: Mapping[object, Counter[tuple[str, str]]],
    pending: Mapping[object, Counter[str]],
    frame: _Frame,
) -> ClassScore:
    """Return the score of a class. In the bounds, an unfinished row with this class as gold counts as wrong, like a
    failed row."""
    answered, has, either = [dict[object, tuple[int, int]]() for _ in range(3)]
    rows = answers = right = 0
    for group, counts in pairs.items():
        both, waits = counts[name, name], pending[group][name]
        here = sum(count for (gold, _), count in counts.items() if gold == name)
        said = sum(count for (_, answer), count in counts.items() if answer == name)
        answered[group], has[group] = (both, said), (both, here + waits)
        either[group] = both, here + waits + said - both
        rows += here
        answers += said
        right += both
    union = rows + answers - right
    f1 = frame.of_some(either)
    return ClassScore(
        rows,
        answers,
        right,
        frame.of_some(answered),
        frame.of_some(has)._replace(rows=rows, value=right / rows if rows else None),
        Estimate(
            right,
            union,
            f1_of(right / union) if union else None,
            None if f1.interval is None else Interval(*map(f1_of, f1.interval)),
            None if f1.at_least is None else f1_of(f1.at_least),
            None if f1.at_most is None else f1_of(f1.at_most),
        ),
    )


def _appears(name: str, pairs: Mapping[tuple[str, str], int]) -> bool:
    return any(name in pair for pair in pairs)


def _in_order(each: GoldField) -> Callable[[str], tuple[int, float, str]]:
    """Return the key that sorts classes: in the order of the schema, integers by size, other classes by name."""
    places = {class_name(value): place for place, value in enumerate(each.allowed)}

    def key(name: str) -> tuple[int, float, str]:
        number = float(name) if each.kind == "integer" and name.lstrip("-").isdigit() else 0.0
        return places.get(name, len(places)), number, name

    return key


def _certain_first(row: WrongRow) -> tuple[int, float]:
    """Return the key that sorts wrong rows: first those with the lowest doubt, then those without a doubt, then failed
    rows."""
    if row.error is not None:
        return 2, 0.0
    return (1, 0.0) if row.doubt is None else (0, row.doubt)


def _mean(total: float, squares: float, count: float) -> Approximate:
    mean = total / count
    if count < 2:
        return Approximate(mean)
    error = NORMAL * math.sqrt(max(0.0, squares / count - mean * mean) / (count - 1))
    return Approximate(mean, Interval(mean - error, mean + error))


def _total(groups: Mapping[object, _Marks], name: str) -> int:
    return sum(getattr(marks, name) for marks in groups.values())


def _is_number(value: JsonValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _bounds_json(interval: Interval | None, bound: float | None, at_most: float | None) -> JsonObject:
    return {"interval": None if interval is None else [*interval], "bound": bound, "at_most": at_most}
