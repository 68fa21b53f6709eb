"""A user's worker: a function of a row and a context, and the state that all rows of a run share for it.

It is foreign code. Any exception from it fails only its row. A coroutine that ignores its cancellation, or a function
that does not return from its thread, is abandoned after a while and cannot keep the run from ending.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

from batch_agent.agent.agent import Agent, InnerWorker, Tally, tool_loop
from batch_agent.agent.context import AgentContext, AskOptions, BlockingContext
from batch_agent.agent.dialogue import Resources, TurnCall
from batch_agent.agent.fingerprint import fingerprint_of
from batch_agent.agent.prepare import Prepared
from batch_agent.agent.shapes import Shapes, build_shapes
from batch_agent.agent.workplace import Workplaces
from batch_agent.backends.base import Backend, ModelRequest, RequestShape
from batch_agent.blocking import in_thread
from batch_agent.compiler.prices import Prices, find_prices
from batch_agent.compiler.schema import OutputSchema
from batch_agent.dispatch.cancellation import worker_boundary
from batch_agent.dispatch.dispatcher import ModelCall
from batch_agent.dispatch.spending import Spending
from batch_agent.errors import InputError, Invalid, OutputError, SpecError, WorkerFailed
from batch_agent.foreign import boundary, describe, is_async
from batch_agent.gateway.client_request import ClientRequest
from batch_agent.gateway.live import LiveAnswer
from batch_agent.messages import Conversation, Reply
from batch_agent.outputs.validate import parse_output
from batch_agent.record.address import directory_of
from batch_agent.scheduler.ordering import FIRST, AgentForecast
from batch_agent.spec import BatchSpec
from batch_agent.tools.base import resolve_tools
from batch_agent.tools.context import ModelKey, ToolContext
from batch_agent.tools.pool import ToolPool

if TYPE_CHECKING:
    from batch_agent.gateway.gateway import Gateway

C = TypeVar("C")
AgentWorker: TypeAlias = "InnerWorker | UserWorker"
logger = logging.getLogger("batch_agent")
Returned: TypeAlias = tuple[object, BaseException | None]  # its return value, or its exception
ENDING_SECONDS = 5.0  # time for a cancelled worker to end
STUCK = 256  # abandoned functions that still run in their threads; above that, no more are started
SHAPES = 256  # number of kinds of request that are cached
NOT_JSON = (
    "the return value of the worker is not JSON: {reason}. Return text, numbers, lists and mappings, or give "
    "output_schema a class and return an instance of it"
)


@dataclass(frozen=True, slots=True)
class AskShapes:
    """How to send a request: its kinds, and the schema of the answer."""

    shapes: Shapes
    schema: OutputSchema[object] | None
    given: object  # the schema as the user gave it; holding it here keeps its id unique


class UserWorker:
    """The user's worker of a run. ``places`` are the directories of its rows; ``gateway`` serves the programs that rows
    start."""

    def __init__(
        self, function: Callable[..., Any], prepared: Prepared, gateway: Gateway, spending: Spending | None = None
    ) -> None:
        self.gateway = gateway
        directory = directory_of(prepared.spec.run_dir)
        self.places = Workplaces(directory)
        self.fingerprint = fingerprint_of(prepared).hex()
        self._function = function
        self._prepared = prepared
        self._spending = spending
        self._tools = {tool.name: tool for tool in prepared.tools}
        self._shapes: dict[object, AskShapes] = {}
        self._client_shapes: dict[bytes, tuple[RequestShape, RequestShape]] = {}
        self._stuck = 0

    # Its row

    async def run(self, agent: Agent) -> object:
        """Return the worker's output for a row. Raises JobError."""
        return await bounded(self._run)(agent.job.input, agent)

    async def _run(self, row: object, agent: Agent) -> object:
        """Run the worker in a task. A task that ignores its cancellation is abandoned."""
        run = self._run_here if is_async(self._function) else self._run_in_thread
        task = asyncio.get_running_loop().create_task(run(row, agent))
        try:
            await agent.wait_for(task)
        except BaseException:
            task.cancel()
            await agent.close()  # else it would wait for its requests
            _, stuck = await asyncio.wait([task], timeout=ENDING_SECONDS)
            if stuck:
                logger.warning("the worker of row %d does not stop when it is cancelled", agent.job.index)
                asyncio._unregister_task(task)  # else asyncio.run would wait for it forever
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # reported above
            raise
        returned, error = task.result()
        if error is not None:
            raise error
        return returned

    async def _run_here(self, row: object, agent: Agent) -> Returned:
        """Return the worker's result or exception. A SystemExit must not escape from a task."""
        try:
            return await self._function(row, AgentContext(agent)), None
        except BaseException as error:  # noqa: BLE001
            return None, error

    async def _run_in_thread(self, row: object, agent: Agent) -> Returned:
        if self._stuck >= STUCK:
            return None, WorkerFailed(f"not started: {self._stuck} abandoned workers are still running")
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        given_up = False

        def ended() -> None:
            self._stuck -= given_up

        def call() -> Returned:
            try:
                return context.run(self._function, row, BlockingContext(agent, loop)), None
            except BaseException as error:  # noqa: BLE001
                return None, error
            finally:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(ended)

        try:
            returned, error = await in_thread(call)
        except asyncio.CancelledError:
            given_up = True
            self._stuck = self._stuck + 1
            raise
        if inspect.iscoroutine(returned):
            returned.close()
            error = WorkerFailed("the worker returned a coroutine: make it an async def")
        return returned, error

    def written(self, returned: object) -> tuple[str, object, bool]:
        """Return the output as JSON, the output, and whether its JSON was repaired."""
        return write_output(returned, self._prepared.schema)

    def read(self, output: str) -> object:
        return read_output(output, self._prepared.schema)

    # Its requests

    @property
    def model(self) -> str:
        return self._prepared.model or ""

    def admit(self, agent: Agent) -> str:
        """Return a new API key of the row at the gateway."""
        return self.gateway.admit(GatewayRow(agent, self, self._prepared.backend))

    @property
    def tool_names(self) -> tuple[str, ...]:
        """The tools of the run."""
        return tuple(tool.name for tool in self._prepared.tools)

    def asking(self, tools: Sequence[object], output_schema: object, options: AskOptions, pool: ToolPool) -> AskShapes:
        """Return the kinds of request for these options; the defaults are those of the run. Equal options return the
        same object, because backends cache what they derive from a shape. ``pool`` gets tools that it does not have."""
        names = tuple(self._find_tool(tool, pool) for tool in tools)
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        key = (names, id(output_schema), json.dumps(given, sort_keys=True, default=str))
        known = self._shapes.get(key)
        if known is None:
            if len(self._shapes) >= SHAPES:
                self._shapes.clear()
            known = self._shapes[key] = self._new_shapes(names, output_schema, given)
        return known

    def _new_shapes(self, names: Sequence[str], output_schema: object, given: Mapping[str, Any]) -> AskShapes:
        prepared, backend = self._prepared, self._prepared.backend
        model = str(given.get("model") or prepared.model or "")
        extra = {**prepared.spec.extra_body, **given.get("extra_body", {})}
        for name in given.keys() - AskOptions.__annotations__.keys():
            raise SpecError(f"ask has no option {name!r}; it has {', '.join(AskOptions.__annotations__)}")
        changed = {"tool_choice": None, **given, "extra_body": extra}
        BatchSpec(task="-", inputs=(), **changed)  # raises SpecError for an invalid value
        schema = OutputSchema.of(output_schema)
        specs = tuple(self._tools[name].spec for name in names)
        shapes = build_shapes(prepared.spec.model_copy(update=changed), model, specs, schema, backend.capabilities)
        every = {shapes.first, shapes.later, shapes.repair}
        for shape in every:
            backend.check(shape)
        if self._spending is not None:
            self._spending.set_terms(every, prices_of(self._prepared, model), backend)
        return AskShapes(shapes, schema, output_schema)

    def client_shapes(self, request: ClientRequest) -> tuple[RequestShape, RequestShape]:
        """Return two shapes for a client's request: the one under which it is recorded, and the one that is sent, which
        is a part of the first. Equal requests get the same objects, as in ``asking``. The backend checks a shape when
        it is sent."""
        shapes = self._client_shapes.get(request.head)
        if shapes is None:
            if len(self._client_shapes) >= SHAPES:
                self._client_shapes.clear()
            if self._spending is not None:
                self._spending.set_terms(
                    (request.shape,), prices_of(self._prepared, request.shape.model), self._prepared.backend
                )
            asked = replace(request.shape, extra_body={"client": request.head.hex()})
            shapes = self._client_shapes[request.head] = asked, request.shape
        return shapes

    def _find_tool(self, tool: object, pool: ToolPool) -> str:
        """Return the name of a tool. A function or a Tool that the run does not have is added to the pool."""
        if isinstance(tool, str):
            if tool not in self._tools:
                there = ", ".join(self._tools) or "none"
                raise InputError(f"{tool} is not a tool of this run: give the tool itself. Its tools are: {there}")
            return tool
        for known in self._tools.values():
            if known is tool or known.function is tool:
                return known.name
        (new,) = resolve_tools([tool])
        if new.name in self._tools:
            raise InputError(
                f"the run has another tool called {new.name}: give this one another name, or define it once, outside "
                "of the worker"
            )
        pool.add(new)
        self._tools[new.name] = new
        return new.name


