"""A score as lines of text, for the end of a run, ``score`` and ``status``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from batch_agent.messages import JsonObject
from batch_agent.trust.gold import ALL, class_name
from batch_agent.trust.intervals import Interval
from batch_agent.trust.score import FAILED, OTHER, Estimate, FieldScore, Score, WrongRow

MOST_SHOWN = 12  # classes of a matrix
LONGEST = 60  # characters of a value


def score_lines(score: Score, *, details: bool = True) -> list[str]:
    """Return the score in lines. Without ``details``: one line per field, and one that says which rows were scored."""
    return [*_lines(score, details)]


def brief_lines(score: JsonObject) -> Iterator[str]:
    """Yield a line for each field of a score, which is given as JSON, and a line that says which rows were scored."""
    fields = score.get("fields")
    every = {**fields, **({ALL: score.get("all")} if len(fields) > 1 else {})} if isinstance(fields, dict) else {}
    for name, found in every.items():
        if not isinstance(found, dict):
            continue
        value = found.get("accuracy")
        low = found.get("bound")
        most = found.get("majority")
        low = None if low == value else low  # it is counted
        if not isinstance(value, float | int):
            yield f"{name}  no row with gold is finished"
            continue
        text = f"{name}  {_value(value)} measured ({found.get('right')} of {found.get('rows')})"
        text += f", at least {_down(low)}" if isinstance(low, float | int) else ""
        yield text + (f"; always saying {found.get('majority_class')}: {most:.2f}" if isinstance(most, float) else "")
    if every:
        yield f"of {score.get('sample')}"


def measured(found: FieldScore) -> str:
    """Return ``0.92 measured (46 of 50), at least 0.82``."""
    if found.accuracy is None:
        return f"no row with gold is finished ({found.pending:,} pending)" if found.pending else "no row has gold"
    text = f"{_value(found.accuracy)} measured ({found.right:,} of {found.rows:,})"
    if found.bound is not None and not _is_counted(found.accuracy, found.interval):
        text += f", at least {_down(found.bound)}"
    return text


def _lines(score: Score, details: bool) -> Iterator[str]:
    names = [*score.fields, *([ALL] if len(score.fields) > 1 else [])]
    wide = max(map(len, names))
    for name in names:
        yield f"{name:{wide}}  {measured(score[name])}{_beside(score[name])}"
        if details:
            yield from (f"{'':{wide}}  {line}" for line in _details(score[name]))
    table = f" of {score.population:,} rows" if score.population is not None and score.basis == "random" else ""
    yield f"of {score.sample}{f' ({score.all.rows + score.pending:,}{table})' if table else ''}"
    if score.looks and score.basis != "random":
        yield f"this gold was looked at {'once' if score.looks == 1 else f'{score.looks} times'} before"
    if score.pending:
        they, one = ("it counts", "is") if score.pending == 1 else ("they count", "are")
        yield f"{_rows(score.pending)} with gold {one} not finished: {they} as wrong in the bounds"
    if score.excluded:
        why = (
            "is left out, because it is an example"
            if score.excluded == 1
            else "are left out, because they are examples"
        )
        yield f"{_rows(score.excluded)} {why} in the prompt"
    if score.sealed:
        what = "these rows were sealed until now" if score.opened else "batch-agent score --open-sealed shows them"
        yield f"the gold of {_rows(score.sealed)} is sealed; {what}" if not score.opened else what
    yield from score.notes
    if score.by is not None:
        for value, fields in score.by.items():
            for name in names if details else names[-1:]:
                where = f"{score.by_column}={value}"
                yield f"{where}  {f'{name}  ' if len(names) > 1 else ''}{measured(fields[name])}"
    for found in score.required:
        if found["met"]:
            yield f"{found['require']}: met"
    yield from score.unmet
    if score.wrong is not None:
        yield from wrong_lines(score.wrong)


def wrong_lines(wrong: Sequence[WrongRow]) -> Iterator[str]:
    """Yield the wrong rows. Those with a certain answer come first."""
    if not wrong:
        yield "no row is wrong"
        return
    certain = any(row.doubt is not None for row in wrong)
    yield f"{len(wrong):,} wrong {'row' if len(wrong) == 1 else 'rows'}" + (
        ", the most certain answers first: look at the gold of these" if certain else ""
    )
    for row in wrong:
        doubt = "" if row.doubt is None else f"  doubt {row.doubt:.2f}"
        said = [
            f"{name}: {'failed' if row.error else shown(answer)}, gold {shown(gold)}"
            for name, (gold, answer) in row.fields.items()
        ]
        yield f"  {row.name}  {'; '.join(said)}{doubt}{f'  ({row.error})' if row.error else ''}"


def _rows(count: int) -> str:
    return f"{count:,} row" if count == 1 else f"{count:,} rows"


def _beside(found: FieldScore) -> str:
    text = ""
    if found.majority is not None and found.majority_class is not None:
        text += f"; always saying {found.majority_class}: {found.majority:.2f}"
    if found.coverage.value is not None and found.coverage.value < 1:
        text += f"; {found.coverage.value:.0%} have an answer"
    return text


def _details(found: FieldScore) -> Iterator[str]:
    if found.interval is not None and found.rows and not _is_counted(found.accuracy, found.interval):
        yield f"interval {_interval(found.interval)}"
    if found.errors is not None:
        middle = found.errors.median
        mean = found.errors.mean
        bias = found.errors.bias
        if middle is not None:
            yield f"median error {_number(middle.value)}, at most {_number(middle.at_most)}"
        if mean is not None and bias is not None:
            yield f"mean absolute error {_number(mean.value)}, bias {_number(bias.value)} (approximate)"
    if found.classes:
        yield from _class_lines(found)
    if found.confusion and len(found.confusion) <= MOST_SHOWN:
        yield from matrix_lines(found.confusion)


def _class_lines(found: FieldScore) -> Iterator[str]:
    assert found.classes is not None
    some = [*found.classes.items()][:MOST_SHOWN]
    wide = max(len(_cut(name)) for name, _ in some)
    for name, each in some:
        parts = [f"{what} {_share(getattr(each, what))}" for what in ("precision", "recall", "f1")]
        yield f"{_cut(name):{wide}}  {each.rows:,} rows: {', '.join(parts)}"
    if len(found.classes) > len(some):
        yield f"and {len(found.classes) - len(some)} more classes"
    if found.macro_f1 is not None:
        yield f"macro-F1 {found.macro_f1.value:.2f} (approximate)"


def matrix_lines(confusion: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield the confusion matrix: a line per gold value, a column per answer."""
    said = dict.fromkeys([*confusion, *(name for row in confusion.values() for name in row)])
    columns = [name for name in said if name not in (OTHER, FAILED)]
    columns += [name for name in (OTHER, FAILED) if name in said]
    if len(columns) > MOST_SHOWN:
        return
    wide = max(len(_cut(name)) for name in ("gold", *confusion))
    widths = [max(len(_cut(name)), 5) for name in columns]
    yield f"{'gold':{wide}}  " + "  ".join(
        f"{_cut(name):>{width}}" for name, width in zip(columns, widths, strict=True)
    )
    for gold, row in confusion.items():
        cells = (f"{row.get(name, 0):>{width},}" for name, width in zip(columns, widths, strict=True))
        yield f"{_cut(gold):{wide}}  " + "  ".join(cells)


