"""The gold of many rows, and the score of the rows that are finished.

``GoldTable`` keeps the gold of each row in few bytes: equal gold is kept once. ``Scoring`` joins results with it, by
their position in the inputs or by their ids, and knows which of these rows are a random sample.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import repeat
from typing import Literal, cast

from pydantic import JsonValue

from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject
from batch_agent.trust.gold import Gold
from batch_agent.trust.order import PILOT_KEY, SEALED_KEY, KeyedOrder
from batch_agent.trust.require import Requirement, check_requirements, with_required
from batch_agent.trust.score import DIGESTS, LONGEST_CLASS, Basis, Score, Scorer, gold_text

# Marks of rows with a result.
SCORED = 1
LEFT_OUT = 2  # no part of the score
WAITING = 3  # not in the digests yet
NAMED_TOGETHER, LARGEST_BYTE = 64, 255

MOST_KINDS = 10_000  # rows with different gold or answers that are counted together with equal ones
PLAIN = (bool, int, type(None))

Judge = Callable[[JsonValue, JsonValue], object]


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """How rows are scored, apart from their gold: ``groups`` and ``by`` are columns of the rows."""

    tolerance: Mapping[str, float] = field(default_factory=dict)
    judges: Mapping[str, Judge] = field(default_factory=dict)
    groups: str | None = None
    by: str | None = None
    sample: Literal["random"] | None = None
    sealed: bool = False
    require: Sequence[Requirement] = ()


@dataclass(frozen=True, slots=True)
class GoldRow:
    """A row with gold. ``index`` is its position in the inputs, or None if only its id is known."""

    name: str
    index: int | None
    values: Mapping[str, JsonValue]


class GoldTable:
    """Rows with gold. ``by_name``: results are joined by their ids, otherwise by their positions in the inputs. Equal
    gold is kept once. If all rows have gold, a row takes two bytes beside its id, and its place in the table is its
    position."""

    def __init__(self, *, by_name: bool = False) -> None:
        self.by_name = by_name
        self._names = bytearray()  # the ids
        self._sizes = bytearray()  # the bytes of each id
        self._starts = array("q")  # where the id of each 64th row begins
        self._long: dict[int, bytes] = {}  # ids that are kept apart, by place
        self._codes: bytearray | array[int] = bytearray()
        self._values: list[Mapping[str, JsonValue]] = []  # what is in it does not change
        self._same: dict[int, int] = {}  # code of each of these objects
        self._texts: list[str] = []  # the same as JSON
        self._known: dict[str, int] = {}
        # The index of each row, -1 if it is not known; None while that is its place. Then ``_of_index`` has the
        # place + 1 of a row by its index, 0 if it has no gold.
        self._indexes: array[int] | None = None
        self._of_index = array("i")
        self._of_name: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._codes)

    def add(self, name: str, index: int | None, values: Mapping[str, JsonValue]) -> None:
        place = len(self._codes)
        code = self._same.get(id(values))
        if code is None:
            code = self._code(values)
        if code > LARGEST_BYTE and isinstance(self._codes, bytearray):
            self._codes = array("i", iter(self._codes))  # bytes would be taken as four to a number
        if not place % NAMED_TOGETHER:
            self._starts.append(len(self._names))
        own = b"" if name == str(index) else name.encode("utf-8", "surrogatepass")
        if len(own) > LARGEST_BYTE or (not own and name != str(index)):
            self._long[place], own = own, b""
        self._names += own
        self._sizes.append(len(own))
        self._codes.append(code)
        if self._indexes is None and index != place:
            self._indexes = array("i", range(place))
            self._of_index = array("i") if self.by_name else array("i", range(1, place + 1))
        if self.by_name:
            self._of_name[name] = place
        if self._indexes is not None:
            self._indexes.append(-1 if index is None else index)
            if index is not None and not self.by_name:
                self._of_index.extend(repeat(0, index + 1 - len(self._of_index)))
                self._of_index[index] = place + 1

    def _code(self, values: Mapping[str, JsonValue]) -> int:
        """Return the number that stands for this gold."""
        text = json.dumps(values)
        code = self._known.get(text)
        if code is None:
            code = self._known[text] = self._same[id(values)] = len(self._values)
            self._values.append(values)
            self._texts.append(text)
        return code

    def code(self, place: int) -> int:
        """Return the number that stands for the gold of a row. Rows with equal gold have the same number."""
        return self._codes[place]

    def values(self, code: int) -> Mapping[str, JsonValue]:
        return self._values[code]

    def place(self, index: int, name: str) -> int | None:
        """Return the place of a row in this table; None if it has no gold."""
        if self.by_name:
            return self._of_name.get(name)
        if self._indexes is None:
            return index if 0 <= index < len(self._codes) else None
        found = self._of_index[index] if 0 <= index < len(self._of_index) else 0
        return found - 1 if found else None

    def row(self, place: int) -> GoldRow:
        return GoldRow(self._name(place), self._index(place), self._values[self._codes[place]])

    def _index(self, place: int) -> int | None:
        if self._indexes is None:
            return place
        return None if (index := self._indexes[place]) < 0 else index

    def _name(self, place: int) -> str:
        if size := self._sizes[place]:
            block = place // NAMED_TOGETHER
            begin = self._starts[block] + sum(self._sizes[block * NAMED_TOGETHER : place])
            return self._names[begin : begin + size].decode("utf-8", "surrogatepass")
        apart = self._long.get(place)
        return str(self._index(place)) if apart is None else apart.decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[GoldRow]:
        return map(self.row, range(len(self)))

    def add_digests(self, places: Iterable[int], digests: dict[str, int]) -> None:
        """Add the ``gold_digests`` of these rows to the sums in ``digests``."""
        ends: dict[int, list[tuple[str, str]]] = {}
        sums = dict.fromkeys(digests, 0)
        names = self._name
        codes = self._codes
        for place in places:
            name, code = names(place), codes[place]
            begin, own = f"{len(name)}:{name}", ends.get(code)
            if own is None:
                own = [(each, gold_text(value)) for each, value in self._values[code].items()]
                if len(ends) < MOST_KINDS:
                    ends[code] = own
            for each, end in own:
                made = blake2b((begin + end).encode("utf-8", "surrogatepass"), digest_size=16).digest()
                sums[each] += int.from_bytes(made)
        for each, number in sums.items():
            digests[each] = (digests[each] + number) % DIGESTS

    def lines(self) -> Iterator[bytes]:
        """Yield the rows as lines of JSON, for the record of a run."""
        for place, code in enumerate(self._codes):
            shown = json.dumps(self._index(place))
            line = f'{{"index": {shown}, "id": {json.dumps(self._name(place))}, "gold": {self._texts[code]}}}\n'
            yield line.encode()

    @classmethod
    def of_lines(cls, lines: Iterator[bytes], *, by_name: bool) -> GoldTable:
        """Return the table with the rows of these lines. An incomplete line is skipped."""
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
    """The pilot of a run: the first ``rows`` rows, ordered by the hash of their ids with ``key``. ``last`` is the hash
    of the last of them, ``of`` the number of rows of the table."""

    rows: int
    of: int
    last: bytes
    key: str = PILOT_KEY
    stopped: bool = False  # no other row was asked

    @classmethod
    def of_facts(cls, facts: JsonObject) -> PilotSample | None:
        """Return the pilot that a record describes; None if the run has none."""
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
        sources: Callable[[], Mapping[str, Mapping[str, object]]] = dict,
    ) -> None:
        """``left_out`` returns, for the fields of a row, whether the row is not scored because it is an example in the
        prompt. ``sources`` returns the fields of rows by id, for columns that the rows do not have: rows of the last
        stage of a pipeline may lack columns of the inputs. ``open_sealed``: only the rows whose gold was sealed are
        scored."""
        self._gold = gold.with_rules(options.tolerance, options.judges)
        self._table = table
        self._options = options
        self._keeps_wrong = keeps_wrong
        self._open_sealed = open_sealed
        self._left_out = left_out
        self._sealing = KeyedOrder(SEALED_KEY) if options.sealed or open_sealed else None
        self._seen = bytearray()
        self._checked = False
        self._sources = sources
        self._source_rows = dict[str, Mapping[str, object]]()
        self._scorer = self._new(self._gold)
        # Without a schema the types are those of the answers: rows are kept until these are known.
        self._held: list[tuple[int, _Told]] | None = None
        if any(each.kind == "unknown" for each in gold.fields.values()):
            self._held = []
        self.excluded = 0
        # Rows with equal gold and equal answers are counted together, if nothing else of them matters.
        plain = not keeps_wrong and self._sealing is None and self._held is None and self._columns == (None, None)
        quick = plain and left_out is None
        self._takes = [each.take for each in self._gold.fields.values()] if quick else None
        self._equal: dict[tuple[object, ...], int] = {}
        self._digests: dict[str, int] = dict.fromkeys(self._gold.fields, 0)

    def _new(self, gold: Gold) -> Scorer:
        options = self._options
        return Scorer(gold, by=options.by, groups=options.groups, keeps_wrong=self._keeps_wrong)

    def add(
        self,
        index: int,
        name: str,
        output: JsonValue,
        read: Callable[[], Mapping[str, object]],
        *,
        ok: bool,
        doubt: float | None = None,
        error: str | None = None,
    ) -> None:
        """Count a finished row. ``read`` returns the fields of its input."""
        place = self._table.place(index, name)
        if place is None:
            return
        if place >= len(self._seen):
            self._seen.extend(bytes(len(self._table) - len(self._seen)))
        if self._seen[place]:
            return
        self._seen[place] = SCORED
        if self._takes is not None:
            key = _key(self._table.code(place), self._takes, output, ok=ok)
            if key is not None and (key in self._equal or len(self._equal) < MOST_KINDS):
                self._equal[key] = self._equal.get(key, 0) + 1
                self._seen[place] = WAITING
                return
        fields = read()
        if self._left_out is not None and self._left_out(fields):
            self.excluded += 1
            self._seen[place] = LEFT_OUT
            return
        if any(column is not None and column not in fields for column in self._columns):
            self._source_rows = self._source_rows or dict(self._sources())
            fields = {**self._source_rows.get(name, {}), **fields}
        if not self._checked:
            self._check_columns(fields)
            self._checked = True
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
            index=told.index if told.index >= 0 else None,
            group=told.group,
            by=told.by,
            doubt=told.doubt,
            error=told.error,
        )

    def gold_of(self, index: int, name: str) -> Mapping[str, JsonValue] | None:
        """Return the gold of a row; None if the row is not scored."""
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
        ``complete``: no result will follow, so that the run has left out each row without one."""
        scorer = self._scorer
        if self._held is not None:
            answers = [told.output for _, told in self._held if told.ok]
            scorer = self._new(self._gold.typed_by(answers))
            for place, told in self._held:
                self._count(scorer, place, told)
            notes = [*notes, "the schema of the answers is not known: allowed values are not checked"]
        if self._equal:
            scorer = self._with_equal(scorer)
        sealed, missing, scorer = self._with_pending(scorer, pilot, complete=complete)
        if missing:
            rows = "1 row with gold has" if missing == 1 else f"{missing:,} rows with gold have"
            notes = [*notes, f"{rows} no result in this table: not scored"]
        basis, population = self._basis(population, pilot)
        score = scorer.score(
            basis, population, excluded=self.excluded, sealed=sealed, opened=self._open_sealed, notes=notes
        )
        needed = check_requirements(self._options.require, scorer.gold.fields)
        return with_required(score, needed) if needed else score

    def _waiting(self) -> Iterator[int]:
        """Yield the places of the rows that are not in the digests yet, and mark them as being there."""
        place = self._seen.find(WAITING)
        while place >= 0:
            self._seen[place] = SCORED
            yield place
            place = self._seen.find(WAITING, place)

    def _with_equal(self, scorer: Scorer) -> Scorer:
        """Return the scorer with the equal rows added that were counted together."""
        self._table.add_digests(self._waiting(), self._digests)
        scorer = scorer.copy()
        names = [*self._gold.fields]
        for key, times in self._equal.items():
            code, ok, *answers = key
            gold = self._table.values(cast(int, code))
            said = cast("dict[str, JsonValue]", dict(zip(names, answers[1::2], strict=True)) if ok else {})
            scorer.count(gold, {name: said.get(name) for name in gold}, ok=bool(ok), times=times)
        scorer.note(self._digests)
        return scorer

    def _with_pending(self, scorer: Scorer, pilot: PilotSample | None, *, complete: bool) -> tuple[int, int, Scorer]:
        """Return the number of sealed rows, the number of rows that are left out, and the scorer with the unfinished
        rows added."""
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
                    scorer, copied = scorer.copy(), True
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


def _key(
    code: int, takes: Sequence[Callable[[JsonValue], JsonValue]], output: JsonValue, *, ok: bool
) -> tuple[object, ...] | None:
    """Return the part that equal rows share: their gold, and their answers with their types. None if the answers are
    long or are not plain values."""
    if not ok:
        return code, False
    key: list[object] = [code, True]
    for take in takes:
        answer = take(output)
        kind = answer.__class__
        if kind is str:
            if len(cast(str, answer)) > LONGEST_CLASS:
                return None
        elif kind not in PLAIN:
            return None
        key += (kind, answer)  # True is 1 for a dict, and not for a user
    return tuple(key)


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
