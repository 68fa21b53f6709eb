"""Several runs at once, each with a consumer of its results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from batch_agent.errors import BatchAgentError
from batch_agent.job import AgentResult
from batch_agent.run.run import Run


class Party(Protocol):
    """A run and its consumer. ``fail`` raises the error if it cannot handle it."""

    run: Run[Any]

    def take(self, result: AgentResult[Any]) -> None: ...

    def end(self) -> None: ...

    def fail(self, error: BatchAgentError) -> None: ...


async def run_together(parties: Sequence[Party], others: Sequence[Callable[[], Awaitable[None]]] = ()) -> None:
    """Wait until all runs and ``others`` have ended. The first exception ends all, and is raised."""
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
        async with party.run as run:
            async for result in run.results():
                party.take(result)
    except BatchAgentError as error:
        party.fail(error)
    else:
        party.end()


async def _await(other: Callable[[], Awaitable[None]]) -> None:
    await other()
