"""``dynamo://``: NVIDIA Dynamo's frontend, whose router decides which of its workers answers.

Dynamo refuses unknown fields, so only what Dynamo 1.6 accepts is sent. It gets scheduling hints unless the user
disables them: ``nvext.agent_hints`` (how close an agent is to its end, how long its answers usually are, that its
history will come again after a tool). Each agent has a session id, so that its turns go to the worker that has its
history cached, and the session's end is announced.
"""

from __future__ import annotations

from dataclasses import replace

from batch_agent.backends.address import Address
from batch_agent.backends.base import Facts, Load, ModelRequest, RequestShape
from batch_agent.backends.engines.engine import ABLE, EngineBackend
from batch_agent.backends.openai.chat import Tail
from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject

PORT = 8000
INFLIGHT = "dynamo_frontend_inflight_requests"
PENDING = "dynamo_frontend_router_queue_pending_requests"
PROMPT, CACHED = "dynamo_frontend_input_sequence_tokens_sum", "dynamo_frontend_cached_tokens_sum"
BLOCKS, BLOCK_TOKENS = "dynamo_frontend_model_total_kv_blocks", "dynamo_frontend_model_kv_cache_block_size"
WORKERS = "dynamo_frontend_model_workers"
NAMES = frozenset([INFLIGHT, PENDING, PROMPT, CACHED, BLOCKS, BLOCK_TOKENS, WORKERS])
# Fields that other engines accept and Dynamo refuses, with the right place for them, if any.
REFUSED = {
    "priority": "nvext.agent_hints.priority, which is sent anyway",
    "session_id": "the header x-dynamo-session-id, which is sent anyway",
    "cache_control": "",
    "request_id": "",
    "vllm_xargs": "",
    "kv_transfer_params": "",
}


class DynamoBackend(EngineBackend):
    def __init__(self, address: Address) -> None:
        super().__init__(address, port=PORT, capabilities=replace(ABLE, prefills_ahead=True))
        self._salt = address.text("cache_salt")

    def check(self, shape: RequestShape) -> None:
        super().check(shape)
        for name in shape.extra_body:
            if name in REFUSED:
                instead = f"; it belongs in {REFUSED[name]}" if REFUSED[name] else ""
                raise SpecError(f"extra_body has {name!r}, and a Dynamo server refuses requests with it{instead}")

    def own_part(self, request: ModelRequest) -> Tail:
        fields: JsonObject = {}
        if self._salt is not None:
            fields["cache_salt"] = self._salt
        if not request.run:
            return fields, None
        if request.hints:
            fields["nvext"] = {"agent_hints": _hints(request)}
        session = f"batchagent-{request.run}-{request.agent}"
        if request.tries:  # a session stays with its worker for about ten seconds after the worker died
            session += f"-{request.turn}-{request.tries}"
        headers = {"x-dynamo-session-id": session}
        if request.last:
            headers["x-dynamo-session-final"] = "true"
        return fields, headers

    async def facts(self, model: str) -> Facts:
        return Facts(context=await self.context_of(model, "context_window"))

    async def load(self, endpoint: str = "") -> Load:
        told = await self.read_metrics(NAMES)
        if not told.samples(INFLIGHT):
            raise self._metrics.faults.bad("these are not the metrics of a Dynamo frontend that has served a request")
        waiting = told.count(PENDING) or 0
        blocks = told.mean(BLOCKS)
        size = told.mean(BLOCK_TOKENS)
        workers = told.count(WORKERS)
        return Load(
            running=max(0, (told.count(INFLIGHT) or 0) - waiting),
            waiting=waiting,
            kv_tokens=int(blocks * size * workers) or None if blocks and size and workers else None,
            prefix_queries=told.count(PROMPT),
            prefix_hits=told.count(CACHED),
        )


def _hints(request: ModelRequest) -> JsonObject:
    hints: JsonObject = {"priority": -request.priority}  # Dynamo serves higher values first
    if request.usual_tokens:
        most = request.shape.max_tokens or request.usual_tokens
        hints["osl"] = min(request.usual_tokens, most)
    if not request.last:
        hints["speculative_prefill"] = True
    return hints
