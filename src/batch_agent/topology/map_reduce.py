"""Two predefined pipelines: map and reduce; and plan, map and reduce.

An option with the prefix ``planner_``, ``worker_`` or ``reducer_`` applies to that stage only. Options without a prefix
that say what an agent does (task, tools, output_schema, system_prompt, max_tokens …) apply to the map stage; all others
(model, backend, temperature, max_cost, run_dir …) apply to all stages.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any, Generic, Self, TypeVar, cast

from pydantic import BaseModel

from batch_agent.compiler.fields import fields_of
from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import InputError, Interrupted, SpecError
from batch_agent.job import AgentError, AgentResult
from batch_agent.messages import JsonObject
from batch_agent.results import Results, Summary
from batch_agent.topology.pipeline import Pipeline, finished
from batch_agent.topology.reduce import Reduction, Shape
from batch_agent.topology.stages import OF_A_STAGE, FlatMap

T = TypeVar("T")
R = TypeVar("R")

PLAN = "plan"
MAP = "map"
REDUCE = "reduce"
PREFIXES = {"planner_": PLAN, "worker_": MAP, "reducer_": REDUCE}
Options = Mapping[str, Any]


class Items(BaseModel):
    """The default schema of a plan."""

    items: list[str]


class Reduced(Generic[T, R], tuple[Results[T], R | AgentResult[R]]):
    """``(results, reduced)``. ``reduced`` is the value itself, or the failed Reduction, an AgentResult that is false.
    ``reduction`` says in both cases what the reduction covers. ``summary`` covers all stages."""

    reduction: Reduction[R]
    summary: Summary

    def __new__(cls, results: Results[T], reduction: Reduction[R], summary: Summary) -> Self:
        reduced = cast(R, reduction.output) if reduction.ok else cast("AgentResult[R]", reduction)
        made = super().__new__(cls, (results, reduced))
        made.reduction, made.summary = reduction, summary
        return made


def reduce_pipeline(
    *, reduce: str, reduce_schema: object = None, reduce_tree: Shape = "auto", **options: Any
) -> tuple[Pipeline[Any], Options]:
    """Return the pipeline, and the options for the whole."""
    whole, stages = split(options, (MAP, REDUCE))
    task, inputs = _task(stages[MAP]), _taken(stages[MAP], "inputs")
    mapped = Pipeline(inputs).map(name=MAP, task=task, **stages[MAP])
    pipeline = mapped.reduce(reduce, name=REDUCE, output_schema=reduce_schema, tree=reduce_tree, **stages[REDUCE])
    return pipeline, whole


def map_reduce_pipeline(
    *,
    plan_prompt: str,
    plan_inputs: Iterable[object] | AsyncIterable[object] | Mapping[str, object] = ({},),
    plan_output_schema: object = Items,
    reduce: str,
    reduce_schema: object = None,
    reduce_tree: Shape = "auto",
    **options: Any,
) -> tuple[Pipeline[Any], Options]:
    """Return the pipeline with a plan before the map, and the options for the whole. A single mapping as
    ``plan_inputs`` is one row."""
    whole, stages = split(options, (PLAN, MAP, REDUCE))
    task = _task(stages[MAP])
    if "inputs" in stages[MAP]:
        raise SpecError("inputs: the plan makes the inputs of the agents; use plan_inputs for its own")
    fields = item_fields(OutputSchema.of(plan_output_schema))
    rows = [plan_inputs] if isinstance(plan_inputs, Mapping) else plan_inputs
    planned = Pipeline(rows).map(name=PLAN, task=plan_prompt, output_schema=plan_output_schema, **stages[PLAN])
    mapped = planned.then(FlatMap(_numbered(), fields)).map(name=MAP, task=task, **stages[MAP])
    pipeline = mapped.reduce(reduce, name=REDUCE, output_schema=reduce_schema, tree=reduce_tree, **stages[REDUCE])
    return pipeline, whole


async def run_reduced(pipeline: Pipeline[Any], options: Options, progress: bool | None = None) -> Reduced[Any, Any]:
    """Run the pipeline. An exception has the results of the map as ``results``."""
    try:
        outcome = await finished(pipeline.open(**options), progress)
    except BaseException as error:
        with suppress(AttributeError, KeyError, TypeError):  # an exception of foreign code may have no room for it
            error.results = error.results[MAP]  # type: ignore[attr-defined]
        raise
    reduction = outcome.reductions.get(REDUCE)
    if reduction is None:
        unfinished = Interrupted(f"the run ended before the reduction ({outcome.statistics.ended})")
        reduction = Reduction(0, "", None, False, None, AgentError.of(unfinished))
    return Reduced(outcome.results[MAP], reduction, outcome.summary)


def split(options: Options, stages: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the options for all stages, and those of each."""
    whole: dict[str, Any] = {}
    each: dict[str, dict[str, Any]] = {name: {} for name in stages}
    prefixed: dict[str, dict[str, Any]] = {name: {} for name in stages}
    for name, value in options.items():
        prefix = next((prefix for prefix, stage in PREFIXES.items() if name.startswith(prefix) and stage in each), None)
        if prefix is not None:
            prefixed[PREFIXES[prefix]][name.removeprefix(prefix)] = value
        elif name in OF_A_STAGE or name in ("carry", "id_column"):
            each[MAP][name] = value
        else:
            whole[name] = value
    return whole, {name: each[name] | prefixed[name] for name in stages}


