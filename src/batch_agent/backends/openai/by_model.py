"""OpenAI itself: chat completions, or responses for the models served only there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from batch_agent.backends.base import Capabilities, ModelRequest, OnToolCall, RequestShape
from batch_agent.backends.openai.chat import OpenAIBackend
from batch_agent.backends.openai.models import needs_responses
from batch_agent.backends.openai.responses import ResponsesBackend
from batch_agent.messages import Reply


class OpenAIByModel(OpenAIBackend):
    """An OpenAIBackend that forwards to a ResponsesBackend the models that need it."""

    def __init__(self, base_url: str, **options: Any) -> None:
        super().__init__(base_url, **options)
        self._responses = ResponsesBackend(base_url, **options)

    @property
    def capabilities(self) -> Capabilities:
        """Return the capabilities. What either wire learnt about schemas counts, because a run uses only one wire."""
        note = self._responses.capabilities.schema_note
        return replace(self._capabilities, native_schema=False, schema_note=note) if note else self._capabilities

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        await self._responses.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        try:
            await self._responses.__aexit__(*exception)
        finally:
            await super().__aexit__(*exception)

    def check(self, shape: RequestShape) -> None:
        if needs_responses(shape.model):
            self._responses.check(shape)
        else:
            super().check(shape)

    @property
    def wires(self) -> frozenset[str]:
        return super().wires | self._responses.wires

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        if needs_responses(request.shape.model) or self._responses.own_body(request) is not None:
            return await self._responses.infer(request, on_tool_call)
        return await super().infer(request, on_tool_call)
