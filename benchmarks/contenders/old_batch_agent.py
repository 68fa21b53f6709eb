"""The older package of the same name, 0.2.0 by other authors, in the settings that suit it best here.

Its OpenAI adapter, which keeps one HTTP client, with its cache hints off: with ``vllm://`` and the defaults it opens a
new HTTP client for each hint and each probe, and the benchmark would measure little else.
"""

# mypy: ignore-errors
# What it imports is in an environment of its own, where the type checker does not look.

from __future__ import annotations

from batch_agent import BatchAgent, Tool
from batch_agent.backends.openai import OpenAIBackend
from benchmarks.workload import MODEL, SYSTEM_PROMPT, TASK, Review, Work, contend, lookup, rows

LOOKUP = Tool.define(lookup)


async def run(work: Work) -> list[Review]:
    results = await BatchAgent.run(
        system_prompt=SYSTEM_PROMPT,
        task=TASK,
        inputs=list(rows(work.agents)),
        tools=[LOOKUP] if work.turns == 2 else [],
        output_schema=Review,
        model=MODEL,
        runtime=OpenAIBackend(api_key="none", base_url=work.url),
        max_inflight=work.inflight,
        max_turns=10 if work.turns == 2 else 1,
        streaming_tool_dispatch=work.stream,
        kvflow=False,
    )
    return [result.output for result in results if result.output is not None]


if __name__ == "__main__":
    contend(run)
