"""``BatchAgent.stream`` with a run directory: a second start goes on where the first was killed."""

from __future__ import annotations

from pathlib import Path

from batch_agent import BatchAgent, Tool
from benchmarks.peers.harness import Finished, compete
from benchmarks.workload import MODEL, SYSTEM_PROMPT, TASK, Review, Work, lookup, rows

LOOKUP = Tool.define(cacheable=True)(lookup)


async def run(work: Work, keep: Path, finished: Finished) -> list[Review | None]:
    reviews: list[Review | None] = [None] * work.agents
    async for result in BatchAgent.stream(
        system_prompt=SYSTEM_PROMPT,
        task=TASK,
        inputs=list(rows(work.agents)),
        tools=[LOOKUP],
        output_schema=Review,
        model=MODEL,
        backend=work.url,
        max_inflight=work.inflight,
        run_dir=keep,
        resume=True,
    ):
        reviews[result.index] = result.output
        finished()
    return reviews


if __name__ == "__main__":
    compete(run)
