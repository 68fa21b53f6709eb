"""Orders, evictions and aborts at random, on vLLM's real scheduler with ``batch_agent.vllm_pin``: no model is computed.
Runs in a server's environment: ``python pin_stress.py FOLDER_OF_A_MODEL``, with the package on the path.

Every request must end, and when all pins are released no block may be in use.
"""

from __future__ import annotations

import inspect
import os
import random
import sys
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
import vllm
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16  # tokens
PATIENCE = 20  # steps in which nothing is scheduled
LONGEST = 700  # tokens of a context
PIN = {
    "kv_connector": "PinConnector",
    "kv_connector_module_path": "batch_agent.vllm_pin",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"pin_share": 0.95},
}
MULTI = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": [PIN]}}


def scheduler(model: str, blocks: int, policy: str, connector: dict[str, Any]) -> Scheduler:
    cache = CacheConfig(block_size=BLOCK, gpu_memory_utilization=0.9, cache_dtype="auto", enable_prefix_caching=True)
    config = VllmConfig(
        model_config=ModelConfig(model=model, dtype="float16", seed=1, skip_tokenizer_init=True, max_model_len=4096),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=256,
            max_model_len=4096,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            policy=policy,
        ),
        cache_config=cache,
        parallel_config=ParallelConfig(),
        kv_transfer_config=KVTransferConfig(**connector),
        device_config=DeviceConfig("cpu"),
    )
    cache.num_gpu_blocks = blocks
    register_all_kvcache_specs(config)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    given: dict[str, Any] = {
        "vllm_config": config,
        "kv_cache_config": KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        "log_stats": True,
        "structured_output_manager": StructuredOutputManager(config),
        "block_size": BLOCK,
    }
    if "hash_block_size" in inspect.signature(Scheduler).parameters:
        given["hash_block_size"] = BLOCK
    return Scheduler(**given)


class Requests:
    def __init__(self) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._count = 0

    def make(self, tokens: list[int], order: object, answer: int) -> Request:
        self._count += 1
        sampling = SamplingParams(ignore_eos=True, max_tokens=answer)
        if order is not None:
            sampling.extra_args = {"kv_transfer_params": {"batch_agent": order}}
        return Request(
            request_id=str(self._count),
            prompt_token_ids=tokens,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
        )


def step(engine: Scheduler) -> int:
    """One step, with made-up tokens. Returns how many requests were scheduled."""
    scheduled = engine.schedule()
    ids = list(scheduled.num_scheduled_tokens)
    done = [engine.requests[name].num_computed_tokens >= engine.requests[name].num_tokens for name in ids]
    output = ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={name: place for place, name in enumerate(ids)},
        sampled_token_ids=[[7] if each else [] for each in done],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    engine.update_from_output(scheduled, output)
    return len(ids)


def finish(engine: Scheduler) -> None:
    empty = 0
    while engine.has_unfinished_requests():
        empty = 0 if step(engine) else empty + 1
        if empty > PATIENCE:
            free = engine.kv_cache_manager.block_pool.get_num_free_blocks()
            raise SystemExit(f"stuck: {len(engine.waiting)} requests wait, {free} blocks are free")


def play(engine: Scheduler, seed: int, turns: int) -> None:
    chance, requests, contexts = random.Random(seed), Requests(), dict[str, list[int]]()

    def words(most: int) -> list[int]:
        return [chance.randrange(10, 1_000) for _ in range(chance.randrange(10, most))]

    for _ in range(turns):
        agent = chance.choice("abcdefgh")
        context = (contexts.get(agent) or words(200)) + words(80)
        if len(context) > LONGEST:
            contexts.pop(agent, None)
            order: object = {"release": [agent]}
        else:
            contexts[agent] = context
            pin = {"pin": agent, "seconds": chance.choice([0.001, 5, 100])}
            order = chance.choice([pin, pin, {"pin": agent}, {"pin": 5}, None])
        engine.add_request(requests.make(context, order, chance.randrange(1, 30)))
        for _ in range(chance.randrange(6)):
            step(engine)
        if engine.requests and chance.random() < 0.05:
            engine.finish_requests(chance.choice(list(engine.requests)), RequestStatus.FINISHED_ABORTED)
    finish(engine)
    engine.reset_prefix_cache(reset_connector=True)
    if not engine.reset_prefix_cache():
        raise SystemExit("blocks are in use after all pins were released")


def main() -> None:
    for policy in ("fcfs", "priority"):
        for connector in (PIN, MULTI):
            for seed in range(3):
                play(scheduler(sys.argv[1], 60, policy, connector), seed, 300)
    print(f"every request ended, vLLM {vllm.__version__}")


if __name__ == "__main__":
    main()
