"""Review files, one agent a file: python examples/review_files.py src/batch_agent/scheduler/*.py"""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel, Field

from batch_agent import BatchAgent, Tool


class Review(BaseModel):
    severity: Literal["none", "low", "high"]
    findings: list[str] = Field(max_length=3)


async def main(paths: list[str]) -> None:
    worst: dict[str, list[str]] = {"high": [], "low": [], "none": [], "failed": []}
    async for result in BatchAgent.stream(
        system_prompt="You review Python code. Report only what is wrong.",
        task="Read the file {path} and review it.",
        inputs=({"id": path, "path": path} for path in paths),
        tools=[Tool.read_file],
        output_schema=Review,
        max_turns=6,
        max_tokens=200,
    ):
        review = result.output
        worst[review.severity if review else "failed"].append(result.job_id)
        print(f"{result.job_id}: {review.findings if review else result.error}")
    print({severity: len(files) for severity, files in worst.items()})


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or ["examples/label_csv.py", "examples/review_files.py"]))
