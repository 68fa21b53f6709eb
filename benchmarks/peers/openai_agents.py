"""openai-agents: one ``Agent`` with a tool and an output type; a semaphore around ``Runner.run``."""

# mypy: ignore-errors
# What it imports is in an environment of its own, where the type checker does not look.

from __future__ import annotations

from pathlib import Path

import openai

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from benchmarks.peers.harness import Finished, compete, gathered
from benchmarks.workload import MODEL, SYSTEM_PROMPT, TASK, Review, Work, lookup


async def run(work: Work, keep: Path, finished: Finished) -> list[Review | None]:
    set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=f"{work.url}/v1", api_key="none") as client:
        agent = Agent(
            name="reviewer",
            instructions=SYSTEM_PROMPT,
            tools=[function_tool(lookup)],
            output_type=Review,
            model=OpenAIChatCompletionsModel(MODEL, client),
        )

        async def one(given):
            return (await Runner.run(agent, TASK.format(**given))).final_output

        return await gathered(work, one, finished)


if __name__ == "__main__":
    compete(run)
