"""A running pipeline: its stages are runs inside one outer run, which owns the slots, the budget, the record and the
view.

The outer run has no rows. Everything is prepared and checked before anything is sent.
"""

from __future__ import annotations

import asyncio
import copy
import difflib
import inspect
import os
import posixpath
import time
from array import array
from collections.abc import AsyncIterable, AsyncIterator, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from pydantic import JsonValue

from batch_agent.agent.prepare import Prepared, prepare, recorded_facts
from batch_agent.agreement import OF_ENTRIES
from batch_agent.backends.registry import BACKEND_VARIABLE
from batch_agent.blocking import in_thread
from batch_agent.compiler.fields import field_names, fields_of, listed, own_id
from batch_agent.compiler.schema import OutputSchema
from batch_agent.compiler.template import Template
from batch_agent.dispatch.row_channel import FULL, RowChannel
from batch_agent.errors import InputError, Interrupted, SpecError, WorkerFailed, about
from batch_agent.events import Sink
from batch_agent.files.inputs import refuse_uncountable
from batch_agent.foreign import describe
from batch_agent.job import AgentError, AgentResult, Placed, UnreadableRow
from batch_agent.messages import JsonObject
from batch_agent.observe.outlook import NO_WORK, Outlook, together, work_of
from batch_agent.observe.stage_counts import StageCount
from batch_agent.observe.statistics import Statistics
from batch_agent.record.rundir import recorded_options
from batch_agent.record.store import RunStore
from batch_agent.record.timeline import Line
from batch_agent.results import Results, Summary
from batch_agent.run.changes import Changes, OnChange
from batch_agent.run.collecting import collect_all
from batch_agent.run.lending import Lending
from batch_agent.run.pilot import Pilot, outlook_of
from batch_agent.run.recording import open_record
from batch_agent.run.rows import Rows, UniqueIds
from batch_agent.run.run import Run
from batch_agent.run.scoring import OPTIONS as SCORE_OPTIONS
from batch_agent.run.shared_backends import SharedBackends, Wrap
from batch_agent.run.shared_state import SharedState
from batch_agent.run.spec_json import spec_json
from batch_agent.run.trust import HOSTS, hosts_of
from batch_agent.spec import BatchSpec
from batch_agent.tools.execution import ToolStatistics
from batch_agent.topology.nodes import AgentNode, Collector, InOrder, InProgress, Item, JoinNode, Receiver
from batch_agent.topology.plan import graph_of
from batch_agent.topology.reduce import ReduceNode, Reduction
from batch_agent.topology.scoring import gold_of_pipeline, score_of_flow
from batch_agent.topology.stages import (
    OF_THE_WHOLE,
    Agents,
    Filter,
    FlatMap,
    Join,
    Reduce,
    Stage,
    carried_after,
    check_options_of_the_whole,
)
from batch_agent.trust.score import Score

Inputs = Iterable[Any] | AsyncIterable[Any]
NO_PILOT: Mapping[str, Any] = {"pilot": None, "pilot_key": None, "pilot_only": False}
# Options of the whole that a reduction does not take over: its answer has other fields than those of the rows.
ONCE: Mapping[str, Any] = {"samples": 1, "vote": None, "doubt": False}
RUN_DIR = ("run_dir", "checkpoint_dir")

BREATHER = 128  # inputs read before the event loop may run other tasks
SLICE = 0.05  # seconds that a thread works before it delivers what it has made
# Exceptions of the user's code that must not end our process.
FOREIGN = (Exception, SystemExit, asyncio.CancelledError)

T = TypeVar("T")


