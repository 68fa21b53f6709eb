"""``sglang://``: SGLang's dialect of the chat wire, and its native ``/generate`` for lists of text.

It adds priorities if the server schedules by them, a key that separates prefix caches, and load metrics. The names are
those of SGLang 0.5.21 and of 0.5.16, with which they were tested. Cached tokens are reported only with
``--enable-cache-report``, and not at all when nothing was cached. A server that does not schedule by priority may
answer 503 to one, which looks like overload. So a priority is sent only if the server reports that it uses it. A server
that also evicts by priority (``--radix-eviction-policy priority``) keeps the contexts with the highest priority
forever: that of an ended agent would outlast all others. There all turns except the last have the same priority, above
that of the last one and of requests without a priority. Request ids are not sent: the server refuses an id that it
still holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import orjson
from pydantic import JsonValue

from batch_agent.backends.address import Address
from batch_agent.backends.base import Answers, Facts, Load, ModelRequest, RequestShape
from batch_agent.backends.engines.engine import (
    ABLE,
    EngineBackend,
    EngineState,
    Sharing,
    at,
    infer_in_lists,
    read_each,
    shares,
    whole,
)
from batch_agent.backends.http.wire import json_of
from batch_agent.backends.openai.chat import Tail
from batch_agent.errors import BackendError, SpecError
from batch_agent.messages import JsonObject, Reply

PORT = 30000
LIST = 64  # texts in one request
RUNNING = "sglang:num_running_reqs"
WAITING = "sglang:num_queue_reqs"
USAGE = "sglang:token_usage"
PROMPT, CACHED = "sglang:prompt_tokens_total", "sglang:cached_tokens_total"
GENERATED, HOST = "sglang:generation_tokens_total", "sglang:hicache_host_total_tokens"
FINISHED = "sglang:num_requests_total"
NAMES = frozenset([RUNNING, WAITING, USAGE, PROMPT, CACHED, GENERATED, FINISHED, HOST])


class SglangBackend(EngineBackend):
    def __init__(self, address: Address) -> None:
        super().__init__(address, port=PORT, capabilities=replace(ABLE, prefix_leader=True))
        self._generate = self._http.route("POST", "/generate", beside=True)
        self._loads = self._http.route("GET", "/loads?include=core")
        self._server_info = self._http.route("GET", "/server_info", beside=True)
        self._extra_key = address.text("extra_key")
        self._priority = address.options.get("priority")  # None: read from the server
        self._lowest_first = False
        self._evicts_by_priority = False
        self._has_loads = True
        self._kv_tokens: int | None = None  # of the GPU's cache, or of the host's if that is larger
        self._offloads = False  # to a memory of unknown size

    def own_part(self, request: ModelRequest) -> Tail:
        fields: JsonObject = {}
        if self._extra_key is not None:
            fields["extra_key"] = self._extra_key
        if self._priority and request.run:
            fields["priority"] = self._priority_of(request)
        return fields, None

    def _priority_of(self, request: ModelRequest) -> int:
        if self._evicts_by_priority and not self._lowest_first:
            return 0 if request.last else 1
        return request.priority if self._lowest_first else -request.priority

    async def facts(self, model: str) -> Facts:
        info = await self.ask_if_there(self._server_info)
        self._lowest_first = info.get("schedule_low_priority_values_first") is True
        self._evicts_by_priority = info.get("radix_eviction_policy") == "priority"
        if self._priority is None and info:
            takes = info.get("abort_on_priority_when_disabled") is not True
            self._priority = info.get("enable_priority_scheduling") is True or (self._evicts_by_priority and takes)
        host = _host_tokens(info)
        self._kv_tokens = max(host or 0, _kv_tokens(info) or 0) or None
        self._offloads = info.get("enable_hierarchical_cache") is True and host is None
        return Facts(context=await self.context_of(model) or whole(info.get("context_length")))

    async def state(self, sharing: Sharing) -> EngineState:
        info = await self.ask_if_there(self._server_info)
        off = info.get("disable_radix_cache") is True

        def has(name: str) -> bool | None:
            return info.get(name) is True if info else None

        return EngineState(
            "sglang",
            prefix_caching=False if off else shares(sharing),
            reports_cached=has("enable_cache_report"),
            by_priority=has("enable_priority_scheduling"),
            offloads=has("enable_hierarchical_cache"),
            kv_tokens=_kv_tokens(info),
        )

    async def load(self, endpoint: str = "") -> Load:
        if self._has_loads:
            try:
                load = _read_loads(await self.ask(self._loads))
                kv_tokens = max(load.kv_tokens or 0, self._kv_tokens or 0) or None
                return replace(load, kv_tokens=kv_tokens, offloads=self._offloads)
            except BackendError as error:
                if error.retryable:
                    raise
                self._has_loads = False
        told = await self.read_metrics(NAMES)
        if not told.samples(RUNNING):
            raise self._metrics.faults.bad("the metrics are not those of an SGLang server (--enable-metrics)")
        return Load(
            running=told.count(RUNNING) or 0,
            waiting=told.count(WAITING) or 0,
            kv_usage=told.mean(USAGE),
            kv_tokens=max(told.count(HOST) or 0, self._kv_tokens or 0) or None,
            offloads=self._offloads and not told.count(HOST),
            finished=told.count(FINISHED),
            generated=told.count(GENERATED),
            prefix_queries=told.count(PROMPT),
            prefix_hits=told.count(CACHED),
        )

    async def generate_texts(self, texts: Sequence[str], shape: RequestShape | None = None) -> Answers:
        """Return the model's continuation of each raw text, without a chat template, many in one request. A failed text
        is an error in its place."""
        sampling = _sampling(shape or RequestShape(""))

        async def ask_list(some: Sequence[str]) -> Answers:
            return await self._continue(some, sampling)

        async def ask_one(text: str) -> Reply:
            [answer] = await self._continue([text], sampling)
            if isinstance(answer, BackendError):
                raise answer
            return answer

        answers, _ = await infer_in_lists(texts, LIST, ask_list, ask_one)
        return answers

    async def _continue(self, texts: Sequence[str], sampling: JsonObject) -> Answers:
        question: JsonObject = {"text": list(texts), "sampling_params": sampling}
        if self._extra_key is not None:
            question["extra_key"] = self._extra_key
        faults = self._generate.faults
        body = await self._http.send(self._generate, orjson.dumps(question)) or b""
        told = json_of(body)
        if not isinstance(told, list) or len(told) != len(texts):
            raise faults.bad(f"the answer is not a list of {len(texts)}")
        return read_each(map(_as_chat, told), faults)


def _sampling(shape: RequestShape) -> JsonObject:
    """Return only the fields the server is known to accept: an unknown one fails the whole list with 500."""
    for name in ("tools", "extra_body"):
        if getattr(shape, name):
            raise SpecError(f"a raw text cannot have {name}: use messages")
    fields: JsonObject = {
        "max_new_tokens": shape.max_tokens,
        "temperature": shape.temperature,
        "top_p": shape.top_p,
        "sampling_seed": shape.seed,
        "stop": list(shape.stop) or None,
        "json_schema": None if shape.schema is None else orjson.dumps(shape.schema).decode(),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _as_chat(answer: JsonValue) -> JsonObject:
    counts = {name: at(answer, "meta_info", name) for name in ("prompt_tokens", "completion_tokens")}
    cached = {"cached_tokens": at(answer, "meta_info", "cached_tokens")}
    finish = at(answer, "meta_info", "finish_reason")
    choice: JsonObject = {"message": {"content": at(answer, "text")}, "finish_reason": finish}
    return {"choices": [choice], "usage": {**counts, "prompt_tokens_details": cached}}


def _kv_tokens(info: JsonObject) -> int | None:
    """Return how many tokens the KV cache of all data-parallel ranks holds; None if the server does not say."""
    ranks, size = info.get("internal_states"), whole(info.get("max_total_num_tokens"))
    return size and size * max(1, len(ranks) if isinstance(ranks, list) else 1)


def _host_tokens(info: JsonObject) -> int | None:
    """Return how many tokens the cache in the host's memory holds. It includes what is on the GPU, so the two are not
    added. None if there is no such cache, or if its size is given in gigabytes."""
    ratio = info.get("hicache_ratio")
    size = info.get("hicache_size")
    gpu = _kv_tokens(info)
    if info.get("enable_hierarchical_cache") is not True or size or gpu is None or not isinstance(ratio, int | float):
        return None
    return int(gpu * ratio)


def _read_loads(told: JsonObject) -> Load:
    """Return the sum over all ranks."""
    loads = told.get("loads")
    ranks = loads if isinstance(loads, list) else []

    def total(name: str) -> int:
        return sum(whole(at(rank, name)) or 0 for rank in ranks)

    usages = [usage for rank in ranks if isinstance(usage := at(rank, "token_usage"), int | float)]
    return Load(
        running=total("num_running_reqs"),
        waiting=total("num_waiting_reqs"),
        kv_usage=sum(usages) / len(usages) if usages else None,
        kv_tokens=total("max_total_num_tokens") or None,
    )