def shown(value: object) -> str:
    """Return a value of a field on one line."""
    return _cut(class_name(value))  # type: ignore[arg-type]


def _share(share: Estimate) -> str:
    if share.value is None:
        return "-"
    counted = _is_counted(share.value, share.interval)
    return _value(share.value) + ("" if counted or share.at_least is None else f" (at least {_down(share.at_least)})")


def _is_counted(value: float | None, interval: Interval | None) -> bool:
    """Return whether a share was counted over all rows, and not estimated from some."""
    return interval is not None and interval.low == interval.high == value


def _interval(interval: Interval) -> str:
    return f"{_down(interval.low)} to {math.ceil(interval.high * 100 - 1e-9) / 100:.2f}"


def _down(value: float) -> str:
    """Return a lower bound as text, rounded down: rounded up, it would promise more than was measured."""
    digits = 4 if 0.99 <= value < 1 else 2
    return f"{math.floor(value * 10**digits + 1e-9) / 10**digits:.{digits}f}"


def _value(value: float) -> str:
    """Return a share as text. A share below 1 is never shown as 1."""
    return f"{value:.2f}" if value < 0.99 or value == 1 else f"{math.floor(value * 10_000) / 10_000:.4f}"


def _number(value: float) -> str:
    return "unlimited" if math.isinf(value) else f"{value:.4g}"


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
