"""The score of results and of recorded runs: joins their rows with gold, and counts looks at it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from pydantic import JsonValue

from batch_agent.compiler.fields import fields_of, listed
from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import InputError, Interrupted, SpecError, StoreError
from batch_agent.files.gold import (
    GivenGold,
    TakenGold,
    checked_gold,
    file_of,
    is_gold_file,
    read_gold_file,
    score_options,
    warn_unjoined,
)
from batch_agent.files.results import from_json, to_json
from batch_agent.files.tables import Record, record_of
from batch_agent.job import AgentResult
from batch_agent.messages import JsonObject
from batch_agent.record.looks import LEDGER, looks_before, looks_of
from batch_agent.record.private import private
from batch_agent.trust.examples import ExampleRows
from batch_agent.trust.gold import Gold, GoldField, fields_of_answers, named_problems
from batch_agent.trust.order import SEALED_KEY, KeyedOrder
from batch_agent.trust.score import Score
from batch_agent.trust.table import GoldTable, PilotSample, Scoring

SAW_GOLD = (
    "this score says nothing: some of the answers were made when the agents saw the columns of gold; run it again in "
    "another run directory"
)
UNKNOWN = "unknown"  # what was asked, if the record does not say it


def add_result(scoring: Scoring, result: AgentResult[Any], schema: OutputSchema[object] | None) -> None:
    """Add a finished row. An interrupted row is not finished and is not added."""
    ok = result.ok
    error = None
    output = None
    if result.error is not None:
        if (error := result.error.type) == Interrupted.type:
            return
    else:
        try:
            output = plain_output(result.output, schema)
        except Exception as failed:  # the user's own serializers can raise anything: no output is written for this row  # noqa: BLE001
            ok, error = False, type(failed).__name__
    scoring.add(
        result.index,
        result.job_id,
        output,
        lambda: row_fields(result.input),
        ok=ok,
        doubt=getattr(result, "doubt", None),
        error=error,
    )


def plain_output(output: object, schema: OutputSchema[object] | None) -> JsonValue:
    """Return an output as JSON. The user's own serializers may raise anything."""
    if schema is not None:
        return cast(JsonValue, None if output is None else schema.to_plain(output))
    return cast(JsonValue, output if isinstance(output, str | bool | int | None) else from_json(to_json(output)))


def add_record(scoring: Scoring, record: Record) -> None:
    """Add a recorded row."""
    if (kind := _kind_of(record)) == Interrupted.type:
        return
    index, doubt = record.get("index"), record.get("doubt")
    scoring.add(
        index if isinstance(index, int) else -1,
        str(record.get("job_id")),
        cast(JsonValue, record.get("output")),
        lambda: row_fields(record.get("input")),
        ok=bool(record.get("ok")),
        doubt=doubt if isinstance(doubt, float | int) else None,
        error=kind,
    )


def _kind_of(record: Record) -> str | None:
    """Return the type of the error of a recorded row."""
    error = record.get("error")
    return str(error.get("type")) if isinstance(error, dict) else None


def row_fields(value: object) -> Mapping[str, object]:
    """Return the fields of an input; {} if they cannot be read."""
    if value is None:
        return {}
    try:
        return fields_of(value)
    except InputError:
        return {}


def first_fields(rows: Iterable[tuple[str, object]]) -> dict[str, Mapping[str, object]]:
    """Return the fields of rows by id. ``rows`` are ids and inputs, stage by stage; the first input of an id is
    used."""
    found: dict[str, Mapping[str, object]] = {}
    for name, value in rows:
        if name not in found:
            found[name] = row_fields(value)
    return found


@dataclass(frozen=True, slots=True)
class RunGold:
    """What a run says about right answers. ``options`` are those of the run; ``asked`` identifies its prompt, model,
    examples and schema. ``complete``: every row has a result, except rows that the run left out."""

    taken: TakenGold | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    asked: str = ""
    population: int | None = None
    pilot: PilotSample | None = None
    complete: bool = True
    examples: ExampleRows | None = None  # in its prompt
    seen: bool = False  # agents saw this gold
    sources: Callable[[], Mapping[str, Mapping[str, object]]] = dict  # rows of a pipeline as its first stage got them

    @property
    def notes(self) -> list[str]:
        """Notes that belong to the score."""
        return [SAW_GOLD] if self.seen else []

    def measure(
        self,
        given: Mapping[str, object],
        rows: Iterable[tuple[int, str, Mapping[str, object]]],
        schema: OutputSchema[object] | None,
        *,
        typed: bool = True,
        answers: Callable[[], Iterable[JsonValue]] = tuple,
    ) -> TakenGold:
        """Return the gold for a score. An option that is not given is that of the run. ``rows`` are index, id and
        fields of the rows. ``typed``: the schema is known; a known schema of None means text. If it is not known, the
        fields are those of the ``answers``. Raises SpecError."""
        options = {**self.options, **{name: value for name, value in given.items() if value}}
        gold = cast("GivenGold | None", given.get("gold"))
        if gold is None and self.taken is not None:
            return replace(self.taken, options=score_options(options), examples=self.examples)
        if gold is None:
            raise SpecError("there is no gold to score by: give gold, a column or a file with right answers")
        taken = frozenset[str]() if self.taken is None else self.taken.taken
        seen = None if typed else fields_of_answers(answers())
        found, table = gold_of_rows(gold, rows, schema, options, seen=seen, taken=taken)
        return TakenGold(found, table, score_options(options), (), examples=self.examples)


