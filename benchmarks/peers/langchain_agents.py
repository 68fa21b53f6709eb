"""LangChain: ``create_agent`` with a tool, and ``abatch_as_completed`` with its limit on concurrency."""

# mypy: ignore-errors
# What it imports is in an environment of its own, where the type checker does not look.

from __future__ import annotations

from pathlib import Path

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from benchmarks.peers.harness import Finished, compete
from benchmarks.workload import MODEL, SYSTEM_PROMPT_WITH_SCHEMA, TASK, Review, Work, lookup, rows


async def run(work: Work, keep: Path, finished: Finished) -> list[Review | None]:
    model = ChatOpenAI(model=MODEL, base_url=f"{work.url}/v1", api_key="none", use_responses_api=False)
    agent = create_agent(model, [tool(lookup)], system_prompt=SYSTEM_PROMPT_WITH_SCHEMA)
    inputs = [{"messages": [("user", TASK.format(**given))]} for given in rows(work.agents)]
    reviews: list[Review | None] = [None] * work.agents
    limit = {"max_concurrency": work.inflight}
    async for place, state in agent.abatch_as_completed(inputs, config=limit, return_exceptions=True):
        if not isinstance(state, Exception):
            reviews[place] = Review.model_validate_json(state["messages"][-1].content)
            finished()
    return reviews


if __name__ == "__main__":
    compete(run)
