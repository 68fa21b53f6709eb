"""``generate_batch``: many single-turn conversations, answered together, on any backend.

Where a backend answers many in one request it does; elsewhere each is a request of its own, all at once. Nothing here
limits, retries or times out: whoever calls this for thousands holds a limiter in front of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from batch_agent.backends.base import Backend, Batched, ModelRequest, RequestShape
from batch_agent.errors import BackendError, SpecError
from batch_agent.messages import Conversation, Message, Reply

Prompt = str | Sequence[Message] | Conversation


async def generate_batch(
    backend: Backend, prompts: Sequence[Prompt], shape: RequestShape | None = None
) -> list[Reply | BackendError]:
    """The answers in the order of the prompts; one that failed is its error. A prompt is the user's words, or a
    conversation. Without a model in ``shape`` the one that the backend serves."""
    if not prompts:
        return []
    shape = shape or RequestShape("")
    if not shape.model:
        shape = replace(shape, model=await _only_model(backend))
    requests = [
        ModelRequest(shape, _conversation(prompt), str(number), agent=number) for number, prompt in enumerate(prompts)
    ]
    if backend.capabilities.batch and not shape.tools:
        return await cast(Batched, backend).infer_batch(requests)
    return await asyncio.gather(*(_one(backend, request) for request in requests))


class Generates:
    """``generate_batch`` as a method, for a Backend to inherit."""

    async def generate_batch(
        self: Backend, prompts: Sequence[Prompt], shape: RequestShape | None = None
    ) -> list[Reply | BackendError]:
        return await generate_batch(self, prompts, shape)


async def _one(backend: Backend, request: ModelRequest) -> Reply | BackendError:
    try:
        return await backend.infer(request)
    except BackendError as error:
        return error


async def _only_model(backend: Backend) -> str:
    names = await backend.models()
    if len(names) != 1:
        raise SpecError(f"{backend.name} serves {', '.join(names) or 'no model'}: name one in the shape")
    return names[0]


def _conversation(prompt: Prompt) -> Conversation:
    if isinstance(prompt, Conversation):
        return prompt
    return Conversation([Message("user", prompt)] if isinstance(prompt, str) else prompt)
