"""``generate_batch``: many single-turn conversations, answered together, on any backend.

Where a backend answers many in one request it does; elsewhere each is a request of its own, all at once. Nothing here
limits, retries or times out: whoever calls this for thousands holds a limiter in front of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import TypeAlias, TypeVar, cast

from batch_agent.backends.base import Backend, Batched, ModelRequest, RequestShape
from batch_agent.errors import BackendError, SpecError
from batch_agent.messages import Conversation, Message, Reply

Prompt = str | Sequence[Message] | Conversation
T = TypeVar("T")
Answers: TypeAlias = list[Reply | BackendError]
NOT_THERE = frozenset([404, 405, 501])  # what a server without such a route answers


async def generate_batch(backend: Backend, prompts: Sequence[Prompt], shape: RequestShape | None = None) -> Answers:
    """The answers in the order of the prompts; one that failed is its error. A prompt is the user's words, or a
    conversation. Without a model in ``shape`` the one that the backend serves."""
    if not prompts:
        return []
    shape = shape or RequestShape("")
    if not shape.model:
        shape = replace(shape, model=await only_model(backend))
    requests = [
        ModelRequest(shape, conversation_of(prompt), str(number), agent=number) for number, prompt in enumerate(prompts)
    ]
    if backend.capabilities.batch and not shape.tools:
        return await cast(Batched, backend).infer_batch(requests)
    return await asyncio.gather(*(_caught(backend.infer(request)) for request in requests))


class Generates:
    """``generate_batch`` as a method, for a Backend to inherit."""

    async def generate_batch(self: Backend, prompts: Sequence[Prompt], shape: RequestShape | None = None) -> Answers:
        return await generate_batch(self, prompts, shape)


async def infer_in_lists(
    asked: Sequence[T],
    most: int,
    ask_list: Callable[[Sequence[T]], Awaitable[Answers]],
    ask_one: Callable[[T], Awaitable[Reply]],
) -> tuple[Answers, bool]:
    """For a server that answers so many in one request: ``ask_list`` gives the answers of a list, or raises for all of
    it. A list that is refused is asked in halves, so that the bad one fails alone; where the server has no lists at
    all, each is asked by itself. And whether it has them, as far as was seen."""
    lists = [asked[start : start + most] for start in range(0, len(asked), most)]
    answered = await asyncio.gather(*(_ask_list(part, ask_list, ask_one) for part in lists))
    return [answer for answers, _ in answered for answer in answers], all(there for _, there in answered)


async def _ask_list(
    asked: Sequence[T],
    ask_list: Callable[[Sequence[T]], Awaitable[Answers]],
    ask_one: Callable[[T], Awaitable[Reply]],
) -> tuple[Answers, bool]:
    if len(asked) == 1:
        return [await _caught(ask_one(asked[0]))], True
    try:
        return await ask_list(asked), True
    except BackendError as error:
        if error.retryable:
            return [copy(error) for _ in asked], True
        status = error.status
    if status in NOT_THERE:
        answers = await asyncio.gather(*(_caught(ask_one(each)) for each in asked))
        # A model that is not there answers like a route that is not, but then nothing else works either.
        return answers, not any(isinstance(answer, Reply) for answer in answers)
    return await infer_in_lists(asked, -(-len(asked) // 2), ask_list, ask_one)


async def _caught(asking: Awaitable[Reply]) -> Reply | BackendError:
    try:
        return await asking
    except BackendError as error:
        return error


async def only_model(backend: Backend) -> str:
    names = await backend.models()
    if len(names) != 1:
        raise SpecError(f"{backend.name} serves {', '.join(names) or 'no model'}: name one in the shape")
    return names[0]


def conversation_of(prompt: Prompt) -> Conversation:
    if isinstance(prompt, Conversation):
        return prompt
    return Conversation([Message("user", prompt)] if isinstance(prompt, str) else prompt)