class Flow:
    """Enter it with ``async with``, then call ``finish``; ``statistics``, ``pause``, ``drain`` and ``cancel`` are those
    of a Run. ``wrap`` is called with each backend and its API key, and returns the backend to use."""

    def __init__(
        self,
        inputs: Inputs,
        stages: tuple[Stage, ...],
        options: Mapping[str, Any],
        *,
        sinks: Sequence[Sink] = (),
        command: Mapping[str, JsonValue] | None = None,
        sends: bool = True,
        record: Callable[[BatchSpec], RunStore] = open_record,
        wrap: Wrap = lambda backend, api_key: backend,
    ) -> None:
        check_options_of_the_whole(options)
        self.gold_options = {name: options.get(name) for name in SCORE_OPTIONS}
        options, self.gold = gold_of_pipeline(inputs, stages, options)
        if self.gold is not None:
            inputs = cast("Inputs", self.gold.inputs)
        self.inputs = inputs
        options = _with_recorded_backend(options)
        self.collector = Collector()
        self.nodes: list[AgentNode | ReduceNode] = []  # in the order of the stages
        self._options = dict(options)
        self._sends = sends
        self._backends = SharedBackends(wrap)
        self._row_schemas: dict[str, type[object]] = {}  # of stages whose rows are instances of a class
        self._sources: list[InputSource] = []
        self._functions: list[FunctionNode] = []
        self._failure: Exception | None = None
        self.pilot_rows = self._pilot(inputs)
        self._progress = InProgress()
        self._flat_maps: list[FlatMapNode] = []  # of the inputs, the last one first
        self._wire(inputs, stages, self.collector, self._options.pop("id_column", None), self.pilot_rows)
        if self.pilot_rows is not None:
            self.pilot_rows.on_read = self._progress.on_none = self._end_pilot
            for first in self._flat_maps[-1:]:
                first.order = InOrder(self.pilot_rows.place)
        self.nodes.reverse()
        if not self.nodes:
            raise SpecError("a pipeline needs a stage that calls a model: map or reduce")
        self._prepared = self._outermost()
        self._graph = graph_of(stages)
        self._run = self._open(sinks, command, record)

    def _pilot(self, inputs: Inputs) -> Pilot | None:
        """Return the pilot of the inputs; None if there is none. It ends when nothing that was made of its rows is in
        progress any more."""
        if (count := self._options.get("pilot")) is None:
            return None
        refuse_uncountable(inputs, "pilot")
        return Pilot(count, self._options.get("pilot_key"), only=self._options.get("pilot_only", False))

    def _end_pilot(self) -> None:
        pilot = self.pilot_rows
        if pilot is None or not pilot.read or self._progress.count:
            return
        reader = next((node for node in self.nodes if isinstance(node, AgentNode) and node.pilot is not None), None)
        if reader is None or len(reader.results) >= len(pilot.indexes):
            pilot.end()

    def _open(
        self,
        sinks: Sequence[Sink],
        command: Mapping[str, JsonValue] | None,
        record: Callable[[BatchSpec], RunStore],
    ) -> Run[Any]:
        """Open and return the outer run, after that of each stage."""
        whole, nodes = self._prepared, self.nodes
        self.names: Sequence[str] = [node.name for node in nodes]
        self.parts: Mapping[str, Prepared] = {node.name: node.prepared for node in nodes}
        run: Run[Any] = Run(whole, sinks, command, record=record, inside=self, controls=self, pilot=self.pilot_rows)
        for node in nodes:  # in this order: of several stages that can start an agent, the last one goes first
            schema = self._row_schemas.get(node.name)
            with about(f"{node.name}: "):
                pilot = node.pilot if isinstance(node, AgentNode) else None
                own = partial(Run[Any], node.prepared, within=run.shared, stage=node.name, row_schema=schema)
                node.run = own(record=record, pilot=pilot)
        return run

    def facts(self, prepared: Prepared) -> JsonObject:
        """Return the specs of the stages, for workers. Raises SpecError for an option that workers cannot use."""
        specs: JsonObject = {}
        for node in self.nodes:
            with about(f"{node.name}: "):
                specs[node.name] = spec_json(node.prepared)
        return {"specs": specs, HOSTS: [host for node in self.nodes for host in hosts_of(node.prepared.backend)]}

    async def work(self, run: Run[object]) -> bool:
        """Run the stages. Returns whether all of them ended normally; otherwise their records have the reasons."""
        beside: list[InputSource | FunctionNode] = [*self._sources, *self._functions]
        try:
            await collect_all(self.nodes, [partial(node.pump, run.shared) for node in beside])
        except Exception as error:
            self._failure = error
            raise
        return not self.collector.why

    async def begin_sharing(self, lender: Lending) -> None:
        for node in self.nodes:
            await node.run.begin_sharing(lender)

    def stop_feeding(self) -> None:
        for node in self.nodes:
            node.run.stop_feeding()

    async def __aenter__(self) -> Self:
        await self._run.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._run.__aexit__(*exception)

    async def finish(self) -> None:
        """Wait until all stages have ended. Raises the error of a failed stage; a failed reduction raises nothing."""
        async for _ in self._run.results():
            pass
        if self._failure is not None:
            raise self._failure

    async def each(self) -> AsyncIterator[AgentResult[Any]]:
        """Yield the results of the last stage that calls a model, when all stages have ended."""
        await self.finish()
        for result in self.results():
            yield result

    async def pass_to(self, consumer: Callable[[AgentResult[Any]], None]) -> None:
        """Call ``consumer`` with the same results."""
        async for result in self.each():
            consumer(result)

    def statistics(self) -> Statistics:
        """Return the statistics of all stages together, with the counts of each stage."""
        whole = self._run.statistics()
        return replace(whole, stages=tuple(_counted(node, ended=whole.ended is not None) for node in self.nodes))

    def tool_statistics(self) -> dict[str, ToolStatistics]:
        """Return the statistics of the tools of all stages, by name; a later stage replaces an earlier one."""
        return {name: use for node in self.nodes for name, use in node.run.tool_statistics().items()}

    def score(self, *, count: bool = True) -> Score:
        """Return how many answers of the last stage are right so far. Raises SpecError without gold."""
        return score_of_flow(self, self.inputs, count=count)

    @property
    def runs(self) -> list[Run[Any]]:
        """The outer run, and the run of each stage."""
        return [self._run, *(node.run for node in self.nodes)]

    def pause(self) -> None:
        self._run.pause()

    def resume(self) -> None:
        self._run.resume()

    async def pilot(self) -> Results[Any]:
        """Wait until the rows of the pilot have gone through all stages, and return the results of the last stage that
        calls a model. No other row starts before ``finish`` is called."""
        if self.pilot_rows is None:
            raise SpecError("this pipeline has no pilot: give pilot=N, the number of rows that go first")
        await self.pilot_rows.wait_ended()
        results = self.results()
        summary = Summary(self.statistics(), self.tool_statistics(), pilot=await self.outlook())
        return Results(results, summary, self.nodes[-1].prepared.spec.output_schema)

    async def outlook(self) -> Outlook | None:
        """Return what the pilot says about all rows; None if there is no pilot, or if it is not complete. The work of a
        row is its work in all stages, except stages that only read a table for a join."""
        if (pilot := self.pilot_rows) is None:
            return None
        work = dict.fromkeys(pilot.indexes, NO_WORK)
        for node in self.nodes:
            if isinstance(node, AgentNode) and node.counts:
                for result in node.results:
                    root = node.order(result.index)[0]
                    if root in work:
                        work[root] = together(work[root], work_of(result))
        return await outlook_of(pilot, [*work.values()], self.parts)

    def drain(self) -> None:
        """Start nothing new. Running agents finish, but their results do not start further stages."""
        for source in self._sources:
            source.stop()
        for node in self.nodes:
            node.run.drain()

    def cancel(self) -> None:
        self._run.cancel()

    def changes(self) -> Changes:
        """Compare the stages with their record. May block."""
        return self._run.changes()

    @property
    def on_change(self) -> OnChange:
        """The option ``on_change``. It may be set before the flow is entered."""
        return self._run.on_change

    @on_change.setter
    def on_change(self, on_change: OnChange) -> None:
        for run in (self._run, *(node.run for node in self.nodes)):
            run.on_change = on_change

    def resize(self, max_inflight: int | None) -> None:
        """Change the concurrency limit of each backend."""
        self._run.resize(max_inflight)

    def cancel_row(self, row: str | int) -> None:
        """Cancel a row of a stage, named ``STAGE/ROW``; it fails, the others continue."""
        self._run.cancel_row(row)

    def retry_row(self, row: str | int) -> None:
        """Start a row of a stage again, named ``STAGE/ROW``."""
        self._run.retry_row(row)

    def serve(self) -> Path:
        return self._run.serve()

    def status(self) -> JsonObject:
        """Return the current state of the pipeline as one JSON object: all stages together, and each one in
        ``stages``."""
        whole = self._run.status(self.statistics())
        stages: list[JsonValue] = []
        for node in self._graph:
            ran = next((each.run for each in self.nodes if each.name == node["name"]), None)
            stages.append({**node, "status": None if ran is None else ran.status()})
        return {**whole, "stages": stages}

    def sample(self) -> Line:
        """Return one sample of the pipeline's timeline."""
        return self._run.sample(self.statistics())

    def live_rows(self, limit: int = 200) -> list[JsonObject]:
        """Return the running rows, those of later stages first."""
        rows: list[JsonObject] = []
        for node in reversed(self.nodes):
            rows += [{**row, "stage": node.name} for row in node.run.live_rows(limit - len(rows))]
        return rows

    def live_row(self, row: str | int) -> JsonObject:
        return self._run.live_row(row)

    def stage_row(self, row: str | int) -> tuple[Run[Any], str]:
        stage, _, name = str(row).partition("/")
        node = next((node for node in self.nodes if node.name == stage), None)
        if node is None or not name:
            raise SpecError(
                f"a row of a pipeline is named STAGE/ROW; its stages: {', '.join(n.name for n in self.nodes)}"
            )
        return node.run, name

    @property
    def spec(self) -> BatchSpec:
        """Return the spec of the whole pipeline."""
        return self._prepared.spec

    def results(self) -> list[AgentResult[Any]]:
        """Return the results of the last stage that calls a model."""
        last = self.nodes[-1]
        if isinstance(last, ReduceNode):
            return [] if last.reduction is None else [cast("AgentResult[Any]", last.reduction)]
        return sorted(last.results, key=lambda result: last.order(result.index))

    def outputs(self) -> list[Any]:
        """Return the outputs of the last stage, in the order of the inputs."""
        order = self._order(0)
        return [item.value for item in sorted(self.collector.items, key=lambda item: order(item.index)) if item.ok]

    @property
    def reductions(self) -> dict[str, Reduction[Any]]:
        """Return the reductions that have ended."""
        ended = ((node.name, node.reduction) for node in self.nodes if isinstance(node, ReduceNode))
        return {name: reduction for name, reduction in ended if reduction is not None}

    # Wiring

    def _wire(
        self, inputs: Inputs, stages: tuple[Stage, ...], out: Receiver, id_column: str | None, pilot: Pilot | None
    ) -> None:
        """Connect the stages from the last to the first, because each must know where its rows go. ``id_column`` is the
        field with the ids of the inputs, which later rows keep. ``pilot`` is that of these inputs."""
        for place, stage in reversed(list(enumerate(stages))):
            carry = carried_after(stages[: place + 1])
            if isinstance(stage, Agents) and place:
                check_fields(stages[:place], stage, self._options.get("template"))
                if (schema := schema_of_rows(stages[:place])) is not None:
                    self._row_schemas[stage.name] = schema
                out = self._agents(stage, out, RowChannel(), carry, counts=pilot is not None)
            elif isinstance(stage, Agents):
                own: dict[str, Any] = {} if id_column is None else {"id_column": id_column}
                if isinstance(inputs, list | tuple) and inputs:
                    check_carry(stage, inputs[0])
                if pilot is None:
                    own |= NO_PILOT
                stage = replace(stage, options={**own, **stage.options})
                node = self._agents(stage, out, inputs, carry, counts=pilot is not None)
                node.pilot = pilot
                return
            else:
                out = self._node(stage, out, counts=pilot is not None)
        self._sources.append(InputSource(inputs, out, id_column, pilot))

    def _agents(
        self, stage: Agents, out: Receiver, inputs: Inputs, carry: tuple[str, ...], *, counts: bool
    ) -> AgentNode:
        """Return the node of a stage of agents. ``counts``: its rows were made from the inputs of the pilot."""
        prepared = self._prepare(stage.name, {**stage.options, "inputs": inputs})
        channel = inputs if isinstance(inputs, RowChannel) else None
        node = AgentNode(stage.name, replace(prepared, carry=carry), channel, out, self._progress)
        node.order = self._order(len(self._flat_maps))
        node.counts = counts
        self.nodes.append(node)
        return node

    def _order(self, after: int) -> Callable[[int], tuple[int, ...]]:
        """Return a function that orders rows by their inputs, for rows that come before the first ``after`` flat_maps
        of the list. With a pilot, the rows of a flat_map are numbered in the order in which the inputs are read."""

        def key(index: int) -> tuple[int, ...]:
            places = [index]
            for node in self._flat_maps[after:] if self.pilot_rows is not None else ():
                places.append(node.sources[places[-1]])
            return tuple(reversed(places))

        return key

    def _node(self, stage: Reduce | FlatMap | Filter | Join, out: Receiver, *, counts: bool) -> Receiver:
        match stage:
            case Reduce():
                rows: RowChannel[object] = RowChannel()
                prepared = self._prepare(stage.name, {**ONCE, **stage.options, "task": "{prompt}", "inputs": rows})
                node = ReduceNode(stage.name, stage.prompt, stage.tree, prepared, rows, out)
                self.nodes.append(node)
                return node
            case FlatMap():
                flat = FlatMapNode(stage.function, out, self._progress)
                if counts:
                    self._flat_maps.append(flat)
                return self._function(flat)
            case Filter():
                return self._function(FilterNode(stage.function, out, self._progress))
            case Join():
                join = JoinNode(out, self._progress)
                other = self._function(KeyNode(stage.other_key, join.other, self._progress, looked_up=True))
                self._wire(stage.other.inputs, stage.other.stages, other, None, None)
                return self._function(KeyNode(stage.key, join, self._progress))

    def _function(self, node: FunctionNode) -> Receiver:
        self._functions.append(node)
        return node

    def _prepare(self, name: str, options: Mapping[str, Any]) -> Prepared:
        if any(node.name == name for node in self.nodes):
            raise SpecError(f"two stages are called {name!r}: give each its own name, with name=")
        inherited = self._options
        if options.get("cascade") is not None:  # its entries name their own backends
            inherited = {option: value for option, value in inherited.items() if option not in OF_ENTRIES}
        known = {**inherited, **options}
        for place in RUN_DIR:
            if (given := known.get(place)) is not None:
                known[place] = posixpath.join(given, name)  # a path or a URL
        with about(f"{name}: "):
            return self._backends.share(prepare(BatchSpec(**known), sends=self._sends))

    def _outermost(self) -> Prepared:
        """Return the outer run that contains the stages. It sends nothing itself, and has no rows."""
        first = self.nodes[0].prepared
        options = {name: value for name, value in self._options.items() if name in OF_THE_WHOLE or name == "prices"}
        options |= {name: getattr(first.spec, name) for name in ("model", "backend", "runtime", "api_key")}
        stages = " → ".join(node.name for node in self.nodes)
        prepared = prepare(BatchSpec(**options, task="{input}", inputs=[stages]), sends=self._sends)
        plan = copy.copy(prepared.plan)
        plan.total = None  # the pipeline has no rows of its own
        where = self._options.get("backend") or os.environ.get(BACKEND_VARIABLE)
        made = replace(prepared, plan=plan, backend=first.backend, model=first.model, where=where)
        return replace(made, gold=self.gold)


