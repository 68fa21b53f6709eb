"""A call as a run of the engine: for ``dispatch="balanced"``, and for ``run_dir=``.

Each answer is a row. The engine places, moves, records and resumes rows; the pool writes the requests. A row that is
already recorded is not sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import orjson

from batch_agent.agent.dialogue import Dialogue
from batch_agent.agent.prepare import prepare
from batch_agent.backends.base import Backend, Capabilities, ModelRequest, OnToolCall, Probe
from batch_agent.errors import JobError, RunRejected, RunUnreachable, Unavailable
from batch_agent.fleet.backend import Fleet
from batch_agent.job import AgentResult
from batch_agent.messages import JsonObject, Reply, Usage
from batch_agent.run.run import Run
from batch_agent.spec import BatchSpec
from batch_agent.swarm.asking import Asking
from batch_agent.swarm.response import Response
from batch_agent.swarm.scatter import Scatter

if TYPE_CHECKING:
    from batch_agent.swarm.pool import AgentPool

MODEL = "swarm"  # for the engine; the pool sets the model in its requests


class AskOne(Protocol):
    async def __call__(
        self, agent_index: int, prompt: str, max_tokens: int | None, asking: Asking, *, once: bool
    ) -> list[Response]: ...


@dataclass(frozen=True, slots=True)
class Call:
    """One call over many prompts. Each prompt has ``asking.n`` rows. ``facts`` are what answers depend on beside their
    rows: answers recorded with other facts are not used."""

    pool: AgentPool
    ask: AskOne
    prompts: Sequence[str]
    max_tokens: int | None
    asking: Asking
    facts: JsonObject

    @property
    def is_balanced(self) -> bool:
        return self.asking.dispatch == "balanced"

    def home(self, row: int) -> int:
        return self.pool.turn(row // self.asking.n)

    async def answer(self, agent_index: int, row: int) -> Response:
        index, sample = divmod(row, self.asking.n)
        own = self.asking.sample(index, sample)
        once = self.is_balanced  # then the engine retries, at another server
        (response,) = await self.ask(agent_index, self.prompts[index], self.max_tokens, own, once=once)
        return response

    async def run(self, scatter: Scatter) -> None:
        """Run the rows and put an answer for each."""
        asking, n = self.asking, self.asking.n
        rows = [asking.row(prompt, index, sample) for index, prompt in enumerate(self.prompts) for sample in range(n)]
        spec = BatchSpec(
            task="{prompt}",
            inputs=rows,
            backend=self._backend(),
            model=MODEL,
            extra_body={"swarm": self.facts},
            no_hoist=True,
            timeout_per_turn=None,
            affinity=None if asking.affinity is None else "affinity",
            hedge=asking.hedge,
            run_dir=asking.run_dir,
            resume=asking.run_dir is not None,
        )
        left = set(range(len(rows)))
        why = "the run ended before this prompt finished"
        try:
            async with Run[object](prepare(spec), worker=_answer) as run:
                dispatcher, most = run.shared.dispatcher, self.pool.concurrency
                dispatcher.grow(min(most, dispatcher.scheduler.max_inflight or most))
                async for result in run.results():
                    left.discard(result.index)
                    response = _response(result, -1 if self.is_balanced else self.home(result.index))
                    await scatter.put(result.index // n, [asking.read(response)], result.index % n)
        except (RunRejected, RunUnreachable) as error:
            why = str(error)
        for row in sorted(left):
            await scatter.put(row // n, [Response.failed(Unavailable(why))], row % n)

    def _backend(self) -> Backend:
        if not self.is_balanced:
            return _Seat(self, None, self.pool.concurrency)
        seats = [_Seat(self, place, self.asking.inflight) for place in range(self.pool.size)]
        return Fleet(seats, name=f"swarm of {len(seats)}")


async def _answer(row: object, context: Dialogue) -> object:
    """Return the answer with all its details, so that the record has them too."""
    value: object = orjson.loads((await context.ask()).text)
    return value


def _response(result: AgentResult[object], home: int) -> Response:
    if not result.ok:
        return Response.failed(result.error.exception(), home, result.attempts)
    response = Response(True, **cast("dict[str, object]", result.output))  # type: ignore[arg-type]
    response.usage, response.attempts = result.usage, result.attempts
    return response


class _Seat(Backend):
    """One agent as a backend; the engine handles its failures. Without a ``place`` it stands for all agents: each row
    goes to its own agent, and a failure there is final."""

    def __init__(self, call: Call, place: int | None, inflight: int | None) -> None:
        self._call, self._place = call, place
        self._capabilities = Capabilities(streaming=False, default_inflight=inflight)

    @property
    def name(self) -> str:
        """Return the agent's address: keys stay with it when other agents join or leave."""
        pool = self._call.pool
        return f"swarm of {pool.size}" if self._place is None else pool.url(self._place)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def models(self) -> list[str]:
        return [MODEL]

    async def probe(self, endpoint: str = "") -> Probe:
        return Probe("unknown") if self._place is None else await self._call.pool.probe(self._place)

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        place = self._call.home(request.agent) if self._place is None else self._place
        response = await self._call.answer(place, request.agent)
        if response.fault is not None:
            raise JobError(str(response.error)) if self._place is None else response.fault
        said = {"text": response.text, "finish_reason": response.finish_reason, "agent_index": place}
        text = orjson.dumps(said | {"latency": response.latency}).decode()
        return Reply(text, usage=response.usage or Usage(), finish_reason=response.finish_reason or "stop")