class GatewayRow:
    """A row as the gateway uses it: requests of the row's clients become requests of the row."""

    def __init__(self, agent: Agent, worker: UserWorker, backend: Backend) -> None:
        self._agent = agent
        self._worker = worker
        self._backend = backend

    @property
    def model(self) -> str:
        return self._worker.model

    @property
    def wires(self) -> frozenset[str]:
        return self._backend.wires

    async def models(self) -> Sequence[str]:
        return await self._backend.models()

    async def answer(self, request: ClientRequest, live: LiveAnswer | None = None) -> Reply:
        asked, sent = self._worker.client_shapes(request)

        def send(question: ModelRequest) -> ModelCall:
            question.shape, question.client = sent, request.client_body
            return client_call(self._agent.r, question, live)

        return await self._agent.answer(asked, Conversation(request.messages), send=send)


def client_call(r: Resources, question: ModelRequest, live: LiveAnswer | None) -> ModelCall:
    """Return a client's request as a call. ``live`` follows the answer if it is streamed. With hedging nothing is
    streamed, because either of two requests may be answered first."""
    if live is None or r.policy.hedge is not None or not r.backend.capabilities.streaming:
        return ModelCall(r.backend, question)
    live.follow(question)
    return ModelCall(r.backend, question, lambda call: None)  # so that the backend streams


