"""The score of a recorded run, or of a file of results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from pydantic import JsonValue

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import SpecError
from batch_agent.files.gold import BEFORE, GOLD_FACT, TakenGold, checked_gold, score_options, was_seen
from batch_agent.files.read import read_inputs
from batch_agent.files.tables import OWN, Record
from batch_agent.messages import JsonObject
from batch_agent.record.reader import RunReader
from batch_agent.record.rundir import SCHEMA, recorded_options, stage_names
from batch_agent.record.scoring import (
    RunGold,
    add_record,
    asked_of,
    digest_of,
    first_fields,
    keep_looks,
    row_fields,
    with_looks,
)
from batch_agent.trust.examples import ExampleRows
from batch_agent.trust.score import Score
from batch_agent.trust.table import GoldTable, PilotSample, Scoring

OUTPUT = "output"
OWN_COLUMNS = {column.name: column.path for column in OWN}


def score_of_run(
    run: RunReader,
    given: Mapping[str, object],
    *,
    open_sealed: bool = False,
    wrong: bool = False,
    count: bool = True,
) -> Score:
    """Return the score of a recorded run, finished or not; for a pipeline, that of its last stage. ``given`` are
    options that replace those of the run. ``count``: this counts as a look at the gold. Raises SpecError."""
    with part_of(run) as part:
        known, schema, typed = known_of_run(run)
        rows = ((_index(each), str(each.get("job_id")), row_fields(each.get("input"))) for each in part.rows)
        taken = known.measure(given, rows, schema, typed=typed, answers=lambda: outputs_of(part.rows))
        how: dict[str, Any] = {"keeps_wrong": wrong, "open_sealed": open_sealed}
        how |= {"left_out": taken.left_out, "sources": known.sources}
        scoring = Scoring(taken.gold, taken.table, taken.options, **how)
        for record in ScoredRows(run, part):
            add_record(scoring, record)
        score = scoring.score(known.population, pilot=known.pilot, complete=known.complete, notes=known.notes)
    score = with_looks(score, known.asked, run=run.name, count=count)
    if count and isinstance(run.place, Path):
        keep_looks(score, run.place)
    return score


def part_of(run: RunReader) -> AbstractContextManager[RunReader]:
    """Return the part of a run whose answers are scored: for a pipeline, its last stage. Raises SpecError if that stage
    has not begun."""
    names = stage_names(run.facts())
    if names and names[-1] not in run.begun_stages():
        raise SpecError(f"the last stage of {run.name}, {names[-1]}, has not begun, so there is no answer to score")
    return run.stage(names[-1]) if names else nullcontext(run)


class ScoredRows:
    """The finished rows that are scored. For a pipeline these are the rows of its last stage, ``part``, and the rows
    that failed before it."""

    def __init__(self, run: RunReader, part: RunReader) -> None:
        self._run, self._part = run, part

    def __iter__(self) -> Iterator[Record]:
        yield from self._part.rows
        for record in earlier_rows(self._run):
            if not record.get("ok"):
                yield {**record, "index": -1}  # it is no row of the last stage


def earlier_rows(run: RunReader) -> Iterator[Record]:
    """Yield the rows of a pipeline's stages before the last one. Stages that only read a table for a join are left
    out."""
    facts = run.facts()
    gold, names = facts.get(GOLD_FACT), stage_names(facts)[:-1]
    before = gold.get(BEFORE) if isinstance(gold, dict) else None
    begun = run.begun_stages() if names else []
    for name in names:
        if name in begun and (not isinstance(before, list) or name in before):
            with run.stage(name) as stage:
                yield from stage.rows


def sources_of(run: RunReader) -> dict[str, Mapping[str, object]]:
    """Return the fields of the rows of a pipeline by id, as its first stage got them; {} for a run that is not a
    pipeline."""
    return first_fields((str(record.get("job_id")), record.get("input")) for record in earlier_rows(run))


def known_of_run(run: RunReader) -> tuple[RunGold, OutputSchema[object] | None, bool]:
    """Return what the record of a run says about right answers, the schema of its answers, and whether the schema is
    known."""
    facts, view = run.facts(), run.view()
    names = stage_names(facts)
    stages = [_facts_of(run, name) for name in run.begun_stages()]
    part = stages[-1] if names else facts
    known = RunGold(
        _recorded_gold(run, facts, part),
        _recorded_options(facts, part),
        asked_of(facts, stages),
        view.total if not names else next(iter(view.stages.values())).total,
        PilotSample.of_facts(facts),
        complete=view.state == "complete",
        examples=ExampleRows.of_facts(part),
        seen=was_seen(facts),
        sources=partial(sources_of, run),
    )
    return known, *schema_of(part)


def known_of_file(path: Path) -> tuple[list[Record], RunGold]:
    """Return the results in a file, and what they say about right answers. Raises SpecError."""
    records = [*records_of(path)]
    if not records:
        raise SpecError(f"{path} has no results")
    answers = [[each.get("job_id"), each.get("output")] for each in records]
    return records, RunGold(population=len(records), asked=digest_of(answers))


def score_of_file(path: Path, given: Mapping[str, object], *, open_sealed: bool = False, wrong: bool = False) -> Score:
    """Return the score of a file of results, which has lines or is a table. Raises SpecError."""
    records, known = known_of_file(path)
    rows = ((_index(each), str(each.get("job_id")), row_fields(each.get("input"))) for each in records)
    taken = known.measure(given, rows, None, typed=False, answers=lambda: outputs_of(records))
    scoring = Scoring(taken.gold, taken.table, taken.options, keeps_wrong=wrong, open_sealed=open_sealed)
    for record in records:
        add_record(scoring, record)
    return with_looks(scoring.score(known.population, complete=True), known.asked, run=str(path))


def outputs_of(records: Iterable[Record]) -> Iterator[JsonValue]:
    """Yield the answers of the rows that are ok."""
    return (cast(JsonValue, each.get(OUTPUT)) for each in records if each.get("ok"))


def gold_of_record(run: RunReader) -> TakenGold:
    """Return the recorded gold of a run, with the run's own options. The run must have gold."""
    facts = run.facts()
    names = stage_names(facts)
    part = _facts_of(run, names[-1]) if names else facts
    taken = _recorded_gold(run, facts, part)
    assert taken is not None, "the run has gold"
    options = score_options(_recorded_options(facts, part))
    return replace(taken, options=options, examples=ExampleRows.of_facts(part))


