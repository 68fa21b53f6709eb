"""One call over many prompts: its responses in order, until all are there or the deadline has passed.

With ``dispatch="balanced"`` or ``run_dir=`` the call is a run of the engine, and each answer is a row. The engine
places, moves, records and resumes rows; the pool writes the requests. A row that is recorded is not sent again.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import orjson

from batch_agent.agent.dialogue import Dialogue
from batch_agent.agent.prepare import prepare
from batch_agent.backends.base import Backend, Capabilities, ModelRequest, OnToolCall, Probe
from batch_agent.dispatch.cancellation import first_error
from batch_agent.errors import JobError, RunRejected, RunUnreachable, Timeout, Unavailable
from batch_agent.fleet.backend import Fleet
from batch_agent.job import AgentResult
from batch_agent.messages import JsonObject, Reply, Usage
from batch_agent.run.run import Run
from batch_agent.spec import BatchSpec
from batch_agent.swarm.options import CallOptions, Response

if TYPE_CHECKING:
    from batch_agent.swarm.pool import AgentPool

logger = logging.getLogger("batch_agent")

MODEL = "swarm"  # for the engine; the pool sets the model in its requests

Sink = Callable[[Response], object]


class Scatter:
    """Holds ``n`` responses for each prompt, one after another. ``turn`` returns the agent for a prompt."""

    def __init__(
        self, prompts: int, turn: Callable[[int], int], options: CallOptions, sink: Sink | None = None
    ) -> None:
        self._options = options
        self._turn = turn
        self._sink = sink
        self._found: list[Response | None] = [None] * (prompts * options.n)
        self._reported = False

    async def put(self, index: int, responses: Sequence[Response], first: int = 0) -> None:
        """Store the responses to one prompt, and report them; ``first`` is the number of the first sample."""
        for sample, response in enumerate(responses, start=first):
            response.index = index
            self._found[index * self._options.n + sample] = response
            if self._options.on_result is not None:
                await self._tell(self._options.on_result, response)
            if self._sink is not None:
                self._sink(response)

    async def run(self, work: Iterable[Coroutine[object, object, None]]) -> list[Response]:
        """Run all work at once and return the responses. Unfinished work fails at the deadline."""
        limit, all_work = asyncio.timeout(self._options.deadline), list(work)
        try:
            if len(all_work) == 1 and self._options.deadline is None:  # as for each prompt of a large call
                await all_work[0]
            else:
                async with limit, asyncio.TaskGroup() as tasks:
                    for each in all_work:
                        tasks.create_task(each)
        except TimeoutError:
            if not limit.expired():
                raise
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        for place, response in enumerate(tuple(self._found)):
            if response is None:
                index, sample = divmod(place, self._options.n)
                error = Timeout(f"not finished by the deadline, {self._options.deadline} s")
                agent_index = -1 if self._options.is_balanced else self._turn(index)
                await self.put(index, [Response.failed(error, agent_index)], sample)
        return [response for response in self._found if response is not None]

    async def _tell(self, on_result: Sink, response: Response) -> None:
        """Call the user's function. Its errors are logged once, and fail nothing."""
        try:
            outcome = on_result(response)
            if inspect.isawaitable(outcome):
                await outcome
        except Exception:
            if not self._reported:
                self._reported = True
                logger.exception("on_result raised for prompt %d; further errors are not logged", response.index)


class AskOne(Protocol):
    async def __call__(
        self, agent_index: int, prompt: str, max_tokens: int | None, options: CallOptions, *, once: bool
    ) -> list[Response]: ...


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call as a run. Each prompt has ``options.n`` rows. ``facts`` are what answers depend on beside their rows:
    answers recorded with other facts are not used."""

    pool: AgentPool
    ask: AskOne
    prompts: Sequence[str]
    max_tokens: int | None
    options: CallOptions
    facts: JsonObject

    def home(self, row: int) -> int:
        return self.pool.turn(row // self.options.n)

    async def answer(self, agent_index: int, row: int) -> Response:
        index, sample = divmod(row, self.options.n)
        own, once = self.options.sample(index, sample), self.options.is_balanced  # then the engine retries elsewhere
        (response,) = await self.ask(agent_index, self.prompts[index], self.max_tokens, own, once=once)
        return response

    async def run(self, scatter: Scatter) -> list[Response]:
        return await scatter.run([self._run(scatter)])

    async def _run(self, scatter: Scatter) -> None:
        """Run the rows and put an answer for each."""
        options, n = self.options, self.options.n
        rows = [options.row(prompt, index, sample) for index, prompt in enumerate(self.prompts) for sample in range(n)]
        spec = BatchSpec(
            task="{prompt}",
            inputs=rows,
            backend=self._backend(),
            model=MODEL,
            extra_body={"swarm": self.facts},
            no_hoist=True,
            timeout_per_turn=None,
            affinity=None if options.affinity is None else "affinity",
            hedge=options.hedge,
            run_dir=options.run_dir,
            resume=options.run_dir is not None,
            on_change=None if options.run_dir is None else "resend",  # calls with other options share the directory
        )
        left = set(range(len(rows)))
        why = "the run ended before this prompt finished"
        try:
            async with Run[object](prepare(spec), worker=_answer) as run:
                dispatcher, most = run.shared.dispatcher, self.pool.concurrency
                dispatcher.grow(min(most, dispatcher.scheduler.max_inflight or most))
                async for result in run.results():
                    left.discard(result.index)
                    response = _response(result, -1 if options.is_balanced else self.home(result.index))
                    await scatter.put(result.index // n, [options.read(response)], result.index % n)
        except (RunRejected, RunUnreachable) as error:
            why = str(error)
        for row in sorted(left):
            await scatter.put(row // n, [Response.failed(Unavailable(why))], row % n)

    def _backend(self) -> Backend:
        if not self.options.is_balanced:
            return _Seat(self, None, self.pool.concurrency)
        seats = [_Seat(self, place, self.options.inflight) for place in range(self.pool.size)]
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

    def __init__(self, call: RecordedCall, place: int | None, inflight: int | None) -> None:
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
