"""Compares two runs over the same rows, matched by job id: their agreement, and the rows that differ."""

from __future__ import annotations

from functools import partial
from typing import cast

from pydantic import JsonValue

from batch_agent.files.columns import Record
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


async def _differing(one: ShownRun, other: ShownRun, offset: int, limit: int) -> tuple[JsonObject, list[JsonObject]]:
    file = other.record.index.file if "index" in vars(other.record) else await other.do(lambda: other.record.index.file)

    def mine() -> tuple[JsonObject, list[tuple[str, Record]]]:
        counts, places = one.record.index.differing(file, offset, limit)
        found = ((job_id, one.record.index.at(place)) for place, job_id in places)
        return counts, [(job_id, record) for job_id, record in found if record is not None]

    counts, records = await one.do(mine)
    theirs = await other.do(lambda: [other.record.index.record(job_id) for job_id, _ in records])
    rows = [
        _row(job_id, record, opposite) for (job_id, record), opposite in zip(records, theirs, strict=True) if opposite
    ]
    return counts, rows


async def differing_rows(one: ShownRun, other: ShownRun) -> list[Record]:
    """Return all rows that differ, as flat records for a table."""
    _, rows = await _differing(one, other, 0, MOST_EXPORTED)
    flat: list[Record] = []
    for number, row in enumerate(rows):
        a, b = cast(JsonObject, row["a"]), cast(JsonObject, row["b"])
        flat.append(
            {
                "index": number,
                "job_id": row["job_id"],
                "input": row["input"],
                **{f"{name}_a": a[name] for name in a},
                **{f"{name}_b": b[name] for name in b},
            }
        )
    return flat


def _row(job_id: str, one: Record, other: Record) -> JsonObject:
    return {
        "job_id": job_id,
        "input": cast(JsonValue, one.get("input")),
        "a": _side(one),
        "b": _side(other),
    }


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