def items_of(plan: object) -> list[object]:
    """Return the items of a plan: its field ``items``; if it has none, the plan itself."""
    if isinstance(plan, list):
        return plan
    items = plan.get("items") if isinstance(plan, Mapping) else getattr(plan, "items", None)
    if not isinstance(items, Iterable):
        raise InputError("the plan has no items")
    return list(items)


def item_fields(schema: OutputSchema[object] | None) -> tuple[str, ...] | None:
    """Return the fields that the task may use. None if items may have any fields, so that they are only known from the
    plan. Raises SpecError for a schema without items."""
    top = {} if schema is None else schema.json_schema
    if top.get("type") == "array":
        item = top.get("items")
    else:
        properties = top.get("properties")
        listed = _resolved(properties.get("items"), top) if isinstance(properties, dict) else {}
        if listed.get("type") != "array":
            raise SpecError("plan_output_schema must have a field items that is a list, or be a list")
        item = listed.get("items")
    kind = _resolved(item, top)
    own = kind.get("properties")
    is_open = bool(kind.get("additionalProperties")) or (kind.get("type") == "object" and own is None)
    if not kind or "anyOf" in kind or is_open:
        return None
    return ("item", "index", *(own if isinstance(own, dict) else ()))


def _resolved(schema: object, top: JsonObject) -> JsonObject:
    if not isinstance(schema, dict):
        return {}
    reference = schema.get("$ref")
    if isinstance(reference, str):
        definitions = top.get("$defs")
        known = definitions.get(reference.rpartition("/")[2]) if isinstance(definitions, dict) else None
        return known if isinstance(known, dict) else {}
    return schema


def _numbered() -> Any:
    """Return a function that makes rows of a plan, with ``item``, ``index`` and the fields of an item. It gets the
    plans in order."""
    numbers = count()

    def rows(plan: object) -> list[object]:
        return [
            {
                "item": item,
                "index": next(numbers),
                **({} if isinstance(item, str | int | float | list | None) else fields_of(item)),
            }
            for item in items_of(plan)
        ]

    return rows


def _task(options: dict[str, Any]) -> str:
    task = options.pop("task", "") if options.get("worker") is not None else _taken(options, "task")
    if not isinstance(task, str):
        raise SpecError(f"task: must be text (got {type(task).__name__})")
    return task


def _taken(options: dict[str, Any], name: str) -> Any:
    if name not in options:
        raise SpecError(f"{name} is missing")
    return options.pop(name)
