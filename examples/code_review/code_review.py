"""Review source files and sum up what is wrong with them: one agent a file, then one answer for all.

    python examples/code_review/code_review.py src/batch_agent/scheduler/*.py

The backend is BATCH_AGENT_BACKEND, for instance vllm://localhost:8000. With RUN_DIR set, the run is recorded there and
goes on where it was when it is started again.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from batch_agent import AgentResult, BatchAgent

HERE = Path(__file__).parent


class Bug(BaseModel):
    line: int
    severity: Literal["low", "medium", "high"]
    what: str = Field(max_length=200)


class Report(BaseModel):
    bugs: list[Bug] = Field(max_length=5)


class Summary(BaseModel):
    worst_file: str = Field(max_length=100)
    advice: str = Field(max_length=400)


def rows(paths: list[Path]) -> list[dict[str, str]]:
    return [{"path": path.name, "code": path.read_text()} for path in paths]


async def main(paths: list[Path]) -> None:
    outcome = await BatchAgent.run_with_reduce(
        system_prompt="You review Python code. Report only what is wrong.",
        task="Review {path}:\n\n{code}",
        inputs=rows(paths),
        output_schema=Report,
        reduce="Here are the bug reports on {n} files, as JSON. Name the worst file and say what to mend first.",
        reduce_schema=Summary,
        max_tokens=300,
        temperature=0,
        run_dir=os.environ.get("RUN_DIR"),
        resume="RUN_DIR" in os.environ,
    )
    reports, summary = outcome
    for path, report in zip(paths, reports, strict=True):
        bugs = report.output.bugs if report.output else []
        print(f"{path.name}: {len(bugs)} bugs" if report.ok else f"{path.name}: {report.error}")
        for bug in bugs:
            print(f"  line {bug.line}, {bug.severity}: {bug.what}")
    if isinstance(summary, AgentResult):
        print(f"no summary: {summary.error}")
    else:
        print(f"\nworst: {summary.worst_file}\n{summary.advice}")
    print(f"({len(outcome.reduction.covers)} of {len(reports)} reports were summed up)")


if __name__ == "__main__":
    asyncio.run(main([Path(path) for path in sys.argv[1:]] or sorted(HERE.glob("to_review/*.py"))))
