"""Requests that bring evicted contexts back into the engine's KV cache before they are needed.

An agent whose tool takes long may lose its context to others. While the tool still runs, its history is sent once more
with an answer of one token: the engine computes it again, or loads it from a slower memory, and the agent's next turn
finds it cached. This pays only if the engine has spare capacity, so ``Admission.may_touch`` decides.

A touch never harms its row: it is cancelled when the tool ends, its failure is ignored, and after several failures no
more are sent. It is not sent in a run with a budget of tokens or money, nor to a server with rate limits. A run's
summary counts its tokens separately.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

from batch_agent.backends.base import Backend, ModelRequest, RequestShape
from batch_agent.dispatch.dispatcher import Dispatcher, ModelCall
from batch_agent.dispatch.policy import Policy
from batch_agent.errors import JobError, Truncated
from batch_agent.messages import Conversation, Message, Reply, Usage
from batch_agent.scheduler.ordering import LAST, AgentForecast
from batch_agent.scheduler.server import Endpoint
from batch_agent.tools.pool import ToolPool

MOST_FAILURES = 3
LONGEST_SECONDS = 60.0  # time limit of a touch
AFTER_ALL = 1 << 20  # a priority: a touch comes after every turn


class TouchCall(ModelCall):
    def shortened(self, cut: Truncated) -> Reply:
        return Reply("", usage=cut.usage or Usage())  # expected after one token


class Touches:
    def __init__(self, backend: Backend, dispatcher: Dispatcher, shape: RequestShape) -> None:
        self._backend, self._dispatcher = backend, dispatcher
        self._shape = replace(shape, max_tokens=1, schema=None, stop=())
        self._failures = 0

    @asynccontextmanager
    async def during(
        self, tools: ToolPool, names: Iterable[str], progress: AgentForecast, asked: Conversation
    ) -> AsyncIterator[None]:
        """Touch the agent's history shortly before these tools are expected to end. Nothing is sent if they end
        sooner."""
        usual = [tools.usual_seconds(name) for name in names]
        if not usual or None in usual or self._failures >= MOST_FAILURES:
            yield
            return
        loop, admission = asyncio.get_running_loop(), self._dispatcher.scheduler.admission
        history = Conversation(asked.messages)
        touching: asyncio.Task[None] | None = None

        def begin() -> None:
            nonlocal touching
            if admission.may_touch(progress, self._dispatcher.scheduler.waiting):
                touching = loop.create_task(self._touch(progress, history))

        lead = admission.seconds_to_compute(progress)
        timer = loop.call_later(max(0.0, max(each for each in usual if each is not None) - lead), begin)
        try:
            yield
        finally:
            timer.cancel()
            if touching is not None:
                touching.cancel()
                await asyncio.gather(touching, return_exceptions=True)

    async def _touch(self, progress: AgentForecast, history: Conversation) -> None:
        endpoint = progress.home or self._dispatcher.scheduler.endpoints[0]
        usage = await self.send(endpoint, history)
        if usage is not None:
            self._dispatcher.scheduler.admission.touched(progress, endpoint, usage)

    async def keep_prefix(self, endpoint: Endpoint, shared: Conversation) -> None:
        """Touch the prefix that all agents share."""
        usage = await self.send(endpoint, Conversation((*shared.messages, Message("user", "."))))
        if usage is not None:
            self._dispatcher.scheduler.admission.counts.kept_alive += 1

    async def send(self, endpoint: Endpoint, history: Conversation) -> Usage | None:
        """Send a history to an endpoint and return its usage; None if it was not sent or failed."""
        dispatcher = self._dispatcher
        request = ModelRequest(self._shape, history, "touch", priority=AFTER_ALL)
        spending = dispatcher.spending
        if endpoint.server.rates is not None or (spending is not None and not spending.is_free):
            return None
        policy = Policy(0, wait_out=False, timeout=LONGEST_SECONDS)
        ticket = dispatcher.slots.claim(AgentForecast(LAST), LAST, pinned=endpoint)
        try:
            reply = await dispatcher.ask(TouchCall(self._backend, request), policy, ticket=ticket)
        except JobError:
            self._failures += 1
            return None
        self._failures = 0
        return reply.usage
