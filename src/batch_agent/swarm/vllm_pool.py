"""VLLMPool: an AgentPool over servers with OpenAI's API, mainly vLLM.

Single prompts are chat requests; ``send_all_batched`` sends each agent one list (``lists``). The token limit of an
answer depends on its prompt's length and on the server's context (``budget``).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from math import ceil
from typing import Unpack

from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.messages import JsonObject
from batch_agent.swarm.answers import chat_text, completion_text, read_choices
from batch_agent.swarm.asking import Asking, Options
from batch_agent.swarm.budget import (
    DEFAULT_PER_SEQUENCE,
    DEFAULT_TOKENS,
    answer_tokens,
    context_of,
    from_environment,
    whole_from_environment,
)
from batch_agent.swarm.checks import above_zero, whole
from batch_agent.swarm.lines import Exchange, Line
from batch_agent.swarm.lists import CHAT, COMPLETIONS, NOT_THERE, Item, chat_messages, settle
from batch_agent.swarm.members import texts_of
from batch_agent.swarm.pool import AgentPool
from batch_agent.swarm.response import Response
from batch_agent.swarm.scatter import Scatter


class VLLMPool(AgentPool):
    """A missing argument gets the value of its ``AURORA_SWARM_…`` variable, else its default."""

    _path = "/v1/chat/completions"
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
        **options: Unpack[Options],
    ) -> None:
        super().__init__(endpoints, concurrency, connector_limit, timeout, api_key=api_key, **options)
        self._model = model
        self.answer_tokens = whole_from_environment(max_tokens, "max_tokens") or DEFAULT_TOKENS
        aggregation = whole_from_environment(max_tokens_aggregation, "max_tokens_aggregation")
        self.aggregation_tokens = aggregation or 2 * self.answer_tokens
        self._context = whole_from_environment(model_max_context, "model_max_context")
        self._buffer = whole("buffer", buffer, None)
        self._use_batch = use_batch
        self._batch_concurrency = whole("batch_concurrency", batch_concurrency)
        self._timeout_per_sequence = (
            from_environment(timeout_per_sequence, "timeout_per_sequence") or DEFAULT_PER_SEQUENCE
        )
        self._batch_timeout_cap = (
            None if batch_timeout_cap is None else above_zero("batch_timeout_cap", batch_timeout_cap)
        )

    async def post_batch(
        self, agent_index: int, prompts: Sequence[str], max_tokens: int | None = None, **options: Unpack[Options]
    ) -> list[Response]:
        """Send a list of prompts to one agent in one request. Prompts with different token limits or seeds need
        separate lists; a prompt that the server refuses fails alone."""
        asking, prompts = self._asking.having(options), texts_of(prompts)
        if not prompts:
            return []
        scatter = self._scatter(prompts, asking)
        return await scatter.run([self._post_list(scatter, agent_index, list(enumerate(prompts)), max_tokens, asking)])

    async def send_all_batched(
        self, prompts: Sequence[str], max_tokens: int | None = None, **options: Unpack[Options]
    ) -> list[Response]:
        """Send each agent one list, of the prompts i mod size. Returns the responses in the order of the prompts."""
        asking, prompts = self._asking.having(options), texts_of(prompts)
        if not self._use_batch or not prompts:
            return await self._send_all(prompts, max_tokens, options)
        scatter = self._scatter(prompts, asking)
        if asking.runs and self.size:
            ask, path = (self.ask, self._path) if asking.is_chat else (self._complete, COMPLETIONS.path)
            return await scatter.run([self._run(prompts, max_tokens, asking, scatter, ask, path)])
        groups: defaultdict[int, list[Item]] = defaultdict(list)
        for index, prompt in enumerate(prompts):
            groups[self.turn(index)].append((index, prompt))
        return await scatter.run(
            self._post_list(scatter, agent_index, items, max_tokens, asking) for agent_index, items in groups.items()
        )

    async def ask(
        self, agent_index: int, prompt: str, max_tokens: int | None, asking: Asking, *, once: bool = False
    ) -> list[Response]:
        """Send the prompt as a chat request."""
        if missing := self._missing(agent_index):
            return [Response.failed(missing, agent_index) for _ in range(asking.n)]
        line, began = self._lines[agent_index], asyncio.get_running_loop().time()
        (budget,) = await self._budgets(line, [prompt], max_tokens, asking)
        spent = asyncio.get_running_loop().time() - began
        body: JsonObject = {"model": self._model, "messages": [*chat_messages(prompt, asking.system)]}
        body |= {"max_tokens": budget, **asking.fields()}
        if once:
            exchange = await self._net.ask_once(line, self._path, body, self.timeout - spent)
        else:
            exchange = await self._net.ask(line, self._path, body, self.timeout, spent)
        responses = read_choices(exchange, agent_index, [prompt], asking.n, chat_text)
        return [asking.read(response) for response in responses]

    async def _complete(
        self, agent_index: int, prompt: str, max_tokens: int | None, asking: Asking, *, once: bool = False
    ) -> list[Response]:
        """Send the prompt without the chat template, as a list of one."""
        line = self._lines[agent_index]
        (budget,) = await self._budgets(line, [prompt], max_tokens, asking)
        body = COMPLETIONS.body(self._model, [prompt], None, budget) | asking.fields()
        ask = self._net.ask_once if once else self._net.ask
        exchange = await ask(line, COMPLETIONS.path, body, self._list_limit(1))
        responses = read_choices(exchange, agent_index, [prompt], asking.n, completion_text)
        return [asking.read(response) for response in responses]

    async def _post_list(
        self, scatter: Scatter, agent_index: int, items: Sequence[Item], max_tokens: int | None, asking: Asking
    ) -> None:
        """Send one agent its prompts, in as few requests as possible."""
        if missing := self._missing(agent_index):
            for index, _ in items:
                await scatter.put(index, [Response.failed(missing, agent_index) for _ in range(asking.n)])
            return
        line, began = self._lines[agent_index], asyncio.get_running_loop().time()
        budgets = await self._budgets(line, [prompt for _, prompt in items], max_tokens, asking)
        limit, spent = self._list_limit(len(items)), asyncio.get_running_loop().time() - began
        alike: defaultdict[tuple[int, int | None], list[Item]] = defaultdict(list)
        for item, budget in zip(items, budgets, strict=True):
            alike[budget, asking.seed_of(item[0])].append(item)
        await asyncio.gather(
            *(
                self._send_list(scatter, agent_index, some, budget, asking.alone(some[0][0]), limit, spent)
                for (budget, _), some in alike.items()
            )
        )

    async def _send_list(
        self,
        scatter: Scatter,
        agent_index: int,
        items: Sequence[Item],
        budget: int,
        asking: Asking,
        limit: float,
        spent: float,
    ) -> None:
        line = self._lines[agent_index]
        form = CHAT if asking.is_chat else COMPLETIONS

        async def send(part: Sequence[Item]) -> Exchange:
            body = form.body(self._model, [prompt for _, prompt in part], asking.system, budget) | asking.fields()
            return await self._net.ask(line, form.path, body, limit, spent)

        async def put(index: int, responses: Sequence[Response]) -> None:
            await scatter.put(index, [asking.read(response) for response in responses])

        if form is COMPLETIONS or (line.has_chat_batch and asking.n == 1 and len(items) > 1):
            exchange = await send(items)
            missing = exchange.error is not None and exchange.error.status in NOT_THERE
            if form is COMPLETIONS or not missing:
                await settle(exchange, items, send, form.text_of, asking.n, agent_index, put)
                return
            line.has_chat_batch = False

        async def chat(index: int, prompt: str) -> None:
            await scatter.put(index, await self.ask(agent_index, prompt, budget, asking))

        await asyncio.gather(*(chat(index, prompt) for index, prompt in items))

    async def _budgets(self, line: Line, prompts: Sequence[str], max_tokens: int | None, asking: Asking) -> list[int]:
        if max_tokens is not None:
            return [max_tokens] * len(prompts)
        context = self._context or await context_of(line, self._net, self._model, self.timeout)
        beside = len(asking.system or "")
        return [answer_tokens(self.answer_tokens, context, beside + len(prompt), self._buffer) for prompt in prompts]

    def _list_limit(self, prompts: int) -> float:
        waves = ceil(prompts / self._batch_concurrency)
        limit = max(self.timeout, waves * self._timeout_per_sequence)
        return limit if self._batch_timeout_cap is None else min(limit, self._batch_timeout_cap)

    def _facts(self, max_tokens: int | None, asking: Asking) -> JsonObject:
        own: JsonObject = {
            "model": self._model,
            "max_tokens": max_tokens or self.answer_tokens,
            "system": asking.system,
        }
        return super()._facts(max_tokens, asking) | own