def has_gold(facts: JsonObject) -> bool:
    return isinstance(facts.get(GOLD_FACT), dict)


def _facts_of(run: RunReader, stage: str) -> JsonObject:
    with run.stage(stage) as part:
        return part.facts()


def schema_of(facts: JsonObject) -> tuple[OutputSchema[object] | None, bool]:
    """Return the schema of a record, and whether it is known. Earlier versions did not keep it."""
    recorded = facts.get(SCHEMA)
    if SCHEMA not in facts:
        return None, False
    if isinstance(recorded, dict):
        return OutputSchema.of(recorded), True
    return None, recorded_options(facts).get("worker") is None


def _recorded_options(facts: JsonObject, part: JsonObject) -> dict[str, object]:
    """Return the recorded options of a run that concern its score."""
    recorded = facts.get(GOLD_FACT)
    options: dict[str, object] = dict(recorded) if isinstance(recorded, dict) else {}
    return {**options, "id_column": recorded_options(part).get("id_column")}


def _recorded_gold(run: RunReader, facts: JsonObject, part: JsonObject) -> TakenGold | None:
    recorded = facts.get(GOLD_FACT)
    if not isinstance(recorded, dict) or not isinstance(columns := recorded.get("fields"), dict):
        return None
    schema, typed = schema_of(part)
    gold = checked_gold(cast("Mapping[str, str]", columns), schema, known=typed)
    table = GoldTable.of_lines(iter(run.gold_lines()), by_name=bool(stage_names(facts)))
    taken = frozenset(cast("Iterable[str]", recorded.get("taken") or ()))
    return TakenGold(gold, table, score_options({}), (), taken)


def _index(record: Record) -> int:
    index = record.get("index")
    return index if isinstance(index, int) else -1


def records_of(path: Path) -> Iterator[Record]:
    """Yield the results in a file. Raises SpecError for a line that is not a result, because it is another kind of
    file."""
    rows = read_inputs(path)
    try:
        for number, row in enumerate(rows):
            if isinstance(row, dict) and "ok" in row and ("job_id" in row or "index" in row):
                is_line = isinstance(row["ok"], bool) and isinstance(row.get("index"), int)
                yield row if is_line and (OUTPUT in row or "error" in row) else _of_cells(row, number)
            elif isinstance(row, dict) and {"index", "job_id", "type"} <= row.keys():  # a line of failures.jsonl
                yield {**row, "ok": False, "output": None, "error": {"type": row["type"]}}
            else:
                raise SpecError(f"{path} is no file of results: row {number + 1} has no job_id and ok")
    finally:
        close = getattr(rows, "close", None)
        if close is not None:
            close()


def _of_cells(row: Mapping[str, object], number: int) -> Record:
    """Return the result in a row of a table, whose cells may all be text."""
    ok = row["ok"] if isinstance(row["ok"], bool) else str(row["ok"]).lower() == "true"
    output: JsonValue = None
    job_id: object = row.get("job_id")
    fields: dict[str, JsonValue] = {}
    given: dict[str, object] = {}
    for name, cell in row.items():
        if name == OUTPUT:
            output = _value(cell)
        elif name.startswith(f"{OUTPUT}."):
            fields[name.removeprefix(f"{OUTPUT}.")] = _value(cell)
        elif name not in OWN_COLUMNS:
            given[name] = cell
    index = row.get("index")
    place = int(index) if isinstance(index, int) or (isinstance(index, str) and index.isdigit()) else number
    error = None if ok else {"type": row.get("error_type")}
    return {
        "index": place,
        "job_id": str(place if job_id is None else job_id),
        "ok": ok,
        "output": (fields or output) if ok else None,
        "error": error,
        "input": given,
        "cost": _value(row.get("cost")),
        "seconds": _value(row.get("seconds")),
    }


def _value(cell: object) -> JsonValue:
    """Return the value of a cell of a table. Text that is JSON of a number, list or object becomes that value."""
    if not isinstance(cell, str):
        return cast(JsonValue, cell)
    if cell == "":
        return None
    try:
        value = json.loads(cell)
    except ValueError:
        return cell
    return cell if isinstance(value, str) else cast(JsonValue, value)
