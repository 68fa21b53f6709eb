"""One command-line agent as a guarded process: given its prompt, read line by line, ended as a whole."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from batch_agent.children import open_guarded

LINE_BYTES = 16 * 1024 * 1024  # of one event; a longer one is ignored
TAIL_LINES = 20  # of standard error, for the message of a failed row


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How an agent's process ended: 0 is success. ``tail`` is the end of its standard error."""

    status: int
    tail: str


async def run_agent(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    prompt: str,
    errors: Path,
    on_line: Callable[[bytes], None],
) -> ProcessEnd:
    """Run the command until it ends; standard error goes to the file ``errors``. If this is cancelled, or this process
    dies, everything that the command started is killed."""
    pipe = asyncio.subprocess.PIPE
    with errors.open("wb") as file:
        opened = open_guarded(command, cwd=cwd, env=env, stdin=pipe, stdout=pipe, stderr=file, limit=LINE_BYTES)
        async with opened as process, asyncio.TaskGroup() as tasks:
            tasks.create_task(_feed(process, prompt.encode("utf-8", "replace")))
            tasks.create_task(_read(process, on_line))
            status = await process.wait()
    return ProcessEnd(status, tail_of(errors))


async def _feed(process: asyncio.subprocess.Process, prompt: bytes) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):  # an agent may not read its whole input
        process.stdin.write(prompt)
        await process.stdin.drain()
    process.stdin.close()


async def _read(process: asyncio.subprocess.Process, on_line: Callable[[bytes], None]) -> None:
    assert process.stdout is not None
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:
            continue  # longer than the limit: the buffered part is dropped
        if not line:
            return
        on_line(line)


def tail_of(file: Path) -> str:
    with suppress(OSError), file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - 64 * 1024))
        lines = deque(opened.read().decode("utf-8", "replace").splitlines(), TAIL_LINES)
        return "\n".join(lines).strip()
    return ""
