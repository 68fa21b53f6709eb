"""``vllm://``: vLLM's dialect of the chat wire.

It adds a request id that appears in the server's log, a salt for its prefix cache, priorities if the server schedules
by them, several conversations in one request, exact token counts, and load metrics.

Metric names are those of vLLM 0.32 and earlier ones. A server that does not schedule by priority ignores it, and older
servers refuse it. So it is sent only if the server was seen to run with ``--scheduling-policy priority`` (shown only in
its development mode) or if the address sets it.

With ``kvflow=True`` agents order that their contexts stay in the cache during tool waits. A server without
``batch_agent.vllm_pin`` ignores the orders. One that refuses them gets no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import orjson
from pydantic import JsonValue

from batch_agent.backends.address import Address
from batch_agent.backends.base import (
    Answers,
    Facts,
    Load,
    ModelRequest,
    Prompt,
    RequestShape,
    conversation_of,
)
from batch_agent.backends.engines.engine import (
    ABLE,
    EngineBackend,
    EngineState,
    Exposition,
    Sharing,
    at,
    infer_in_lists,
    read_each,
    shares,
    whole,
)
from batch_agent.backends.engines.pin_orders import FIELD, PinOrders
from batch_agent.backends.http.backend import Route
from batch_agent.backends.openai.chat import ChatView, Tail, end_body, join_body
from batch_agent.errors import Rejected
from batch_agent.messages import JsonObject, Reply
from batch_agent.value_type import lazy_property

PORT = 8000
# Conversations in one request. Measured on two cores: lists of 16 took 0.87 of the time of as many single requests, one
# list of 64 took 1.0.
LIST = 16
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
PREEMPTIONS = "vllm:num_preemptions_total"
QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
CACHE, GENERATED = "vllm:cache_config_info", "vllm:generation_tokens_total"
FINISHED = "vllm:request_success_total"
COUNTS = (PREEMPTIONS, *QUERIES, *HITS, GENERATED, FINISHED)
NAMES = frozenset([RUNNING, WAITING, *KV_USAGE, CACHE, *COUNTS])


class VllmBackend(EngineBackend):
    def __init__(self, address: Address) -> None:
        able = replace(ABLE, schema_beside_tools=True, batch=True)
        super().__init__(address, port=PORT, capabilities=able)
        self._salt = address.text("cache_salt")
        self._priority = address.options.get("priority")  # None: read from the server
        self._pins: PinOrders | None = PinOrders()  # None: the server refuses them

    # Created on first use: a fleet may have a thousand of these.

    @lazy_property
    def _lists(self) -> Route:
        return self._http.route("POST", "/chat/completions/batch")

    @lazy_property
    def _tokenize(self) -> Route:
        return self._http.route("POST", "/tokenize", beside=True)

    @lazy_property
    def _server_info(self) -> Route:
        return self._http.route("GET", "/server_info?config_format=json", beside=True)

    def own_part(self, request: ModelRequest) -> Tail:
        fields: JsonObject = {}
        if self._salt is not None:
            fields["cache_salt"] = self._salt
        if self._priority and request.run:
            fields["priority"] = request.priority  # vLLM serves lower values first
        if self._pins is not None and (request.pin_seconds or self._pins.is_used):
            fields.update(self._pins.fields(request))
        if not request.run:
            return fields, None
        return fields, {"X-Request-Id": f"batchagent-{request.run}-{request.agent}-{request.turn}"}

    def learn(self, request: ModelRequest, reply: Reply, refused: Mapping[str, Rejected]) -> None:
        super().learn(request, reply, refused)
        if self._pins is not None and self._pins.is_used:
            self._pins.answered(request, reply)

    async def without(self, request: ModelRequest, error: Rejected, refused: dict[str, Rejected]) -> ModelRequest:
        if FIELD not in str(error) or FIELD in refused:
            return await super().without(request, error, refused)
        self._pins, refused[FIELD] = None, error
        return request

    async def facts(self, model: str) -> Facts:
        if self._priority is None:
            info = await self.ask_if_there(self._server_info)
            self._priority = at(info, "vllm_config", "scheduler_config", "policy") == "priority" if info else None
        return Facts(context=await self.context_of(model))

    async def state(self, sharing: Sharing) -> EngineState:
        told = await self.read_metrics(NAMES)
        cache = next((sample.labels for sample in told.samples(CACHE)), {})
        config = at(await self.ask_if_there(self._server_info), "vllm_config")
        policy = at(config, "scheduler_config", "policy")
        connector = str(at(config, "kv_transfer_config") or "")
        offloads = cache.get("kv_offloading_size", "None") != "None" or "Offload" in connector or "LMCache" in connector
        return EngineState(
            "vllm",
            prefix_caching=cache.get("enable_prefix_caching", "True") == "True" and shares(sharing),
            reports_cached=sharing.in_answer if sharing.share else None,
            by_priority=None if policy is None else policy == "priority",
            offloads=offloads if cache else None,
            pins=None if config is None else "PinConnector" in connector,
            kv_tokens=read_load(told).kv_tokens,
        )

    async def count_tokens(self, prompt: Prompt, shape: RequestShape | None = None) -> int:
        """Return the tokens of the prompt as the server renders it, with the tools of ``shape`` and the opening."""
        shape = shape or RequestShape("")
        asked = orjson.loads(join_body(self._head(shape, False), conversation_of(prompt).view(ChatView)))
        question = {name: asked[name] for name in ("model", "messages", "tools") if asked.get(name)}
        count = (await self.ask(self._tokenize, orjson.dumps(question))).get("count")
        if type(count) is not int:
            raise self._tokenize.faults.bad("the answer has no count of tokens")
        return count

    async def infer_batch(self, requests: Sequence[ModelRequest]) -> Answers:
        if not self._capabilities.batch or any(request.shape.tools for request in requests):
            return await super().infer_batch(requests)
        answers, there = await infer_in_lists(requests, LIST, self._infer_list, self.infer)
        if not there:
            self._capabilities = replace(self._capabilities, batch=False)
        return answers

    async def _infer_list(self, requests: Sequence[ModelRequest]) -> Answers:
        faults, shape = self._lists.faults, requests[0].shape
        own, _ = self.tail_of(min(requests, key=lambda request: request.priority))
        conversations = b",".join(join_body(b"[", request.conversation.view(ChatView), b"]") for request in requests)
        document = await self.ask(self._lists, self._head(shape, False) + conversations + end_body(own))
        choices = document.get("choices")
        by_index = {at(choice, "index"): choice for choice in choices} if isinstance(choices, list) else {}
        usages = _shares(document.get("usage"), len(requests))
        alone = ({"choices": [by_index.get(place)], "usage": usage} for place, usage in enumerate(usages))
        return read_each(alone, faults)

    async def load(self, endpoint: str = "") -> Load:
        told = await self.read_metrics(NAMES)
        if not told.samples(RUNNING):
            raise self._metrics.faults.bad("the metrics are not those of a vLLM server")
        return read_load(told)


def read_load(told: Exposition) -> Load:
    """Return the load. Several engines behind one address (data parallel) have different labels, and their values are
    summed."""
    caches = [cache.labels for cache in told.samples(CACHE)]
    return Load(
        running=told.count(RUNNING) or 0,
        waiting=told.count(WAITING) or 0,
        kv_usage=told.mean(*KV_USAGE),
        kv_tokens=sum(map(_cache_tokens, caches)) or None,
        offloads=any(labels.get("kv_offloading_size", "None") != "None" for labels in caches),
        finished=told.count(FINISHED),
        generated=told.count(GENERATED),
        preemptions=told.count(PREEMPTIONS),
        prefix_queries=told.count(*QUERIES),
        prefix_hits=told.count(*HITS),
    )


def _cache_tokens(labels: Mapping[str, str]) -> int:
    """Return how many tokens a KV cache holds. For models with different kinds of layers, the number of blocks times
    their size would be too much."""
    blocks, size = whole(labels.get("num_gpu_blocks")), whole(labels.get("block_size"))
    return whole(labels.get("kv_cache_size_tokens")) or (blocks or 0) * (size or 0)


def _shares(usage: JsonValue, count: int) -> list[JsonObject]:
    """Split the usage of a list, reported as one sum, evenly among its requests."""
    told = {name: whole(at(usage, name)) or 0 for name in ("prompt_tokens", "completion_tokens")}
    return [
        {name: total * (place + 1) // count - total * place // count for name, total in told.items()}
        for place in range(count)
    ]
