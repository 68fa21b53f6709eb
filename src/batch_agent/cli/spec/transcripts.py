"""The conversations of a recorded run, one line of JSON each, in the format for fine-tuning.

A record holds the answers of models and tools. The prompts are made again from the spec, which must not have
changed since the run.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from batch_agent.agent.fingerprint import matched
from batch_agent.agent.prepare import Prepared
from batch_agent.agent.transcript import conversations, transcript
from batch_agent.api import BatchAgent
from batch_agent.cli.spec.load import is_pipeline, load_spec
from batch_agent.cli.spec.recorded import command_again, recorded_command
from batch_agent.cli.spec.stages import load_flow
from batch_agent.errors import SpecError, StoreError
from batch_agent.files.columns import Record
from batch_agent.files.read import LazyRows
from batch_agent.files.results import to_json
from batch_agent.job import Job
from batch_agent.record.reader import FinishedRows, RunReader
from batch_agent.record.rundir import stage_names
from batch_agent.run.joining import prepare_worker, refuse_damaged
from batch_agent.run.trust import SECRET, Trust


def prepared_again(run: RunReader, import_from: Path | None = None) -> Mapping[str, Prepared]:
    """Return the parts of a run, prepared as when it was recorded: the stages of a pipeline by name; a plain run as "".

    A part whose task, model, schema or tools changed is omitted. Raises SpecError if the spec cannot be read.
    ``import_from`` is the directory of the user's modules, if the run was in Redis.
    """
    facts = run.facts()
    recorded = {"": facts}
    if stage_names(facts):
        recorded = {}
        for name in run.begun_stages():
            with run.stage(name) as stage:
                recorded[name] = stage.facts()
    if "spec" in next(iter(recorded.values()), {}):  # the run is or was in Redis
        trust = Trust(environ={**os.environ, SECRET: ""})
        for each in recorded.values():  # an MCP server would be started or connected to
            refuse_damaged(each)
            tools = cast("dict[str, list[str]]", each["spec"]).get("tools", [])
            trust.check({"spec": {"tools": [t for t in tools if t[:4] == "mcp:"]}})
        return {name: prepare_worker(each, import_from, trust) for name, each in recorded.items()}
    options = command_again(
        recorded_command(
            facts,
            f"{run.name} was not started by the command line, so its prompts are unknown here; in Python, "
            "result.messages has the conversation of each result, also after resume=True",
        )
    )
    options.output, options.no_run_dir, options.dry_run = None, True, True
    if is_pipeline(options):
        parts = {node.name: node.prepared for node in load_flow(options, sends=False).nodes}
    else:
        parts = {"": BatchAgent.plan(load_spec(options))}
    same = {}
    for name, prepared in parts.items():
        if isinstance(prepared.spec.inputs, LazyRows):
            prepared.spec.inputs.close()  # only rows in a list affect the shared prompt
        prepared, unchanged = matched(prepared, recorded.get(name, {}))
        if unchanged:
            same[name] = prepared
    return same


def prompts_changed(run: str) -> SpecError:
    return SpecError(
        f"the task, model, schema or tools in the spec have changed since {run} was recorded, so its prompts are "
        "unknown"
    )


def transcript_lines(run: RunReader, prepared: Prepared, records: FinishedRows) -> Iterator[bytes]:
    """Yield one line for each record that is ok; for a row of a worker, one line for each conversation."""
    plan = prepared.plan
    tools = [{"type": "function", "function": dataclasses.asdict(tool.spec)} for tool in prepared.tools]
    for place, record in records.placed():
        if not record.get("ok"):
            continue
        job = _job(prepared, record)
        if job.parts:  # its answer merges those of several conversations
            continue
        past = run.past(place, record)
        if past is None:
            raise StoreError(f"the journal in {run.name} does not have row {job.index}, which has a result")
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
