"""Compares two runs over the same rows, matched by job id: their agreement, and the rows that differ."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from pydantic import JsonValue

from batch_agent.files.tables import Record
from batch_agent.messages import JsonObject
from batch_agent.view.record import RunRecord
from batch_agent.view.runs import ShownRun

MOST_EXPORTED = 1_000_000
PATIENCE = 30.0  # seconds that a comparison waits for the indexes


async def compare(one: ShownRun, other: ShownRun, offset: int, limit: int) -> JsonObject:
    """Return the numbers of both runs, their agreement, and a page of the rows that differ."""
    for run in (one, other):
        await run.indexed(PATIENCE)
    counts, rows = await _differing(one, other, offset, limit)
    sides = [cast(JsonValue, await run.do(partial(_numbers, run.record))) for run in (one, other)]
    return {"sides": sides, "agreement": counts, "offset": offset, "rows": cast("list[JsonValue]", rows)}


def _numbers(record: RunRecord) -> JsonObject:
    return {"run": record.in_short(), "counts": record.index.counts(), "index": record.index.progress()}


def compare_now(one: RunRecord, other: RunRecord, limit: int) -> JsonObject:
    """Return the comparison of two runs whose rows are all indexed. Blocks."""
    counts, found = one.index.differing(other.index.file, 0, limit)
    mine = one.index.at([place for _, place in found])
    theirs = [other.index.record(job_id) for job_id, _ in found]
    rows = _rows([job_id for job_id, _ in found], mine, theirs)
    return {
        "sides": [_numbers(one), _numbers(other)],
        "agreement": counts,
        "offset": 0,
        "rows": cast("list[JsonValue]", rows),
    }


async def _differing(one: ShownRun, other: ShownRun, offset: int, limit: int) -> tuple[JsonObject, list[JsonObject]]:
    file = await other.do(lambda: other.record.index.file)

    def mine() -> tuple[JsonObject, list[str], list[Record | None]]:
        counts, found = one.record.index.differing(file, offset, limit)
        return counts, [job_id for job_id, _ in found], one.record.index.at([place for _, place in found])

    counts, ids, records = await one.do(mine)
    theirs = await other.do(lambda: [other.record.index.record(job_id) for job_id in ids])
    return counts, _rows(ids, records, theirs)


def _rows(ids: Sequence[str], mine: Sequence[Record | None], theirs: Sequence[Record | None]) -> list[JsonObject]:
    return [
        {"job_id": job_id, "input": cast(JsonValue, one.get("input")), "a": _side(one), "b": _side(other)}
        for job_id, one, other in zip(ids, mine, theirs, strict=True)
        if one is not None and other is not None
    ]


async def differing_rows(one: ShownRun, other: ShownRun) -> list[Record]:
    """Return all rows that differ, as flat records for a table."""
    _, rows = await _differing(one, other, 0, MOST_EXPORTED)
    flat: list[Record] = []
    for number, row in enumerate(rows):
        sides = {f"{name}_{side}": value for side in "ab" for name, value in cast(JsonObject, row[side]).items()}
        flat.append({"index": number, "job_id": row["job_id"], "input": row["input"], **sides})
    return flat


def _side(record: Record) -> JsonObject:
    error, timings = record.get("error"), record.get("timings")
    return {
        "index": cast(JsonValue, record.get("index")),
        "ok": bool(record.get("ok")),
        "output": cast(JsonValue, record.get("output")),
        "error": f"{error.get('type')}: {error.get('message')}" if isinstance(error, dict) else None,
        "seconds": timings.get("total") if isinstance(timings, dict) else None,
        "cost": cast(JsonValue, record.get("cost")),
        "turns": cast(JsonValue, record.get("turns")),
    }
