"""``BatchAgent.run`` as a user calls it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from batch_agent import BatchAgent, Tool
from batch_agent.dispatch import load_poller
from batch_agent.record import commits
from batch_agent.record.directory import DirectoryStore
from batch_agent.scheduler.numbers import N
from benchmarks.workload import MODEL, SYSTEM_PROMPT, TASK, Review, Work, contend, lookup, rows

SLOWER = float(os.environ.get("BENCHMARK_SLOWER", "1"))  # see ``benchmarks.instructions``
load_poller.FIRST_SECONDS *= SLOWER
vars(load_poller)["N"] = replace(N, refresh=N.refresh * SLOWER)
DirectoryStore.gathering *= SLOWER
vars(commits)["GATHERING"] = DirectoryStore.gathering
LOOKUP = Tool.define(cacheable=True)(lookup)


async def run(
    work: Work, run_dir: Path | None = None, *, tool: Tool = LOOKUP, system_prompt: str = SYSTEM_PROMPT, **more: Any
) -> list[Review]:
    results = await BatchAgent.run(
        system_prompt=system_prompt,
        task=TASK,
        inputs=list(rows(work.agents)),
        tools=[tool] if work.turns == 2 else [],
        output_schema=Review,
        model=MODEL,
        backend=work.url.replace("http://", "vllm://"),
        max_inflight=work.inflight,
        streaming_tool_dispatch=work.stream,
        run_dir=run_dir,
        **more,
    )
    return [result.output for result in results if result.output is not None]


if __name__ == "__main__":
    contend(run)
