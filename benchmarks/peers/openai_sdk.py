"""The openai SDK: one client, its own retries, a tool loop by hand."""

# mypy: ignore-errors
# What it imports is in an environment of its own, where the type checker does not look.

from __future__ import annotations

from pathlib import Path

import openai

from benchmarks.peers.harness import Finished, compete, gathered, tool_loop
from benchmarks.workload import Review, Work, request_body


async def run(work: Work, keep: Path, finished: Finished) -> list[Review | None]:
    async with openai.AsyncOpenAI(base_url=f"{work.url}/v1", api_key="none") as client:

        async def ask(messages):
            answer = await client.chat.completions.create(**request_body(messages, tools=True, stream=False))
            return answer.choices[0].message.model_dump(exclude_none=True)

        return await gathered(work, lambda given: tool_loop(ask, given), finished)


if __name__ == "__main__":
    compete(run)