def _with_recorded_backend(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of a pipeline. A resumed pipeline that names no backend uses the recorded one, also for stages
    that have not begun."""
    run_dir = next((options[name] for name in RUN_DIR if options.get(name) is not None), None)
    known = recorded_options(recorded_facts(run_dir)).get("backend")
    if options.get("backend") is not None or not isinstance(known, str | list):
        return options
    return {**options, "backend": known}


def _counted(node: AgentNode | ReduceNode, *, ended: bool) -> StageCount:
    """Return the row counts of a stage. After the end of the pipeline no row is running."""
    own = node.run.statistics()
    total = own.done if own.ended == "complete" else own.total
    return StageCount(node.name, total, own.done, own.failed, 0 if ended else own.alive, node.failed_before)


def schema_of_rows(before: Sequence[Stage]) -> type[object] | None:
    """Return the class of the rows after these stages; None if it is unknown, or if they are plain data."""
    last = next((stage for stage in reversed(before) if not isinstance(stage, Filter)), None)
    if carried_after(before):
        return None
    schema = last.options.get("output_schema") if isinstance(last, Agents | Reduce) else None
    return schema if isinstance(schema, type) and schema is not str else None


def check_fields(before: Sequence[Stage], stage: Agents, template: str | None) -> None:
    """Raise SpecError for a field that the stage uses or carries, if its rows are known not to have it. ``template`` is
    the language of the pipeline's tasks."""
    own, carried = known_fields(before), carried_after(before)
    if own is None:
        return
    if twice := [name for name in carried if name in own]:
        raise SpecError(
            f"{stage.name}: its rows have a field {twice[0]!r} of their own: take it out of carry, or rename it"
        )
    with about(f"{stage.name}: "):
        if stage.options.get("template", template) != "jinja":
            Template.parse(stage.options.get("task", ""), (*carried, *own))
        _check_carry(stage.carry, (*carried, *own))


def known_fields(before: Sequence[Stage]) -> Sequence[str] | None:
    """Return the fields of the rows after these stages, without carried ones; None if they are unknown before there are
    rows."""
    last = next((stage for stage in reversed(before) if not isinstance(stage, Filter)), None)
    match last:
        case FlatMap():
            return last.fields
        case Agents() | Reduce():
            schema = last.options.get("output_schema")
            if schema is None and last.options.get("worker") is not None:
                return None  # it may return a dict
            if schema is None or schema is str:
                return ("input",)
            known = None if isinstance(schema, Mapping) else OutputSchema.of(schema)
            properties = None if known is None else known.json_schema.get("properties")
            return tuple(properties) if isinstance(properties, dict) else None
        case Join() | Filter() | None:
            return None


def check_carry(stage: Agents, first: object) -> None:
    """Raise SpecError for a carried field that the first input does not have."""
    with suppress(InputError), about(f"{stage.name}: "):
        _check_carry(stage.carry, field_names(first))


def _check_carry(carry: Sequence[str], fields: Sequence[str]) -> None:
    for name in carry:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise SpecError(f"carry: the rows have no field {name!r} (their fields: {listed(fields)}){hint}")


# Sources and functions: stages that produce rows without a model. Functions are user code. They run in threads, one row
# after another, so that agents continue beside a slow one; an exception fails only its row. Output is read only as the
# next stage has room, so a generator may be endless. ``pump`` does the work of a node until its rows have ended, or the
# run's time is up.
class InputSource:
    """The inputs of a pipeline whose first stage is not a stage of agents."""

    def __init__(
        self,
        inputs: Iterable[object] | AsyncIterable[object],
        out: Receiver,
        id_column: str | None,
        pilot: Pilot | None = None,
    ) -> None:
        self._rows = Rows(inputs, pilot, id_column)
        self._out, self._id_column = out, id_column
        self._pilot = pilot
        self._ids = UniqueIds()
        self._reader: asyncio.Task[None] | None = None

    async def pump(self, shared: SharedState) -> None:
        """Read the inputs as they are needed. It has a feed, so that it stops when nothing new may start."""
        self._reader = asyncio.current_task()
        feed = shared.dispatcher.feed(self.stop)
        feed.expect(0)
        feed.set_reading(True)
        why = "the inputs were not read to their end"
        try:
            count = 0
            if self._pilot is not None:
                await self._rows.choose(self._pilot)
            while await self._out.room():
                values = await self._rows.read(1)
                if not values:
                    why = "the run stopped after its pilot" if self._rows.stopped else ""
                    break
                self._out.put(self._item(count, values[0]))
                count += 1
                if count % BREATHER == 0:
                    await asyncio.sleep(0)
        finally:
            self._reader = None
            self._out.close(why)
            feed.close()

    def _item(self, index: int, value: object) -> Item:
        if isinstance(value, Placed):  # of the pilot, or behind it
            index, value = value.index, value.value
        if isinstance(value, UnreadableRow):
            return Item(index, error=AgentError.of(InputError(value.message)))
        try:
            name = own_id(fields_of(value), self._id_column)
            return Item(index, value, name=name if name is None else self._ids.unique(name))
        except InputError:  # a function may take what is no row
            return Item(index, value)

    def stop(self) -> None:
        """Read no more inputs."""
        if self._reader is not None:
            self._reader.cancel()


class FunctionNode:
    """Calls a function for each row. ``make`` returns the rows that one row becomes."""

    def __init__(self, function: Callable[[Any], Any], out: Receiver, progress: InProgress) -> None:
        self._function = function
        self._out = out
        self._progress = progress
        self._inlet: RowChannel[Item] = RowChannel()
        self._why = ""

    def put(self, item: Item) -> None:
        self._progress.add()
        self._inlet.put(item)

    async def room(self) -> bool:
        return await self._inlet.room()

    def close(self, why: str) -> None:
        self._why = why
        self._inlet.close()

    async def pump(self, shared: SharedState) -> None:
        try:
            while items := await self._inlet.take_all():
                made = chain.from_iterable(map(self.make, items))
                more = True
                while more and await self._out.room():
                    rows, more = await _until_time_is_up(partial(_next_of, made), shared)
                    for row in rows:
                        self.pass_on(row)
                if more:  # the next stage takes no more rows
                    break
                self._progress.done(len(items))
        except Interrupted as error:
            self._why = str(error)
        self._inlet.close()
        self._out.close(self._why)

    def make(self, item: Item) -> Iterator[Item]:
        """Return the rows made from one; runs in a thread."""
        raise NotImplementedError

    def pass_on(self, item: Item) -> None:
        self._out.put(item)


class FlatMapNode(FunctionNode):
    """Numbers its rows in the order of their source rows. So the rows of a later source wait until those of the earlier
    ones are known."""

    def __init__(self, function: Callable[[Any], Iterable[object]], out: Receiver, progress: InProgress) -> None:
        super().__init__(function, out, progress)
        self.order = InOrder()
        self.sources = array("q")  # the index of the row that each row was made of

    def put(self, item: Item) -> None:
        for ready in self.order.add(item):
            super().put(ready)

    def make(self, item: Item) -> Iterator[Item]:
        if item.left_out:
            return
        if not item.ok:
            yield item
            return
        try:
            for number, value in enumerate(_plain(self._function(item.value))):
                name = None if item.name is None else f"{item.name}.{number}"
                yield Item(item.index, value, name=name, carried=item.carried)
        except FOREIGN as error:
            yield replace(item, error=_failure("flat_map", error))

    def pass_on(self, item: Item) -> None:
        self._out.put(replace(item, index=len(self.sources)))
        self.sources.append(item.index)


class FilterNode(FunctionNode):
    def make(self, item: Item) -> Iterator[Item]:
        if item.ok:
            try:
                item = replace(item, left_out=not _plain(self._function(item.value)))
            except FOREIGN as error:
                item = replace(item, error=_failure("filter", error))
        yield item


class KeyNode(FunctionNode):
    """Makes ``(key, value)`` of a row. On the side of a join that is looked up, a row without a key ends the pipeline,
    because another row might need it."""

    def __init__(
        self, function: Callable[[Any], Hashable], out: Receiver, progress: InProgress, *, looked_up: bool = False
    ) -> None:
        super().__init__(function, out, progress)
        self._looked_up = looked_up

    def make(self, item: Item) -> Iterator[Item]:
        if item.ok:
            try:
                key = _plain(self._function(item.value))
                hash(key)
                item = replace(item, value=(key, item.value))
            except FOREIGN as error:
                if self._looked_up:
                    raise SpecError(f"join: the key of a row raised {describe(error)}") from error
                item = replace(item, error=_failure("join", error))
        yield item


async def _until_time_is_up(function: Callable[[], T], shared: SharedState) -> T:
    """Run a function in a thread. Raises Interrupted when the run's time is up; the thread is then abandoned."""
    if shared.spending.time_is_up:
        raise shared.spending.refusal()
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    work = in_thread(function)
    work.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
    await shared.dispatcher.wait_for_tools(ended)
    return work.result()


def _next_of(rows: Iterator[T]) -> tuple[list[T], bool]:
    """Return the next rows, and whether there may be more. It returns as many as fit the channel, or as are made within
    a moment."""
    until, made = time.monotonic() + SLICE, []
    for row in rows:
        made.append(row)
        if len(made) >= FULL or time.monotonic() > until:
            return made, True
    return made, False


def _plain(made: T) -> T:
    if inspect.isawaitable(made):
        if inspect.iscoroutine(made):
            made.close()
        raise TypeError("it is async, but a plain function is needed here")
    return made


def _failure(stage: str, error: BaseException) -> AgentError:
    return AgentError.of(WorkerFailed(f"the function of {stage} raised {describe(error)}"))
