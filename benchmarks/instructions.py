"""Instructions per turn: what a contender costs, whatever else the machine does.

CPU time depends on what other programs leave of caches and cores; the number of instructions does not. ``perf`` counts
them where the processor lets it, and valgrind everywhere else, fifty times slower. A contender runs twice, with few
agents and with more: the difference is free of its start. Under valgrind a second has few turns, so what our contenders
do by the clock (read the load of the server, gather records for a commit) is done as much less often (``SLOWER``).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from benchmarks import environments

FEW, MORE = 64, 192  # agents
SLOWER = "BENCHMARK_SLOWER"  # in the environment of a contender: how many times slower it runs
PERF = ("perf", "stat", "-x", ",", "-e", "instructions:u")
VALGRIND = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")


@cache
def tool() -> tuple[str, ...] | None:
    """The command that counts the instructions of another one; None if there is none on this machine."""
    if shutil.which("perf") and _counted(PERF, ("true",)) is not None:
        return PERF
    return VALGRIND if shutil.which("valgrind") else None


def per_turn(command: Sequence[str], turns: int) -> float | None:
    """Return the instructions of a turn. ``command`` is a contender's, without its number of agents."""
    counter = tool()
    if counter is None:
        return None
    few, more = (_counted(counter, (*command, "--agents", str(agents))) for agents in (FEW, MORE))
    return None if few is None or more is None else (more - few) / (turns * (MORE - FEW))


def _counted(counter: tuple[str, ...], command: Sequence[str]) -> int | None:
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "told")
        to = f"--log-file={told}" if counter is VALGRIND else f"--output={told}"
        done = subprocess.run(
            [*counter, to, *command],
            cwd=environments.ROOT,
            env={**os.environ, "PYTHONHASHSEED": "0", SLOWER: "50" if counter is VALGRIND else "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
        )
        if done.returncode or not told.exists():
            return None
        text = told.read_text()
    found = re.search(r"I\s+refs:\s+([\d,]+)", text) or re.search(r"^(\d+),", text, re.MULTILINE)
    return int(found[1].replace(",", "")) if found else None
