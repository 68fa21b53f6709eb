"""The gold of many rows, and the score of the rows that are finished.

``GoldTable`` keeps the gold of each row in few bytes: equal gold is kept once. ``Scoring`` joins results with it, by
their position in the inputs or by their ids, and knows which of these rows are a random sample.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import repeat
from typing import Literal

from pydantic import JsonValue

from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject
from batch_agent.trust.gold import Gold
from batch_agent.trust.order import PILOT_KEY, SEALED_KEY, KeyedOrder
from batch_agent.trust.require import Requirement, check_requirements, with_required
from batch_agent.trust.score import Basis, Score, Scorer

LEFT_OUT = 2  # mark of a row with a result that is no part of the score; 1: it is one

Judge = Callable[[JsonValue, JsonValue], object]


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """How rows are scored, beside their gold: ``groups`` and ``by`` are columns of the rows."""

    tolerance: Mapping[str, float] = field(default_factory=dict)
    judges: Mapping[str, Judge] = field(default_factory=dict)
    groups: str | None = None
    by: str | None = None
    sample: Literal["random"] | None = None
    sealed: bool = False
    require: Sequence[Requirement] = ()


@dataclass(frozen=True, slots=True)
class GoldRow:
    """``index`` is the position of the row in the inputs, or None if it is known by its id only."""

    name: str
    index: int | None
    values: Mapping[str, JsonValue]


class GoldTable:
    """Rows with gold. ``by_name``: results are joined by their ids, else by their positions in the inputs. A row takes
    some 20 bytes beside its id: equal gold is kept once."""

    def __init__(self, *, by_name: bool = False) -> None:
        self.by_name = by_name
        self._names, self._ends = bytearray(), array("q")  # the id of a row whose id is its position is not kept
        self._indexes, self._codes = array("i"), array("i")
        self._values: list[dict[str, JsonValue]] = []
        self._texts: list[str] = []  # the same as JSON
        self._known: dict[str, int] = {}
        self._of_index = array("i")  # place of a row + 1, by index; 0: it has no gold
        self._of_name: dict[str, int] = {}
        self._digest = blake2b(digest_size=16)

    def __len__(self) -> int:
        return len(self._codes)

    def add(self, name: str, index: int | None, values: Mapping[str, JsonValue]) -> None:
        place, text = len(self._codes), json.dumps(values)
        code = self._known.get(text)
        if code is None:
            code = self._known[text] = len(self._values)
            self._values.append(dict(values))
            self._texts.append(text)
        if index is None or name != str(index):
            self._names += name.encode("utf-8", "surrogatepass")
        self._ends.append(len(self._names))
        self._codes.append(code)
        self._indexes.append(-1 if index is None else index)
        self._digest.update(f"{index} {len(name)} {name}{text}".encode("utf-8", "surrogatepass"))
        if self.by_name:
            self._of_name[name] = place
        elif index is not None:
            if index >= len(self._of_index):
                self._of_index.extend(repeat(0, index + 1 - len(self._of_index)))
            self._of_index[index] = place + 1

    def place(self, index: int, name: str) -> int | None:
        """Return the place of a row in this table, or None."""
        if self.by_name:
            return self._of_name.get(name)
        found = self._of_index[index] if 0 <= index < len(self._of_index) else 0
        return found - 1 if found else None

    def row(self, place: int) -> GoldRow:
        index = self._indexes[place]
        return GoldRow(self._name(place), None if index < 0 else index, self._values[self._codes[place]])

    def _name(self, place: int) -> str:
        begin, end = self._ends[place - 1] if place else 0, self._ends[place]
        if begin == end and self._indexes[place] >= 0:
            return str(self._indexes[place])
        return self._names[begin:end].decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[GoldRow]:
        return map(self.row, range(len(self)))

    def digest(self) -> str:
        """Return a digest of the gold so far."""
        return self._digest.hexdigest()

    def lines(self) -> Iterator[bytes]:
        """Yield the rows as lines of JSON, for the record of a run."""
        for place, code in enumerate(self._codes):
            index = self._indexes[place]
            shown = "null" if index < 0 else str(index)
            line = f'{{"index": {shown}, "id": {json.dumps(self._name(place))}, "gold": {self._texts[code]}}}\n'
            yield line.encode()

    @classmethod
    def of_lines(cls, lines: Iterator[bytes], *, by_name: bool) -> GoldTable:
        """Return the table of these lines. A line that is not complete is skipped."""
        table = cls(by_name=by_name)
        for line in lines:
            try:
                row = json.loads(line)
                table.add(row["id"], row["index"], row["gold"])
            except (ValueError, KeyError, TypeError):
                continue
        return table


@dataclass(frozen=True, slots=True)
class PilotSample:
    """The pilot of a run: its first ``rows`` rows in the order of the hash of their ids with ``key``. ``last`` is the
    hash of the last of them, ``of`` the number of rows of the table."""

    rows: int
    of: int
    last: bytes
    key: str = PILOT_KEY
    stopped: bool = False  # no other row was asked

    @classmethod
    def of_facts(cls, facts: JsonObject) -> PilotSample | None:
        """Return the pilot that a record describes."""
        known = facts.get("pilot")
        if not isinstance(known, dict) or not known.get("last"):
            return None
        rows, of, last, key = (known.get(name) for name in ("rows", "of", "last", "key"))
        if not (isinstance(rows, int) and isinstance(of, int) and isinstance(last, str)):
            return None
        stopped = known.get("stopped") is True
        return cls(min(rows, of), of, bytes.fromhex(last), key if isinstance(key, str) else PILOT_KEY, stopped)


class Scoring:
    """Joins results with gold. Rows are added in any order; a second result of a row is not counted."""

    def __init__(
        self,
        gold: Gold,
        table: GoldTable,
        options: ScoreOptions,
        *,
        keeps_wrong: bool = False,
        open_sealed: bool = False,
        left_out: Callable[[Mapping[str, object]], bool] | None = None,
    ) -> None:
        """``left_out`` says of the fields of a row whether it is no part of the score, because it is an example in the
        prompt. ``open_sealed``: the rows whose gold was sealed are scored, and no others."""
        self._gold, self._table, self._options = gold.with_rules(options.tolerance, options.judges), table, options
        self._keeps_wrong, self._open_sealed, self._left_out = keeps_wrong, open_sealed, left_out
        self._sealing = KeyedOrder(SEALED_KEY) if options.sealed or open_sealed else None
        self._seen = bytearray()
        self._scorer = self._new(self._gold)
        # Without a schema the types are those of the answers: rows are kept until these are known.
        self._held: list[tuple[int, _Told]] | None = None
        if any(each.kind == "unknown" for each in gold.fields.values()):
            self._held = []
        self.excluded = 0

    def _new(self, gold: Gold) -> Scorer:
        options = self._options
        return Scorer(gold, by=options.by, groups=options.groups, keeps_wrong=self._keeps_wrong)

    def add(
        self,
        index: int,
        name: str,
        output: JsonValue,
        fields: Mapping[str, object],
        *,
        ok: bool,
        doubt: float | None = None,
        error: str | None = None,
    ) -> None:
        """Count a finished row. ``fields`` are those of its input."""
        place = self._table.place(index, name)
        if place is None:
            return
        if not self._seen:
            self._check_columns(fields)
        self._seen.extend(bytes(max(0, len(self._table) - len(self._seen))))
        if self._seen[place]:
            return
        self._seen[place] = 1
        if self._left_out is not None and self._left_out(fields):
            self.excluded += 1
            self._seen[place] = LEFT_OUT
            return
        group, by = (None if column is None else fields.get(column) for column in self._columns)
        told = _Told(output, ok, index, _hashable(group), by, doubt, error)
        if self._held is not None:
            self._held.append((place, told))
        else:
            self._count(self._scorer, place, told)

    @property
    def _columns(self) -> tuple[str | None, str | None]:
        return self._options.groups, self._options.by

    def _check_columns(self, fields: Mapping[str, object]) -> None:
        for option, column in zip(("groups", "by"), self._columns, strict=True):
            if column is not None and column not in fields:
                listed = ", ".join(map(str, fields)) or "none"
                raise SpecError(f"{option}: the rows have no column {column!r} (their columns: {listed})")

    def _count(self, scorer: Scorer, place: int, told: _Told) -> None:
        row = self._table.row(place)
        if not self._is_open(row.name):
            return
        values = row.values
        if self._held is not None:  # the cells are read by the types of the answers
            gold = scorer.gold
            try:
                values = gold.read({gold.columns[field]: value for field, value in values.items()})
            except ValueError as error:
                raise SpecError(f"gold: row {row.name}: {error}") from None
        scorer.add(
            row.name,
            values,
            told.output,
            ok=told.ok,
            index=told.index,
            group=told.group,
            by=told.by,
            doubt=told.doubt,
            error=told.error,
        )

    def gold_of(self, index: int, name: str) -> Mapping[str, JsonValue] | None:
        """Return the gold of a row that is scored, or None."""
        place = self._table.place(index, name)
        if place is None or place >= len(self._seen) or self._seen[place] in (0, LEFT_OUT):
            return None
        row = self._table.row(place)
        return row.values if self._is_open(row.name) else None

    def _is_open(self, name: str) -> bool:
        return self._sealing is None or self._sealing.in_first_half(name) == self._open_sealed

    def score(
        self,
        population: int | None = None,
        *,
        pilot: PilotSample | None = None,
        complete: bool = False,
        notes: Sequence[str] = (),
    ) -> Score:
        """Return the score of the rows so far. ``population``: number of rows of the table, if it is known.
        ``complete``: no result will follow, so that a row without one was left out by the run."""
        scorer = self._scorer
        if self._held is not None:
            answers = [told.output for _, told in self._held if told.ok]
            scorer = self._new(self._gold.typed_by(answers))
            for place, told in self._held:
                self._count(scorer, place, told)
            notes = [*notes, "the schema of the answers is not known: allowed values are not checked"]
        sealed, missing, scorer = self._with_pending(scorer, pilot, complete=complete)
        if missing:
            notes = [*notes, f"{missing:,} rows with gold have no result in this table, and are not scored"]
        basis, population = self._basis(population, pilot)
        score = scorer.score(
            basis, population, excluded=self.excluded, sealed=sealed, opened=self._open_sealed, notes=notes
        )
        needed = check_requirements(self._options.require, scorer.gold.fields)
        return with_required(score, needed) if needed else score

    def _with_pending(self, scorer: Scorer, pilot: PilotSample | None, *, complete: bool) -> tuple[int, int, Scorer]:
        """Return the number of rows that are sealed, the number of those that are left out, and the scorer with the
        rows that are not finished."""
        only = KeyedOrder(pilot.key) if pilot is not None and pilot.stopped else None
        sealed = missing = 0
        copied = False
        for place in range(len(self._table)):
            done = place < len(self._seen) and self._seen[place]
            if done and self._sealing is None:
                continue
            row = self._table.row(place)
            if only is not None and pilot is not None and only.rank(row.name) > pilot.last:
                continue
            if not self._is_open(row.name):
                sealed += 1
            elif not done and complete:
                missing += 1
            elif not done:
                if not copied:
                    scorer, copied = deepcopy(scorer), True
                scorer.skip(row.name, row.values)
        return sealed, missing, scorer

    def _basis(self, population: int | None, pilot: PilotSample | None) -> tuple[Basis, int | None]:
        if self._options.sample == "random":
            return "random", population
        if pilot is not None and len(self._table) >= pilot.rows:
            order = KeyedOrder(pilot.key)
            inside = sum(order.rank(row.name) <= pilot.last for row in self._table)
            if inside == pilot.rows and (pilot.stopped or inside == len(self._table)):
                whole = pilot.rows >= pilot.of and not pilot.stopped
                return ("chosen", population) if whole else ("random", pilot.of)
        return "chosen", population


@dataclass(frozen=True, slots=True)
class _Told:
    """What is known of a finished row."""

    output: JsonValue
    ok: bool
    index: int
    group: object
    by: object
    doubt: float | None
    error: str | None


def _hashable(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | None) else str(value)
