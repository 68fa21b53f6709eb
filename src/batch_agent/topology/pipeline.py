"""Pipelines: stages over rows, described one after another and run as one.

    pages = Pipeline(paths).map(name="review", task="Review {path}", output_schema=Review)
    outcome = await pages.filter(lambda review: review.bugs).reduce("Sum up {n} reviews", output_schema=Summary).run()

A row passes to the next stage as soon as it is ready. A Pipeline is a description that can be extended and run any
number of times; ``flow`` runs it.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast, overload

from batch_agent.errors import SpecError
from batch_agent.events import Sink
from batch_agent.files.gold import GivenGold
from batch_agent.files.inputs import rows_from
from batch_agent.job import AgentResult
from batch_agent.observe.statistics import Statistics
from batch_agent.record.compare import Side
from batch_agent.record.scoring import first_fields
from batch_agent.results import Results, Summary, with_unfinished
from batch_agent.run.collecting import Collecting
from batch_agent.run.interruption import Interruption
from batch_agent.run.scoring import final_score
from batch_agent.topology.flow import Flow
from batch_agent.topology.nodes import AgentNode
from batch_agent.topology.plan import PipelinePlan, plan_stages
from batch_agent.topology.reduce import ReduceNode, Reduction, Shape, check_shape
from batch_agent.topology.scoring import gold_of_flow
from batch_agent.topology.stages import Agents, Filter, FlatMap, Join, Reduce, Stage, check_stage_options
from batch_agent.trust.score import Score

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True, repr=False)
class FlowOutcome(Generic[T]):
    """``outputs``: the output of the last stage, in order. ``results``: those of each stage that calls a model, by name
    and in index order. ``reductions``: what each reduction covers. Prints as a summary."""

    outputs: list[T]
    results: Mapping[str, Results[Any]]
    reductions: Mapping[str, Reduction[Any]]
    summary: Summary

    @property
    def statistics(self) -> Statistics:
        """The sums over all stages, and the counts of each."""
        return self.summary.statistics

    def __str__(self) -> str:
        return str(self.summary)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.summary._repr_html_()

    def score(self, gold: GivenGold | None = None, **options: Any) -> Score:
        """Return how many answers of the last stage are right. The options are those of ``Results.score``."""
        return self._last.score(gold, **options)

    @property
    def _last(self) -> Results[Any]:
        return [*self.results.values()][-1]

    def side(self, name: str) -> Side:
        """Return the results of the last stage as one side of a comparison (``batch_agent.compare``)."""
        *before, last = self.results.values()
        rows = [(each.job_id, each.input) for results in before for each in results]
        side = last.side(name)
        return replace(side, known=replace(side.known, sources=lambda: first_fields(rows)))

    @property
    def failures(self) -> list[AgentResult[Any]]:
        """Return every failed row of every stage."""
        return [result for results in self.results.values() for result in results if not result.ok]


class Pipeline(Generic[T]):
    """Stages over rows. ``inputs`` are rows, a path or a table, as for ``BatchAgent.run``."""

    def __init__(self, inputs: Iterable[T] | AsyncIterable[T], *, stages: tuple[Stage, ...] = ()) -> None:
        self.inputs = inputs if isinstance(inputs, list | tuple) else cast("Iterable[T]", rows_from(inputs))
        self.stages = stages

    @overload
    def map(self, *, name: str = ..., task: str = ..., output_schema: type[U], **options: Any) -> Pipeline[U]: ...
    @overload
    def map(self, *, name: str = ..., task: str = ..., output_schema: None = None, **options: Any) -> Pipeline[str]: ...
    @overload
    def map(self, *, name: str = ..., task: str = ..., output_schema: Any, **options: Any) -> Pipeline[Any]: ...
    def map(
        self,
        *,
        name: str = "map",
        task: str = "",
        output_schema: Any = None,
        carry: Sequence[str] = (),
        **options: Any,
    ) -> Pipeline[Any]:
        """Add a stage with an agent per row, with the options of ``BatchAgent.run``, including ``worker``; the next
        stage gets its output. ``task`` is optional with a worker. The rows of all later stages of agents are then dicts
        that also have the fields ``carry`` of this stage's rows."""
        _check_name(name)
        if isinstance(carry, str) or not all(isinstance(field, str) for field in carry):
            raise SpecError(f"{name}: carry must be a list of names of fields (got {carry!r})")
        if not task and options.get("worker") is None:
            raise SpecError(f"{name}: task is missing: say what to do with each row, or give a worker")
        check_stage_options(name, options)
        return self.then(Agents(name, {**options, "task": task, "output_schema": output_schema}, tuple(carry)))

    def flat_map(self, function: Callable[[T], Iterable[U]]) -> Pipeline[U]:
        """Add a function that returns any number of rows for each row."""
        return self.then(FlatMap(function))

    def filter(self, function: Callable[[T], object]) -> Pipeline[T]:
        """Keep only the rows for which the function returns a true value."""
        return self.then(Filter(function))

    def join(
        self, other: Pipeline[U], *, key: Callable[[T], Hashable], other_key: Callable[[U], Hashable]
    ) -> Pipeline[tuple[T, U]]:
        """Pair each row with the row of ``other`` that has the same key, as soon as both are there. Keys of ``other``
        must be unique; a row without a partner fails."""
        return self.then(Join(other, key, other_key))

    @overload
    def reduce(
        self, prompt: str, *, name: str = ..., output_schema: type[U], tree: Shape = ..., **options: Any
    ) -> Pipeline[U]: ...
    @overload
    def reduce(
        self, prompt: str, *, name: str = ..., output_schema: None = None, tree: Shape = ..., **options: Any
    ) -> Pipeline[str]: ...
    @overload
    def reduce(
        self, prompt: str, *, name: str = ..., output_schema: Any, tree: Shape = ..., **options: Any
    ) -> Pipeline[Any]: ...
    def reduce(
        self, prompt: str, *, name: str = "reduce", output_schema: Any = None, tree: Shape = "auto", **options: Any
    ) -> Pipeline[Any]:
        """Reduce all rows to one answer, failed ones included. ``{n}`` in the prompt is their number. ``tree`` decides
        what happens if they do not fit one request: "auto" groups by tokens, a number by rows, "flat" never groups."""
        _check_name(name)
        check_stage_options(name, options)
        check_shape(tree)
        if not prompt.strip():
            raise SpecError("reduce is empty: say what to make of the results")
        return self.then(Reduce(name, prompt, tree, {**options, "output_schema": output_schema}))

    async def run(self, *, progress: bool | None = None, **options: Any) -> FlowOutcome[T]:
        """Run the pipeline with options for the whole and ``progress``, as in ``BatchAgent.run``. Failed rows and
        reductions are results."""
        return await finished(self.open(**options), progress)

    def plan(self, **options: Any) -> PipelinePlan:
        """Return what ``run`` would do: rows, first message and cost of each stage. Nothing is sent. Print it."""
        flow = Flow(self.inputs, self.stages, options, sends=False)
        return plan_stages(self.inputs, self.stages, {node.name: node.prepared for node in flow.nodes})

    def open(self, *, sinks: Sequence[Sink] = (), **options: Any) -> Flow:
        """Return a flow to control the run: ``async with pipeline.open() as flow``, then ``await flow.finish()``.
        Checks all options."""
        return Flow(self.inputs, self.stages, options, sinks=sinks)

    def then(self, stage: Stage) -> Pipeline[Any]:
        """Return the pipeline with one more stage."""
        return Pipeline(cast("Iterable[Any]", self.inputs), stages=(*self.stages, stage))


