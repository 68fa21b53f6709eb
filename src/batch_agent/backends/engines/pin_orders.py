"""The pin orders that a client sends to a vLLM server with ``batch_agent.vllm_pin``.

An order is part of the turn's own request, so a pin costs no request. Whether the answer is a tool call is not known at
that time. The pin of an agent that ended is released by the next request to the server, or expires.
"""

from __future__ import annotations

from batch_agent.backends.base import ModelRequest
from batch_agent.messages import JsonObject, Reply
from batch_agent.vllm_pin import MOST_KEYS, ORDER, Order

FIELD = "kv_transfer_params"
MOST_PINNED = 10_000  # agents that are remembered


class PinOrders:
    """The orders of one server."""

    def __init__(self) -> None:
        self._pinned: dict[str, None] = {}  # agents that are pinned, as far as is known
        self._ended: list[str] = []  # of these, those that do not come back
        self.is_used = False  # an agent was pinned

    def order(self, request: ModelRequest) -> Order | None:
        """Return the pin that a request orders; None if it orders none."""
        pin, key = "", _key(request)
        if request.pin_seconds:
            pin = key
            self._pinned[key] = None
            self.is_used = True
            if len(self._pinned) > MOST_PINNED:  # of agents that failed: their pins have expired
                del self._pinned[next(iter(self._pinned))]
        elif key in self._pinned:
            pin = key
            del self._pinned[key]
        release = tuple(self._ended[:MOST_KEYS])
        del self._ended[:MOST_KEYS]
        return Order(pin, request.pin_seconds, release) if pin or release else None

    def fields(self, request: ModelRequest) -> JsonObject:
        """The fields of a request's body that order its pin."""
        order = self.order(request)
        return {} if order is None else {FIELD: {ORDER: order.to_json()}}

    def answered(self, request: ModelRequest, reply: Reply) -> None:
        if self._pinned and not reply.tool_calls and (key := _key(request)) in self._pinned:
            del self._pinned[key]
            self._ended.append(key)


def _key(request: ModelRequest) -> str:
    return f"{request.run}-{request.agent}"