class CallRow:
    """A tool call as the gateway uses it. Its requests have the run's slots, rate limits and budget, and belong to no
    conversation: the record has the result of the call."""

    def __init__(self, r: Resources, prepared: Prepared, spending: Spending, index: int, job_id: str) -> None:
        self._r = r
        self._prepared = prepared
        self._spending = spending
        self._index = index
        self._job_id = job_id

    @property
    def model(self) -> str:
        return self._prepared.model or ""

    @property
    def wires(self) -> frozenset[str]:
        return self._r.backend.wires

    async def models(self) -> Sequence[str]:
        return await self._r.backend.models()

    async def answer(self, request: ClientRequest, live: LiveAnswer | None = None) -> Reply:
        r, shape = self._r, request.shape
        self._spending.set_terms((shape,), prices_of(self._prepared, shape.model), r.backend)
        question = ModelRequest(
            shape,
            Conversation(request.messages),
            self._job_id,
            agent=self._index,
            run=r.run,
            client=request.client_body,
        )
        tally = Tally(r.emit.metrics.agent(r.run, self._index))
        call = client_call(r, question, live)
        turn = TurnCall(r, question, self._index, tally, None, None)
        progress = AgentForecast(FIRST, model=shape.model)  # a started row waits for the answer
        ticket = r.dispatcher.slots.claim(progress, FIRST)
        return await r.dispatcher.ask(call, r.policy, ticket=ticket, observer=turn)


