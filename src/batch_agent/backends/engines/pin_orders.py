"""The pin orders that a client sends to a vLLM server with ``batch_agent.vllm_pin``.

An order is part of the turn's own request, so a pin costs no request. Whether the answer is a tool call is not known at
that time. The pin of an agent that ended is released by the next request to the server, or expires.
"""

from __future__ import annotations

from batch_agent.backends.base import ModelRequest
from batch_agent.messages import JsonObject, Reply
from batch_agent.vllm_pin import MOST_KEYS, ORDER

FIELD = "kv_transfer_params"


class PinOrders:
    """The orders of one server."""

    def __init__(self) -> None:
        self._ended: list[str] = []  # pinned agents that do not come back

    def fields(self, request: ModelRequest) -> JsonObject:
        """The fields of a request's body that order its pin; none where there is nothing to order."""
        order: JsonObject = {}
        if request.run and (request.pin_seconds or request.turn > 1):
            order["pin"] = _key(request)
            if request.pin_seconds:
                order["seconds"] = round(request.pin_seconds, 1)
        if self._ended:
            order["release"] = [*self._ended[:MOST_KEYS]]
            del self._ended[:MOST_KEYS]
        return {FIELD: {ORDER: order}} if order else {}

    def answered(self, request: ModelRequest, reply: Reply) -> None:
        if request.pin_seconds and not reply.tool_calls:
            self._ended.append(_key(request))


def _key(request: ModelRequest) -> str:
    return f"{request.run}-{request.agent}"
