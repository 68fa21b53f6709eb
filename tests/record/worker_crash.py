"""A worker of the user's that is killed with SIGKILL again and again until its rows are done.

``python tests/record/worker_crash.py --work URL DIRECTORY ROWS`` is the process that is killed. Every row writes before
it asks, asks two things at once, in an order that changes from one session to the next, writes twice for one answer and
beside another ask, and rests a while after an answer. Answers that it has received are noted.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

from batch_agent import AgentContext, BatchAgent, Tool
from batch_agent.errors import OutcomeUnknown

WRITES, STARTED, RECEIVED = "writes.log", "started.log", "received.log"


def append(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def main() -> None:
    _, _, url, place, rows = sys.argv
    directory, chance = Path(place), random.Random()

    @Tool.define(effect="write")
    def write_down(what: str) -> str:
        append(directory / WRITES, what)
        return f"written {what}"

    async def careful(ctx: AgentContext, what: str) -> str:
        try:
            return await ctx.call("write_down", what=what)
        except OutcomeUnknown:
            return f"written {what}"  # or not: this worker does not mind

    async def ask(ctx: AgentContext, question: str) -> str:
        reply = await ctx.ask(question)
        append(directory / RECEIVED, question)
        return reply.text

    async def work(row: str, ctx: AgentContext) -> object:
        append(directory / STARTED, row)
        said = [await careful(ctx, f"{row} before")]
        asks = [f"row {row} left", f"row {row} right"]
        chance.shuffle(asks)
        said += sorted(await asyncio.gather(*(ask(ctx, question) for question in asks)))
        await asyncio.sleep(chance.uniform(0.0, 0.02))
        said += await asyncio.gather(careful(ctx, f"{row} twice"), careful(ctx, f"{row} twice"))
        said += await asyncio.gather(ask(ctx, f"row {row} last"), careful(ctx, f"{row} beside"))
        await asyncio.sleep(chance.uniform(0.0, 0.02))
        return said

    run = BatchAgent.run(
        worker=work,
        inputs=[str(number) for number in range(int(rows))],
        tools=[write_down],
        model="m",
        backend=url,
        max_inflight=4,
        max_agents=6,
        run_dir=directory / "run",
        resume=True,
    )
    asyncio.run(run)


if __name__ == "__main__":
    main()