class RunModels:
    """Keys for the programs that tools start. The gateway opens with the first key."""

    def __init__(self, r: Resources, prepared: Prepared, spending: Spending) -> None:
        self._r = r
        self._prepared = prepared
        self._spending = spending
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._gateway: Gateway | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    @asynccontextmanager
    async def opened(self, context: ToolContext) -> AsyncIterator[ModelKey]:
        async with self._opening:
            if self._gateway is None:
                from batch_agent.gateway.gateway import Gateway  # it includes an HTTP server

                self._gateway = await self._stack.enter_async_context(Gateway())
        gateway = self._gateway
        row = CallRow(self._r, self._prepared, self._spending, context.index, context.job_id)
        key = gateway.admit(row)
        try:
            yield ModelKey(f"{gateway.url}/v1", key, gateway.env(key), row.model)
        finally:
            gateway.dismiss(key)


def prices_of(prepared: Prepared, model: str) -> Prices | None:
    """Return the prices of a model at the run's backend. Raises SpecError if they are unknown and max_cost is set."""
    if model == prepared.model or prepared.spec.prices is not None:
        return prepared.prices
    prices = find_prices(None, model=model, backend=prepared.backend.name)
    if prices is None and prepared.spec.max_cost is not None:
        raise SpecError(f"max_cost: no price of {model} at {prepared.backend.name} is known; give prices")
    return None if prices is None else prices.times(prepared.backend.capabilities.price)


def bounded(worker: Callable[[object, C], Awaitable[object]]) -> Callable[[object, C], Awaitable[object]]:
    """Return the worker with its exceptions converted, so that any of them fails only its row."""

    async def work(row: object, context: C) -> object:
        with worker_boundary("the worker failed:"):
            return await worker(row, context)

    return work


def write_output(returned: object, schema: OutputSchema[object] | None) -> tuple[str, object, bool]:
    """Return the output of a row as JSON text, the output itself, and whether its JSON was repaired. ``returned`` is
    what the worker has returned; a schema validates it. The output is read back from the JSON also the first time, so a
    resumed row has the same output."""
    if schema is None:
        text = _to_text(returned)
        return text, json.loads(text), False
    value, repaired = _valid(returned, schema)
    with boundary(lambda raised: Invalid(f"the output cannot be written as JSON: {raised}")):  # the user's serializers
        plain = schema.to_plain(value)
    text = _to_text(plain)
    return text, schema.read_back(text), repaired


def read_output(text: str, schema: OutputSchema[object] | None) -> object:
    """Return a recorded output. Raises Invalid if the schema no longer accepts it."""
    return json.loads(text) if schema is None else schema.read_written(text)


def _valid(returned: object, schema: OutputSchema[object]) -> tuple[object, bool]:
    """Return an instance, a mapping or JSON text as a value of the schema, and whether its JSON was repaired."""
    if not isinstance(returned, str):
        return schema.validate_python(returned), False
    try:
        parsed = parse_output(returned, schema)
    except OutputError:
        if not schema.is_scalar:
            raise
        return schema.validate_python(returned), False
    return parsed.value, parsed.repaired


def _to_text(value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise WorkerFailed(NOT_JSON.format(reason=describe(error))) from None


@asynccontextmanager
async def open_worker(prepared: Prepared, inner: InnerWorker | None, spending: Spending) -> AsyncIterator[AgentWorker]:
    """Yield the worker of a run: the user's worker, a built-in one (``inner``), or the tool loop."""
    if prepared.spec.worker is None:
        yield tool_loop if inner is None else bounded(inner)
        return
    from batch_agent.gateway.gateway import Gateway  # it includes an HTTP server, which other runs do not need

    async with Gateway() as gateway:
        yield UserWorker(prepared.spec.worker, prepared, gateway, spending)
