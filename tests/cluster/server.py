"""A model server for the cluster suite, in a process of its own: ``python -m tests.cluster.server FOLDER SECONDS``.

Each row calls the tool that writes in its first turn, and answers in its second. Every request is one line of
``requests.log``: the row and the turn. So the suite sees what was asked twice, whichever process asked.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

from batch_agent.testing import CallTools, Request, Say, ScriptedServer, ToolUse

REQUESTS, NOTES = "requests.log", "notes.log"
UNKNOWN = "unknown"  # what the model reads of a write that was interrupted


def main() -> None:
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    log = os.open(folder / REQUESTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def answer(request: Request) -> Say:
        user = next(str(message["content"]) for message in request.messages if message["role"] == "user")
        found = re.search(r"row (\d+)", user)
        assert found is not None
        row, turn = int(found[1]), request.turn
        told = str(request.messages[-1]["content"]) if turn else ""
        os.write(log, f"{row} {turn} {'interrupted' if UNKNOWN in told else '-'}\n".encode())
        if turn == 0:
            call = ToolUse("write_note", {"row": row, "path": str(folder / NOTES)})
            return CallTools(call, text=f"row {row}", latency=seconds)
        return Say(f"row {row} is done", latency=seconds)

    async def serve() -> None:
        async with ScriptedServer(answer, models=["m"]) as server:
            print(server.backend_url, flush=True)  # noqa: T201
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

    asyncio.run(serve())


if __name__ == "__main__":
    main()
