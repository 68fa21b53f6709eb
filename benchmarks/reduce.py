"""What a reduction costs beside the map it follows, where slots are short. The clock is virtual: any machine does.

``python -m benchmarks.reduce``. A thousand agents answer in some hundred tokens each, and one answer is made of all of
them, by a tree whose groups are what fits the model's context. An answer takes as long as its tokens take, prompt and
output, so a reduction takes longer than a leaf.

- ``map``: the agents alone
- ``ours``: map and tree, the parts reduced as soon as their rows are there
- ``after``: the same parts, level by level, after the last agent
"""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import dataclass
from typing import Any

from batch_agent import BatchAgent
from batch_agent.backends.base import Capabilities
from batch_agent.testing import Request, Say, ScriptedBackend
from batch_agent.testing.clock import run_virtual
from benchmarks import report

BAR = 1.15  # parts start while the map runs; 1.10 is reached only by holding them back to the end of the map
LEAVES = 1_000
PREFILL, DECODE = 5_000, 50  # tokens a second of one request
PARTIAL = 200  # tokens of a reduction's answer


@dataclass(frozen=True, slots=True)
class Case:
    slots: int
    leaf_tokens: int  # of an answer, on average
    context: int
    drawn: bool  # lengths of answers vary

    def __str__(self) -> str:
        return (
            f"{self.slots} slots, {self.leaf_tokens} tokens{', drawn' if self.drawn else ''}, context {self.context:,}"
        )


CASES = (
    Case(16, 150, 8_192, drawn=False),
    Case(16, 150, 8_192, drawn=True),
    Case(16, 150, 16_384, drawn=True),
    Case(8, 150, 8_192, drawn=True),
    Case(32, 400, 32_768, drawn=True),
)
CHAIN = Case(64, 150, 16_384, drawn=True)  # here the way from the last leaf to the root decides, and not the slots


def words(tokens: int) -> str:
    return "word " * (tokens * 4 // 5)


def answer(request: Request, tokens: int) -> Say:
    return Say(words(tokens), latency=len(request.text) / 4 / PREFILL + tokens / DECODE)


def script(case: Case) -> ScriptedBackend:
    chance = random.Random(1)
    drawn = [int(chance.lognormvariate(-0.125, 0.5) * case.leaf_tokens) + 1 for _ in range(LEAVES)]
    lengths = drawn if case.drawn else [case.leaf_tokens] * LEAVES

    def leaf_or_part(request: Request) -> Say:
        return answer(request, PARTIAL if '{"status"' in request.text else lengths[int(request.text)])

    return ScriptedBackend(leaf_or_part, capabilities=Capabilities(streaming=False))


def options(case: Case) -> dict[str, Any]:
    return {"task": "{input}", "backend": script(case), "max_inflight": case.slots, "model_max_context": case.context}


def inputs() -> list[str]:
    return [str(number) for number in range(LEAVES)]


async def map_alone(case: Case) -> tuple[float, int]:
    began = asyncio.get_running_loop().time()
    await BatchAgent.run(inputs=inputs(), **options(case))
    return asyncio.get_running_loop().time() - began, 0


async def ours(case: Case) -> tuple[float, int]:
    began = asyncio.get_running_loop().time()
    outcome = await BatchAgent.run_with_reduce(inputs=inputs(), reduce="Sum up {n} answers.", **options(case))
    assert outcome.reduction.covers == tuple(range(LEAVES)), outcome.reduction.error
    return asyncio.get_running_loop().time() - began, outcome.reduction.requests


async def after(case: Case) -> tuple[float, int]:
    began = asyncio.get_running_loop().time()
    results = await BatchAgent.run(inputs=inputs(), **options(case))
    leaves = {str(result.index): str(result.output) for result in results}

    def known(request: Request) -> Say:
        """The leaves are there already and take no time."""
        return Say(leaves[request.text]) if request.text in leaves else answer(request, PARTIAL)

    backend = ScriptedBackend(known, capabilities=Capabilities(streaming=False))
    changed = {**options(case), "backend": backend}
    outcome = await BatchAgent.run_with_reduce(inputs=inputs(), reduce="Sum up {n} answers.", **changed)
    assert outcome.reduction.ok
    return asyncio.get_running_loop().time() - began, outcome.reduction.requests


def main() -> int:
    env = report.environment()
    rows, bars, measurements = [], [], []
    for case in (*CASES, CHAIN):
        alone, _ = run_virtual(map_alone(case))
        whole, requests = run_virtual(ours(case))
        late, _ = run_virtual(after(case))
        rows.append((str(case), f"{alone:.0f}", f"{whole:.0f}", f"{late:.0f}", str(requests)))
        if case is not CHAIN:
            bars.append(report.Bar(f"{case}: map and tree over map", whole / alone, "<=", BAR))
        measurements.append({"case": str(case), "map_s": alone, "ours_s": whole, "after_s": late, "parts": requests})
    print(report.table((f"{LEAVES:,} leaves, seconds", "map", "ours", "after", "parts"), rows), "\n")
    return report.finish("reduce", env, bars, measurements)


if __name__ == "__main__":
    sys.exit(main())
