"""Runs over the same rows, compared: what differs, and with gold, what became right and what became wrong.

Two runs are paired by row. ``compare_answers`` takes rows that are in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import NamedTuple

from pydantic import JsonValue

from batch_agent.messages import JsonObject
from batch_agent.money import dollars
from batch_agent.trust.gold import ALL, OUTPUT, Gold, class_name, normalised, same_json
from batch_agent.trust.intervals import Interval
from batch_agent.trust.paired import difference, holm, mcnemar, smallest_visible

SHOWN = 20  # rows of each kind, in the text
LONGEST = 60  # characters of a value


class Answer(NamedTuple):
    """The answer of one run to a row. ``output`` is None if the row failed; ``error`` is the reason."""

    output: JsonValue
    ok: bool
    error: str | None = None
    cost: float | None = None
    seconds: float | None = None


class PairedRow(NamedTuple):
    """A row that is in all runs, with its right values by field in ``gold``."""

    name: str
    answers: Sequence[Answer]
    gold: Mapping[str, JsonValue]


class ChangedRow(NamedTuple):
    """A row that was right in one run and wrong in the other, or that differs."""

    name: str
    gold: JsonValue
    answers: tuple[JsonValue, JsonValue]

    def to_json(self) -> JsonObject:
        return {"id": self.name, "gold": self.gold, "a": self.answers[0], "b": self.answers[1]}


@dataclass(frozen=True, slots=True)
class FieldComparison:
    """The comparison of two runs by one field. ``differs``: how many of ``rows`` rows have different answers. With
    gold, on ``scored`` rows: how many are right in each run; how many became right (``better``) and wrong (``worse``)
    in the second run; ``difference`` of the accuracies with its paired interval; ``p`` of McNemar's exact test, and
    ``p_holm``, corrected for the number of pairs of runs; ``smallest_visible``: the smallest difference that this gold
    could have shown, None if it could show none."""

    rows: int
    differs: int
    differing: Sequence[ChangedRow]
    scored: int = 0
    right: tuple[int, int] = (0, 0)
    better: Sequence[ChangedRow] = ()
    worse: Sequence[ChangedRow] = ()
    difference: float | None = None
    interval: Interval | None = None
    p: float | None = None
    p_holm: float | None = None
    smallest_visible: float | None = None

    @property
    def accuracy(self) -> tuple[float, float] | None:
        """The accuracies of both runs on the rows with gold; None without gold."""
        return (self.right[0] / self.scored, self.right[1] / self.scored) if self.scored else None

    def to_json(self) -> JsonObject:
        found: JsonObject = {"rows": self.rows, "differs": self.differs}
        if not self.scored:
            return {**found, "differing": [row.to_json() for row in self.differing]}
        assert self.accuracy is not None
        return {
            **found,
            "scored": self.scored,
            "right": [*self.right],
            "accuracy": [*self.accuracy],
            "difference": self.difference,
            "interval": None if self.interval is None else [*self.interval],
            "p": self.p,
            "p_holm": self.p_holm,
            "smallest_visible": self.smallest_visible,
            "better": [row.to_json() for row in self.better],
            "worse": [row.to_json() for row in self.worse],
        }


@dataclass(frozen=True, slots=True)
class RunSide:
    """One run of a comparison. ``only``: number of its rows that are not in all runs. ``cost`` in $ and ``seconds`` per
    row, over the rows that are compared; None if they are unknown."""

    name: str
    rows: int
    only: int
    failed: int
    cost: float | None
    seconds: float | None

    def to_json(self) -> JsonObject:
        rows: JsonObject = {"run": self.name, "rows": self.rows, "only": self.only, "failed": self.failed}
        return {**rows, "cost": self.cost, "seconds_per_row": self.seconds}


@dataclass(frozen=True, slots=True)
class Pair:
    """Two of the runs, compared by field: ``pair["mood"]`` is a FieldComparison."""

    a: str
    b: str
    fields: Mapping[str, FieldComparison]

    def __getitem__(self, name: str) -> FieldComparison:
        return self.fields[name]

    def to_json(self) -> JsonObject:
        return {"a": self.a, "b": self.b, "fields": {name: each.to_json() for name, each in self.fields.items()}}


@dataclass(frozen=True, slots=True)
class RunComparison:
    """A comparison of runs over the same rows. With two runs, ``comparison["mood"]`` compares a field; with more,
    ``comparison.pairs`` has each pair of runs. ``changed``: rows that have the same id but another content in the runs;
    they are not compared."""

    runs: Sequence[RunSide]
    pairs: Sequence[Pair]
    rows: int
    changed: int
    excluded: int = 0  # examples in the prompt
    sealed: int = 0
    looks: int | None = None
    notes: Sequence[str] = field(default_factory=tuple)

    def __getitem__(self, name: str) -> FieldComparison:
        """Return the comparison of a field of two runs."""
        if len(self.pairs) > 1:
            raise KeyError(f"there are {len(self.runs)} runs: use comparison.pairs[0][{name!r}]")
        return self.pairs[0][name]

    def to_json(self) -> JsonObject:
        return {
            "runs": [run.to_json() for run in self.runs],
            "rows": self.rows,
            "changed": self.changed,
            "excluded": self.excluded,
            "sealed": self.sealed,
            "looks": self.looks,
            "pairs": [pair.to_json() for pair in self.pairs],
            "notes": [*self.notes],
        }

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    __repr__ = __str__


def compare_answers(
    names: Sequence[str],
    rows: Sequence[PairedRow],
    gold: Gold | None,
    *,
    fields: Sequence[str] = (),
    grouped: bool = False,
) -> list[Pair]:
    """Return a comparison of each pair of runs, on the rows that are in all runs. ``gold`` has the right values, and
    ``fields`` are the fields of the answers. ``grouped``: rows of one group are alike, so that no test and no interval
    is valid."""
    every = [*fields] or [OUTPUT]
    named = dict.fromkeys((*every, *(gold.fields if gold is not None else ())))
    if len(named) > 1:
        named[ALL] = None
    pairs = [
        Pair(names[a], names[b], {name: _field(name, [*every], rows, gold, a, b) for name in named})
        for a, b in combinations(range(len(names)), 2)
    ]
    for name in named:
        values = [pair[name].p for pair in pairs]
        known = [value for value in values if value is not None]
        corrected = iter(holm(known))
        for place, pair in enumerate(pairs):
            found = pair.fields[name]
            if found.p is None:
                continue
            changed = len(found.better) + len(found.worse)
            smallest = smallest_visible(changed, found.scored, len(known))
            found = replace(found, p_holm=next(corrected), smallest_visible=smallest)
            if grouped:
                found = replace(found, interval=None, p=None, p_holm=None, smallest_visible=None)
            pairs[place] = pair = replace(pair, fields={**pair.fields, name: found})
    return pairs


def _field(
    name: str, every: Sequence[str], rows: Sequence[PairedRow], gold: Gold | None, a: int, b: int
) -> FieldComparison:
    differing: list[ChangedRow] = []
    better: list[ChangedRow] = []
    worse: list[ChangedRow] = []
    right, scored = [0, 0], 0
    for row in rows:
        one, other = row.answers[a], row.answers[b]
        values = _taken(name, one), _taken(name, other)
        if one.ok != other.ok or any(not _same(_taken(each, one), _taken(each, other)) for each in _of(name, every)):
            differing.append(ChangedRow(row.name, None, values))
        wanted = row.gold if name == ALL else {name: row.gold[name]} if name in row.gold else {}
        if gold is None or not wanted:
            continue
        scored += 1
        truth = [_right(answer, wanted, gold) for answer in (one, other)]
        right = [right[0] + truth[0], right[1] + truth[1]]
        if truth[0] != truth[1]:
            shown: JsonValue = {**wanted} if name == ALL else wanted[name]
            (better if truth[1] else worse).append(ChangedRow(row.name, shown, values))
    found = FieldComparison(len(rows), len(differing), differing)
    if not scored:
        return found
    return replace(
        found,
        scored=scored,
        right=(right[0], right[1]),
        better=better,
        worse=worse,
        difference=(right[1] - right[0]) / scored,
        interval=difference(len(better), len(worse), scored),
        p=mcnemar(len(better), len(worse)),
    )


def _of(name: str, every: Sequence[str]) -> Sequence[str]:
    return every if name == ALL else (name,)


def _right(answer: Answer, wanted: Mapping[str, JsonValue], gold: Gold) -> bool:
    fields, output = gold.fields, answer.output
    return answer.ok and all(fields[each].right(fields[each].take(output), value) for each, value in wanted.items())


def _taken(name: str, answer: Answer) -> JsonValue:
    """Return a field of an answer. Returns the whole answer if it has no fields, or if ``name`` stands for all
    fields."""
    output = answer.output
    if not answer.ok or name == ALL or (name == OUTPUT and not (isinstance(output, dict) and OUTPUT in output)):
        return output
    if isinstance(output, dict) and name in output:
        return output[name]
    for step in name.split("."):
        output = output.get(step) if isinstance(output, dict) else None
    return output


def _same(one: JsonValue, other: JsonValue) -> bool:
    """Return whether two answers are the same: texts after NFKC, without case, with single spaces; numbers within
    1e-9."""
    if isinstance(one, str) and isinstance(other, str):
        return normalised(one) == normalised(other)
    if isinstance(one, float) or isinstance(other, float):
        numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (one, other))
        return numbers and math.isclose(one, other, rel_tol=0.0, abs_tol=1e-9)  # type: ignore[arg-type]
    return same_json(one, other)


# In words


def _lines(found: RunComparison) -> Iterator[str]:
    only = [f"{run.only:,} only in {run.name}" for run in found.runs if run.only]
    left = [*only, *([f"{found.changed:,} with the same id and another content"] if found.changed else [])]
    yield f"{found.rows:,} rows are in all of them" + (f"; left out: {', '.join(left)}" if left else "")
    if found.excluded:
        yield f"{found.excluded:,} rows are left out, because they are examples in a prompt"
    if found.sealed:
        yield f"{found.sealed:,} rows are left out, because their gold is sealed"
    if found.looks:
        yield f"this gold was looked at {'once' if found.looks == 1 else f'{found.looks} times'} before"
    for run in found.runs:
        cost = "" if run.cost is None else f", {dollars(run.cost)}"
        seconds = "" if run.seconds is None else f", {run.seconds:.3g} s a row"
        yield f"{run.name}: {run.failed:,} failed{cost}{seconds}"
    for pair in found.pairs:
        if len(found.pairs) > 1:
            yield f"{pair.a} → {pair.b}"
        for name, each in pair.fields.items():
            yield from _field_lines(name, each, pairs=len(found.pairs))
    yield from found.notes


def _field_lines(name: str, found: FieldComparison, *, pairs: int) -> Iterator[str]:
    yield f"{name}  differs in {found.differs:,} of {found.rows:,} rows"
    if found.accuracy is None or found.difference is None:
        return
    one, other = found.accuracy
    interval = "" if found.interval is None else f" ({found.interval.low:+.3f} to {found.interval.high:+.3f})"
    yield f"  {one:.3g} → {other:.3g} of {found.scored:,} rows with gold: {found.difference:+.3f}{interval}"
    test = "" if found.p is None else f"; p = {found.p:.3g} (McNemar's exact test)"
    if found.p_holm is not None and pairs > 1:
        test += f", {found.p_holm:.3g} corrected for {pairs} pairs (Holm)"
    yield f"  {len(found.better):,} became right, {len(found.worse):,} became wrong{test}"
    if found.p is not None:
        least = found.smallest_visible
        shown = "no difference" if least is None else f"no difference below {least:.3g}"
        yield f"  this gold could have shown {shown}"
    for kind, rows in (("right", found.better), ("wrong", found.worse)):
        for row in rows[:SHOWN]:
            answers = " → ".join(map(_short, row.answers))
            yield f"  became {kind}: {row.name}  {answers}, gold {_short(row.gold)}"
        if len(rows) > SHOWN:
            yield f"  became {kind}: {len(rows) - SHOWN:,} more (--json has all)"


def _short(value: JsonValue) -> str:
    text = " ".join(class_name(value).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
