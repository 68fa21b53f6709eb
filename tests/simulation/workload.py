"""What a simulated run has to do: rows, a shape of run, options. One seed makes one workload.

A session opens the run in the feeder's process, takes the results and returns them as plain values that can be compared
with those of the undisturbed run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal, get_args

from tests.simulation.faults import EditKind
from tests.simulation.jobs import batch_backend
from tests.simulation.model import Answer
from tests.simulation.process import WORLD, Process, SimulatedCrew, join_later, look, note
from tests.simulation.world import Row

from batch_agent import BatchAgent, Pipeline
from batch_agent.errors import ToolError
from batch_agent.events import Event, JobFinished, JobStarted, ToolFinished, TurnFinished
from batch_agent.job import AgentResult
from batch_agent.run.run import Run
from batch_agent.topology.flow import Flow
from batch_agent.topology.pipeline import outcome_of

Shape = Literal["tool loop", "chunks", "user worker", "pipeline", "batch", "batch pipeline"]
SHAPES: tuple[Shape, ...] = get_args(Shape)

Outcome = dict[str, object]  # by row or stage: its output, or the type of its error
LONG = 400  # numbers in a row that does not fit
CONTEXT = 1_200  # tokens


@dataclass(frozen=True, slots=True)
class Edition:
    """The prompt and the rows of one session."""

    version: int
    rows: tuple[str, ...]

    def edited(self, what: EditKind, chance: Random) -> Edition:
        rows = list(self.rows)
        place = chance.randrange(len(rows))
        match what:
            case "prompt":
                return replace(self, version=self.version + 1)
            case "add":
                rows.insert(place, f"n{chance.randrange(10_000)}")
            case "remove" if len(rows) > 1:
                del rows[place]
            case "replace":
                rows[place] = f"n{chance.randrange(10_000)}"
            case "reorder":
                chance.shuffle(rows)
        return replace(self, rows=tuple(rows))

    def wanted(self) -> Counter[Row]:
        return Counter((self.version, row) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Workload:
    seed: int
    shape: Shape
    first: Edition
    servers: int
    capacity: int | None  # of each server
    max_inflight: int | None
    rpm: int | None
    max_retries: int
    hedge: float | None
    streaming: bool
    budget: float | None  # as a share of the tokens that the whole takes
    workers: int = 0  # worker processes; 0: the feeder works itself
    joins: float | None = None  # seconds after which the workers join a feeder that works itself

    @classmethod
    def of(cls, seed: int, shapes: Sequence[Shape]) -> Workload:
        chance = Random(f"workload {seed}")
        shape = chance.choice(shapes)
        rows = [f"k{number}" for number in range(chance.choice((1, 2, 5, 12, 30)))]
        if len(rows) > 4 and chance.random() < 0.3:
            rows[3] = rows[0]  # the same row twice
        servers = chance.choice((1, 1, 2, 3))
        found = cls(
            seed,
            shape,
            Edition(0, tuple(rows)),
            servers,
            capacity=chance.choice((None, None, 4, 8)),
            max_inflight=chance.choice((None, 1, 4, 16)),
            rpm=chance.choice((None, None, None, 30)),
            max_retries=chance.choice((1, 2, 3)),
            hedge=chance.choice((None, None, 20.0)) if servers > 1 else None,
            streaming=chance.random() < 0.5,
            budget=chance.uniform(0.2, 1.1) if chance.random() < 0.2 else None,
        )
        if not found.is_batch:
            found = found._shared(Random(f"workers {seed}"))
        else:
            found = replace(found, servers=1, capacity=None, rpm=None, hedge=None, budget=None, max_inflight=None)
        return found

    def _shared(self, chance: Random) -> Workload:
        """The same, with worker processes in half of the seeds."""
        joins = chance.choice((None, None, 10 ** chance.uniform(-2, 1.5)))
        return replace(self, workers=chance.choice((1, 2, 3)), joins=joins) if chance.random() < 0.5 else self

    @property
    def is_batch(self) -> bool:
        return self.shape in ("batch", "batch pipeline")

    @property
    def is_pipeline(self) -> bool:
        return self.shape in ("pipeline", "batch pipeline")

    @property
    def writes(self) -> bool:
        return self.shape != "chunks"

    def is_complete(self, outcome: Outcome, edition: Edition) -> bool:
        """Whether every row has a result. Of a pipeline, those of its first stage and the reduction."""
        prefix = "work " if self.is_pipeline else ""
        every = {f"{prefix}{index}" for index in range(len(edition.rows))}
        if self.is_pipeline:
            every.add("reduce")
        return every <= outcome.keys() and all(isinstance(value, dict) for value in outcome.values())

    def backend(self, process: Process) -> object:
        if self.is_batch:
            return batch_backend(process, process.world.provider)
        urls = [f"{WORLD}://{server.name}" for server in process.world.servers]
        return urls[0] if len(urls) == 1 else urls

    def options(self, process: Process) -> dict[str, Any]:
        options: dict[str, Any] = {
            "max_total_tokens": process.world.max_tokens,
            "backend": self.backend(process),
            "run_dir": process.directory,
            "resume": True,
            "on_change": "resend",
            "rpm": self.rpm,
            "max_retries": self.max_retries,
            "hedge": self.hedge,
            "timeout_per_tool": 60.0,
            "streaming_tool_dispatch": self.streaming,
        }
        if self.is_batch:
            options["model"] = "scripted"
        else:
            options["timeout_per_turn"] = 120.0
        if self.max_inflight is not None:
            options["max_inflight"] = self.max_inflight
        if self.workers and self.joins is None:
            options["cluster"] = SimulatedCrew(process.session, self.workers)
        return options

    def joining(self, process: Process, run: Run[Any]) -> asyncio.Task[None] | None:
        """The task in which workers join a run that was alone."""
        if self.joins is None:
            return None
        return asyncio.create_task(join_later(process.session, run, self.workers, self.joins), name="joining")

    async def play(self, process: Process, edition: Edition) -> Outcome:
        """One session to its end."""
        if self.is_pipeline:
            return await self._play_pipeline(process, edition)
        options = self.options(process) | self._asking(process, edition)
        if self.shape == "user worker":
            options["worker"] = gather_answers
        events: list[Event] = []
        run: Run[Answer] = Run(BatchAgent.plan(**options), [events.append], record=process.record)
        results: list[AgentResult[Answer]] = []
        async with run, _beside(self.joining(process, run)):
            process.run = run
            async for result in run.results():
                process.deliver(result)
                results.append(result)
        self._check_events(process, events)
        return _outcome(results)

    def _check_events(self, process: Process, events: Sequence[Event]) -> None:
        """Each row begins before it ends, and ends once; no event comes twice. In some shapes a row asks for
        several answers at once, whose events are the same."""
        begun, ended, told = set[int](), set[int](), Counter[Event]()
        for event in events:
            if isinstance(event, JobStarted):
                begun.add(event.index)
            elif isinstance(event, JobFinished):
                if event.index in ended or event.index not in begun:
                    process.world.complain(f"row {event.index} ended twice, or before it began")
                ended.add(event.index)
            elif isinstance(event, TurnFinished | ToolFinished) and self.shape not in ("chunks", "user worker"):
                told[event] += 1
        if twice := [event for event, count in told.items() if count > 1]:
            process.world.complain(f"events came twice: {twice}")

    def _asking(self, process: Process, edition: Edition) -> dict[str, Any]:
        if self.shape == "chunks":
            return {
                "task": f"Version {edition.version} of the range of {{words}}",
                "inputs": [{"id": row, "words": words_of(row, LONG)} for row in edition.rows],
                "output_schema": Answer,
                "oversized": "chunk",
                "model_max_context": CONTEXT,
            }
        return {
            "task": f"v{edition.version}: work on {{row}}: {{words}}",
            "inputs": [{"row": row, "words": words_of(row, 3)} for row in edition.rows],
            "output_schema": Answer,
            "tools": [look, note],
        }

    async def _play_pipeline(self, process: Process, edition: Edition) -> Outcome:
        pipeline = (
            Pipeline([{"row": row, "words": words_of(row, 3)} for row in edition.rows])
            .map(
                name="work",
                task=f"v{edition.version}: work on {{row}}: {{words}}",
                output_schema=Answer,
                tools=[look, note],
            )
            .filter(passes)
            .flat_map(lambda answer: [{"words": f"w{answer.low}"}, {"words": f"w{answer.high}"}])
            .map(name="again", task="the range of {words}", output_schema=Answer)
            .reduce("the range of all", tree=4, output_schema=Answer)
        )
        flow = Flow(pipeline.inputs, pipeline.stages, self.options(process), record=process.record)
        async with flow, _beside(self.joining(process, flow._run)):
            process.run = flow
            await flow.finish()
            outcome = outcome_of(flow)
        stages = {name: results for name, results in outcome.results.items() if name != "reduce"}
        for result in (result for results in stages.values() for result in results):
            process.deliver(result)
        found: Outcome = {f"{name} {key}": value for name in stages for key, value in _outcome(stages[name]).items()}
        reduction = outcome.reductions.get("reduce")
        if stages["work"] and not any(passes(result.output) for result in stages["work"] if result.output):
            found["reduce"] = {}  # nothing to reduce, so an error
        elif reduction is not None:
            lost = {"failed": reduction.failed, "lost": reduction.lost, "covers": reduction.covers}
            output = reduction.output
            found["reduce"] = f"{reduction.error}" if output is None else {**output.model_dump(), **lost}
        return found


@asynccontextmanager
async def _beside(task: asyncio.Task[None] | None) -> AsyncIterator[None]:
    """End the task with the context, if it has not ended before."""
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()


async def gather_answers(row: dict[str, str], ctx: Any) -> object:
    """A worker of the user's with the public context: twice a write before it asks, two questions at once and a pause;
    then the tool loop."""
    version = ctx.prompt.partition(":")[0].removeprefix("v")
    for time in range(2):
        with suppress(ToolError):  # it failed, or its outcome is unknown
            await ctx.call("note", key=f"v{version}.{row['row']}.own.{time}")
        sides = (
            f"{side} {time}, version {version}, {row['row']}: {row['words']}" for side in ("the least", "the most")
        )
        await asyncio.gather(*(ctx.ask(side) for side in sides))
        await asyncio.sleep(1.5)
    return await ctx.loop(ctx.prompt, output_schema=Answer)


def passes(answer: Answer) -> bool:
    return answer.low % 3 > 0


def words_of(row: str, count: int) -> str:
    chance = Random(f"words {row}")
    return " ".join(f"w{chance.randrange(1000)}" for _ in range(count))


def _outcome(results: Sequence[AgentResult[Answer]]) -> Outcome:
    return {
        str(result.index): result.output.model_dump() if result.ok and result.output is not None else f"{result.error}"
        for result in results
    }
