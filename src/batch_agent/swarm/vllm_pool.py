"""VLLMPool: an AgentPool over servers with OpenAI's API, mainly vLLM.

Single prompts are chat requests; ``send_all_batched`` sends each agent one list. A list that is refused is split until
only the refused prompt is left. The token limit of an answer depends on its prompt's length and the server's context.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Unpack

from batch_agent.errors import BackendError
from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.messages import JsonObject
from batch_agent.swarm.options import CallOptions, Response, SwarmOptions, above_zero, setting, texts_of, whole
from batch_agent.swarm.pool import AgentPool, PoolCall
from batch_agent.swarm.servers import CHAT, CHAT_LIST, COMPLETIONS, Exchange, Form, Item, read_answers

DEFAULT_TOKENS, LEAST_TOKENS = 512, 128  # of an answer
DEFAULT_PER_SEQUENCE = 60.0  # seconds
CHARACTERS_PER_TOKEN = 4
NOT_THERE = (404, 405, 501)  # statuses of a server without a route for lists of conversations


class VLLMPool(AgentPool):
    """A missing argument gets the value of its ``AURORA_SWARM_…`` variable, else its default."""

    form = CHAT
    answer_tokens: int
    aggregation_tokens: int

    def __init__(
        self,
        endpoints: Sequence[AgentEndpoint | tuple[str, int]],
        model: str = "openai/gpt-oss-120b",
        max_tokens: int | None = None,
        max_tokens_aggregation: int | None = None,
        model_max_context: int | None = None,
        buffer: int = 512,
        use_batch: bool = True,
        concurrency: int = 512,
        connector_limit: int = 1024,
        timeout: float = 300.0,
        batch_concurrency: int = 256,
        timeout_per_sequence: float | None = None,
        batch_timeout_cap: float | None = None,
        *,
        api_key: str | None = None,
        **options: Unpack[SwarmOptions],
    ) -> None:
        super().__init__(endpoints, concurrency, connector_limit, timeout, api_key=api_key, **options)
        self._model = model
        self.answer_tokens = setting("max_tokens", max_tokens, DEFAULT_TOKENS, whole)
        twice = 2 * self.answer_tokens
        self.aggregation_tokens = setting("max_tokens_aggregation", max_tokens_aggregation, twice, whole)
        self._context = setting("model_max_context", model_max_context, None, whole)
        self._buffer = whole("buffer", buffer, None)
        self._use_batch = use_batch
        self._batch_concurrency = whole("batch_concurrency", batch_concurrency)
        per_sequence = setting("timeout_per_sequence", timeout_per_sequence, DEFAULT_PER_SEQUENCE, above_zero)
        self._timeout_per_sequence = per_sequence
        cap = batch_timeout_cap
        self._batch_timeout_cap = None if cap is None else above_zero("batch_timeout_cap", cap)

    async def post_batch(
        self, agent_index: int, prompts: Sequence[str], max_tokens: int | None = None, **options: Unpack[SwarmOptions]
    ) -> list[Response]:
        """Send a list of prompts to one agent in one request. Prompts with different token limits or seeds need
        separate lists; a prompt that the server refuses fails alone."""
        asked, prompts = self._options.having(options, max_tokens), texts_of(prompts)
        if not prompts:
            return []
        call = PoolCall(self, prompts, asked, COMPLETIONS)
        return await call.run([self._post_list(call, agent_index, list(enumerate(prompts)), asked)])

    async def send_all_batched(
        self, prompts: Sequence[str], max_tokens: int | None = None, **options: Unpack[SwarmOptions]
    ) -> list[Response]:
        """Send each agent one list, of the prompts i mod size. Returns the responses in the order of the prompts."""
        asked, prompts = self._options.having(options, max_tokens), texts_of(prompts)
        if not self._use_batch or not prompts:
            return await self._send_all(prompts, max_tokens, options)
        call = PoolCall(self, prompts, asked, CHAT if asked.is_chat else COMPLETIONS)
        if asked.runs and self.size:
            return await call.run([call.recorded()])
        lists = self.turns(prompts).items()
        return await call.run(self._post_list(call, agent_index, items, asked) for agent_index, items in lists)

    async def _post_list(self, call: PoolCall, agent_index: int, items: Sequence[Item], options: CallOptions) -> None:
        """Send one agent its prompts, in as few requests as possible: those with equal token limits and seeds together.
        A list that is refused is split."""
        n = options.n
        form = CHAT_LIST if options.is_chat else COMPLETIONS
        try:
            limits = await self._token_limits(agent_index, [prompt for _, prompt in items], options)
        except BackendError as error:
            for index, _ in items:
                await call.put(index * n, [Response.failed(error, agent_index) for _ in range(n)])
            return
        server, seconds = self._servers[agent_index], self._list_limit(len(items))

        async def send(items: Sequence[Item], own: CallOptions) -> None:
            async def take(items: Sequence[Item], exchange: Exchange) -> None:
                if form is CHAT_LIST and exchange.error is not None and exchange.error.status in NOT_THERE:
                    server.takes_chat_lists = False
                    return await send(items, own)
                responses = read_answers(exchange, agent_index, [prompt for _, prompt in items], n, form)
                for place, (index, _) in enumerate(items):
                    await call.put(index * n, [own.read(each) for each in responses[place * n : (place + 1) * n]])

            async def chat(index: int, prompt: str) -> None:
                await call.put(index * n, await self.ask(agent_index, prompt, own, CHAT))

            if form is CHAT_LIST and (not server.takes_chat_lists or n > 1 or len(items) == 1):
                await asyncio.gather(*(chat(*item) for item in items))
            else:
                write = partial(self._body, form, options=own)
                await self._net.ask_list(server, form.path, items, write, seconds, take)

        alike: defaultdict[tuple[int, int | None], list[Item]] = defaultdict(list)
        for item, tokens in zip(items, limits, strict=True):
            alike[tokens, options.seed_of(item[0])].append(item)
        lists = [(some, replace(options.alone(some[0][0]), max_tokens=tokens)) for (tokens, _), some in alike.items()]
        await asyncio.gather(*(send(*each) for each in lists))

    def _body(self, form: Form, prompts: Sequence[str], options: CallOptions) -> JsonObject:
        written = form.write(prompts, options.system)
        return {"model": self._model, form.field: written, "max_tokens": options.max_tokens, **options.fields()}

    async def _token_limits(self, agent_index: int, prompts: Sequence[str], options: CallOptions) -> list[int]:
        """Return how many tokens each answer may have: what the server's context leaves beside its prompt. Raises
        BackendError if there is no such agent, or the pool is closed."""
        if missing := self._missing(agent_index):
            raise missing
        if options.max_tokens is not None:
            return [options.max_tokens] * len(prompts)
        context = self._context or await self._net.context_of(self._servers[agent_index], self._model, self.timeout)
        beside = len(options.system or "")
        room = [context - (beside + len(prompt)) // CHARACTERS_PER_TOKEN - self._buffer for prompt in prompts]
        return [min(self.answer_tokens, max(LEAST_TOKENS, left)) for left in room]

    def _list_limit(self, prompts: int) -> float:
        waves = ceil(prompts / self._batch_concurrency)
        limit = max(self.timeout, waves * self._timeout_per_sequence)
        return limit if self._batch_timeout_cap is None else min(limit, self._batch_timeout_cap)

    def facts(self, form: Form, options: CallOptions) -> JsonObject:
        tokens = options.max_tokens or self.answer_tokens
        own: JsonObject = {"model": self._model, "max_tokens": tokens, "system": options.system}
        return super().facts(form, options) | own
