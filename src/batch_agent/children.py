"""Foreign programs as child processes: agents, MCP servers, programs that a model wrote. Each runs below a guard."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import IO

GUARD = str(Path(__file__).with_name("guard.py"))
ENDING_SECONDS = 5.0  # for the guard to kill and reap everything; then it is killed itself
LINE_BYTES = 64 * 1024

Stream = int | IO[bytes]


@asynccontextmanager
async def open_guarded(
    command: Sequence[str],
    *,
    cwd: str | PathLike[str] | None,
    env: Mapping[str, str],
    stdin: Stream,
    stdout: Stream,
    stderr: Stream,
    limit: int = LINE_BYTES,
) -> AsyncIterator[Process]:
    """Start the command. When the block ends, or if this process dies, everything that it started is killed.
    ``limit`` is the longest line that can be read from its output."""
    watched, alive = os.pipe()
    try:
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", GUARD, str(watched), *command),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=cwd,
                env=dict(env),
                pass_fds=(watched,),
                limit=limit,
                start_new_session=True,  # Ctrl-C in a terminal is for this process alone
            )
        finally:
            os.close(watched)
        try:
            yield process
        finally:
            os.close(alive)
            alive = -1
            await asyncio.shield(_ended(process))
    finally:
        if alive >= 0:
            os.close(alive)


async def _ended(process: Process) -> None:
    try:
        await asyncio.wait_for(process.wait(), ENDING_SECONDS)
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    process._transport.close()  # type: ignore[attr-defined]  # else a surviving process would keep its pipes open
