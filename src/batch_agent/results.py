"""What a run returns: its results in input order, with common operations on them.

A ``Results`` is a list. Its ``summary`` has time, tokens, cost and savings of the whole run; ``batch_agent.files``
writes tables and lines.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from batch_agent.compiler.fields import fields_of, own_id
from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import InputError, Interrupted, Invalid
from batch_agent.files.compression import extra
from batch_agent.files.gold import GivenGold
from batch_agent.files.results import result_line, unwritten
from batch_agent.files.tables import Column, Record, columns_of, complete_file, record_of
from batch_agent.job import AgentError, AgentResult, Failure, Success, cut, is_interrupted
from batch_agent.messages import JsonObject, Usage
from batch_agent.observe.numbers import of_statistics
from batch_agent.observe.outlook import Outlook
from batch_agent.observe.statistics import Statistics
from batch_agent.observe.summary import summary_json, summary_lines
from batch_agent.observe.text import rows
from batch_agent.record.compare import Side, SideRows
from batch_agent.record.promise import PromiseStanding
from batch_agent.record.scoring import (
    RunGold,
    add_result,
    digest_of,
    output_line,
    plain_output,
    row_fields,
    with_gold,
    with_looks,
)
from batch_agent.tools.execution import ToolStatistics
from batch_agent.trust.calibration import Calibration, calibration
from batch_agent.trust.gold import ALL
from batch_agent.trust.score import Score
from batch_agent.trust.table import Scoring

if TYPE_CHECKING:
    import pandas
    import polars

T = TypeVar("T")

HTML_ROWS = 20
CELL_CHARACTERS = 200
# The pandas type of a column with missing cells, by the type of its other cells.
_PANDAS_WITH_GAPS = {"bool": "boolean", "int": "Int64"}
_POLARS = {"bool": "Boolean", "int": "Int64", "float": "Float64", "text": "String"}


@dataclass(frozen=True, slots=True, repr=False)
class Summary:
    """How a run went; prints as the lines at the end of the command line's output."""

    statistics: Statistics
    tools: Mapping[str, ToolStatistics] = field(default_factory=dict)
    score: Score | None = None
    pilot: Outlook | None = None  # what the pilot says of all rows, if these are its results
    promise: PromiseStanding | None = None  # how the promise of the run stands

    def to_json(self) -> JsonObject:
        pilot = {} if self.pilot is None else {"pilot": self.pilot.to_json()}
        found = summary_json(self.statistics, tools=self.tools, score=self.score, promise=self.promise)
        return {**found, **pilot}

    def __str__(self) -> str:
        lines = summary_lines(self.statistics, tools=self.tools, score=self.score, promise=self.promise)
        return "\n".join([*lines, *([] if self.pilot is None else self.pilot.lines())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


class Results(list[AgentResult[T]]):
    """The results of a run, in input order. A list of some of them has a summary computed from those."""

    def __init__(
        self,
        results: Iterable[AgentResult[T]] = (),
        summary: Summary | None = None,
        output_schema: object = None,
        page: object = None,
        gold: RunGold | None = None,
    ) -> None:
        """``output_schema`` is that of the spec. ``page`` is the run's page, which is served until this object is
        dropped. ``gold`` has the right answers that the run knows."""
        super().__init__(results)
        self._summary = summary
        self._output_schema = output_schema
        self._page = page
        self._gold = gold

    def know(self, gold: RunGold) -> None:
        """Store the right answers that a run knows, for ``score``."""
        self._gold = gold

    @property
    def ok(self) -> list[Success[T]]:
        """Return the successful results."""
        return [result for result in self if isinstance(result, Success)]

    @property
    def failed(self) -> list[Failure]:
        """Return the failed results."""
        return [result for result in self if isinstance(result, Failure)]

    @property
    def outputs(self) -> list[T]:
        """Return the outputs of the successful results."""
        return [result.output for result in self.ok]

    @property
    def summary(self) -> Summary:
        return self._summary or Summary(_statistics(self))

    @property
    def cost(self) -> float | None:
        """Return the cost of the run in $, of all its sessions, including failed requests; None if no price is known.
        ``summary.statistics.cost`` is that of this session."""
        return of_statistics(self.summary.statistics).cost

    def score(
        self,
        gold: GivenGold | None = None,
        *,
        gold_sample: Literal["random"] | None = None,
        tolerance: Mapping[str, float] | None = None,
        score: Mapping[str, str | Callable[[Any, Any], bool]] | None = None,
        by: str | None = None,
        groups: str | None = None,
        require: str | Sequence[str] = (),
        open_sealed: bool = False,
        wrong: bool = False,
    ) -> Score:
        """Return how many answers are right, with exact intervals (docs/trust.md).

        An argument that is not given has the value of the run. ``gold`` is a column of the inputs, a mapping from
        fields to columns, or a file with ids. ``open_sealed`` scores the rows that ``gold_sealed`` kept unseen;
        ``wrong`` keeps the wrong rows.
        """
        given: dict[str, object] = {"gold": gold, "gold_sample": gold_sample, "tolerance": tolerance, "score": score}
        given |= {"by": by, "groups": groups, "require": require}
        return self._scored(given, open_sealed=open_sealed, wrong=wrong)[1]

    def calibration(
        self,
        gold: GivenGold | None = None,
        *,
        tolerance: Mapping[str, float] | None = None,
        score: Mapping[str, str | Callable[[Any, Any], bool]] | None = None,
        open_sealed: bool = False,
    ) -> Calibration:
        """Return how often the answers are right in five bins from certain to doubted (docs/trust.md). The arguments
        are those of ``score``. Raises SpecError without gold, or if no row with gold has a doubt."""
        given: dict[str, object] = {"gold": gold, "tolerance": tolerance, "score": score}
        scoring, found = self._scored(given, open_sealed=open_sealed, wrong=True)
        wrong = {(row.index, row.name): row.fields for row in found.wrong or ()}
        pairs: dict[str, list[tuple[float | None, bool]]] = {name: [] for name in (*found.fields, ALL)}
        for result in self:
            fields = scoring.gold_of(result.index, result.job_id)
            if fields is None:
                continue
            bad = wrong.get((result.index, result.job_id), {})
            for name in fields:
                pairs[name].append(((result.doubts or {}).get(name), name not in bad))
            pairs[ALL].append((result.doubt, not bad))
        return calibration(pairs)

    def _scored(self, given: Mapping[str, object], *, open_sealed: bool, wrong: bool) -> tuple[Scoring, Score]:
        known = self._gold or RunGold()
        schema = OutputSchema.of(self._output_schema)
        rows = ((result.index, result.job_id, row_fields(result.input)) for result in self)
        typed = schema is not None or all(isinstance(output, str) for output in self.outputs)
        answers = (plain_output(result.output, schema) for result in self if result.ok)
        taken = known.measure(given, rows, schema, typed=typed, answers=lambda: answers)
        how = {"keeps_wrong": wrong, "open_sealed": open_sealed}
        scoring = Scoring(taken.gold, taken.table, taken.options, left_out=taken.left_out, sources=known.sources, **how)
        for result in self:
            add_result(scoring, result, schema)
        total = len(self) if known.population is None else known.population
        found = scoring.score(total, pilot=known.pilot, complete=known.complete, notes=known.notes)
        return scoring, with_looks(found, known.asked or digest_of([*map(output_line, self._lines())]))

    def side(self, name: str) -> Side:
        """Return these results as one side of a comparison (``batch_agent.compare``)."""
        known = self._gold or RunGold()
        schema = OutputSchema.of(self._output_schema)
        typed = schema is not None or all(isinstance(output, str) for output in self.outputs)
        known = replace(known, asked=known.asked or digest_of([*map(output_line, self._lines())]))
        records = [record for line in self._lines() if (record := record_of(line)) is not None]
        return Side(name, SideRows(records), known, schema, typed)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row per result, with the columns of a CSV or Parquet file (docs/files.md). Lists and dicts are not
        written as JSON."""
        library: Any = extra("pandas", "a pandas DataFrame")
        frame: pandas.DataFrame = library.DataFrame(
            {
                column.name: library.Series(cells, dtype=_pandas_type(column, cells))
                for column, cells in self._columns(nested=True)
            }
        )
        return frame

    def to_polars(self) -> polars.DataFrame:
        """Return a row per result as a polars DataFrame, with lists and dicts as JSON."""
        library: Any = extra("polars", "a polars DataFrame")
        frame: polars.DataFrame = library.DataFrame(
            [
                library.Series(column.name, cells, dtype=getattr(library, _POLARS[column.type]))
                for column, cells in self._columns()
            ]
        )
        return frame

    def to_jsonl(self, path: str | Path) -> None:
        """Write one line of JSON per result, compressed for .gz or .zst. The file appears when complete."""
        with complete_file(Path(path)) as file:
            file.writelines(self._lines())

    def _lines(self) -> Iterator[bytes]:
        schema = OutputSchema.of(self._output_schema)
        for result in self:
            try:
                yield result_line(result, schema)
            except Invalid as error:
                yield result_line(unwritten(result, error))

    def _columns(self, *, nested: bool = False) -> Iterator[tuple[Column, list[object]]]:
        records: list[Record] = [record for line in self._lines() if (record := record_of(line)) is not None]
        if self._gold is not None and (taken := self._gold.taken) is not None:
            taken = replace(taken, examples=self._gold.examples)
            records = [with_gold(record, taken) for record in records]
        for column in columns_of(records):
            yield column, [column.cell(record, nested=nested) for record in records]

    def __repr__(self) -> str:
        return f"<Results: {self._counts()}>"

    def _counts(self) -> str:
        kinds = Counter(result.error.type for result in self.failed)
        failures = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
        parts = [rows(len(self)), f"{len(self.ok):,} ok"]
        if failures:
            parts.append(f"{len(self.failed):,} failed ({failures})")
        if words := of_statistics(self.summary.statistics).cost_words:
            parts.append(words)
        return ", ".join(parts)

    def _repr_html_(self) -> str:
        """Return the summary and the first rows, including the first failed ones."""
        shown = self[:HTML_ROWS]
        if self.failed and not any(result.error for result in shown):
            shown = [*shown[: HTML_ROWS // 2], *self.failed[: HTML_ROWS // 2]]
        head = "".join(f"<th>{name}</th>" for name in ("row", "input", "output"))
        more = f"<p>{len(self) - len(shown):,} more</p>" if len(self) > len(shown) else ""
        body = "".join(map(_html_row, shown))
        return f"{self.summary._repr_html_()}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def with_unfinished(
    results: Iterable[AgentResult[T]],
    inputs: object,
    statistics: Statistics,
    id_column: str | None = None,
    asked: Collection[int] | None = None,
) -> list[AgentResult[T]]:
    """Return the results in input order; a listed row without a result gets an Interrupted one. ``asked`` are the
    indexes of the rows that the run may ask; None for all."""
    known = {result.index: result for result in results}
    if isinstance(inputs, Collection) and len(known) < len(inputs):
        reason = f"{statistics.ended}: {statistics.reason}" if statistics.reason else statistics.ended
        error = AgentError.of(Interrupted(f"the run ended before this row finished ({reason})"))
        for index, value in enumerate(inputs):
            if index not in known and (asked is None or index in asked):
                known[index] = Failure(index, _job_id(index, value, id_column), value, False, None, error)
    return [known[index] for index in sorted(known)]


def _job_id(index: int, value: object, id_column: str | None) -> str:
    try:
        own = own_id(fields_of(value), id_column)
    except InputError:
        own = None
    return str(index) if own is None else own


def _html_row(result: AgentResult[object]) -> str:
    said = str(result.error) if result.error else _text(result.output)
    style = ' style="color: #b00020"' if result.error else ""
    cells = (result.job_id, _text(result.input), said)
    texts = [html.escape(cut(text, CELL_CHARACTERS)) for text in cells]
    return f"<tr{style}>" + "".join(f'<td style="text-align: left">{text}</td>' for text in texts) + "</tr>"


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return repr(value)
    except Exception:  # the value's class is user code  # noqa: BLE001
        return type(value).__name__


def _pandas_type(column: Column, cells: Sequence[object]) -> str | None:
    plain = {"bool": "bool", "int": "int64", "float": "float64"}
    if None in cells:
        plain |= _PANDAS_WITH_GAPS
    return plain.get(column.type)


def _statistics(results: Sequence[AgentResult[object]]) -> Statistics:
    done = [result for result in results if not is_interrupted(result)]
    costs = [result.cost for result in results if result.cost is not None]
    return Statistics(
        total=len(results),
        done=len(done),
        ok=sum(result.ok for result in done),
        interrupted=len(results) - len(done),
        resumed=sum(result.resumed for result in done),
        failures=Counter(result.error.type for result in done if result.error is not None),
        answered_by=Counter(result.answered_by for result in done if result.answered_by is not None),
        turns=sum(result.turns for result in results),
        usage=sum((result.usage for result in results), Usage()),
        cost=sum(costs) if costs else None,
        elapsed=max((result.timings.total for result in results), default=0.0),
    )
