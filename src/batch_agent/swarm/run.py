"""A scatter as a run of the engine: for ``dispatch="balanced"``, and for ``run_dir=``.

Each answer that is wanted is a row. Where it goes, what becomes of it when its server dies, what is recorded and what a
resumed call finds again is the engine's part; the words on the wire are the pool's own. A row that the record has is
not asked again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, cast

import orjson

from batch_agent.backends.base import Capabilities, ModelRequest, OnToolCall, RequestShape
from batch_agent.engine.context import AgentContext
from batch_agent.engine.prepare import prepare
from batch_agent.engine.run import Run
from batch_agent.errors import JobError, RunRejected, RunUnreachable, Unavailable
from batch_agent.job import AgentResult
from batch_agent.messages import JsonObject, Reply, Usage
from batch_agent.spec import BatchSpec
from batch_agent.swarm.asking import Asking
from batch_agent.swarm.response import Response
from batch_agent.swarm.scatter import Scatter

PER_ENDPOINT = 16  # requests in flight at each, where the engine knows no better

Ask = Callable[[int, int], Awaitable[Response]]
"""An agent and a row in, the answer out."""


async def scatter_run(
    ask: Ask, endpoints: Sequence[str], rows: Sequence[JsonObject], facts: JsonObject, asking: Asking, scatter: Scatter
) -> None:
    """Puts an answer for each row, of which every prompt has ``n``. ``facts`` are what answers depend on beside their
    rows: one that was recorded under others is not taken for one of these."""
    backend = _Placed(ask, endpoints, balanced=asking.dispatch == "balanced")
    spec = BatchSpec(
        task="{prompt}",
        inputs=rows,
        backend=backend,
        model="swarm",
        extra_body={"swarm": facts},
        no_hoist=True,
        timeout_per_turn=None,
        run_dir=asking.run_dir,
        resume=asking.run_dir is not None,
    )
    left = set(range(len(rows)))
    why = "the run ended before this prompt was done"
    try:
        async with Run[object](prepare(spec), worker=_answer) as run:
            async for result in run.results():
                left.discard(result.index)
                response = asking.read(backend.response(result))
                await scatter.put(result.index // asking.n, [response], result.index % asking.n)
    except (RunRejected, RunUnreachable) as error:
        why = str(error)
    for place in sorted(left):
        await scatter.put(place // asking.n, [Response.failed(Unavailable(why))], place % asking.n)


async def _answer(row: object, context: AgentContext) -> object:
    """The one turn of a row. What came with the answer is part of it, so that a record holds it too."""
    value: object = orjson.loads((await context.ask()).text)
    return value


class _Placed:
    """A pool's servers as a backend. Balanced, a row goes where the engine says, and a fault is the engine's to see to;
    else it goes where its number says, and what fails there has failed."""

    def __init__(self, ask: Ask, endpoints: Sequence[str], *, balanced: bool) -> None:
        names = tuple(f"{place} {url}" for place, url in enumerate(endpoints))  # two agents may have one address
        self._ask = ask
        self._size = len(endpoints)
        self._places = {name: place for place, name in enumerate(names)} if balanced else {}
        self._asked: dict[int, int] = {}  # by row, the agent that was asked last
        self._capabilities = Capabilities(
            streaming=False,
            default_inflight=PER_ENDPOINT * self._size,
            endpoints=names if balanced else ("",),
        )

    @property
    def name(self) -> str:
        return f"swarm://{self._size}"

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass  # the connections are the pool's

    def check(self, shape: RequestShape) -> None:
        pass  # the pool checks what it is asked for

    async def models(self) -> list[str]:
        return ["swarm"]

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        place = self._places.get(request.endpoint, request.agent % self._size)
        self._asked[request.agent] = place
        response = await self._ask(place, request.agent)
        if response.fault is not None:
            raise response.fault if self._places else JobError(str(response.error))
        said = {"text": response.text, "finish_reason": response.finish_reason, "agent_index": place}
        text = orjson.dumps(said | {"latency": response.latency}).decode()
        return Reply(text, usage=response.usage or Usage(), finish_reason=response.finish_reason or "stop")

    def response(self, result: AgentResult[object]) -> Response:
        if not result.ok:
            response = Response.failed(result.error.exception(), self._asked.get(result.index, -1), result.attempts)
            return response
        response = Response(True, **cast("dict[str, object]", result.output))  # type: ignore[arg-type]
        response.usage, response.attempts = result.usage, result.attempts
        return response
