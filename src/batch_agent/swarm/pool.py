"""AgentPool: sends prompts to many servers that answer ``/generate``.

Prompt i goes to agent i mod size, and responses are in the order of the prompts. Options (``options.SwarmOptions``)
change this for one call or for the pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Unpack

from batch_agent.errors import SpecError
from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.messages import JsonObject
from batch_agent.swarm.answers import read_generated
from batch_agent.swarm.call import RecordedCall, Scatter, Sink
from batch_agent.swarm.options import CallOptions, Response, SwarmOptions, texts_of
from batch_agent.swarm.servers import Members, Servers

__all__ = ["AgentPool", "Response"]


class AgentPool(Members):
    """``concurrency`` limits the requests of the pool and all its sub-pools, ``connector_limit`` their connections;
    ``timeout`` is the seconds for one request, from when it is sent."""

    _path = "/generate"  # route for a single prompt
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
        asked = replace(self._options, n=1).having(options)
        scatter = Scatter(len(texts_of([prompt])), self.turn, asked)

        async def answer() -> None:
            await scatter.put(0, await self.ask(agent_index, prompt, max_tokens, asked.alone(0)))

        (response,) = await scatter.run([answer()])
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
        options, prompts = self._options.having(given), texts_of(prompts)
        if not prompts:
            return []
        scatter = self._scatter(prompts, options, sink)
        if options.runs and self.size:
            facts = self._facts(self._path, max_tokens, options)
            return await RecordedCall(self, self.ask, prompts, max_tokens, options, facts).run(scatter)
        return await scatter.run(
            self._one(scatter, index, prompt, max_tokens, options) for index, prompt in enumerate(prompts)
        )

    async def _one(
        self, scatter: Scatter, index: int, prompt: str, max_tokens: int | None, options: CallOptions
    ) -> None:
        agent_index, own = self.turn(index), options.alone(index)
        if options.n > 1:
            responses = await self.ask(agent_index, prompt, max_tokens, own)
        elif own is options:  # no options: a subclass may accept none
            responses = [await self.post(agent_index, prompt, *([] if max_tokens is None else [max_tokens]))]
        else:
            responses = [await self.post(agent_index, prompt, max_tokens, **own.as_keywords())]
        await scatter.put(index, responses)

    def _scatter(self, prompts: Sequence[str], options: CallOptions, sink: Sink | None = None) -> Scatter:
        options.check_lengths(len(prompts))
        return Scatter(len(prompts), self.turn, options, sink)

    def _facts(self, path: str, max_tokens: int | None, options: CallOptions) -> JsonObject:
        """Return what an answer depends on beside its prompt and its seed."""
        return {"path": path, **replace(options, seed=None).fields()}

    async def ask(
        self, agent_index: int, prompt: str, max_tokens: int | None, options: CallOptions, *, once: bool = False
    ) -> list[Response]:
        """Return ``options.n`` answers to one prompt, over this pool's wire. ``/generate`` has no token limit."""
        if options.is_chat:
            raise SpecError("/generate supports neither chat nor a system prompt: use a VLLMPool")
        if missing := self._missing(agent_index):
            return [Response.failed(missing, agent_index) for _ in range(options.n)]
        server, body = self._servers[agent_index], {"prompt": prompt, **replace(options, n=1).fields()}
        ask = self._net.ask_once if once else self._net.ask
        exchanges = await asyncio.gather(*(ask(server, self._path, body, self.timeout) for _ in range(options.n)))
        return [options.read(read_generated(exchange, agent_index)) for exchange in exchanges]
