"""A process with a run of its own rows that shares slots, limits, a budget and tool calls with its siblings.

It is given one JSON object: the store's URL, its own name, options of the run, and a file for what its tool ran. It
prints its results as one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from batch_agent.agent.prepare import prepare
from batch_agent.record.address import StoreAddress
from batch_agent.record.redis.store import RedisRunStore
from batch_agent.run.run import Run
from batch_agent.run.sharing import Lending
from batch_agent.spec import BatchSpec
from batch_agent.tools import Tool


def lookup(log: Path, seconds: float) -> Tool:
    @Tool.define(cacheable=True)
    async def find(key: str) -> str:
        """Look a key up."""
        with log.open("a") as file:
            file.write(f"{key}\n")
        await asyncio.sleep(seconds)
        return f"value of {key}"

    return find


async def main(given: dict[str, Any]) -> None:
    store = RedisRunStore.at(StoreAddress.parse(given["url"]))
    lending = Lending(store, given["worker"], given.get("seconds", 15.0))
    tools = [lookup(Path(given["log"]), given.get("tool_seconds", 0.3))] if "log" in given else []
    inputs = [{"n": given["first"] + row} for row in range(given["rows"])]
    run: Run[Any] = Run(prepare(BatchSpec(**given["options"], inputs=inputs, tools=tools)), lender=lending)
    ended: list[bool] = []
    async with run:
        async for result in run.results():
            ended.append(result.ok)
    tokens, _ = run.shared.spending.so_far()
    ran = {name: each.runs for name, each in run.tool_statistics().items()}
    found = {"ok": sum(ended), "failed": len(ended) - sum(ended), "tokens": tokens, "ran": ran}
    sys.stdout.write(json.dumps(found))
    store.close()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
