"""What a user requires of a score: ``mood.accuracy >= 0.9``, ``recall[angry] >= 0.8``, ``price.median_error <= 2``.

``>=`` tests the one-sided lower bound, ``<=`` the upper one. An approximate number cannot be required.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject
from batch_agent.trust.gold import ALL, OUTPUT, GoldField, class_name
from batch_agent.trust.score import Estimate, FieldScore, Score

SHARES, OF_CLASSES, NUMBERS = ("accuracy", "coverage"), ("precision", "recall", "f1"), ("median_error",)
METRICS = (*SHARES, *OF_CLASSES, *NUMBERS)
APPROXIMATE = ("macro_f1", "mean_absolute_error", "bias")
FORM = "[FIELD.]METRIC[CLASS] >= NUMBER, such as mood.accuracy >= 0.9 or mood.recall[angry] >= 0.8"
_FORM = re.compile(
    r"\s*(?:(?P<field>.+)\.)?(?P<metric>\w+)\s*(?:\[(?P<of>.+)\])?\s*(?P<operator>[<>=!]=?|≥|≤)\s*(?P<number>\S+)\s*"
)


@dataclass(frozen=True, slots=True)
class Requirement:
    """A requirement. ``text`` is what the user wrote. ``field`` is "" if the text names no field."""

    text: str
    field: str
    metric: str
    of: str | None
    operator: str
    number: float

    def check(self, fields: Mapping[str, GoldField]) -> Requirement:
        """Return the requirement with its field. Raises SpecError for a field or a class that is not there."""
        name = self.field
        if not name:
            name = next(iter(fields)) if len(fields) == 1 else ALL
        if name == OUTPUT and name not in fields and len(fields) == 1:
            name = next(iter(fields))
        if name != ALL and name not in fields:
            near = difflib.get_close_matches(name, [*fields, ALL], n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise SpecError(
                f"require: {self.text!r}: {name!r} has no gold{meant} Fields with gold: {', '.join(fields)}"
            )
        if name == ALL and ALL not in fields:
            if self.metric not in SHARES:
                raise SpecError(f"require: {self.text!r}: {self.metric} is of one field: {', '.join(fields)}")
            return replace(self, field=ALL)
        self._check_kind(fields[name])
        return replace(self, field=name)

    def _check_kind(self, each: GoldField) -> None:
        if self.metric in NUMBERS and not each.is_number and each.kind != "unknown":
            raise SpecError(f"require: {self.text!r}: {self.metric} is of a number, and {each.name} is {each.kind}")
        if self.metric not in OF_CLASSES:
            return
        if each.kind in ("number", "json"):
            raise SpecError(
                f"require: {self.text!r}: {self.metric} is of a class, and {each.name} is {_kind_words(each)}"
            )
        if each.kind in ("class", "boolean"):
            names = [class_name(value) for value in each.allowed] or ["true", "false"]
            if self.of not in names:
                raise SpecError(f"require: {self.text!r}: {each.name} has no class {self.of!r}: {', '.join(names)}")

    def test(self, score: Score) -> tuple[JsonObject, str]:
        """Return the result as JSON, and the reason why the requirement is not met; "" if it is."""
        value, low, high, counts = self._measured(score)
        decisive = low if self.operator == ">=" else high
        met = decisive is not None and (decisive >= self.number if self.operator == ">=" else decisive <= self.number)
        found: JsonObject = {
            "require": self.text,
            "met": met,
            "value": None if value is None or math.isinf(value) else value,
            "bound": None if decisive is None or math.isinf(decisive) else decisive,
        }
        return found, "" if met else f"{self.text} is not met: {self._why(value, decisive, counts, score)}"

    def _why(self, value: float | None, decisive: float | None, counts: str, score: Score) -> str:
        where = "at least" if self.operator == ">=" else "at most"
        if value is None:
            return "no finished row with gold shows it"
        if decisive is None:
            return f"{_number(value)} measured{counts}, without a bound" + (
                f" (there are fewer than 20 groups of {score.groups_column})" if score.groups_column else ""
            )
        return f"{_number(value)} measured{counts}, {where} {_number(decisive)}"

    def _measured(self, score: Score) -> tuple[float | None, float | None, float | None, str]:
        field: FieldScore = score[self.field]
        if self.metric == "accuracy":
            pending = f"; {field.pending} pending" if field.pending else ""
            return field.accuracy, field.bound, field.at_most, f" ({field.right} of {field.rows}{pending})"
        if self.metric == "coverage":
            return _of_share(field.coverage)
        if self.metric in NUMBERS:
            middle = None if field.errors is None else field.errors.median
            if middle is None:
                return None, None, None, ""
            return middle.value, middle.interval.low, middle.at_most, f" ({field.rows} rows)"
        classes = field.classes or {}
        found = classes.get(self.of or "")
        return (None, None, None, "") if found is None else _of_share(getattr(found, self.metric))


def read_requirements(texts: str | Sequence[str]) -> list[Requirement]:
    """Return the requirements of these texts. Raises SpecError for a text that cannot be read, and lists what can be
    required."""
    return [_read(text) for text in ([texts] if isinstance(texts, str) else texts)]


def check_requirements(requirements: Iterable[Requirement], fields: Mapping[str, GoldField]) -> list[Requirement]:
    """Return the requirements with their fields. Raises SpecError."""
    return [each.check(fields) for each in requirements]


def with_required(score: Score, requirements: Sequence[Requirement]) -> Score:
    """Return the score with the results of its requirements."""
    results = [each.test(score) for each in requirements]
    return replace(score, required=[found for found, _ in results], unmet=[why for _, why in results if why])


def _read(text: str) -> Requirement:
    listed = f"What can be required: {', '.join(METRICS)}"
    found = _FORM.fullmatch(text)
    if found is None:
        raise SpecError(f"require: {text!r} is not {FORM}. {listed}")
    metric = found["metric"]
    of = found["of"]
    operator = {"≥": ">=", "≤": "<="}.get(found["operator"], found["operator"])
    if metric in APPROXIMATE:
        raise SpecError(f"require: {text!r}: {metric} is approximate, so nothing can be decided by it. {listed}")
    if metric not in METRICS:
        near = difflib.get_close_matches(metric, METRICS, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else "."
        raise SpecError(f"require: {text!r}: there is no {metric!r}{meant} {listed}")
    if operator not in (">=", "<="):
        raise SpecError(f"require: {text!r}: write >= or <=, not {operator}")
    if (metric in OF_CLASSES) != (of is not None):
        wanted = f"{metric} is of one class: {metric}[CLASS]" if of is None else f"{metric} is not of a class"
        raise SpecError(f"require: {text!r}: {wanted}. {listed}")
    try:
        number = float(found["number"])
    except ValueError:
        raise SpecError(f"require: {text!r}: {found['number']!r} is not a number") from None
    if not math.isfinite(number) or number < 0 or (number > 1 and metric not in NUMBERS):
        most = "0 or more" if metric in NUMBERS else "from 0 to 1"
        raise SpecError(f"require: {text!r}: {metric} is {most}")
    return Requirement(text.strip(), (found["field"] or "").strip(), metric, of, operator, number)


def _of_share(share: Estimate) -> tuple[float | None, float | None, float | None, str]:
    return share.value, share.at_least, share.at_most, f" ({share.right} of {share.rows})"


def _kind_words(each: GoldField) -> str:
    return "a number" if each.kind == "number" else "a list or an object"


def _number(value: float) -> str:
    return "infinite" if math.isinf(value) else f"{value:.4g}"
