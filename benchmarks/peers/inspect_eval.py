"""inspect_ai: a ``Task`` with a tool; its log is what a second start goes on from (``eval_retry``)."""

# mypy: ignore-errors
# What it imports is in an environment of its own, where the type checker does not look.

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from inspect_ai import Task, eval_async, eval_retry_async
from inspect_ai.dataset import Sample
from inspect_ai.log import list_eval_logs, read_eval_log
from inspect_ai.model import ChatMessageSystem, ChatMessageUser
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

from benchmarks.peers.harness import Finished, compete
from benchmarks.workload import MODEL, SYSTEM_PROMPT_WITH_SCHEMA, TASK, Review, Work, lookup, rows

os.environ["INSPECT_DISPLAY"] = "none"


@tool(name="lookup")
def lookup_tool():
    async def execute(topic: str) -> str:
        """Look up what is known about a topic.

        Args:
            topic: The topic's name.
        """
        return await lookup(topic)

    return execute


async def run(work: Work, keep: Path, finished: Finished) -> list[Review | None]:
    os.environ["LOCAL_BASE_URL"], os.environ["LOCAL_API_KEY"] = f"{work.url}/v1", "none"
    system = ChatMessageSystem(content=SYSTEM_PROMPT_WITH_SCHEMA)
    samples = [
        Sample(input=[system, ChatMessageUser(content=TASK.format(**given))], id=str(given["record"]))
        for given in rows(work.agents)
    ]
    task = Task(dataset=samples, solver=[use_tools(lookup_tool()), generate()], name="reviews")
    how = {"max_connections": work.inflight, "max_samples": work.inflight, "fail_on_error": False}
    before = await asyncio.to_thread(lambda: list_eval_logs(str(keep)) if keep.exists() else [])
    if before:
        logs = await eval_retry_async(before[0].name, log_dir=str(keep), **how)
    else:
        logs = await eval_async(task, model=f"openai-api/local/{MODEL}", log_dir=str(keep), **how)
    log = await asyncio.to_thread(read_eval_log, logs[0].location)
    reviews: list[Review | None] = [None] * work.agents
    for sample in log.samples or []:
        if sample.error is None:
            reviews[int(sample.id)] = Review.model_validate_json(sample.output.completion)
    return reviews


if __name__ == "__main__":
    compete(run)
