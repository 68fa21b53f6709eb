"""SimulatedBackend: the simulated engine as a Backend, in this process and without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Self
from weakref import WeakKeyDictionary

from batch_agent.backends.address import Address
from batch_agent.backends.base import Backend, Capabilities, Load, ModelRequest, OnToolCall, Probe, RequestShape
from batch_agent.backends.engines.pin_orders import PinOrders
from batch_agent.backends.http.wire import CallIds
from batch_agent.backends.simulated.answers import SimulatedAnswer, chat_answer
from batch_agent.backends.simulated.core import Sequence, SimulatedEngine, SimulatedStep
from batch_agent.backends.simulated.model import EngineModel
from batch_agent.backends.simulated.tokens import PromptView, chat_prompt, encode_tools
from batch_agent.errors import Rejected, Truncated
from batch_agent.messages import Reply, Usage
from batch_agent.vllm_pin import Order

OnToken = Callable[[Sequence], None]


class EngineRunner:
    """Runs the engine over time: one step after another on the event loop's clock, as callbacks, without a task. It
    serves any number of callers of one event loop at a time.

    The results of a step appear when its seconds have passed. So under a virtual clock simulated hours take only their
    computing time.
    """

    def __init__(self, model: EngineModel) -> None:
        self.engine = SimulatedEngine(model)
        self._listeners: dict[Sequence, OnToken] = {}
        self._timer: asyncio.Handle | None = None

    def start(
        self, work: Many[tuple[bytes, bytes]], on_token: OnToken, priority: int = 0, order: Order | None = None
    ) -> list[Sequence]:
        """Queue (prompt, output) pairs, all or none, and report each of their tokens. Raises what a refusing server
        would answer. The caller must ``abort`` what it started."""
        self.engine.now = asyncio.get_running_loop().time()
        for prompt, output in work:
            self.engine.check(prompt, output, len(work))
        sequences = [self.engine.add(prompt, output, priority, order) for prompt, output in work]
        for sequence in sequences:
            self._listeners[sequence] = on_token
        if self._timer is None:
            # Not at once: requests that arrive in the same iteration of the loop share their first step.
            self._timer = asyncio.get_running_loop().call_soon(self._next_step)
        return sequences

    def abort(self, sequences: Many[Sequence]) -> None:
        """Abort unfinished sequences; the rest of the batch continues."""
        for sequence in sequences:
            self.engine.abort(sequence)
            self._listeners.pop(sequence, None)

    def close(self) -> None:
        """Drop the running step. The cache stays warm for the next user, possibly on another event loop."""
        self.abort(list(self._listeners))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _next_step(self) -> None:
        self.engine.now = asyncio.get_running_loop().time()
        step = self.engine.schedule()
        if step is None:
            self._timer = None
            return
        loop = asyncio.get_running_loop()
        if step.seconds > 0:
            self._timer = loop.call_later(step.seconds, self._complete, step)
        else:
            self._timer = loop.call_soon(self._complete, step)

    def _complete(self, step: SimulatedStep) -> None:
        self.engine.now = asyncio.get_running_loop().time()
        for sequence in self.engine.complete(step):
            listener = self._listeners.get(sequence)
            if sequence.ended:
                self._listeners.pop(sequence, None)
            if listener is not None:
                listener(sequence)
        self._next_step()


class SimulatedBackend(Backend):
    """``runner.engine.counters`` counts what the simulated engine did; its cache outlives the runs that use it."""

    def __init__(self, model: EngineModel | None = None) -> None:
        self.model = model if model is not None else EngineModel()
        self.runner = EngineRunner(self.model)
        self._entered = 0
        self._tools: WeakKeyDictionary[RequestShape, bytes] = WeakKeyDictionary()
        self._pins = PinOrders()

    @property
    def name(self) -> str:
        return f"simulated://{self.model.name}"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(native_schema=True, schema_with_tools=True, reports_load=True)

    async def __aenter__(self) -> Self:
        self._entered += 1
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._entered -= 1
        if not self._entered:
            self.runner.close()

    async def models(self) -> list[str]:
        return [self.model.name]

    async def probe(self, endpoint: str = "") -> Probe:
        return Probe("up", models=(self.model.name,))

    async def load(self, endpoint: str = "") -> Load:
        return engine_load(self.runner.engine, asyncio.get_running_loop().time())

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        shape = request.shape
        if shape.model and shape.model != self.model.name:
            raise Rejected(f"the simulated engine serves {self.model.name!r}, not {shape.model!r}", status=404)
        prompt = chat_prompt(self._tools_of(shape), request.conversation.view(PromptView).pieces)
        answer = self.answer(prompt, request)
        if answer.calls:
            ids = CallIds(request.conversation.messages)
            answer = replace(answer, calls=tuple(replace(call, id=ids.take(call.id)) for call in answer.calls))
        priority = shape.extra_body.get("priority", request.priority)
        priority = priority if isinstance(priority, int) else 0
        reply = await self._generate(prompt, answer, priority, self._pins.order(request), on_tool_call)
        self._pins.answered(request, reply)
        if answer.cut:
            message = f"the simulated answer reached max_tokens={shape.max_tokens}"
            raise Truncated(message, text=answer.text, usage=reply.usage, in_call=bool(answer.calls))
        return reply

    def answer(self, prompt: bytes, request: ModelRequest) -> SimulatedAnswer:
        """Return what the model answers; the engine decides how long that takes."""
        return chat_answer(self.model, prompt, request.conversation.messages, request.shape)

    async def _generate(
        self,
        prompt: bytes,
        answer: SimulatedAnswer,
        priority: int,
        order: Order | None,
        on_tool_call: OnToolCall | None,
    ) -> Reply:
        loop = asyncio.get_running_loop()
        sent = loop.time()
        first = 0.0
        reported = 0
        done: asyncio.Future[None] = loop.create_future()

        def on_token(sequence: Sequence) -> None:
            nonlocal first, reported
            if done.done():
                return
            if sequence.generated == 1:
                first = loop.time() - sent
            try:
                if on_tool_call is not None and answer.calls:
                    for call in answer.calls[reported : (reported := answer.calls_until(sequence.generated))]:
                        on_tool_call(call)
                if sequence.ended:
                    done.set_result(None)
            except Exception as error:  # noqa: BLE001
                # The error belongs to this caller; raised here it would stop the engine for all callers.
                done.set_exception(error)

        sequences = self.runner.start([(prompt, answer.output)], on_token, priority, order)
        try:
            await done
        finally:
            self.runner.abort(sequences)
        return Reply(
            text=answer.text,
            tool_calls=answer.calls,
            usage=usage_of(sequences),
            first_token=first,
            finish_reason=answer.finish_reason,
        )

    def _tools_of(self, shape: RequestShape) -> bytes:
        tokens = self._tools.get(shape)
        if tokens is None:
            tokens = self._tools[shape] = encode_tools(shape.tools)
        return tokens


def engine_load(engine: SimulatedEngine, now: float) -> Load:
    reading, model = engine.reading(now), engine.model
    counters = reading.counters
    return Load(
        running=reading.running,
        waiting=reading.waiting,
        kv_usage=reading.held / model.blocks,
        kv_tokens=model.blocks * model.block_size,
        offloads=bool(engine.offload.size),
        finished=counters.finished,
        generated=counters.generated_tokens,
        preemptions=counters.preemptions,
        prefix_queries=counters.prefix_queries,
        prefix_hits=counters.prefix_hits,
    )


def usage_of(sequences: list[Sequence]) -> Usage:
    return Usage(
        prompt_tokens=sum(sequence.prompt_tokens for sequence in sequences),
        cached_tokens=sum(sequence.cached_tokens or 0 for sequence in sequences),
        completion_tokens=sum(sequence.generated for sequence in sequences),
    )


def from_address(address: Address) -> SimulatedBackend:
    return SimulatedBackend(EngineModel.from_url(address.url.geturl()))
