"""curator: one ``LLM`` over a data set, with its cache. It has no tool loop, so each row is one turn."""

# mypy: ignore-errors
# What it imports is in an environment of its own, where the type checker does not look.

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from benchmarks.peers.harness import Finished, compete
from benchmarks.workload import MODEL, SYSTEM_PROMPT_WITH_SCHEMA, TASK, Review, Work, rows

os.environ.setdefault("CURATOR_DISABLE_RICH_DISPLAY", "1")
os.environ.setdefault("TELEMETRY_ENABLED", "0")
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices


def _generate(work: Work, keep: Path) -> list[Review | None]:
    os.environ["OPENAI_API_KEY"], os.environ["OPENAI_BASE_URL"] = "none", f"{work.url}/v1"
    from bespokelabs import curator

    class Reviewer(curator.LLM):
        def prompt(self, given):
            text = TASK.format(**given)
            return [{"role": "system", "content": SYSTEM_PROMPT_WITH_SCHEMA}, {"role": "user", "content": text}]

        def parse(self, given, response):
            return {"record": given["record"], "answer": response}

    limits = {
        "base_url": f"{work.url}/v1",
        "max_concurrent_requests": work.inflight,
        "max_requests_per_minute": 10_000_000,
        "max_tokens_per_minute": 10_000_000_000,
    }
    reviewer = Reviewer(model_name=f"openai/{MODEL}", backend="litellm", backend_params=limits)
    found = reviewer(list(rows(work.agents)), working_dir=str(keep))
    reviews: list[Review | None] = [None] * work.agents
    for given in getattr(found, "dataset", found):
        reviews[given["record"]] = Review.model_validate_json(given["answer"])
    return reviews


async def run(work: Work, keep: Path, finished: Finished) -> list[Review | None]:
    return await asyncio.to_thread(_generate, work, keep)


if __name__ == "__main__":
    compete(run)
