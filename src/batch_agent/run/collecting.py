"""Collects the results of runs: of one run, of the stages of a pipeline, and those that a caller of the library waits
for."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from inspect import iscoroutinefunction
from typing import Any, Generic, Protocol, TypeVar, cast

from batch_agent.blocking import in_thread
from batch_agent.errors import BatchAgentError
from batch_agent.files.read import LazyRows
from batch_agent.job import AgentResult
from batch_agent.observe.progress import ProgressDisplay, with_expected
from batch_agent.observe.statistics import Statistics
from batch_agent.results import Results, Summary, with_unfinished
from batch_agent.run.interruption import Interruption, interrupted_words
from batch_agent.run.pilot import outlook_of_run
from batch_agent.run.run import Run
from batch_agent.run.scoring import final_score
from batch_agent.spec import BatchSpec

T = TypeVar("T")


class Running(AbstractAsyncContextManager[object], Protocol):
    """A run or a pipeline whose results are collected."""

    def cancel(self) -> None: ...

    def each(self) -> AsyncIterator[AgentResult[Any]]:
        """Yield each result as it finishes. A pipeline yields those of its last stage, at the end."""
        ...

    async def pass_to(self, consumer: Callable[[AgentResult[Any]], None]) -> None:
        """Call ``consumer`` with each of them."""
        ...


async def collect(
    run: Running,
    take: Callable[[AgentResult[Any]], Coroutine[Any, Any, None]] | Callable[[AgentResult[Any]], None],
    *,
    interruption: AbstractContextManager[object] | None = None,
    display: AbstractAsyncContextManager[object] | None = None,
) -> None:
    """Enter the run, and call ``take`` with each result until the run ends."""
    async with run:
        with interruption or nullcontext():
            async with display or nullcontext():
                if iscoroutinefunction(take):
                    async for result in run.each():  # a slow consumer stops the start of new agents
                        await take(result)
                else:
                    await run.pass_to(cast("Callable[[AgentResult[Any]], None]", take))


class Outcome(Protocol):
    """What the caller gets. Printing it shows the summary of the run."""

    @property
    def summary(self) -> Summary: ...


Given = TypeVar("Given", bound=Outcome)


class Collecting(ABC, Generic[Given]):
    """Collects the results of a run for a caller of the library, and shows its progress."""

    def __init__(self, run: Running, spec: BatchSpec) -> None:
        self._running, self._spec = run, spec

    def take(self, result: AgentResult[Any]) -> None:
        """Called with each result."""

    @abstractmethod
    def statistics(self) -> Statistics: ...

    @abstractmethod
    def so_far(self) -> Given:
        """Return the outcome of a run that an exception ended."""

    @abstractmethod
    async def at_end(self) -> Given:
        """Return the outcome of a run that has ended."""

    @abstractmethod
    def kept(self, outcome: Given) -> object:
        """Return the object that an exception gets as ``results``."""

    async def collect(self, progress: bool | None, interruption: Interruption) -> Given:
        """Return the outcome. In a script, Ctrl-C raises KeyboardInterrupt after the run has ended."""
        run, display = self._running, ProgressDisplay(progress, self.statistics)
        try:
            await collect(run, self.take, interruption=interruption.stopping(run.cancel), display=display)
        except BaseException as error:
            outcome = self.so_far()
            if self.statistics().done:  # show how far the run came
                display.conclude(str(outcome.summary))
            with suppress(AttributeError, TypeError):  # an exception class of other code may not allow attributes
                error.results = self.kept(outcome)  # type: ignore[attr-defined]
            raise
        outcome = await self.at_end()
        display.conclude(str(outcome.summary))
        if interruption.happened:
            words = interrupted_words(self.statistics(), self._spec)
            return interruption.conclude(outcome, self.kept(outcome), words)
        return outcome


class RunCollecting(Collecting[Results[T]]):
    """Collects the results of one run. ``page`` is that of the run, which is served as long as its results exist."""

    def __init__(self, run: Run[T], spec: BatchSpec, page: object) -> None:
        super().__init__(run, spec)
        self._run, self._page = run, page
        self._taken: list[AgentResult[T]] = []

    def take(self, result: AgentResult[T]) -> None:
        self._taken.append(result)

    def statistics(self) -> Statistics:
        inputs = self._spec.inputs
        return with_expected(self._run.statistics(), inputs.expected_rows() if isinstance(inputs, LazyRows) else None)

    def _summary(self) -> Summary:
        run = self._run
        return Summary(self.statistics(), run.tool_statistics(), None if run.scoring is None else final_score(run))

    def so_far(self) -> Results[T]:
        done = sorted(self._taken, key=lambda result: result.index)
        return Results(done, self._summary(), self._spec.output_schema, self._page, self._run.gold())

    async def at_end(self) -> Results[T]:
        run = self._run
        spec = self._spec
        taken = self._taken
        asked = None
        summary = replace(self._summary(), promise=await in_thread(lambda: run.promise))
        if (pilot := run.pilot_rows) is not None and pilot.stopped:
            asked = pilot.indexes
            summary = replace(summary, pilot=await outlook_of_run(run, taken))
        rows = with_unfinished(taken, run.plan.spec.inputs, self.statistics(), spec.id_column, asked)
        return Results(rows, summary, spec.output_schema, self._page, run.gold())

    def kept(self, outcome: Results[T]) -> object:
        return outcome


class Party(Protocol):
    """A run and its consumer. ``fail`` raises the error if the consumer cannot handle it."""

    run: Run[Any]

    def take(self, result: AgentResult[Any]) -> None: ...

    def end(self) -> None: ...

    def fail(self, error: BatchAgentError) -> None: ...


async def collect_all(parties: Sequence[Party], others: Sequence[Callable[[], Awaitable[None]]] = ()) -> None:
    """Wait until all runs and ``others`` have ended. The first exception ends all of them, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for party in parties:
                group.create_task(_accompany(party))
            for other in others:
                group.create_task(_await(other))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _accompany(party: Party) -> None:
    try:
        await collect(party.run, party.take)
    except BatchAgentError as error:
        party.fail(error)
    else:
        party.end()


async def _await(other: Callable[[], Awaitable[None]]) -> None:
    await other()
