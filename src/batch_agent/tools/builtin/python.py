"""python_eval: runs a program that a model wrote, in its own interpreter process.

Time, memory, file size and output are limited, and the environment is nearly empty. All processes of the program are
killed at the end, on a timeout and on cancellation (``guard.py``). This protects against accidents, not against
attacks: the program has the user's rights and network. So it is off unless an environment variable enables it.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from batch_agent.children import open_guarded
from batch_agent.errors import ToolError, ToolTimeout
from batch_agent.tools.base import Tool
from batch_agent.tools.builtin import python_child

SWITCH = "BATCH_AGENT_ENABLE_PYTHON_EVAL"
_FILE_BYTES = 16 * 1024 * 1024


def python_eval(
    *, timeout: float = 10.0, memory_bytes: int = 512 * 1024 * 1024, output_bytes: int = 20_000
) -> Tool[..., Coroutine[Any, Any, str]]:
    """Return the tool. ``timeout`` is in seconds and limits both wall time and CPU time."""

    # A program can have any effect, so it is a write: every call runs, and none starts early. Its output is cut here.
    @Tool.define(name="python_eval", effect="write", max_tokens=None)
    async def evaluate(code: str) -> str:
        """Run a Python program and return what it prints, and the value of its last expression.

        Each call starts afresh: nothing is kept between calls.

        Args:
            code: The program.
        """
        if os.environ.get(SWITCH) != "1":
            raise ToolError(f"python_eval is disabled; to let models run programs on this machine, set {SWITCH}=1")
        with tempfile.TemporaryDirectory(prefix="batch-agent-", ignore_cleanup_errors=True) as folder:
            # Output goes to a file: a pipe stays open until the last descendant process ends.
            output = Path(folder, "output")
            limits = (memory_bytes, math.ceil(timeout) + 1, _FILE_BYTES)
            status = await _run(code, Path(folder), output, limits, timeout)
            text = _head(output, output_bytes)
        if status != 0:
            raise ToolError(f"{text}\n{_ending(status)}".strip())
        return text or "(no output)"

    return evaluate


async def _run(code: str, folder: Path, output: Path, limits: tuple[int, int, int], timeout: float) -> int:
    """Run the program and return its exit status. When this returns or raises, no process of the program is left."""
    work = folder / "work"
    work.mkdir()
    program = folder / "program.py"
    program.write_text(code, encoding="utf-8", errors="replace")
    environment = {"PATH": os.defpath, "HOME": str(work), "TMPDIR": str(work), "LANG": "C.UTF-8"}
    command = (sys.executable, "-I", "-X", "utf8", python_child.__file__, str(program), *map(str, limits))
    null = asyncio.subprocess.DEVNULL
    try:
        with output.open("wb") as sink:
            opened = open_guarded(command, cwd=work, env=environment, stdin=null, stdout=sink, stderr=sink)
            async with opened as process, asyncio.timeout(timeout):
                return await process.wait()
    except TimeoutError:
        raise ToolTimeout(f"the program was stopped after {timeout:g} s") from None


def _head(output: Path, limit: int) -> str:
    with output.open("rb") as file:
        data = file.read(limit)
    size = output.stat().st_size
    text = data.decode(errors="replace").rstrip()
    return f"{text}\n[cut: these are the first {limit} of {size} bytes]" if size > limit else text


def _ending(status: int) -> str:
    if status == -signal.SIGXCPU or status == -signal.SIGKILL:
        return "The program was stopped: it used up its processor time or memory."
    if status < 0:
        return f"The program was ended by signal {-status}."
    return f"The program ended with status {status}."
