"""The conversations of a recorded run, one line of JSON each, in the format for fine-tuning.

A record holds the answers of models and tools. The prompts are made again from the spec, which must not have
changed since the run.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from batch_agent.agent.fingerprint import matched
from batch_agent.agent.prepare import Prepared
from batch_agent.agent.transcript import conversations, transcript
from batch_agent.api import BatchAgent
from batch_agent.cli.spec.load import command_again, is_pipeline, load_flow, load_spec, recorded_command
from batch_agent.errors import SpecError, StoreError
from batch_agent.files.read import LazyRows
from batch_agent.files.results import to_json
from batch_agent.files.tables import Record
from batch_agent.job import AgentError, Placed
from batch_agent.messages import JsonObject
from batch_agent.record.keys import row_of
from batch_agent.record.reader import FinishedRows, RunReader, UnfinishedRow, row_name
from batch_agent.record.rundir import stage_names
from batch_agent.run.joined_worker import prepare_worker, refuse_damaged
from batch_agent.run.trust import SECRET, Trust
from batch_agent.topology.nodes import AgentNode, Item, carried_by
from batch_agent.topology.reduce import ReduceNode


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
    if "spec" not in next(iter(recorded.values()), {}):
        return _by_command(run, facts, recorded)
    if isinstance(run.place, Path):  # its inputs are not recorded: those of its command show rows that are not done
        with suppress(SpecError):
            parts = _by_command(run, facts, recorded)
            if recorded.keys() <= parts.keys():
                return parts
    trust = Trust(environ={**os.environ, SECRET: ""})
    for each in recorded.values():  # an MCP server would be started or connected to
        refuse_damaged(each)
        tools = cast("dict[str, list[str]]", each["spec"]).get("tools", [])
        trust.check({"spec": {"tools": [t for t in tools if t[:4] == "mcp:"]}})
    return {name: prepare_worker(each, import_from, trust) for name, each in recorded.items()}


def _by_command(run: RunReader, facts: JsonObject, recorded: Mapping[str, JsonObject]) -> dict[str, Prepared]:
    """Return the parts that the command of a run would start now, if they are as recorded. Raises SpecError if the
    command cannot be read."""
    options = command_again(
        recorded_command(
            facts,
            f"{run.name} was not started by the command line, so its prompts are unknown here; in Python, "
            "result.messages has the conversation of each result, also after resume=True",
        )
    )
    options.output = None
    options.no_run_dir = True
    options.dry_run = True
    nodes: Sequence[AgentNode | ReduceNode] = ()
    if is_pipeline(options):
        nodes = load_flow(options, sends=False).nodes
        parts = {node.name: node.prepared for node in nodes}
    else:
        parts = {"": BatchAgent.plan(load_spec(options))}
    same = {}
    for name, prepared in parts.items():
        if isinstance(prepared.spec.inputs, LazyRows):
            prepared.spec.inputs.close()  # only rows in a list affect the shared prompt
        prepared, unchanged = matched(prepared, recorded.get(name, {}))
        if unchanged:
            same[name] = prepared
    for before, node in pairwise(nodes):
        if isinstance(before, AgentNode) and isinstance(node, ReduceNode) and {before.name, node.name} <= same.keys():
            same[node.name] = _with_requests(run, before, node, same[node.name])
    return same


def _with_requests(run: RunReader, before: AgentNode, node: ReduceNode, prepared: Prepared) -> Prepared:
    """Return a reduction with its requests without an answer as inputs. They are made again from the answers of the
    stage ``before``, which is impossible if a function is between the two stages."""
    with run.stage(before.name) as stage:
        records = sorted(stage.rows, key=lambda record: cast(int, record["index"]))
        items = [_item(record, before.prepared.carry) for record in records]
        before.pass_recorded(items, complete=stage.facts().get("state") == "complete")
    with run.stage(node.name) as stage:
        answers = {cast(int, record["index"]): record.get("output") for record in stage.rows if record.get("ok")}
    requests = node.unanswered(answers)
    return replace(prepared, spec=prepared.spec.model_copy(update={"inputs": requests}))


def _item(record: Record, carry: Sequence[str]) -> Item:
    """Return what a recorded row passes on to the next stage."""
    index = cast(int, record["index"])
    name = record.get("job_id")
    error = record.get("error")
    return Item(
        index,
        record.get("output"),
        AgentError(**cast("dict[str, Any]", error)) if isinstance(error, dict) else None,
        name=name if isinstance(name, str) and name != str(index) else None,
        carried=carried_by(record.get("input"), carry),
    )


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
        value = record.get("input")
        plan.check_first(value)
        job = plan.job(cast(int, record["index"]), value)
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


def unfinished_rows(run: RunReader, prepared: Prepared | None, others: Sequence[RunReader]) -> Iterator[UnfinishedRow]:
    """Yield the rows that have begun and are not done, with their inputs if they are found. ``others`` are the other
    stages of the run.

    A run directory records the input of a row with its result. Before that, the input is searched in the inputs of the
    command that started the run, and in the answers of the other stages.
    """
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
    """Return index, id and input of the wanted rows, by the hash of the input."""
    known: dict[bytes, list[tuple[int, str, object]]] = {row: [] for row in wanted}
    spec = None if prepared is None else prepared.spec
    column = None if spec is None else spec.id_column
    inputs = () if spec is None else spec.inputs
    places: list[Iterable[tuple[int, object, str | None]]] = []
    if wanted and isinstance(inputs, list | LazyRows):
        places.append(
            (each.index, each.value, each.name) if isinstance(each, Placed) else (index, each, None)
            for index, each in enumerate(inputs)
        )
    if wanted:
        places += [_answered(other) for other in others]
    for place in places:
        for index, value, name in place:
            row = row_of(value, "")
            if row in wanted and not run.rows.has(index):
                known[row].append((index, row_name(value, index, column, name), value))
    return known


def _answered(run: RunReader) -> Iterator[tuple[int, object, str | None]]:
    """Yield everything that may be a row of the next stage, with its id: each output; the items of an output that is a
    list; and both as a field, with the fields that the row carries on."""
    carry = run.facts().get("carry")
    names = [str(name) for name in carry] if isinstance(carry, list) else []
    for record in run.rows:
        if record.get("ok") and isinstance(record["index"], int):
            item = _item(record, names)
            output = item.value
            for value in (output, {"input": output}, *(output if isinstance(output, list) else ())):
                yield item.index, replace(item, value=value).placed().value, item.name
