"""The conversations of a recorded run, one line of JSON each, in the format for fine-tuning.

A run directory holds the answers of models and tools. The prompts are made again from the spec, which must not have
changed since the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import cast

from batch_agent.agent.fingerprint import rows_under
from batch_agent.agent.prepare import Prepared
from batch_agent.agent.transcript import conversations, transcript
from batch_agent.api import BatchAgent
from batch_agent.cli.spec.load import is_pipeline, load_spec
from batch_agent.cli.spec.recorded import command_again, matched, recorded_command
from batch_agent.cli.spec.stages import load_flow
from batch_agent.errors import SpecError, StoreError
from batch_agent.files.columns import Record
from batch_agent.files.read import LazyRows
from batch_agent.files.results import to_json
from batch_agent.job import Job
from batch_agent.messages import JsonObject
from batch_agent.record.keys import Keys
from batch_agent.record.rundir import JOURNAL, RUN, read_run, stage_names
from batch_agent.record.sqlite import SqliteJournal, connect_to_read, glance
from batch_agent.run.joining import prepare_worker

AT_ONCE = 256  # rows looked up in the journal together


def prepared_again(directory: Path, facts: JsonObject, import_from: Path | None = None) -> Mapping[str, Prepared]:
    """Return the parts of a run, prepared as when it was recorded: the stages of a pipeline by name; a plain run as "".

    A part whose task, model, schema or tools changed is omitted. Raises SpecError if the spec cannot be read.
    ``import_from`` is the directory of the user's modules, if the run was in Redis.
    """
    if "spec" in facts:  # the run was in Redis
        stages = {name: directory / name for name in stage_names(facts) if (directory / name / RUN).exists()}
        recorded = {name: read_run(path) for name, path in stages.items()} if stage_names(facts) else {"": facts}
        return {name: prepare_worker(each, import_from) for name, each in recorded.items()}
    options = command_again(
        recorded_command(
            facts,
            f"{directory} was not started by the command line, so its prompts are unknown here; in Python, "
            "result.messages has the conversation of each result, also after resume=True",
        )
    )
    options.output, options.no_run_dir, options.dry_run = None, True, True
    if is_pipeline(options):
        nodes = load_flow(options, sends=False).nodes
        parts = {node.name: (directory / node.name, node.prepared) for node in nodes}
    else:
        parts = {"": (directory, BatchAgent.plan(load_spec(options)))}
    same = {}
    for name, (path, prepared) in parts.items():
        if isinstance(prepared.spec.inputs, LazyRows):
            prepared.spec.inputs.close()  # only rows in a list affect the shared prompt
        prepared, unchanged = matched(prepared, read_run(path) if (path / RUN).exists() else {})
        if unchanged:
            same[name] = prepared
    return same


def prompts_changed(directory: Path) -> SpecError:
    return SpecError(
        f"the task, model, schema or tools in the spec have changed since {directory} was recorded, so its prompts are "
        "unknown"
    )


def transcript_lines(
    directory: Path, facts: JsonObject, prepared: Prepared, records: Iterable[Record]
) -> Iterator[bytes]:
    """Yield one line for each record that is ok; for a row of a worker, one line for each conversation."""
    plan, keys = prepared.plan, Keys(rows_under(prepared))
    tools = [{"type": "function", "function": dataclasses.asdict(tool.spec)} for tool in prepared.tools]
    good = (record for record in records if record.get("ok"))
    with closing(open_journal(directory / JOURNAL)) as journal:
        journal.sort_by("row" if facts.get("forced") else "key")
        while jobs := [_job(prepared, record) for record in islice(good, AT_ONCE)]:
            found = journal.claim([keys.identity(job, plan.question(job)) for job in jobs])
            for job, past in zip(jobs, found, strict=True):
                if job.parts:  # its answer merges those of several conversations
                    continue
                if past is None:
                    raise StoreError(f"the journal in {directory} does not have row {job.index}, which has a result")
                if prepared.spec.worker is not None:
                    every = list(conversations(plan.shared, past))
                else:
                    every = [transcript(job, plan.shared, prepared.schema, past)]
                for messages in every:
                    line: dict[str, object] = {"messages": [message.to_dict() for message in messages]}
                    yield to_json({**line, "tools": tools} if tools else line) + b"\n"


def _job(prepared: Prepared, record: Record) -> Job:
    value = record.get("input")
    prepared.plan.check_first(value)
    return prepared.plan.job(cast(int, record["index"]), value)


def open_journal(path: Path) -> SqliteJournal:
    glance(path)  # raises if this version cannot read it
    return SqliteJournal(connect_to_read(path), path)
