"""Review source files: one agent a file, each reads its file with a tool and answers in a schema.

    python examples/review_files.py src/batch_agent/scheduler/*.py

The backend is BATCH_AGENT_BACKEND, for instance vllm://localhost:8000.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel

from batch_agent import AgentResult, BatchAgent, Tool


class Review(BaseModel):
    severity: Literal["none", "low", "high"]
    findings: list[str]


def show(result: AgentResult[Review]) -> None:
    path = result.input["path"]  # type: ignore[index]
    print(f"{path}: {result.output.severity if result.output else result.error}")


async def main(paths: list[str]) -> None:
    results = await BatchAgent.run(
        system_prompt="You review Python code. Report only what is wrong.",
        task="Read the file {path} and review it.",
        inputs=[{"path": path} for path in paths],
        tools=[Tool.read_file],
        output_schema=Review,
        max_turns=6,
        on_result=show,
    )
    tokens = sum(result.usage.prompt_tokens for result in results)
    cached = sum(result.usage.cached_tokens for result in results)
    good = sum(result.ok for result in results)
    print(f"{good} of {len(results)} reviewed; {cached} of {tokens} prompt tokens cached")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or ["examples/review_files.py"]))
