"""Worker processes that start at once, and what they import in tests: tools."""

from __future__ import annotations

import os
from asyncio.subprocess import DEVNULL, Process
from pathlib import Path
from typing import cast

from tests.warm import start

from batch_agent import Tool
from batch_agent.run.worker_processes import ProcessCrew

ROOT = Path(__file__).parents[2]
NOTES = "BATCH_AGENT_TEST_NOTES"  # names the file of the notes


@Tool.define(effect="write")
def note(row: str) -> str:
    """Write down that a row was worked on, as one line of a file."""
    descriptor = os.open(os.environ[NOTES], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"{row}\n".encode())
    finally:
        os.close(descriptor)
    return "written"


@Tool.define(effect="write")
async def note_at_once(row: str) -> str:
    """Write down that a row was worked on, without a point at which this call could be cancelled."""
    return note.function(row)


@Tool.define(effect="read")
def quick(n: int) -> str:
    """Look something up at once."""
    return "seen"


def notes() -> list[str]:
    path = Path(os.environ[NOTES])
    return path.read_text().split() if path.exists() else []


class WarmCrew(ProcessCrew):
    """The worker processes of ``processes=2``, but copies of a process that has imported the package."""

    def __init__(self, modules: Path = ROOT) -> None:
        super().__init__(2)
        self._modules = modules

    async def _start(self, stderr: int, mark: str) -> Process:
        words = ("-m", "batch_agent", "work", self._place, "--import-from", str(self._modules))
        return cast(Process, await start(*words, cwd=ROOT, stdin=DEVNULL, stdout=DEVNULL, stderr=stderr))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]
