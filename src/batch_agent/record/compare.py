"""Compares runs over the same rows: recorded runs, files of results, and ``Results``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from pydantic import JsonValue

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import Interrupted, SpecError
from batch_agent.files.gold import GivenGold, TakenGold
from batch_agent.files.tables import TRUST, Record
from batch_agent.record.reader import open_run
from batch_agent.record.score_reader import ScoredRows, known_of_file, known_of_run, part_of
from batch_agent.record.scoring import RunGold, row_fields, with_looks
from batch_agent.trust.comparison import Answer, PairedRow, RunComparison, RunSide, compare_answers
from batch_agent.trust.examples import examples_filter
from batch_agent.trust.gold import OUTPUT, Gold, class_name
from batch_agent.trust.order import SEALED_KEY, KeyedOrder
from batch_agent.trust.table import Scoring

MEASURED = {column.name for column in TRUST}


class SideRow(NamedTuple):
    """A finished row of a run. ``place`` is its index."""

    place: int
    name: str
    fields: Mapping[str, object]
    answer: Answer

    def given(self) -> Mapping[str, object]:
        return self.fields


@dataclass(frozen=True, slots=True)
class Side:
    """A run of a comparison, and its gold. ``rows`` can be read again. ``typed``: the schema is known; a known schema
    of None means text."""

    name: str
    rows: Iterable[SideRow]
    known: RunGold = field(default_factory=RunGold)
    schema: OutputSchema[object] | None = None
    typed: bool = False

    def gold(self, given: Mapping[str, object]) -> TakenGold | None:
        """Return the gold to compare by; None if there is none."""
        if given.get("gold") is None and self.known.taken is None:
            return None
        rows = ((row.place, row.name, row.fields) for row in self.rows)
        answers = (row.answer.output for row in self.rows if row.answer.ok)
        return self.known.measure(given, rows, self.schema, typed=self.typed, answers=lambda: answers)


class HasSide(Protocol):
    """Results that can be a side of a comparison."""

    def side(self, name: str) -> Side: ...


class SideRows:
    """The finished rows of a record, or of a file of results."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = records

    def __iter__(self) -> Iterator[SideRow]:
        for record in self._records:
            error = record.get("error")
            kind = str(error.get("type")) if isinstance(error, dict) else None
            if kind == Interrupted.type:
                continue
            index, timings = record.get("index"), record.get("timings")
            seconds = timings.get("total") if isinstance(timings, dict) else record.get("seconds")
            answer = Answer(
                cast(JsonValue, record.get("output")),
                bool(record.get("ok")),
                kind,
                _number(record.get("cost")),
                _number(seconds),
            )
            place = index if isinstance(index, int) else -1
            yield SideRow(place, str(record.get("job_id")), row_fields(record.get("input")), answer)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def compare(
    a: str | Path | HasSide,
    b: str | Path | HasSide,
    *others: str | Path | HasSide,
    gold: GivenGold | None = None,
    tolerance: Mapping[str, float] | None = None,
    score: Mapping[str, Any] | None = None,
    groups: str | None = None,
) -> RunComparison:
    """Compare runs over the same rows: ``compare(a, b)["mood"]``.

    A run is a ``Results``, the outcome of a pipeline, a run directory or the URL of a run in Redis, or a file of
    results. Rows are joined by id. Rows that are not in all runs, or whose content differs between the runs, are
    counted and left out. Without ``gold``, the gold of the runs is used. If there is none, the comparison says what
    differs, and not what is better.
    """
    given: dict[str, object] = {"gold": gold, "tolerance": tolerance, "score": score, "groups": groups}
    with ExitStack() as opened:
        sides = [_side(run, place, opened) for place, run in enumerate((a, b, *others))]
        return _compared(_with_names(sides), {name: value for name, value in given.items() if value is not None})


def _side(run: str | Path | HasSide, place: int, opened: ExitStack) -> Side:
    if not isinstance(run, str | Path):
        if not hasattr(run, "side"):
            raise SpecError(f"compare takes runs: Results, run directories or files of results, not {_kind(run)}")
        return run.side("abcdefghijklmnopqrstuvwxyz"[place] if place < 26 else f"run {place + 1}")
    if Path(run).is_file():
        records, known = known_of_file(Path(run))
        return Side(str(run), SideRows(records), known)
    reader = opened.enter_context(open_run(str(run)))
    part = opened.enter_context(part_of(reader))
    known, schema, typed = known_of_run(reader)
    return Side(reader.name, SideRows(ScoredRows(reader, part)), known, schema, typed)


def _kind(value: object) -> str:
    return type(value).__name__


def _with_names(sides: Sequence[Side]) -> list[Side]:
    """Return the sides, each with a different name."""
    names = [side.name for side in sides]
    return [
        side if names.count(side.name) == 1 else replace(side, name=f"{side.name} ({place + 1})")
        for place, side in enumerate(sides)
    ]


