"""What a pipeline would do, stage by stage, before anything is sent: ``--dry-run``, and ``Pipeline.plan``.

Only the rows of the first stage exist before the run. A later stage gets placeholders for the answers before it, and
its numbers follow from those of the stage before: as many rows, each as long as an answer may be. Functions are not
called. So it is unknown which rows a filter leaves out and which rows a flat_map adds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, assert_never

from batch_agent.agent.comparison import Comparison
from batch_agent.agent.dryrun import HEADLINE, MARKED, DryRun, sample_of
from batch_agent.agent.prepare import Prepared
from batch_agent.compiler.fields import fields_of
from batch_agent.compiler.schema import OutputSchema
from batch_agent.compiler.tokens import estimate_tokens
from batch_agent.errors import InputError, SpecError
from batch_agent.messages import JsonObject
from batch_agent.observe.text import counted, dollars, rows
from batch_agent.topology.reduce import room_for_rows
from batch_agent.topology.stages import Agents, Filter, FlatMap, Join, Reduce, Stage, carried_after

LINE_TOKENS = 15  # of a result's line in a reduction, beside the answer itself
FIELD = re.compile(r"\{([^\W\d]\w*)[^{}\n]*\}")


@dataclass(frozen=True, slots=True)
class IncomingRows:
    """What is known of the rows that reach a stage. ``tokens`` is the size of the answer that becomes a row, or None
    if the rows themselves are available as ``sample``."""

    rows: int | None
    note: str
    sample: Sequence[object]
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """What each stage that asks a model would do. Prints as text."""

    graph: Sequence[JsonObject]
    stages: dict[str, DryRun]

    @property
    def cost(self) -> tuple[float, float] | None:
        """The cost of all stages together in $, with shared prefixes cached and with nothing cached; None if a cost is
        unknown."""
        costs = [dry.cost for dry in self.stages.values()]
        known = [cost for cost in costs if cost is not None]
        if len(known) < len(costs):
            return None
        return sum(cost[0] for cost in known), sum(cost[1] for cost in known)

    def compare(
        self, *, only: str = "", gpu_price: float | None = None, tokens_per_second: float | None = None
    ) -> Comparison:
        """Return the estimated cost of all stages together at each provider and model with a known price. Print it."""
        plans = [*self.stages.values()]
        return Comparison.of(plans, only=only, gpu_price=gpu_price, gpu_speed=tokens_per_second)

    def to_json(self) -> JsonObject:
        cost = self.cost
        return {
            "stages": [{"name": name, **dry.to_json()} for name, dry in self.stages.items()],
            "estimated_cost": {
                "prefix_cached": cost[0] if cost else None,
                "nothing_cached": cost[1] if cost else None,
            },
        }

    def to_text(self, marks: tuple[str, str] = MARKED) -> str:
        path = " → ".join(f"{node['name']} ({node['kind']})" for node in self.graph)
        span = " to ".join(dict.fromkeys(map(dollars, self.cost or ())))
        lines = [HEADLINE, "", f"  {'stages':<15} {path}", f"  {'cost':<15} {span or 'unknown for some stages'}"]
        parts = ["\n".join(lines)]
        for number, (name, dry) in enumerate(self.stages.items(), 1):
            title = f"Stage {number} of {len(self.stages)}: {name}"
            parts.append(f"{title}\n{'=' * len(title)}\n{dry.body(marks)}")
        return "\n\n".join(parts)

    __str__ = __repr__ = to_text


def plan_stages(inputs: object, stages: Sequence[Stage], prepared: dict[str, Prepared]) -> PipelinePlan:
    """Return the plan of these stages. ``prepared`` has the stages that ask a model, by name."""
    planned: dict[str, DryRun] = {}
    _walk(inputs, stages, prepared, planned)
    return PipelinePlan(graph_of(stages), planned)


def _walk(
    inputs: object, stages: Sequence[Stage], prepared: dict[str, Prepared], planned: dict[str, DryRun]
) -> IncomingRows:
    before: IncomingRows | None = None
    for place, stage in enumerate(stages):
        match stage:
            case Agents():
                dry = planned[stage.name] = _mapped(prepared[stage.name], before, carried_after(stages[:place]))
                note = "" if dry.rows_exact else dry.rows_note
                row = _placeholder(stage.options.get("output_schema"), stage.name)
                before = IncomingRows(dry.rows, note, [row], dry.answer_tokens)
            case Reduce():
                dry = planned[stage.name] = _reduced(stage, prepared[stage.name], before or _source(inputs))
                row = _placeholder(stage.options.get("output_schema"), stage.name)
                before = IncomingRows(1, "", [row], dry.answer_tokens)
            case Filter():
                before = before or _source(inputs)
                most = "unknown" if before.rows is None else f"at most {before.rows:,}: a filter comes before it"
                before = replace(before, note=most)
            case FlatMap():
                before = before or _source(inputs)
                known = [{name: f"[{name}]" for name in stage.fields}] if stage.fields else []
                before = IncomingRows(None, "unknown: a flat_map comes before it", known, before.tokens)
            case Join():
                before = before or _source(inputs)
                _walk(stage.other.inputs, stage.other.stages, prepared, planned)
                most = "unknown" if before.rows is None else f"at most {before.rows:,}: a join comes before it"
                before = IncomingRows(before.rows, most, [], before.tokens)
            case _:
                assert_never(stage)
    return before or _source(inputs)


def _source(inputs: object) -> IncomingRows:
    sample = sample_of(inputs)
    return IncomingRows(len(inputs) if isinstance(inputs, list | tuple) else None, "", sample)


def _mapped(prepared: Prepared, before: IncomingRows | None, carried: Sequence[str]) -> DryRun:
    if before is None:  # the stage reads the inputs of the pipeline itself
        return DryRun.of(prepared)
    task = prepared.spec.task
    sample = before.sample or [{name: f"[{name}]" for name in FIELD.findall(task)}]
    if carried:
        sample = [{**{name: f"[{name}]" for name in carried}, **fields_of(row)} for row in sample]
    return _with_sample(prepared, before, sample, before.tokens or 0)


def _reduced(stage: Reduce, prepared: Prepared, before: IncomingRows) -> DryRun:
    number = "N" if before.rows is None else f"{before.rows:,}"
    prompt = f"{stage.prompt.replace('{n}', number)}\n\n[a line for each of the {number} results]"
    seen = before.sample
    mean = sum(estimate_tokens(str(value)) for value in seen) // len(seen) if seen else 0
    each = LINE_TOKENS + (before.tokens or mean)
    requests = None if before.rows is None else _requests(stage, prepared, before.rows, each)
    if before.rows is None or requests is None:
        return _with_sample(prepared, before, [{"prompt": prompt}], 0)
    note = f"{rows(before.rows)} in {counted(requests, 'request')}"
    after = IncomingRows(requests, note if not before.note else f"{note}, at most", [], None)
    return _with_sample(prepared, after, [{"prompt": prompt}], before.rows * each // requests)


def _requests(stage: Reduce, prepared: Prepared, rows: int, each: int) -> int:
    """Return the number of requests in the tree of a reduction."""
    room = room_for_rows(stage.prompt, prepared) if stage.tree == "auto" else None
    most = stage.tree if isinstance(stage.tree, int) else max(2, room // each) if room is not None else rows
    requests, left = 1, rows
    while left > most:
        left = ceil(left / most)
        requests += left
    return requests


def _with_sample(prepared: Prepared, before: IncomingRows, sample: Sequence[object], tokens: int) -> DryRun:
    """Return the dry run of a stage with this row as its first row. ``tokens`` is what a row adds beside its
    placeholders."""
    try:
        description = prepared.plan.describe(sample)
    except (SpecError, InputError):  # the placeholders cannot fill this task; its rows may
        description = prepared.plan.describe([])
    description = replace(description, own_tokens=description.own_tokens + tokens)
    own = "" if before.tokens is None and not tokens else "as long as the answers before it may be"
    return DryRun(prepared, description, len(sample), before.rows, not before.note, before.note, own)


def _placeholder(schema: Any, stage: str) -> object:
    """Return a row that stands for an answer of this stage."""
    known = OutputSchema.of(schema)
    properties = None if known is None else known.json_schema.get("properties")
    if not isinstance(properties, dict):
        return f"[the answer of {stage}]"
    names: Iterable[str] = properties
    return {name: f"[{name} of {stage}]" for name in names}


def graph_of(stages: Sequence[Stage]) -> list[JsonObject]:
    """Return each stage with its ``name``, its ``kind``, and the stages whose rows it takes (``after``)."""
    graph: list[JsonObject] = []
    _add(stages, graph)
    return graph


def _add(stages: Sequence[Stage], graph: list[JsonObject]) -> str | None:
    """Add the stages and return the name of the last one."""
    before: str | None = None
    for stage in stages:
        after = [] if before is None else [before]
        match stage:
            case Agents() | Reduce():
                name = stage.name
                kind = "map" if isinstance(stage, Agents) else "reduce"
            case FlatMap() | Filter():
                kind = "flat map" if isinstance(stage, FlatMap) else "filter"
                name = _new(getattr(stage.function, "__name__", kind), graph)
            case Join():
                kind, name = "join", _new("join", graph)
                other = _add(stage.other.stages, graph)
                after += [] if other is None else [other]
            case _:
                assert_never(stage)
        graph.append({"name": name, "kind": kind, "after": [*after]})
        before = name
    return before


def _new(name: str, graph: Sequence[JsonObject]) -> str:
    """Return a name that no stage of the graph has."""
    taken = {node["name"] for node in graph}
    name = "function" if name == "<lambda>" else name
    number = 1
    while (numbered := name if number == 1 else f"{name} {number}") in taken:
        number += 1
    return numbered
