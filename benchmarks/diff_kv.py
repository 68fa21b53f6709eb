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
import statistics
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

import torch
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config import KVTransferConfig

from benchmarks import report
from benchmarks.server.kv_reader import CACHES, FINISHED

ROOT = Path(__file__).parents[1]
BLOCK = 32  # tokens
AGENTS = 6
SYSTEM, OWN, SHARED = 256, 256, 1_024  # tokens of each part


@dataclass(frozen=True)
class Case:
    """Token ids of each agent's prompt, and where the shared material begins in it, if that is the same in all."""

    name: str
    prompts: list[list[int]]
    shared_at: int | None


def cases(words: list[int]) -> list[Case]:
    """``words`` are the tokens of real text. Each agent has its own stretch of it."""
    system, shared = words[:SYSTEM], words[SYSTEM : SYSTEM + SHARED]
    rest = words[SYSTEM + SHARED :]

    def own(agent: int, tokens: int = OWN) -> list[int]:
        return rest[agent * 2 * OWN : agent * 2 * OWN + tokens]

    agents = range(AGENTS)
    return [
        Case("shared first", [system + shared + own(n) for n in agents], SYSTEM),
        Case("own first, equally long", [system + own(n) + shared for n in agents], SYSTEM + OWN),
        Case("own first, of different lengths", [system + own(n, OWN + 7 * n) + shared for n in agents], None),
    ]


def halves(cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The keys and the values of a layer, as vLLM's attention for CPUs takes them: a block has both."""
    blocks, heads, tokens, _ = cache.shape
    return cache.view(blocks, heads, tokens * 2, -1).chunk(2, dim=2)


def digest(block: torch.Tensor) -> bytes:
    return hashlib.blake2b(block.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()


def measure(case: Case, tables: list[list[int]]) -> dict[str, object]:
    """Counts of half blocks (keys or values of 32 tokens in a layer), and how far the shared material's KV differs."""
    full = [table[: len(prompt) // BLOCK] for table, prompt in zip(tables, case.prompts, strict=True)]
    copies = prefix = distinct = 0
    same_layers, differs = [], []
    for cache in CACHES.values():
        for half in halves(cache):
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
        "median_relative_difference": statistics.median(differs) if case.shared_at is not None else None,
    }


def _distance(case: Case, tables: list[list[int]], half: torch.Tensor) -> float:
    """The relative difference of two agents' KV of the same block of shared tokens: 0 is the same."""
    if case.shared_at is None:
        return float("nan")
    place = (case.shared_at + SHARED // 2) // BLOCK
    one, other = (half[tables[agent][place]] for agent in (0, 1))
    return float((one - other).norm() / one.norm())


def text_tokens(llm: LLM) -> list[int]:
    pages = sorted((ROOT / "docs").glob("*.md"))
    return llm.get_tokenizer().encode("\n".join(page.read_text() for page in pages))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diff_kv", description=__doc__)
    parser.add_argument("--model", required=True)
    options = parser.parse_args()
    connector = KVTransferConfig(
        kv_connector="ReadingConnector", kv_connector_module_path="benchmarks.server.kv_reader", kv_role="kv_both"
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
    sampling = SamplingParams(max_tokens=1, temperature=0)
    measurements = []
    for case in cases(words):
        llm.reset_prefix_cache()
        FINISHED.clear()
        # One after the other, so that each finds what the ones before it left.
        for prompt in case.prompts:
            llm.generate(TokensPrompt(prompt_token_ids=prompt), sampling, use_tqdm=False)
        measurements.append(measure(case, FINISHED))
        print(json.dumps(measurements[-1]), flush=True)
    rows = [
        (
            str(each["case"]),
            f"{each['prefix_caching_saves']:.1%}",
            f"{each['exact_diff_saves_beyond']:.2%}",
            f"{each['halves_with_any_equal_block']} of {each['halves']}",
            "" if each["median_relative_difference"] is None else f"{each['median_relative_difference']:.1%}",
        )
        for each in measurements
    ]
    head = ("case", "prefix caching saves", "exact diff saves beyond", "layers' halves with equal blocks", "difference")
    print(report.table(head, rows))
    env = report.environment() | {"vllm": metadata.version("vllm"), "model": "SmolLM2-135M-Instruct, float32"}
    return report.finish("diff_kv", env, [], measurements)


if __name__ == "__main__":
    sys.exit(main())
