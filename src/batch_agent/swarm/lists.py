"""Many prompts in one request, an answer for each. A refused list is split until only the refused prompt is left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from batch_agent.errors import BackendError, ContextOverflow
from batch_agent.messages import JsonObject
from batch_agent.swarm.answers import TextOf, chat_text, completion_text, read_choices
from batch_agent.swarm.lines import Exchange
from batch_agent.swarm.response import Response

REFUSED = (400, 413, 422)  # statuses that one item of a list may cause; others concern the whole list
NOT_THERE = (404, 405, 501)  # statuses of a server without list support

Item = tuple[int, str]
Send = Callable[[Sequence[Item]], Awaitable[Exchange]]
Put = Callable[[int, Sequence[Response]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Form:
    """The format of a list on the wire."""

    path: str
    field: str
    item: Callable[[str, str | None], object]  # of a prompt and the system prompt
    text_of: TextOf

    def body(self, model: str, prompts: Sequence[str], system: str | None, max_tokens: int) -> JsonObject:
        listed = [self.item(prompt, system) for prompt in prompts]
        return {"model": model, self.field: listed, "max_tokens": max_tokens}  # type: ignore[dict-item]


def chat_messages(prompt: str, system: str | None) -> list[JsonObject]:
    said: list[JsonObject] = [] if system is None else [{"role": "system", "content": system}]
    return [*said, {"role": "user", "content": prompt}]


COMPLETIONS = Form("/v1/completions", "prompt", lambda prompt, _: prompt, completion_text)
CHAT = Form("/v1/chat/completions/batch", "messages", chat_messages, chat_text)


def halves(items: Sequence[Item], error: BackendError | None) -> tuple[Sequence[Item], ...]:
    """Return the two halves of a list that was refused for one of its items; nothing for other errors."""
    if len(items) < 2 or error is None or not (error.status in REFUSED or isinstance(error, ContextOverflow)):
        return ()
    middle = len(items) // 2
    return items[:middle], items[middle:]


async def settle(
    exchange: Exchange, items: Sequence[Item], send: Send, text_of: TextOf, n: int, agent_index: int, put: Put
) -> None:
    """Put ``n`` answers for each prompt of a list. The halves of a refused list are sent again."""

    async def again(part: Sequence[Item]) -> None:
        await settle(await send(part), part, send, text_of, n, agent_index, put)

    if parts := halves(items, exchange.error):
        await asyncio.gather(*map(again, parts))
        return
    responses = read_choices(exchange, agent_index, [prompt for _, prompt in items], n, text_of)
    for place, (index, _) in enumerate(items):
        await put(index, responses[place * n : (place + 1) * n])