def _compared(sides: Sequence[Side], given: Mapping[str, object]) -> RunComparison:
    taken: TakenGold | None = None
    error: SpecError | None = None
    owner = 0  # the run whose gold it is
    for place, side in enumerate(sides):
        try:
            taken = side.gold(given)
        except SpecError as refused:  # another run may still have the columns
            error = error or refused
        if taken is not None:
            owner = place
            break
    if taken is None and error is not None:
        raise error
    hidden = frozenset().union(*(each.known.taken.taken for each in sides if each.known.taken is not None))
    hidden |= frozenset() if taken is None else {*taken.gold.columns.values()}
    first, *later = [{row.name: row for row in side.rows} for side in sides]
    common = [name for name in first if all(name in rows for rows in later)]
    sources = [side.known.sources() for side in sides]  # the rows of a pipeline are those of its inputs
    same = [
        name
        for name in common
        if _same_content(
            [own.get(name, rows[name].fields) for own, rows in zip(sources, (first, *later), strict=True)], hidden
        )
    ]
    if common and not same:
        raise SpecError("the rows with the same ids have another content in each run: these are other rows")
    if not common:
        raise SpecError("no row is in all of these runs: rows are joined by their ids")
    example = examples_filter([side.known.examples for side in sides])
    shown = [name for name in same if not example(_bare(first[name].fields, hidden))]
    sealing = KeyedOrder(SEALED_KEY) if taken is not None and taken.options.sealed else None
    kept = [name for name in shown if sealing is None or not sealing.in_first_half(name)]
    every = (first, *later)
    rows = [PairedRow(name, [rows[name].answer for rows in every], {}) for name in kept]
    rules, looks = None, None
    if taken is not None:
        answers = [answer.output for row in rows for answer in row.answers if answer.ok]
        rules = taken.gold.typed_by(answers).with_rules(taken.options.tolerance, taken.options.judges)
        rows = [row._replace(gold=_gold_of(taken, every[owner][row.name])) for row in rows]
        looks = _looks(sides, every, kept, taken, rules)
    grouped = taken is not None and taken.options.groups is not None and taken.options.sample != "random"
    notes = ["no test and no interval: the gold was collected by groups, whose rows are alike"] if grouped else []
    fields = _fields(rows)
    found = [_run_side(side, every[place], len(common), place, rows) for place, side in enumerate(sides)]
    pairs = compare_answers([side.name for side in sides], rows, rules, fields=fields, grouped=grouped)
    return RunComparison(
        found, pairs, len(kept), len(common) - len(same), len(same) - len(shown), len(shown) - len(kept), looks, notes
    )


def _gold_of(taken: TakenGold, row: SideRow) -> Mapping[str, JsonValue]:
    place = taken.table.place(row.place, row.name)
    return {} if place is None else taken.table.row(place).values


def _looks(
    sides: Sequence[Side], every: Sequence[Mapping[str, SideRow]], kept: Sequence[str], taken: TakenGold, rules: Gold
) -> int | None:
    """Count a look at the gold for each run. Returns the number of earlier looks; None if they are unknown."""
    before: list[int] = []
    for side, rows in zip(sides, every, strict=True):
        scoring = Scoring(rules, taken.table, replace(taken.options, sealed=False, require=(), by=None, groups=None))
        for name in kept:
            row = rows[name]
            scoring.add(row.place, name, row.answer.output, row.given, ok=row.answer.ok, error=row.answer.error)
        score = with_looks(scoring.score(complete=True), side.known.asked, run=side.name)
        if score.looks is not None:
            before.append(score.looks)
    return min(before, default=None)


def _run_side(side: Side, rows: Mapping[str, SideRow], common: int, place: int, paired: Sequence[PairedRow]) -> RunSide:
    answers = [row.answers[place] for row in paired]
    costs = [answer.cost for answer in answers if answer.cost is not None]
    seconds = [answer.seconds for answer in answers if answer.seconds is not None]
    return RunSide(
        side.name,
        len(rows),
        len(rows) - common,
        sum(not answer.ok for answer in answers),
        sum(costs) if costs else None,
        sum(seconds) / len(seconds) if seconds else None,
    )


def _fields(rows: Sequence[PairedRow]) -> list[str]:
    """Return the fields of the answers, in the order in which they first appear."""
    names: dict[str, None] = {}
    for row in rows:
        for answer in row.answers:
            if answer.ok and isinstance(answer.output, dict):
                names |= dict.fromkeys(answer.output)
            elif answer.ok:
                names[OUTPUT] = None
    return [*names]


def _bare(fields: Mapping[str, object], hidden: frozenset[str]) -> Mapping[str, object]:
    return {name: value for name, value in fields.items() if name not in hidden and not _is_measured(name)}


def _is_measured(name: str) -> bool:
    """Return whether a column of a table of results measures an answer, and so is not content of the row."""
    return name in MEASURED or name.startswith("gold.")


def _same_content(rows: Sequence[Mapping[str, object]], hidden: frozenset[str]) -> bool:
    """Return whether a row has the same content in all runs. Values may be texts in a table."""
    first, *others = (_content(fields, hidden) for fields in rows)
    return all(other == first for other in others)


def _content(fields: Mapping[str, object], hidden: frozenset[str]) -> bytes:
    made = blake2b(digest_size=16)
    for name in sorted(_bare(fields, hidden)):
        value = fields[name]
        text = "" if value is None else class_name(cast(JsonValue, value))
        made.update(f"{len(name)}:{name}{len(text)}:{text}".encode("utf-8", "surrogatepass"))
    return made.digest()