def gold_of_rows(
    given: GivenGold,
    rows: Iterable[tuple[int, str, Mapping[str, object]]],
    schema: OutputSchema[object] | None,
    options: Mapping[str, object],
    *,
    seen: Sequence[str] | None,
    taken: frozenset[str] = frozenset(),
) -> tuple[Gold, GoldTable]:
    """Return the gold of finished rows, from a file with ids or from columns of their inputs. ``seen``: the fields of
    the answers, if the schema is unknown. Raises SpecError."""
    from batch_agent.record.people import given_gold  # it reads runs, for which it needs this module

    known, given = seen is None, given_gold(given)
    if is_gold_file(given):
        path = file_of(given)
        gold, values = read_gold_file(
            path, schema, cast("str | None", options.get("id_column")), known=known, seen=seen
        )
        table, waiting = GoldTable(by_name=True), dict(values)
        for name, some in values.items():
            table.add(name, None, some)
        for _, name, _ in rows:
            waiting.pop(name, None)
        if len(waiting) == len(values):
            raise SpecError(f"gold: no row has an id of {path}, such as {', '.join([*waiting][:3])}")
        warn_unjoined(path, waiting, len(values))
        return gold, table
    gold = checked_gold(given, schema, known=known, seen=seen)
    table = GoldTable()
    problems = list[tuple[str, str]]()
    missing, first = set(gold.columns.values()), ""
    for index, name, fields in rows:
        first = first or listed(fields)
        missing -= fields.keys()
        try:
            some = gold.read(fields)
        except ValueError as error:
            problems.append((name, str(error)))
            continue
        if some:
            table.add(name, index, some)
    if missing:
        why = "; the run took its gold out of the rows" if missing & taken else ""
        raise SpecError(f"gold: no row has the column {min(missing)!r} (the columns of the first row: {first}){why}")
    if problems:
        raise SpecError(f"gold: {named_problems(iter(problems))}")
    return gold, table


def with_looks(score: Score, asked: str, *, run: str = "", count: bool = True) -> Score:
    """Return the score with the number of earlier looks at its gold. ``asked`` identifies the prompt, model, examples
    and schema."""
    return replace(score, looks=looks_before(score.digests, asked, run=run, count=count and bool(score.all.rows)))


def looks_lines(score: Score) -> list[bytes]:
    """Return the lines of the ledger about the gold of a score."""
    return [to_json(line) + b"\n" for line in looks_of(score.digests)]


def keep_looks(score: Score, directory: Path) -> None:
    """Copy the lines of the ledger about this gold to the record of a run. If the record cannot be written, it stays as
    it is: the score exists without it."""
    lines = b"".join(looks_lines(score))
    path = directory / LEDGER
    with suppress(OSError, StoreError):
        before = path.read_bytes() if path.exists() else b""
        more = b"".join(line + b"\n" for line in lines.splitlines() if line not in before.splitlines())
        if more:
            with open(path, "ab", opener=private) as file:
                file.write(more)


def gold_of_row(
    record: Record, taken: TakenGold
) -> tuple[Mapping[str, JsonValue], Mapping[str, GoldField], dict[str, bool]] | None:
    """Return the gold of a recorded row by field, the fields, and which of them are right. None if the row is not
    scored: it has no gold, its gold is sealed, it is an example in the prompt, or it was interrupted."""
    if _kind_of(record) == Interrupted.type:
        return None
    index, name = record.get("index"), str(record.get("job_id"))
    place = taken.table.place(index if isinstance(index, int) else -1, name)
    if place is None:
        return None
    row, options = taken.table.row(place), taken.options
    if options.sealed and KeyedOrder(SEALED_KEY).in_first_half(row.name):
        return None
    if taken.left_out is not None and taken.left_out(row_fields(record.get("input"))):
        return None
    fields = taken.rules.fields
    output, ok = cast(JsonValue, record.get("output")), bool(record.get("ok"))
    rights = {each: ok and fields[each].right(fields[each].take(output), value) for each, value in row.values.items()}
    return row.values, fields, rights


def with_gold(record: Record, taken: TakenGold) -> Record:
    """Return a record with ``gold`` (by field, if several fields have gold) and ``right``. Sealed gold is not added."""
    found = gold_of_row(record, taken)
    if found is None:
        return record
    values, fields, rights = found
    return {
        **record,
        "gold": values if len(fields) > 1 else next(iter(values.values())),
        "right": all(rights.values()),
    }


def output_line(line: bytes) -> object:
    """Return id and output in a result line, for a digest of what was answered."""
    record = record_of(line) or {}
    return [record.get("job_id"), record.get("output")]


def digest_of(*parts: object) -> str:
    """Return the digest of these values, which identify what was asked."""
    return blake2b(to_json(parts), digest_size=16).hexdigest()


def asked_of(facts: JsonObject, stages: Iterable[JsonObject] = ()) -> str:
    """Return the text that identifies the prompt, model, examples and schema of a recorded run."""
    every = [facts, *stages]
    return digest_of([[each.get("fingerprint"), each.get("model")] for each in every])


def table_from(lines: Iterable[bytes], *, by_name: bool) -> GoldTable:
    return GoldTable.of_lines(iter(lines), by_name=by_name)
