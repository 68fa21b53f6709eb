"""What a start costs: importing the package, and the commands that only say something.

``python -m benchmarks.startup``. Each is a process of its own, from its start to its end; they take turns, and a ratio
is the median of the ratios of neighbouring runs. The baseline is ``import pydantic``, which every program of this kind
pays. What a first run needs beyond that is imported by the run: ``ready to send`` is all of it, over what a
hand-written loop with the same HTTP client and the same schemas imports.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from benchmarks import report

BAR = 2.5


@dataclass(frozen=True, slots=True)
class Start:
    name: str
    arguments: tuple[str, ...]
    over: str = ""  # the name of its baseline


def python(name: str, code: str, over: str = "") -> Start:
    return Start(name, ("-c", code), over)


def command(argument: str) -> Start:
    return Start(f"batch-agent {argument}", ("-m", "batch_agent", *argument.split()), PYDANTIC.name)


PYDANTIC = python("import pydantic", "import pydantic")
LOOP = python(
    "imports of a hand-written loop",
    "import asyncio, aiohttp, orjson; from pydantic import BaseModel, TypeAdapter\n"
    "class Answer(BaseModel):\n    word: str\n"
    "TypeAdapter(Answer)",
)
READY = (
    "from batch_agent import BatchAgent, Tool; from pydantic import BaseModel\n"
    "class Answer(BaseModel):\n    word: str\n"
    "BatchAgent.open(task='{input}', inputs=['a'], output_schema=Answer, backend='vllm://localhost')"
)
STARTS = (
    PYDANTIC,
    python("import batch_agent", "import batch_agent", PYDANTIC.name),
    python("from batch_agent import BatchAgent", "from batch_agent import BatchAgent", PYDANTIC.name),
    command("--version"),
    command("--help"),
    command("run --help"),
    LOOP,
    python("ready to send", READY, LOOP.name),
)


def wall_ms(start: Start) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *start.arguments], check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - began) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description="What a start costs.")
    parser.add_argument("--repetitions", type=int, default=15)
    repetitions = parser.parse_args().repetitions
    env = report.environment()
    for start in STARTS:  # the first of each reads from disk and may have to compile
        wall_ms(start)
    times: dict[str, list[float]] = {start.name: [] for start in STARTS}
    for _ in range(repetitions):
        for start in STARTS:
            times[start.name].append(wall_ms(start))

    ratios = {
        start.name: statistics.median(a / b for a, b in zip(times[start.name], times[start.over], strict=True))
        for start in STARTS
        if start.over
    }
    rows = [
        (start.name, f"{statistics.median(times[start.name]):.0f}", f"{ratios[start.name]:.2f}" if start.over else "1")
        for start in STARTS
    ]
    print(report.table(("process", "ms", "over its baseline"), rows), "\n")
    bars = [
        report.Bar(f"{start.name}, over {start.over}", ratios[start.name], "<=", BAR) for start in STARTS if start.over
    ]
    measurements = [{"process": name, "wall_ms": report.spread(values)} for name, values in times.items()]
    return report.finish("startup", env, bars, measurements)


if __name__ == "__main__":
    sys.exit(main())
