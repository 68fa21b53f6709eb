"""The inputs of rows that have begun and are not done. A run directory records the input of a row with its result, so
before that it is searched in the inputs of the command that started the run, and in the answers of other stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from batch_agent.agent.prepare import Prepared
from batch_agent.files.read import LazyRows
from batch_agent.record.keys import row_of
from batch_agent.record.reader import RunReader, UnfinishedRow, row_name
from batch_agent.topology.nodes import Item, carried_by


def unfinished_rows(run: RunReader, prepared: Prepared | None, others: Sequence[RunReader]) -> Iterator[UnfinishedRow]:
    """Yield the rows that have begun and are not done, with their inputs if they are found. ``others`` are the other
    stages of the run."""
    left = list(run.unfinished())
    known = _inputs(run, prepared, others, {row.row for row in left if row.index is None})
    for row in left:
        if row.index is None and known[row.row]:
            index, job_id, value = known[row.row].pop(0)
            row = replace(row, index=index, job_id=job_id, value=value)
        yield row


def _inputs(
    run: RunReader, prepared: Prepared | None, others: Sequence[RunReader], wanted: set[bytes]
) -> dict[bytes, list[tuple[int, str, object]]]:
    """Return the index, the id and the input of rows, by the hash of the input."""
    known: dict[bytes, list[tuple[int, str, object]]] = {row: [] for row in wanted}
    spec = None if prepared is None else prepared.spec
    column, inputs = None if spec is None else spec.id_column, () if spec is None else spec.inputs
    places: list[Iterable[tuple[int, object, str | None]]] = []
    if wanted and isinstance(inputs, list | LazyRows):
        places.append((index, value, None) for index, value in enumerate(inputs))
    if wanted:
        places += [_answered(other) for other in others]
    for place in places:
        for index, value, name in place:
            row = row_of(value, "")
            if row in wanted and not run.rows.has(index):
                known[row].append((index, row_name(value, index, column, name), value))
    return known


def _answered(run: RunReader) -> Iterator[tuple[int, object, str | None]]:
    """Yield what may be a row of the next stage, and its id: each output, its items if it is a list, and as a field,
    with the fields that it carries."""
    carry = run.facts().get("carry")
    names = [str(name) for name in carry] if isinstance(carry, list) else []
    for record in run.rows:
        index, output, name = record["index"], record.get("output"), record.get("job_id")
        if record.get("ok") and isinstance(index, int):
            name = name if isinstance(name, str) and name != str(index) else None
            carried = carried_by(record.get("input"), names)
            for value in (output, {"input": output}, *(output if isinstance(output, list) else ())):
                yield index, Item(index, value, carried=carried).placed().value, name
