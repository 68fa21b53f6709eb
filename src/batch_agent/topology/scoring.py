"""Gold of a pipeline: taken out of its inputs, and compared with the answers of the last stage that calls a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import SpecError
from batch_agent.files.gold import BEFORE, TakenGold, is_gold_file, take_gold
from batch_agent.record.people import given_gold
from batch_agent.record.scoring import RunGold, asked_of, first_fields
from batch_agent.run.scoring import OPTIONS, RunScoring, no_gold
from batch_agent.topology.nodes import AgentNode
from batch_agent.topology.stages import Agents, FlatMap, Reduce, Stage
from batch_agent.trust.score import Score
from batch_agent.trust.table import PilotSample

if TYPE_CHECKING:
    from batch_agent.topology.flow import Flow


def gold_of_pipeline(
    inputs: object, stages: Sequence[Stage], options: Mapping[str, Any]
) -> tuple[dict[str, Any], TakenGold | None]:
    """Return the options of the stages, and the gold of the last stage that calls a model, or None. Raises
    SpecError."""
    rest = {name: value for name, value in options.items() if name not in OPTIONS or name == "id_column"}
    given = {name: options[name] for name in OPTIONS if options.get(name) and name != "id_column"}
    gold = given.get("gold")
    if gold is None:
        if given:
            raise SpecError(f"{next(iter(given))} is about a score, and there is no gold: give gold")
        return rest, None
    last = next((stage for stage in reversed(stages) if isinstance(stage, Agents | Reduce)), None)
    if isinstance(last, Reduce):
        raise SpecError(
            f"gold: the last stage, {last.name}, makes one answer of all rows, so that no row has an answer of its own"
        )
    if last is None:  # the pipeline says what it needs
        return rest, None
    gold = given_gold(gold)
    if not is_gold_file(gold) and any(isinstance(stage, FlatMap) for stage in stages[: stages.index(last)]):
        raise SpecError(
            "gold: a flat_map makes other rows of the inputs, so that a column of these is not gold of its rows: give "
            "a file with the ids of the new rows, such as a.0, a.1"
        )
    first = stages[0]
    seen = {**rest, **given}
    if isinstance(first, Agents):
        seen = {**seen, **first.options, "carry": first.carry}
    else:
        seen["task"] = ""
    schema = OutputSchema.of(last.options.get("output_schema"))
    known = schema is not None or last.options.get("worker") is None
    taken = take_gold(gold, inputs, schema, seen, known=known, by_name=True)
    before = [stage.name for stage in stages[: stages.index(last)] if isinstance(stage, Agents)]
    return rest, replace(taken, facts=taken.facts | {BEFORE: [*before]})


def gold_of_flow(flow: Flow, inputs: object) -> RunGold:
    """Return the right answers that a pipeline knows."""
    facts = [found for run in flow.runs if (found := run.recorded)]
    ended = flow.statistics().ended
    return RunGold(
        None if flow.gold is None else replace(flow.gold, inputs=()),
        flow.gold_options,
        asked_of(facts[0], facts[1:]) if facts else "",
        len(inputs) if isinstance(inputs, Sized) else None,
        PilotSample.of_facts({**facts[0], "state": ended or "running"}) if facts else None,
        complete=ended == "complete",
        examples=None if (examples := flow.nodes[-1].prepared.examples) is None else examples.rows,
        sources=partial(sources_of, flow),
    )


def sources_of(flow: Flow) -> dict[str, Mapping[str, object]]:
    """Return the fields of the rows of a pipeline by id, as its first stage got them."""
    before = None if flow.gold is None else flow.gold.facts[BEFORE]
    nodes = [node for node in flow.nodes[:-1] if isinstance(before, list) and node.name in before]
    return first_fields(
        (each.job_id, each.input) for node in nodes if isinstance(node, AgentNode) for each in node.results
    )


def score_of_flow(flow: Flow, inputs: object, *, count: bool) -> Score:
    """Return the score of the results so far."""
    if flow.gold is None:
        raise no_gold()
    last = flow.nodes[-1].prepared
    shown = None if last.examples is None else last.examples.rows
    scoring = RunScoring(replace(flow.gold, examples=shown), last.schema, partial(sources_of, flow))
    for result in flow.results():
        scoring.took(result)
    return scoring.score(gold_of_flow(flow, inputs), count=count, run="")