async def finished(flow: Flow, progress: bool | None = None) -> FlowOutcome[Any]:
    """Return the outcome of a flow that is opened, run and left here. An exception has what was done as ``results``."""
    return await FlowCollecting(flow).collect(progress, Interruption())


class FlowCollecting(Collecting[FlowOutcome[Any]]):
    """The stages keep their results."""

    def __init__(self, flow: Flow) -> None:
        super().__init__(flow, flow.spec)
        self._flow = flow

    def statistics(self) -> Statistics:
        return self._flow.statistics()

    def so_far(self) -> FlowOutcome[Any]:
        return outcome_of(self._flow)

    async def at_end(self) -> FlowOutcome[Any]:
        flow, outcome = self._flow, outcome_of(self._flow)
        if flow.pilot_rows is None or not flow.pilot_rows.stopped:
            return outcome
        return replace(outcome, summary=replace(outcome.summary, pilot=await flow.outlook()))

    def kept(self, outcome: FlowOutcome[Any]) -> object:
        return outcome.results


def outcome_of(flow: Flow) -> FlowOutcome[Any]:
    score = None if flow.gold is None else final_score(flow)
    summary = Summary(flow.statistics(), flow.tool_statistics(), score)
    results = {node.name: results_of(node) for node in flow.nodes}
    if flow.gold is not None:
        results[flow.nodes[-1].name].know(gold_of_flow(flow, flow.inputs))
    return FlowOutcome(flow.outputs(), results, flow.reductions, summary)


def results_of(node: AgentNode | ReduceNode) -> Results[Any]:
    """Return the results of a stage in the order of their indexes. The stage that reads a list of inputs has one for
    each input."""
    spec, statistics = node.prepared.spec, node.run.statistics()
    if isinstance(node, AgentNode) and spec.pilot is not None:
        stopped = node.pilot is not None and node.pilot.stopped
        asked = node.pilot.indexes if node.pilot is not None and stopped else None
        results = with_unfinished(node.results, spec.inputs, statistics, spec.id_column, asked)
        results.sort(key=lambda result: node.order(result.index))
    else:
        results = with_unfinished(node.results, spec.inputs, statistics, spec.id_column)
    return Results(results, Summary(statistics, node.run.tool_statistics()), spec.output_schema)


def _check_name(name: object) -> None:
    """Check a stage's name, which is a directory of a recorded run."""
    if not isinstance(name, str) or not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise SpecError(f"a stage's name is letters, digits, - and _ (got {name!r})")
