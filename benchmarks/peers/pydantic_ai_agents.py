"""pydantic-ai: one ``Agent`` with a tool and an output type; a semaphore around ``run``, as it has no batch."""

# mypy: ignore-errors
# What it imports is in an environment of its own, where the type checker does not look.

from __future__ import annotations

from pathlib import Path

from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from benchmarks.peers.harness import Finished, compete, gathered
from benchmarks.workload import MODEL, SYSTEM_PROMPT, TASK, Review, Work, lookup


async def run(work: Work, keep: Path, finished: Finished) -> list[Review | None]:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{work.url}/v1", api_key="none"))
    agent = Agent(model, system_prompt=SYSTEM_PROMPT, tools=[lookup], output_type=NativeOutput(Review))

    async def one(given):
        return (await agent.run(TASK.format(**given))).output

    return await gathered(work, one, finished)


if __name__ == "__main__":
    compete(run)
