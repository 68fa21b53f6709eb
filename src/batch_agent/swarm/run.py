"""A scatter as a run of the engine: for ``dispatch="balanced"``, and for ``run_dir=``.

Each wanted answer is a row. The engine places, moves, records and resumes rows; the pool writes the requests. A row
that is in the record is not asked again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from math import ceil
from typing import Protocol, cast

import orjson

from batch_agent.backends.base import Backend, Capabilities, ModelRequest, OnToolCall, Probe
from batch_agent.engine.agent.context import AgentContext
from batch_agent.engine.run.prepare import prepare
from batch_agent.engine.run.run import Run
from batch_agent.errors import BackendError, JobError, RunRejected, RunUnreachable, Unavailable
from batch_agent.fleet.backend import Fleet
from batch_agent.job import AgentResult
from batch_agent.messages import JsonObject, Reply, Usage
from batch_agent.spec import BatchSpec
from batch_agent.swarm.asking import Asking
from batch_agent.swarm.response import Response
from batch_agent.swarm.scatter import Scatter

MODEL = "swarm"  # for the engine; the pool names the model in its requests
# A server gets its part of a small scatter in so many helpings, so that what a slow one has not begun can go elsewhere.
HELPINGS = 8
SMALLEST, LARGEST = 4, 64  # requests of a helping; for a larger one the engine finds the number


class Seats(Protocol):
    """A pool, as a run sees it."""

    @property
    def size(self) -> int: ...

    def name(self, agent_index: int) -> str:
        """Its address: keys stay with it when other agents come or go."""
        ...

    def home(self, row: int) -> int:
        """Returns the agent whose turn it is."""
        ...

    def ask(self, agent_index: int, row: int) -> Awaitable[Response]: ...

    def knock(self, agent_index: int) -> Awaitable[None]:
        """Raises a BackendError if the agent is unreachable."""
        ...


async def scatter_run(
    seats: Seats, rows: Sequence[JsonObject], facts: JsonObject, asking: Asking, scatter: Scatter
) -> None:
    """Puts an answer for each row; every prompt has ``n`` rows. ``facts`` are what answers depend on beside their rows:
    answers that were recorded with other facts are not used."""
    spec = BatchSpec(
        task="{prompt}",
        inputs=rows,
        backend=_backend(seats, len(rows), asking),
        model=MODEL,
        extra_body={"swarm": facts},
        no_hoist=True,
        timeout_per_turn=None,
        affinity=None if asking.affinity is None else "affinity",
        hedge=asking.hedge,
        run_dir=asking.run_dir,
        resume=asking.run_dir is not None,
    )
    balanced = asking.dispatch == "balanced"
    left = set(range(len(rows)))
    why = "the run ended before this prompt was done"
    try:
        async with Run[object](prepare(spec), worker=_answer) as run:
            async for result in run.results():
                left.discard(result.index)
                response = asking.read(_response(result, -1 if balanced else seats.home(result.index)))
                await scatter.put(result.index // asking.n, [response], result.index % asking.n)
    except (RunRejected, RunUnreachable) as error:
        why = str(error)
    for place in sorted(left):
        await scatter.put(place // asking.n, [Response.failed(Unavailable(why))], place % asking.n)


def _backend(seats: Seats, rows: int, asking: Asking) -> Backend:
    able = Capabilities(streaming=False)
    if asking.dispatch != "balanced":
        return _Seat(seats, None, able)
    helping = asking.inflight
    if helping is None and asking.affinity is None:  # a small number would send keys away from their home
        helping = max(SMALLEST, ceil(rows / seats.size / HELPINGS))
    if helping is not None and (helping < LARGEST or asking.inflight is not None):
        able = Capabilities(streaming=False, default_inflight=helping)
    return Fleet([_Seat(seats, place, able) for place in range(seats.size)], name=f"swarm of {seats.size}")


async def _answer(row: object, context: AgentContext) -> object:
    """Returns the answer with all that came with it, so that a record holds that too."""
    value: object = orjson.loads((await context.ask()).text)
    return value


def _response(result: AgentResult[object], home: int) -> Response:
    if not result.ok:
        return Response.failed(result.error.exception(), home, result.attempts)
    response = Response(True, **cast("dict[str, object]", result.output))  # type: ignore[arg-type]
    response.usage, response.attempts = result.usage, result.attempts
    return response


class _Seat(Backend):
    """One agent as a backend; the engine handles its faults. Without a ``place`` it is all agents: each row goes to its
    own, and what fails there has failed."""

    def __init__(self, seats: Seats, place: int | None, capabilities: Capabilities) -> None:
        self._seats = seats
        self._place = place
        self._capabilities = capabilities

    @property
    def name(self) -> str:
        return f"swarm of {self._seats.size}" if self._place is None else self._seats.name(self._place)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def models(self) -> list[str]:
        return [MODEL]

    async def probe(self, endpoint: str = "") -> Probe:
        if self._place is None:
            return Probe("unknown")
        try:
            await self._seats.knock(self._place)
        except BackendError as error:
            return Probe("down", str(error))
        return Probe("up")

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        place = self._seats.home(request.agent) if self._place is None else self._place
        response = await self._seats.ask(place, request.agent)
        if response.fault is not None:
            raise JobError(str(response.error)) if self._place is None else response.fault
        said = {"text": response.text, "finish_reason": response.finish_reason, "agent_index": place}
        text = orjson.dumps(said | {"latency": response.latency}).decode()
        return Reply(text, usage=response.usage or Usage(), finish_reason=response.finish_reason or "stop")
