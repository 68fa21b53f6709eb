"""ForwardingBackend: the base class of backends that wrap another one. A wrapper overrides only what it changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from batch_agent.backends.base import (
    Answers,
    Backend,
    Capabilities,
    Facts,
    JobLines,
    Listener,
    Load,
    ModelRequest,
    OnToolCall,
    Probe,
    RequestShape,
)
from batch_agent.messages import Reply
from batch_agent.scheduler.server import Standby
from batch_agent.scheduler.server_state import ServerState


class ForwardingBackend(Backend):
    """Forwards every call to ``inner``."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @property
    def wires(self) -> frozenset[str]:
        return self.inner.wires

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.inner.__aexit__(*exception)

    def check(self, shape: RequestShape) -> None:
        self.inner.check(shape)

    def answer_limit(self, shape: RequestShape) -> int | None:
        return self.inner.answer_limit(shape)

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        return await self.inner.infer(request, on_tool_call)

    async def infer_batch(self, requests: Sequence[ModelRequest]) -> Answers:
        return await self.inner.infer_batch(requests)

    async def models(self) -> list[str]:
        return await self.inner.models()

    async def facts(self, model: str) -> Facts:
        return await self.inner.facts(model)

    async def load(self, endpoint: str = "") -> Load | None:
        return await self.inner.load(endpoint)

    async def probe(self, endpoint: str = "") -> Probe:
        return await self.inner.probe(endpoint)

    @property
    def servers(self) -> Mapping[str, ServerState]:
        return self.inner.servers

    @property
    def standbys(self) -> Mapping[str, Standby]:
        return self.inner.standbys

    def lend(self, server: ServerState) -> None:
        self.inner.lend(server)

    def join(self, listener: Listener) -> None:
        self.inner.join(listener)

    def leave(self, listener: Listener) -> None:
        self.inner.leave(listener)

    async def locate(self, model: str) -> None:
        await self.inner.locate(model)

    def keep(self, record: JobLines, *, outlasts: bool) -> None:
        self.inner.keep(record, outlasts=outlasts)

    def has_bought(self, request: ModelRequest) -> bool:
        return self.inner.has_bought(request)
