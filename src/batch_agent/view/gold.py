"""The gold of a run for the page: what is right in each row, and the score."""

from __future__ import annotations

import time
from contextlib import nullcontext

from pydantic import JsonValue

from batch_agent.errors import BatchAgentError, SpecError
from batch_agent.files.tables import Record
from batch_agent.messages import JsonObject
from batch_agent.record.reader import RunReader, open_run
from batch_agent.record.rundir import stage_names
from batch_agent.record.score_reader import gold_of_record, has_gold, score_of_run
from batch_agent.record.scoring import gold_of_row
from batch_agent.trust.score import FAILED

WAITS, LEAST_WAIT = 20.0, 3.0  # pause between two scores, in multiples of the time of one; at least these seconds
LONGEST = 200  # characters of a value

Mark = tuple[int, str, str, str, int]  # index of the row, field, gold, answer, whether it is right


class RunMarks:
    """Marks rows as right or wrong. ``run`` is the run, or its last stage if it is a pipeline. Methods block."""

    def __init__(self, run: RunReader) -> None:
        self._run = run
        self._taken = None
        self._score: tuple[float, JsonObject | None] = 0.0, None  # time of the next score, and the latest one
        self.answers_here = False  # the answers are those of this run, and not of a stage of it
        try:
            with open_run(run.whole) if run.stage_name else nullcontext(run) as whole:
                facts = whole.kept_facts()
                names = stage_names(facts)
                self.stage = names[-1] if names else ""
                if has_gold(facts) and run.stage_name in ("", self.stage):
                    self._taken = gold_of_record(whole)
                    self.answers_here = run.stage_name == self.stage
        except BatchAgentError:  # a function of the user's is not here, or the record cannot be read
            self._taken = None

    def of(self, record: Record) -> list[Mark]:
        """Return the marks of a row; [] without gold."""
        row = None if self._taken is None or not self.answers_here else gold_of_row(record, self._taken)
        if row is None:
            return []
        values, fields, rights = row
        output, ok = record.get("output"), bool(record.get("ok"))
        index = record["index"]
        assert isinstance(index, int)
        return [
            (
                index,
                name,
                fields[name].label(gold)[:LONGEST],
                fields[name].label(fields[name].take(output))[:LONGEST] if ok else FAILED,  # type: ignore[arg-type]
                int(rights[name]),
            )
            for name, gold in values.items()
        ]

    def shown(self, record: Record) -> JsonObject:
        """Return the gold of a row by field, and which fields are right; {} without gold."""
        row = None if self._taken is None or not self.answers_here else gold_of_row(record, self._taken)
        return {} if row is None else {"gold": {**row[0]}, "right": {**row[2]}}

    def score(self, *, again: bool) -> JsonObject | None:
        """Return the score; None without gold. ``again``: rows have been added since the last call."""
        if self._taken is None:
            return None
        now = time.monotonic()
        if self._score[1] is None or (again and now >= self._score[0]):
            found: dict[str, JsonValue] | None = None
            try:
                with open_run(self._run.whole) if self._run.stage_name else nullcontext(self._run) as whole:
                    found = score_of_run(whole, {}, count=False).to_json()
            except SpecError:  # no row is finished, or a function of the user's failed
                found = None
            took = time.monotonic() - now
            self._score = time.monotonic() + max(LEAST_WAIT, WAITS * took), found
        return self._score[1]
