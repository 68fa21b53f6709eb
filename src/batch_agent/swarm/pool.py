"""AgentPool: sends prompts to many servers that answer ``/generate``.

Prompt i goes to agent i mod size, and responses are in the order of the prompts. Options (``options.SwarmOptions``)
change this for one call or for the pool. With ``dispatch="balanced"`` or ``run_dir=`` a call is a run of the engine,
and each answer is a row: the engine places, moves, records and resumes rows, and the pool writes the requests.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Unpack, cast

import orjson

from batch_agent.agent.dialogue import Dialogue
from batch_agent.agent.prepare import prepare
from batch_agent.backends.base import Backend, Capabilities, ModelRequest, OnToolCall, Probe
from batch_agent.dispatch.cancellation import first_error
from batch_agent.errors import BackendError, JobError, RunRejected, RunUnreachable, SpecError, Timeout, Unavailable
from batch_agent.fleet.backend import Fleet
from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.job import AgentResult
from batch_agent.messages import JsonObject, Reply, Usage
from batch_agent.run.run import Run
from batch_agent.spec import BatchSpec
from batch_agent.swarm.options import CallOptions, Response, SwarmOptions, texts_of
from batch_agent.swarm.servers import CHAT, GENERATE, Form, Members, Servers, read_answers

__all__ = ["AgentPool", "Response"]

logger = logging.getLogger("batch_agent")

MODEL = "swarm"  # for the engine; the pool sets the model in its requests

Sink = Callable[[Response], object]


class PoolCall:
    """One call of a pool. It holds ``n`` responses for each prompt, one after another; ``sink`` gets each response when
    it arrives. If the call is a run, each response is a row, and recorded answers with other ``facts`` of the pool are
    not used."""

    def __init__(
        self, pool: AgentPool, prompts: Sequence[str], options: CallOptions, form: Form, sink: Sink | None = None
    ) -> None:
        options.check_lengths(len(prompts))
        self.pool = pool
        self._prompts = prompts
        self._options = options
        self._form = form
        self._sink = sink
        self._found: list[Response | None] = [None] * (len(prompts) * options.n)
        self._reported = False

    def home(self, row: int) -> int:
        """Return the agent to which the row goes; -1 for a balanced call, in which the engine chooses."""
        return -1 if self._options.is_balanced else self.pool.turn(row // self._options.n)

    async def put(self, row: int, responses: Iterable[Response]) -> None:
        """Store responses in this row and the following ones, and report them."""
        for place, response in enumerate(responses, start=row):
            response.index = place // self._options.n
            self._found[place] = response
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
                error = Timeout(f"not finished by the deadline, {self._options.deadline} s")
                await self.put(place, [Response.failed(error, self.home(place))])
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

    async def recorded(self) -> None:
        """Run the rows, and store an answer for each."""
        options, samples = self._options, range(self._options.n)
        spec = BatchSpec(
            task="{prompt}",
            inputs=[options.row(prompt, index, each) for index, prompt in enumerate(self._prompts) for each in samples],
            backend=self._backend(),
            model=MODEL,
            extra_body={"swarm": self.pool.facts(self._form, options)},
            no_hoist=True,
            timeout_per_turn=None,
            affinity=None if options.affinity is None else "affinity",
            hedge=options.hedge,
            run_dir=options.run_dir,
            resume=options.run_dir is not None,
            on_change=None if options.run_dir is None else "resend",  # calls with other options share the directory
        )
        why = "the run ended before this prompt finished"
        try:
            async with Run[object](prepare(spec), worker=_answer) as run:
                dispatcher, most = run.shared.dispatcher, self.pool.concurrency
                dispatcher.grow(min(most, dispatcher.scheduler.max_inflight or most))
                async for result in run.results():
                    response = _response(result, self.home(result.index))
                    await self.put(result.index, [options.read(response)])
        except (RunRejected, RunUnreachable) as error:
            why = str(error)
        for row, found in enumerate(tuple(self._found)):
            if found is None:
                await self.put(row, [Response.failed(Unavailable(why))])

    def _backend(self) -> Backend:
        if not self._options.is_balanced:
            return _Seat(self, None, self.pool.concurrency)
        seats = [_Seat(self, place, self._options.inflight) for place in range(self.pool.size)]
        return Fleet(seats, name=f"swarm of {len(seats)}")

    async def ask(self, agent_index: int, row: int) -> Response:
        """Return one answer. In a balanced call the request is sent once, because the engine retries at another
        agent."""
        index, sample = divmod(row, self._options.n)
        own, once = self._options.sample(index, sample), self._options.is_balanced
        (response,) = await self.pool.ask(agent_index, self._prompts[index], own, self._form, once=once)
        return response


class AgentPool(Members):
    """``concurrency`` limits the requests of the pool and all its sub-pools, ``connector_limit`` their connections;
    ``timeout`` is the seconds for one request, from when it is sent."""

    form = GENERATE  # of a single prompt
    answer_tokens: int | None = None  # token limit of an answer; None if the wire has none
    aggregation_tokens: int | None = None  # token limit of an answer that summarises others

    def __init__(
        self,
        endpoints: Sequence[AgentEndpoint | tuple[str, int]],
        concurrency: int = 512,
        connector_limit: int = 1024,
        timeout: float = 120.0,
        *,
        api_key: str | None = None,
        **options: Unpack[SwarmOptions],
    ) -> None:
        super().__init__(endpoints, Servers(concurrency, connector_limit, api_key), timeout)
        self._options = CallOptions().having(options)

    async def post(
        self, agent_index: int, prompt: str, max_tokens: int | None = None, **options: Unpack[SwarmOptions]
    ) -> Response:
        """Send one prompt to one agent. All other calls use this one, so that a subclass may override it."""
        if options.get("n", 1) != 1:
            raise SpecError("post returns one answer: n is for calls that return a list")
        asked = replace(self._options, n=1).having(options, max_tokens)
        call = PoolCall(self, texts_of([prompt]), asked, self.form)

        async def answer() -> None:
            await call.put(0, await self.ask(agent_index, prompt, asked.alone(0), self.form))

        (response,) = await call.run([answer()])
        response.agent_index = agent_index
        return response

    async def send_all(
        self, prompts: Sequence[str], max_tokens: int | None = None, **options: Unpack[SwarmOptions]
    ) -> list[Response]:
        """Send all prompts at once, prompt i to agent i mod size. Returns the responses in the order of the prompts."""
        return await self._send_all(prompts, max_tokens, options)

    send_all_batched = send_all  # ``/generate`` takes one prompt

    async def broadcast_prompt(
        self, prompt: str, max_tokens: int | None = None, **options: Unpack[SwarmOptions]
    ) -> list[Response]:
        """Send the prompt to every agent once."""
        placed: SwarmOptions = {**options, "dispatch": "round_robin", "affinity": None, "hedge": None, "inflight": None}
        return await self._send_all([prompt] * self.size, max_tokens, placed)

    async def as_completed(
        self, prompts: Sequence[str], max_tokens: int | None = None, **options: Unpack[SwarmOptions]
    ) -> AsyncGenerator[Response, None]:
        """Yield the responses of ``send_all`` as they arrive, with ``index``. Leaving the loop cancels the rest."""
        ready: asyncio.Queue[Response | None] = asyncio.Queue()
        task = asyncio.get_running_loop().create_task(self._send_all(prompts, max_tokens, options, ready.put_nowait))
        task.add_done_callback(lambda _: ready.put_nowait(None))
        try:
            while (response := await ready.get()) is not None:
                yield response
            await task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])

    async def _send_all(
        self, prompts: Sequence[str], max_tokens: int | None, given: SwarmOptions, sink: Sink | None = None
    ) -> list[Response]:
        options, prompts = self._options.having(given, max_tokens), texts_of(prompts)
        if not prompts:
            return []
        call = PoolCall(self, prompts, options, self.form, sink)
        if options.runs and self.size:
            return await call.run([call.recorded()])
        return await call.run(self._one(call, index, prompt, options) for index, prompt in enumerate(prompts))

    async def _one(self, call: PoolCall, index: int, prompt: str, options: CallOptions) -> None:
        agent_index, own = self.turn(index), options.alone(index)
        if options.n > 1:
            responses = await self.ask(agent_index, prompt, own, self.form)
        else:  # a subclass may accept neither a token limit nor options
            tokens = [] if own.max_tokens is None else [own.max_tokens]
            responses = [await self.post(agent_index, prompt, *tokens, **own.as_keywords())]
        await call.put(index * options.n, responses)

    async def ask(
        self, agent_index: int, prompt: str, options: CallOptions, form: Form, *, once: bool = False
    ) -> list[Response]:
        """Return ``options.n`` answers to one prompt, over this pool's wire."""
        try:
            (tokens,) = await self._token_limits(agent_index, [prompt], options)
        except BackendError as error:
            return [Response.failed(error, agent_index) for _ in range(options.n)]
        server = self._servers[agent_index]
        body = self._body(form, [prompt], replace(options, max_tokens=tokens))
        limit = self.timeout if form is CHAT else self._list_limit(1)
        requests = options.n if form is GENERATE else 1  # each of which gives one answer
        asking = [self._net.ask(server, form.path, body, limit, once=once) for _ in range(requests)]
        exchanges = await asyncio.gather(*asking)
        read = (read_answers(each, agent_index, [prompt], options.n // requests, form) for each in exchanges)
        return [options.read(response) for responses in read for response in responses]

    # What another wire does in another way

    async def _token_limits(
        self, agent_index: int, prompts: Sequence[str], options: CallOptions
    ) -> Sequence[int | None]:
        """Return how many tokens each answer may have. Raises BackendError if there is no such agent."""
        if options.is_chat:
            raise SpecError("/generate supports neither chat nor a system prompt: use a VLLMPool")
        if missing := self._missing(agent_index):
            raise missing
        return [None] * len(prompts)

    def _body(self, form: Form, prompts: Sequence[str], options: CallOptions) -> JsonObject:
        return {form.field: form.write(prompts, None), **replace(options, n=1).fields()}

    def _list_limit(self, prompts: int) -> float:
        """Return the time limit in seconds of a request with this number of prompts."""
        return self.timeout

    def facts(self, form: Form, options: CallOptions) -> JsonObject:
        """Return what an answer depends on, apart from its prompt and its seed."""
        return {"path": form.path, **replace(options, seed=None).fields()}


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

    def __init__(self, call: PoolCall, place: int | None, inflight: int | None) -> None:
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
        response = await self._call.ask(place, request.agent)
        if response.fault is not None:
            raise JobError(str(response.error)) if self._place is None else response.fault
        said = {"text": response.text, "finish_reason": response.finish_reason, "agent_index": place}
        text = orjson.dumps(said | {"latency": response.latency}).decode()
        return Reply(text, usage=response.usage or Usage(), finish_reason=response.finish_reason or "stop")
