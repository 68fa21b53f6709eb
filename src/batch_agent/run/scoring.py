"""The score of a run during the run: counts each result as it is delivered, and keeps the gold in the record."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batch_agent.agent.prepare import Prepared
from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import SpecError, StoreError
from batch_agent.files.gold import TakenGold, was_seen
from batch_agent.job import AgentResult
from batch_agent.messages import JsonObject
from batch_agent.record.looks import LEDGER
from batch_agent.record.private import private
from batch_agent.record.rundir import GOLD
from batch_agent.record.scoring import RunGold, add_result, asked_of, keep_looks, looks_lines, with_looks
from batch_agent.record.store import RunStore, WorkStore
from batch_agent.trust.score import Score
from batch_agent.trust.table import PilotSample, Scoring

if TYPE_CHECKING:
    from batch_agent.run.control import Controls
    from batch_agent.run.run import Run

logger = logging.getLogger("batch_agent")

OPTIONS = ("gold", "gold_sample", "gold_sealed", "tolerance", "score", "by", "groups", "require", "id_column")


class RunScoring:
    """Counts the results of a run against its gold. If the user's own function fails, ``score`` raises the error, and
    the run continues."""

    def __init__(
        self,
        taken: TakenGold,
        schema: OutputSchema[object] | None,
        sources: Callable[[], Mapping[str, Mapping[str, object]]] = dict,
    ) -> None:
        self.taken, self._schema = taken, schema
        left_out = taken.left_out
        self._scoring = Scoring(taken.gold, taken.table, taken.options, left_out=left_out, sources=sources)
        self._failure: SpecError | None = None
        self.kept = -1  # number of rows with gold that the record has

    def took(self, result: AgentResult[object]) -> None:
        try:
            add_result(self._scoring, result, self._schema)
        except SpecError as error:
            self._failure = self._failure or error

    def score(self, known: RunGold, *, count: bool, run: str) -> Score:
        """Return the score so far. ``count``: this counts as a look at the gold."""
        if self._failure is not None:
            raise self._failure
        score = self._scoring.score(known.population, pilot=known.pilot, complete=known.complete, notes=known.notes)
        return with_looks(score, known.asked, run=run, count=count and bool(known.asked))

    def keep(self, store: RunStore) -> None:
        """Write the gold to the record of the run. Workers do not read it. May block."""
        if len(self.taken.table) != self.kept and store.writes:
            self.kept = len(self.taken.table)
            keep_lines(store, GOLD, self.taken.table.lines())


def gold_of_run(run: Run[Any], prepared: Prepared, rows: int | None) -> RunGold:
    """Return what a run knows of right answers. It is no pipeline. ``rows`` is their number, once all were read."""
    ended = run.statistics().ended
    total = rows if prepared.plan.total is None else prepared.plan.total
    facts = {**run.recorded, "state": ended or "running"}
    asked = asked_of(facts) if "fingerprint" in facts else ""
    pilot = PilotSample.of_facts(facts)
    options = {name: getattr(prepared.spec, name) for name in OPTIONS}
    taken = None if prepared.gold is None else replace(prepared.gold, inputs=())
    examples = None if prepared.examples is None else prepared.examples.rows
    complete = ended == "complete"
    return RunGold(taken, options, asked, total, pilot, complete=complete, examples=examples, seen=was_seen(facts))


def score_of_run(run: Run[Any], *, count: bool) -> Score:
    """Return the score of a run that is not a pipeline."""
    if run.scoring is None or (known := run.gold()) is None:
        raise no_gold()
    return run.scoring.score(known, count=count, run=run.id)


def final_score(controls: Controls) -> Score | None:
    """Return the score at the end of a run with gold. None if the user's own function fails, which is logged: the
    answers exist without a score."""
    try:
        return controls.score()
    except SpecError as error:
        logger.warning("there is no score: %s", error)
        return None


def no_gold() -> SpecError:
    return SpecError("there is no gold to score by: give gold, a column or a file with the right answers of some rows")


def measured(controls: Controls, prepared: Prepared, store: WorkStore) -> JsonObject:
    """Return the score of a run for its summary, and copy the looks at its gold into its record; {} without gold."""
    if prepared.gold is None:
        return {}
    try:
        found = controls.score()
    except SpecError as error:  # of the user's own function: the answers are there
        return {"score": None, "score_error": str(error)}
    if store.folder is not None:
        keep_looks(found, store.folder)
    elif store.writes:
        store.put_file(LEDGER, b"".join(looks_lines(found)).decode())
        return {}  # workers read the facts of a run in Redis, and a score has gold in its matrix
    return {"score": found.to_json()}


def keep_lines(store: RunStore, name: str, lines: Iterable[bytes]) -> None:
    """Write a file of lines into the record of a run. May block."""
    if store.folder is not None:
        _write(store.folder / name, lines)
    else:
        store.put_file(name, b"".join(lines).decode())


def _write(path: Path, lines: Iterable[bytes]) -> None:
    draft = path.with_name(f"{path.name}.new")
    try:
        with open(draft, "wb", opener=private) as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise StoreError(f"{path} cannot be written: {error.strerror}") from None
