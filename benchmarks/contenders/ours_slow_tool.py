"""``BatchAgent.run`` where streaming pays: the model goes on at length behind its first call, and the tool is slow."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from batch_agent import Tool
from benchmarks.contenders import ours
from benchmarks.workload import Review, Work, contend

SLOW_SECONDS = 0.5


async def lookup(topic: str) -> str:
    """Look up what is known about a topic.

    Args:
        topic: The topic's name.
    """
    await asyncio.sleep(SLOW_SECONDS)
    return f"What is known about {topic}: it has been seen before."


LOOKUP = Tool.define(cacheable=False)(lookup)


async def run(work: Work) -> list[Review]:
    return await ours.run(replace(work, turns=2), tool=LOOKUP, system_prompt="Look things up at length.")


if __name__ == "__main__":
    contend(run)
