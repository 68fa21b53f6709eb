"""The command on a terminal of a known size: what is painted, and what is left alone."""

import asyncio
import fcntl
import os
import pty
import re
import struct
import termios
from pathlib import Path

import pytest
from tests.cli.commandline import rows, serving
from tests.warm import start

from batch_agent.testing import Say

PAINTED = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


async def on_a_terminal(
    directory: Path, arguments: list[str], *, piped: bool, columns: int = 80
) -> tuple[bytes, bytes]:
    """What the terminal got, and what went into the pipe where standard output is one."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = await start(
        *("-m", "batch_agent", *arguments),
        cwd=directory,
        stdin=terminal,
        stdout=asyncio.subprocess.PIPE if piped else terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(terminal)
    seen = asyncio.get_running_loop().run_in_executor(None, read_all, controller)
    out, _ = await process.communicate()
    assert process.returncode == 0
    return await seen, out or b""


def read_all(controller: int) -> bytes:
    parts = []
    try:
        while part := os.read(controller, 65536):
            parts.append(part)
    except OSError:  # the other end is closed
        pass
    os.close(controller)
    return b"".join(parts)


@pytest.mark.parametrize("arguments", [["--output", "out.jsonl"], []], ids=["file", "pipe"])
async def test_a_pipe_on_the_same_terminal_is_not_painted_over(tmp_path: Path, arguments: list[str]) -> None:
    rows(tmp_path, *map(str, range(20)))
    async with serving(tmp_path, lambda _: Say("fine", chunk_delay=0.05)):
        command = ["run", "spec.yaml", "--inputs", "rows.jsonl", *arguments]
        seen, out = await on_a_terminal(tmp_path, command, piped=not arguments)
    assert b"20 rows in" in seen and b"batch-agent show runs/spec-" in seen
    if arguments:
        assert PAINTED.search(seen)  # the live view
    else:
        assert not PAINTED.search(seen) and len(out.splitlines()) == 20


async def test_lines_for_people_fit_a_narrow_terminal(tmp_path: Path) -> None:
    rows(tmp_path, "a")
    async with serving(tmp_path, lambda _: Say("fine")):
        arguments = ["run", "spec.yaml", "--inputs", "rows.jsonl"]
        seen, _ = await on_a_terminal(tmp_path, arguments, piped=True, columns=40)
    text = seen.decode().replace("\r\n", "\n")
    assert all(len(line) <= 40 or "batch-agent show" in line for line in text.splitlines()), text
