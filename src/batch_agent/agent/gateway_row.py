"""A row as the gateway uses it: requests of the row's clients become requests of its ``RowWork``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from batch_agent.backends.base import Backend, ModelRequest, RequestShape
from batch_agent.dispatch.dispatcher import ModelCall
from batch_agent.gateway.client_request import ClientRequest
from batch_agent.messages import Conversation, Reply

if TYPE_CHECKING:
    from batch_agent.agent.row_work import RowWork

KINDS = 256  # number of kinds of request that are cached


class ClientShapes:
    """The shapes of requests, one for each kind: backends and digests cache what they derive from a shape. ``on_new``
    is called with a new shape before its first use."""

    def __init__(self, on_new: Callable[[RequestShape], None]) -> None:
        self._on_new = on_new
        self._known: dict[bytes, tuple[RequestShape, RequestShape]] = {}

    def of(self, request: ClientRequest) -> tuple[RequestShape, RequestShape]:
        """Return the shape for the record, and the shape to send, which is a part of the first."""
        shapes = self._known.get(request.head)
        if shapes is None:
            if len(self._known) >= KINDS:
                self._known.clear()
            self._on_new(request.shape)
            asked = replace(request.shape, extra_body={"client": request.head.hex()})
            shapes = self._known[request.head] = asked, request.shape
        return shapes


class GatewayRow:
    def __init__(self, work: RowWork, backend: Backend) -> None:
        self._work, self._backend = work, backend

    @property
    def model(self) -> str:
        return self._work.worker.model

    @property
    def wires(self) -> frozenset[str]:
        return self._backend.wires

    async def models(self) -> Sequence[str]:
        return await self._backend.models()

    async def answer(self, request: ClientRequest) -> Reply:
        asked, sent = self._work.worker.client_shapes.of(request)

        def send(question: ModelRequest) -> ModelCall:
            question.shape, question.client = sent, request.client_body
            return ModelCall(self._backend, question)

        return await self._work.answer(asked, Conversation(request.messages), send=send)
