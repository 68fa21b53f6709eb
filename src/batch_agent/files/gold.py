"""Gold beside the rows of a run: takes its columns out of the rows before anything sees them, or joins a gold file.

What a cell means is in ``trust/gold``. Inputs that can be read again are checked here before anything is sent; a row of
an iterator is checked when it is read.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import cast

from pydantic import JsonValue

from batch_agent.compiler.fields import ID, field_names, fields_of, listed, own_id
from batch_agent.compiler.schema import OutputSchema
from batch_agent.compiler.template import Template
from batch_agent.errors import InputError, SpecError
from batch_agent.files.compression import format_of
from batch_agent.files.read import KNOWN, LazyRows, read_inputs
from batch_agent.files.rows import Row
from batch_agent.foreign import describe
from batch_agent.job import UnreadableRow
from batch_agent.messages import JsonObject
from batch_agent.trust.examples import ExampleRows
from batch_agent.trust.gold import Gold, GoldField, gold_of, named_problems
from batch_agent.trust.require import read_requirements
from batch_agent.trust.table import GoldTable, Judge, ScoreOptions

logger = logging.getLogger("batch_agent")


@dataclass(frozen=True, slots=True)
class GoldRows:
    """Gold that people gave in the review of a run: the values of the fields, by the id of a row."""

    name: str  # of the run
    values: Mapping[str, Mapping[str, JsonValue]]

    def __str__(self) -> str:
        return self.name


GivenGold = str | Path | Mapping[str, str] | GoldRows
LATEST = 10_000  # rows that are kept as they were given; more than are read and not yet fed
NAMED_ROWS = 5  # in a message about several rows
GOLD_FACT, IN_KEYS = "gold", "in_keys"  # the fact of a run about its gold; in it, the columns that are part of keys
BEFORE = "before"  # in it: the stages of a pipeline whose rows become those that are scored
SEEN = "seen"  # in it: whether the agents of an earlier session saw these columns


@dataclass(frozen=True)
class TakenGold:
    """The gold of a run. ``inputs`` are its rows without the columns of gold; ``taken`` are these columns."""

    gold: Gold
    table: GoldTable
    options: ScoreOptions
    inputs: object
    taken: frozenset[str] = frozenset()
    facts: JsonObject = field(default_factory=dict)  # for the record of the run
    whole: WholeRows | None = None
    examples: ExampleRows | None = None  # in the prompt: rows with their content are not scored

    @property
    def left_out(self) -> Callable[[Mapping[str, object]], bool] | None:
        return None if self.examples is None else self.examples.__contains__

    @cached_property
    def rules(self) -> Gold:
        """The fields with the tolerances and functions of the user."""
        return self.gold.with_rules(self.options.tolerance, self.options.judges)


class WholeRows:
    """Finds the rows as the user gave them, for the rows without gold that the run gets.

    A record from before a gold column was taken out has keys of the whole rows. Rows keep these keys, so that nothing
    is asked again. Of rows that are read as they are needed, only the latest are kept.
    """

    def __init__(self) -> None:
        self._lists: tuple[Sequence[object], Sequence[object]] | None = None
        self._latest: dict[int, tuple[object, object]] | None = {}

    def keep_lists(self, bare: Sequence[object], whole: Sequence[object]) -> None:
        self._lists, self._latest = (bare, whole), None

    def keep(self, bare: object, whole: object) -> None:
        if self._latest is None:
            return
        self._latest[id(bare)] = bare, whole  # a reference to both, so that no other object gets this id
        if len(self._latest) > LATEST:
            del self._latest[next(iter(self._latest))]

    def of(self, bare: object, index: int) -> object:
        """Return the row as it was given. It is ``bare`` itself if nothing was taken out of it."""
        if self._lists is not None:
            known, whole = self._lists
            return whole[index] if index < len(known) and known[index] is bare else bare
        return bare if self._latest is None else self._latest.get(id(bare), (bare, bare))[1]

    def forget(self) -> None:
        """Stop keeping rows: no record has keys of whole rows."""
        self._lists = self._latest = None


def in_keys(taken: Iterable[str], recorded: JsonObject) -> list[str]:
    """Return the gold columns that are part of the keys of recorded rows, because an earlier session did not take them
    out. ``recorded`` are the facts of the record, {} without one."""
    if not recorded:
        return []
    before = recorded.get(GOLD_FACT)
    known = {*cast("Iterable[str]", before.get("taken") or ())} if isinstance(before, dict) else set[str]()
    kept = before.get(IN_KEYS) if isinstance(before, dict) else None
    return sorted({*(taken), *known} - known | {*cast("Iterable[str]", kept or ())})


def was_seen(facts: JsonObject) -> bool:
    """Return whether agents saw the gold when the recorded answers were made."""
    gold = facts.get(GOLD_FACT)
    return isinstance(gold, dict) and gold.get(SEEN) is True


def is_gold_file(given: object) -> bool:
    """Return whether ``gold`` is a file, which has the ids of its rows, and not a column."""
    return isinstance(given, Path | GoldRows) or (isinstance(given, str) and format_of(Path(given))[0] in KNOWN)


def score_options(given: Mapping[str, object]) -> ScoreOptions:
    """Return how to score, from options of a run. Raises SpecError for what cannot be read."""
    required = given.get("require") or ()
    return ScoreOptions(
        cast("Mapping[str, float]", given.get("tolerance") or {}),
        {name: judge_of(each) for name, each in cast("Mapping[str, object]", given.get("score") or {}).items()},
        cast("str | None", given.get("groups")),
        cast("str | None", given.get("by")),
        "random" if given.get("gold_sample") == "random" else None,
        bool(given.get("gold_sealed")),
        read_requirements(cast("str | Sequence[str]", required)),
    )


def score_facts(given: Mapping[str, object], gold: Gold, taken: Iterable[str]) -> JsonObject:
    """Return how a run is scored, for its record. Functions are kept as ``module:function``."""
    judges = cast("Mapping[str, object]", given.get("score") or {})
    required = given.get("require") or ()
    listed_texts: list[JsonValue] = [required] if isinstance(required, str) else [*cast("Sequence[str]", required)]
    return {
        "fields": {**gold.columns},
        "taken": [*sorted(taken)],
        "tolerance": {**cast("Mapping[str, float]", given.get("tolerance") or {})},
        "score": {name: judge_name(judge) for name, judge in judges.items()},
        "groups": cast("str | None", given.get("groups")),
        "by": cast("str | None", given.get("by")),
        "gold_sample": cast("str | None", given.get("gold_sample")),
        "gold_sealed": bool(given.get("gold_sealed")),
        "require": listed_texts,
    }


def judge_of(given: object) -> Judge:
    """Return a function that decides whether an answer is right, given as itself or as ``module:function``."""
    if isinstance(given, str):
        if not re.fullmatch(r"[\w.]+:[\w.]+", given):
            raise SpecError(f"score: {given!r} must be module:function")
        try:
            importlib.import_module(given.partition(":")[0])
            given = resolve_name(given)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the user's module can raise anything  # noqa: BLE001
            raise SpecError(f"score: {given} cannot be imported: {describe(error)}") from None
    if not callable(given):
        raise SpecError("score: a function, or its name as module:function, is needed for each field")
    return given


def judge_name(given: object) -> str:
    """Return ``module:function`` of such a function."""
    if isinstance(given, str):
        return given
    return f"{getattr(given, '__module__', '')}:{getattr(given, '__qualname__', type(given).__name__)}"


def checked_gold(
    given: GivenGold,
    schema: OutputSchema[object] | None,
    *,
    known: bool = True,
    columns: Sequence[str] = (),
    seen: Sequence[str] | None = None,
) -> Gold:
    """Return the fields with gold, which check values by the schema. ``known``: False if the schema is unknown;
    ``seen`` are then the fields of the answers, if there are answers."""
    shape = None if schema is None else schema.written_schema
    gold = gold_of(cast("str | Mapping[str, str]", given), shape, known=known, columns=columns, seen=seen)
    return Gold([_with_check(each) for each in gold.fields.values()], gold.columns)


def _with_check(each: GoldField) -> GoldField:
    """Return the field with a check by its schema added, which may refuse more values than its type does."""
    bounds = set(each.schema) - {"type", "title", "description", "enum", "const", "default", "$defs", "definitions"}
    if not bounds:
        return each
    try:
        schema = OutputSchema.of(each.schema)
    except SpecError:  # a part of a schema that is none by itself
        return each
    return each if schema is None else replace(each, check=schema.validate_python)


def take_gold(
    given: GivenGold,
    inputs: object,
    schema: OutputSchema[object] | None,
    options: Mapping[str, object],
    *,
    known: bool = True,
    by_name: bool = False,
) -> TakenGold:
    """Return the gold of these inputs. ``options`` are those of the run. Raises SpecError for a missing column, for
    values that are not allowed, for an id that occurs twice, for a gold file that matches no row, and for an option
    that names a gold column."""
    id_column = cast("str | None", options.get("id_column"))
    how = score_options(options)
    if is_gold_file(given):
        joiner: _Joiner = _FileJoiner(file_of(given), schema, id_column, known=known, by_name=by_name)
    else:
        gold = checked_gold(given, schema, known=known)
        _refuse_named(options, frozenset(gold.columns.values()))
        joiner = _ColumnJoiner(gold, id_column, by_name=by_name, task=options)
    gold = joiner.gold
    scored = gold.with_rules(how.tolerance, how.judges)
    for each in how.require:
        each.check(scored.fields)
    taken = frozenset(gold.columns.values()) if isinstance(joiner, _ColumnJoiner) else frozenset[str]()
    joiner.columns = {name: column for name in ("by", "groups") if isinstance(column := options.get(name), str)}
    for name, column in joiner.columns.items():
        if column in taken:
            raise SpecError(f"{name}: {column!r} is a column of gold, which is taken out of the rows: name another one")
    rows = joiner.taken_from(inputs)
    facts = score_facts(options, gold, taken)
    return TakenGold(gold, joiner.table, how, rows, taken, facts, joiner.whole)


class _Joiner:
    """Adds the gold of rows to a table. ``join`` returns a row as the run gets it."""

    gold: Gold

    def __init__(self, id_column: str | None, *, by_name: bool) -> None:
        self._id_column = id_column
        self.table = GoldTable(by_name=by_name)
        self.columns: Mapping[str, str] = {}  # of the options ``by`` and ``groups``
        self._problems: list[tuple[str, str]] = []
        self._names: set[str] = set()
        self._seen: set[str] = set()  # columns that rows have
        self.whole = WholeRows()

    def taken_from(self, inputs: object) -> object:
        """Return the inputs without the gold. Inputs that can be read again are read and checked first."""
        if isinstance(inputs, list | tuple):
            rows = [self.join(index, value) for index, value in enumerate(inputs)]
            self.finish(checks=True)
            self.whole.keep_lists(rows, inputs)
            return rows if self.changes else inputs
        if isinstance(inputs, LazyRows):
            with_all = inputs.again()
            try:
                for index, value in enumerate(with_all):
                    self.note(index, value)
            finally:
                with_all.close()
            self.finish(checks=True)
            if self.changes:
                inputs.change(cast("Callable[[Row], Row]", self.bare))
            return inputs
        if isinstance(inputs, AsyncIterable):
            return self._of_async(inputs)
        if isinstance(inputs, Iterator):
            return self._of_iterator(inputs)
        if isinstance(inputs, Iterable):
            for index, value in enumerate(inputs):
                self.note(index, value)
            self.finish(checks=True)
            kind = CountedBareRows if isinstance(inputs, Sized) else BareRows
            return kind(inputs, self.bare) if self.changes else inputs
        return inputs

    @property
    def changes(self) -> bool:
        """Whether rows lose columns."""
        return False

    def join(self, index: int, value: object) -> object:
        """Add the gold of a row to the table, and return the row without it."""
        self.note(index, value)
        return self.bare(value)

    def note(self, index: int, value: object) -> None:
        """Add the gold of a row to the table."""
        if type(value) is dict:  # the usual case
            fields: Mapping[str, object] = value
        else:
            try:
                fields = {} if isinstance(value, UnreadableRow) else fields_of(value)
            except InputError:  # this row fails alone
                return
        if not fields:
            return
        if not index:
            self._check_columns(fields)
        own = own_id(fields, self._id_column)
        self._join(index, str(index) if own is None else own, fields)

    def _check_columns(self, first: Mapping[str, object]) -> None:
        for option, column in self.columns.items():
            if column not in first:
                raise SpecError(f"{option}: the rows have no column {column!r} (their columns: {listed(first)})")

    def bare(self, value: object) -> object:
        return value

    def _join(self, index: int, name: str, fields: Mapping[str, object]) -> None:
        raise NotImplementedError

    def finish(self, *, checks: bool) -> None:
        """Check the gold after the last row. Raises SpecError if it cannot be used. ``checks``: nothing was sent
        yet."""
        if self._problems:
            raise SpecError(f"gold: {named_problems(iter(self._problems))}")

    def _add(self, name: str, index: int, values: Mapping[str, JsonValue]) -> None:
        if self.table.by_name:
            if name in self._names:
                self._problems.append((name, "two rows with gold have this id"))
            self._names.add(name)
        self.table.add(name, index, values)

    def _at_once(self) -> None:
        """Raise the error of a row of an iterator at once: earlier rows were sent already."""
        if self._problems:
            self.finish(checks=False)

    def _of_iterator(self, inputs: Iterator[object]) -> Iterator[object]:
        for index, value in enumerate(inputs):
            row = self.join(index, value)
            self._at_once()
            yield row
        self.finish(checks=False)

    async def _of_async(self, inputs: AsyncIterable[object]) -> AsyncIterator[object]:
        index = 0
        async for value in inputs:
            row = self.join(index, value)
            self._at_once()
            yield row
            index += 1
        self.finish(checks=False)


class _ColumnJoiner(_Joiner):
    def __init__(self, gold: Gold, id_column: str | None, *, by_name: bool, task: Mapping[str, object]) -> None:
        super().__init__(id_column, by_name=by_name)
        self.gold = gold
        self._columns = frozenset(gold.columns.values())
        self._options = task
        self._first = True
        self._one = next(iter(self._columns))
        self._has_all = False  # each of the columns was seen in a row

    @property
    def changes(self) -> bool:
        return True

    def bare(self, value: object) -> object:
        """Return a row without its gold. A row with gold that is not a dict is returned as a dict."""
        if type(value) is dict and self._one in value:  # the usual case
            row = value.copy()
            for column in self._columns:
                row.pop(column, None)
            self.whole.keep(row, value)
            return row
        if isinstance(value, str | UnreadableRow):
            return value
        try:
            names = field_names(value)
        except InputError:
            return value
        if self._columns.isdisjoint(names):
            return value
        bare = {name: cell for name, cell in fields_of(value).items() if name not in self._columns}
        self.whole.keep(bare, value)
        return bare

    def _join(self, index: int, name: str, fields: Mapping[str, object]) -> None:
        if self._first:
            self._first = False
            _refuse_in_task(self._options, self._columns, [*fields])
            self._listed = listed(fields)
        if not self._has_all:
            self._seen |= self._columns & fields.keys()
            self._has_all = len(self._seen) == len(self._columns)
        try:
            values = self.gold.read(fields)
        except ValueError as error:
            self._problems.append((name, str(error)))
            return
        if values and self.table.by_name:
            self._add(name, index, values)
        elif values:
            self.table.add(name, index, values)

    def finish(self, *, checks: bool) -> None:
        missing = sorted(self._columns - self._seen)
        if missing and not self._first:
            raise SpecError(
                f"gold: no row has the column {missing[0]!r} (the columns of the first row: {self._listed})"
            )
        super().finish(checks=checks)
        if not len(self.table) and not self._first:
            raise SpecError(f"gold: no row has a value in {', '.join(sorted(self._columns))}")


class _FileJoiner(_Joiner):
    def __init__(
        self,
        path: Path | GoldRows,
        schema: OutputSchema[object] | None,
        id_column: str | None,
        *,
        known: bool,
        by_name: bool,
    ) -> None:
        super().__init__(id_column, by_name=by_name)
        self._path = path
        self.gold, self._waiting = read_gold_file(path, schema, id_column, known=known)
        self._total = len(self._waiting)

    def _join(self, index: int, name: str, fields: Mapping[str, object]) -> None:
        values = self._waiting.pop(name, None)
        if values is not None:
            self._names.add(name)
            self.table.add(name, index, values)
        elif name in self._names:
            self._problems.append((name, f"two rows have this id, and {self._path} has gold for it"))

    def finish(self, *, checks: bool) -> None:
        super().finish(checks=checks)
        if not self._names:
            some = ", ".join([*self._waiting][:NAMED_ROWS])
            raise SpecError(f"gold: no row has an id of {self._path}, such as {some}")
        warn_unjoined(self._path, self._waiting, self._total)


def file_of(given: GivenGold) -> Path | GoldRows:
    """Return the gold that is in a file, or that people gave in a review."""
    return given if isinstance(given, GoldRows) else Path(cast("str | Path", given))


def warn_unjoined(path: Path | GoldRows, waiting: Mapping[str, object], total: int) -> None:
    """Warn about ids of a gold file that no row has."""
    if waiting:
        some = ", ".join([*waiting][:NAMED_ROWS])
        logger.warning("gold: %d of %d ids of %s are in no row: %s", len(waiting), total, path, some)


def read_gold_file(
    path: Path | GoldRows,
    schema: OutputSchema[object] | None,
    id_column: str | None,
    *,
    known: bool = True,
    seen: Sequence[str] | None = None,
) -> tuple[Gold, dict[str, Mapping[str, JsonValue]]]:
    """Return the fields of a gold file, and the gold of each id. ``known`` and ``seen`` as in ``checked_gold``. Raises
    SpecError."""
    rows: Iterable[object]
    try:
        if isinstance(path, GoldRows):
            id_column = ID
            rows = [{ID: name, **values} for name, values in path.values.items()]
        else:
            rows = read_inputs(path)
    except SpecError as error:
        raise SpecError(f"gold: {str(error).replace('the inputs ', '')}") from None
    columns: dict[str, None] = {}
    found: list[Mapping[str, object]] = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            what = row.message if isinstance(row, UnreadableRow) else f"row {number} is not an object"
            raise SpecError(f"gold: {path}: {what}")
        columns |= dict.fromkeys(row)
        found.append(row)
    name_column = next((name for name in (id_column, ID) if name is not None and name in columns), None)
    if name_column is None:
        wanted = ID if id_column is None else id_column
        raise SpecError(f"gold: {path} needs a column {wanted!r} with the ids of the rows; it has {listed(columns)}")
    fields = [name for name in columns if name != name_column]
    if not fields:
        raise SpecError(f"gold: {path} has only the column {name_column!r}: add a column for each field with gold")
    gold = checked_gold(str(path), schema, known=known, columns=fields, seen=seen)
    values: dict[str, Mapping[str, JsonValue]] = {}
    problems: list[tuple[str, str]] = []
    for cells in found:
        own = own_id(cells, name_column)
        if own is None:
            problems.append((str(cells.get(name_column)), "it has no id"))
        elif own in values:
            problems.append((own, "this id is in the file twice"))
        else:
            try:
                values[own] = gold.read(cells)
            except ValueError as error:
                problems.append((own, str(error)))
    if problems:
        raise SpecError(f"gold: {path}: {named_problems(iter(problems))}")
    values = {name: some for name, some in values.items() if some}
    if not values:
        raise SpecError(f"gold: {path} has no value")
    return gold, values


@dataclass(frozen=True, slots=True)
class BareRows:
    """Rows that can be read again, without their gold."""

    inputs: Iterable[object]
    bare: Callable[[object], object]

    def __iter__(self) -> Iterator[object]:
        return map(self.bare, self.inputs)


class CountedBareRows(BareRows):
    """Rows without their gold whose number is known."""

    def __len__(self) -> int:
        return len(cast("Sized", self.inputs))


def _refuse_named(options: Mapping[str, object], columns: frozenset[str]) -> None:
    """Raise SpecError if an option names a gold column: the run would then see the gold."""
    for option in ("id_column", "document_column", "affinity", "images", "carry"):
        given = options.get(option)
        named = [given] if isinstance(given, str) else [*cast("Iterable[str]", given or ())]
        for name in named:
            if name in columns or name.partition(".")[0].partition("[")[0] in columns:
                raise SpecError(f"{option} names {name!r}, which is a column of gold: the run must not see it")


def _refuse_in_task(options: Mapping[str, object], columns: frozenset[str], fields: Sequence[str]) -> None:
    task = str(options.get("task") or "")
    if options.get("template") == "jinja":
        from batch_agent.compiler.jinja import JinjaTemplate

        names: Iterable[str] = JinjaTemplate(task).names
    else:
        try:
            names = Template.parse(task, fields).names
        except SpecError:  # the plan says what is wrong with the task
            return
    for name in names:
        if name in columns or name.partition(".")[0].partition("[")[0] in columns:
            raise SpecError(
                f"the task names {{{name}}}, which is a column of gold: the model must not see the right answer"
            )
