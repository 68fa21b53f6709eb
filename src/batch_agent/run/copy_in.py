"""Copies a run directory into Redis, with the same calls that a feeder and a worker make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import cast

from batch_agent.agent.fingerprint import rows_under
from batch_agent.agent.prepare import Prepared
from batch_agent.errors import StoreError
from batch_agent.files.results import to_json
from batch_agent.messages import JsonObject
from batch_agent.record.base import Identity, Progress
from batch_agent.record.keys import Keys
from batch_agent.record.row_json import encode_row
from batch_agent.record.rundir import JOURNAL, RunView
from batch_agent.record.sqlite import SqliteJournal, open_to_read
from batch_agent.record.store import KeptStep, NewRow, Resuming, RowChange, RunStore
from batch_agent.run.spec_json import pieces, spec_json
from batch_agent.share.table import BUDGET_COST, BUDGET_TOKENS, DOLLAR, Claim, of_stage

ROWS_AT_ONCE = 100
ResultRecord = Mapping[str, object]


def copy_stages_in(
    store: RunStore, view: RunView, prepared: Mapping[str, Prepared], records: Callable[[Path], Iterable[ResultRecord]]
) -> int:
    """Write the stages of a pipeline into a new run; return the number of their rows.

    ``prepared`` are the stages by name. ``records`` returns the result lines of a directory.
    """
    sitting = store.open_feed(dict(view.facts), Resuming(retry=False)).sitting
    count = 0
    for name, stage in view.stages.items():
        with closing(store.stage(name)) as inner:
            count += copy_in(inner, stage, prepared[name], records(stage.path), name)
        store.keep_feed(sitting)
    _note_spent(store, view.glance.latest, "")
    facts: JsonObject = dict(view.facts) if view.summary is None else {**view.facts, "summary": view.summary}
    store.close_feed(sitting, facts, "ended")
    return count


def copy_in(
    store: RunStore, view: RunView, prepared: Prepared, records: Iterable[ResultRecord], stage: str = ""
) -> int:
    """Write the rows of a directory that have results into a new run; return their number.

    ``prepared`` must make the same requests as the run. ``records`` are the run's result lines. ``stage`` is the name
    of the run in its pipeline.
    """
    facts = _facts(view, prepared)
    sitting = store.open_feed(facts, Resuming(retry=False)).sitting
    worker, plan, keys = store.join({"copies": view.name}), prepared.plan, Keys(rows_under(prepared))
    count = number = 0
    lines = iter(records)
    with closing(SqliteJournal(open_to_read(view.path / JOURNAL), view.path / JOURNAL)) as journal:
        journal.sort_by("row" if view.facts.get("forced") else "key")
        while page := list(islice(lines, ROWS_AT_ONCE)):
            ended: dict[int, tuple[ResultRecord, Identity]] = {}
            for record in page:
                if not count and not ended:
                    plan.check_first(record.get("input"))
                job = plan.job(cast(int, record["index"]), record.get("input"))
                ended[job.index] = (record, keys.identity(job, plan.question(job)))
            rows = [
                NewRow(index, identity.key, identity.row, encode_row(record.get("input")))
                for index, (record, identity) in ended.items()
            ]
            store.feed(sitting, rows)
            for change in _changes(store, worker, journal, ended):
                number += 1
                if store.commit(worker, number, [change]):
                    raise StoreError("the copy took longer than a lease; delete it and try again with a longer lease")
                count += 1
            store.keep_feed(sitting)
    store.end_inputs(sitting)
    _note_spent(store, view.glance.latest, stage)
    store.leave(worker)
    store.close_feed(sitting, facts, "ended")
    return count


def _facts(view: RunView, prepared: Prepared) -> JsonObject:
    facts = dict(view.facts)
    if "spec" not in facts:
        facts.update(spec=spec_json(prepared), first="null", pieces={**pieces(prepared)})
    if view.summary is not None:
        facts["summary"] = view.summary
    return facts


def _changes(
    store: RunStore, worker: int, journal: SqliteJournal, ended: Mapping[int, tuple[ResultRecord, Identity]]
) -> Iterator[RowChange]:
    left = len(ended)
    while left and (taken := store.take(worker, left, 0.0)):
        left -= len(taken)
        for row in taken:
            record, identity = ended[row.lease.index]
            [past] = journal.claim([identity])
            steps = () if past is None else tuple(_kept(journal, past.agent, identity))
            error = record.get("error")
            kind = str(error["type"]) if isinstance(error, dict) else ""
            result = to_json({"raw_text": None, **record, "worker": worker})
            yield RowChange(row.lease, steps, result, kind)


def _kept(journal: SqliteJournal, agent: int, identity: Identity) -> Iterator[KeptStep]:
    for kind, body in journal.steps(agent):
        yield KeptStep(agent, identity.key, identity.row, kind, body)


def _note_spent(store: RunStore, latest: Progress, stage: str) -> None:
    """Record the spending of the run, so that its budget counts it, or of a stage."""
    cost = round((latest.cost or 0.0) * DOLLAR)
    spent = {of_stage(BUDGET_TOKENS, stage): latest.tokens, **({of_stage(BUDGET_COST, stage): cost} if cost else {})}
    store.beat("copied", 1.0, {name: Claim(used, used, used, spent=used) for name, used in spent.items()}, {}, {})
    store.resign("copied")


def directory_is_new(path: Path) -> bool:
    """Whether a run can be written to this path: it does not exist, or it is an empty directory."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))
