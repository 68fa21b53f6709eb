"""The older package of the same name, 0.2.0 by other authors; see ``contenders/old_batch_agent``."""

# mypy: ignore-errors
# What it imports is in an environment of its own, where the type checker does not look.

from __future__ import annotations

from pathlib import Path

from benchmarks.contenders import old_batch_agent
from benchmarks.peers.harness import Finished, compete
from benchmarks.workload import Review, Work


async def run(work: Work, keep: Path, finished: Finished) -> list[Review | None]:
    found = {review.record: review for review in await old_batch_agent.run(work)}
    return [found.get(record) for record in range(work.agents)]


if __name__ == "__main__":
    compete(run)
