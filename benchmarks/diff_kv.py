"""What an exact block diff of agents' KV would save beyond prefix caching, on real KV tensors.

A store that keeps the KV of one agent and, for its siblings, only the blocks that differ (as TokenDance does, with
tolerance) saves memory where the same text stands behind different histories. Prefix caching does not share that text.
This reads the KV of real requests out of vLLM, block by block and layer by layer, and counts distinct blocks: of all
requests, after prefix caching, and after an exact diff on top of that. The ratio is always against prefix caching.

It runs inside the environment of a vLLM for CPUs (``make test-vllm`` makes one):

    PYTHONPATH=src:. ~/.cache/batch-agent/test-servers/vllm/venv/bin/python -m benchmarks.diff_kv \
        --model ~/.cache/batch-agent/test-servers/vllm/model
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

import torch
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

from benchmarks import report

ROOT = Path(__file__).parents[1]
BLOCK = 32  # tokens
AGENTS = 6
SYSTEM, OWN, SHARED = 256, 256, 1_024  # tokens of each part
CACHES: dict[str, torch.Tensor] = {}  # of each layer, as the worker registered them
FINISHED: list[list[int]] = []  # the blocks of each request, in the order of their ends


class ReadingConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves nothing. Remembers where the KV of each finished request is."""

    def register_kv_caches(self, kv_caches):
        CACHES.update(kv_caches)

    def request_finished_all_groups(self, request, block_ids):
        FINISHED.append(list(block_ids[0]))
        return False, None

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        return

    def start_load_kv(self, forward_context, **kwargs):
        return

    def wait_for_layer_load(self, layer_name):
        return

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        return

    def wait_for_save(self):
        return


@dataclass(frozen=True)
class Case:
    """Token ids of each agent's prompt, and where the shared material begins in each."""

    name: str
    prompts: list[list[int]]
    shared_at: list[int]


def cases(words: list[int]) -> list[Case]:
    """``words`` are the tokens of real text. Each agent has its own stretch of it."""
    system, shared = words[:SYSTEM], words[SYSTEM : SYSTEM + SHARED]
    rest = words[SYSTEM + SHARED :]

    def own(agent: int, tokens: int = OWN) -> list[int]:
        return rest[agent * 2 * OWN : agent * 2 * OWN + tokens]

    uneven = [own(agent, OWN + 7 * agent) for agent in range(AGENTS)]
    agents = range(AGENTS)
    return [
        Case("shared first", [system + shared + own(n) for n in agents], [SYSTEM] * AGENTS),
        Case("own first, equally long", [system + own(n) + shared for n in agents], [SYSTEM + OWN] * AGENTS),
        Case("own first, of different lengths", [system + one + shared for one in uneven], [SYSTEM + len(one) for one in uneven]),
    ]


def halves(cache: torch.Tensor, blocks: int) -> list[torch.Tensor]:
    """The keys and the values of a layer, with the blocks in the first dimension."""
    axis = [place for place, size in enumerate(cache.shape) if size == blocks][0]
    cache = cache.movedim(axis, 0)
    pair = [place for place, size in enumerate(cache.shape) if place and size == 2]
    return [cache] if not pair else [cache.select(pair[0], half) for half in (0, 1)]


def digest(block: torch.Tensor) -> bytes:
    return hashlib.blake2b(block.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()


def measure(case: Case, tables: list[list[int]], blocks: int) -> dict[str, object]:
    """Counts of half blocks (keys or values of 32 tokens in a layer), and how far the shared material's KV differs."""
    full = [table[: len(prompt) // BLOCK] for table, prompt in zip(tables, case.prompts, strict=True)]
    copies = prefix = distinct = 0
    same_layers, differs = [], []
    for cache in CACHES.values():
        for half in halves(cache, blocks):
            used = {block for table in full for block in table}
            contents = {digest(half[block]) for block in used}
            copies += sum(map(len, full))
            prefix += len(used)
            distinct += len(contents)
            same_layers.append(1 - len(contents) / len(used))
            differs.append(_distance(case, full, half))
    return {
        "case": case.name,
        "blocks": copies,
        "with_prefix_caching": prefix,
        "with_exact_diff": distinct,
        "prefix_caching_saves": 1 - prefix / copies,
        "exact_diff_saves_beyond": 1 - distinct / prefix,
        "halves_with_any_equal_block": sum(share > 0 for share in same_layers),
        "halves": len(same_layers),
        "median_relative_difference": sorted(differs)[len(differs) // 2],
    }


def _distance(case: Case, tables: list[list[int]], half: torch.Tensor) -> float:
    """The relative difference of two agents' KV of the same shared tokens: 0 is the same. 32 tokens from the middle."""
    rows = []
    for agent in (0, 1):
        at = case.shared_at[agent] + SHARED // 2
        tokens = range(at, at + BLOCK)
        table = tables[agent]
        axis = [place for place, size in enumerate(half.shape[1:]) if size == BLOCK][0]
        rows.append(torch.stack([half[table[token // BLOCK]].select(axis, token % BLOCK) for token in tokens]).float())
    return float((rows[0] - rows[1]).norm() / rows[0].norm())


def text_tokens(llm: LLM) -> list[int]:
    pages = sorted((ROOT / "docs").glob("*.md"))
    return llm.get_tokenizer().encode("\n".join(page.read_text() for page in pages))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diff_kv", description=__doc__)
    parser.add_argument("--model", required=True)
    options = parser.parse_args()
    connector = KVTransferConfig(
        kv_connector="ReadingConnector", kv_connector_module_path="benchmarks.diff_kv", kv_role="kv_both"
    )
    llm = LLM(
        options.model,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=2_048,
        max_num_seqs=1,
        kv_transfer_config=connector,
    )
    words = text_tokens(llm)
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    measurements = []
    for case in cases(words):
        llm.reset_prefix_cache()
        FINISHED.clear()
        # One after the other, so that each finds what the ones before it left.
        for prompt in case.prompts:
            llm.generate(TokensPrompt(prompt_token_ids=prompt), SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        measurements.append(measure(case, FINISHED, blocks))
        print(json.dumps(measurements[-1]), flush=True)
    rows = [
        (
            str(each["case"]),
            f"{each['prefix_caching_saves']:.1%}",
            f"{each['exact_diff_saves_beyond']:.2%}",
            f"{each['halves_with_any_equal_block']} of {each['halves']}",
            f"{each['median_relative_difference']:.0%}",
        )
        for each in measurements
    ]
    head = ("case", "prefix caching saves", "an exact diff saves beyond", "halves of layers with equal blocks", "median difference")
    print(report.table(head, rows))
    env = report.environment() | {"vllm": metadata.version("vllm"), "model": "SmolLM2-135M-Instruct, float32"}
    return report.finish("diff_kv", env, [], measurements)


if __name__ == "__main__":
    # The connector is looked up by its module's name: there must be one copy of what it remembers.
    from benchmarks import diff_kv

    sys.exit(diff_kv.main())
