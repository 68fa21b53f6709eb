"""litellm: ``acompletion`` with its own retries, a tool loop by hand."""

# mypy: ignore-errors
# What it imports is in an environment of its own, where the type checker does not look.

from __future__ import annotations

import os
from pathlib import Path

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices

import litellm

from benchmarks.peers.harness import Finished, compete, gathered, tool_loop
from benchmarks.workload import MODEL, Review, Work, request_body

litellm.suppress_debug_info = True


async def run(work: Work, keep: Path, finished: Finished) -> list[Review | None]:
    async def ask(messages):
        body = request_body(messages, tools=True, stream=False) | {"model": f"openai/{MODEL}"}
        answer = await litellm.acompletion(**body, api_base=f"{work.url}/v1", api_key="none", num_retries=3)
        return answer.choices[0].message.model_dump(exclude_none=True)

    return await gathered(work, lambda given: tool_loop(ask, given), finished)


if __name__ == "__main__":
    compete(run)
