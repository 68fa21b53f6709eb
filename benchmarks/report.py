"""What all benchmarks share: where they ran, the bars they are held to, tables for people and JSON for machines."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("batch-agent", "aiohttp", "httptools", "orjson", "pydantic")


@dataclass(frozen=True, slots=True)
class Bar:
    """A number that must not be passed. ``name`` says what was measured and where."""

    name: str
    measured: float
    relation: Literal["<=", ">="]
    limit: float

    @property
    def met(self) -> bool:
        return self.measured <= self.limit if self.relation == "<=" else self.measured >= self.limit

    def to_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "measured": self.measured,
            "bar": f"{self.relation} {self.limit:g}",
            "met": self.met,
        }


SOURCE = Path(__file__).parent.parent / "src" / "batch_agent"
ENGINES = ("scheduler", "dispatch", "backends/base.py", "backends/engines")
TURN = ("agent", "scheduler", "dispatch", "backends/base.py", "backends/http", "backends/openai", "http")
# What each benchmark measures, as files and folders of the package: a change of them makes its numbers old.
MEASURES: dict[str, tuple[str, ...]] = {
    "kv": ENGINES,
    "kv-simulated": ("scheduler", "dispatch", "backends/base.py", "backends/simulated"),
    "gpu": (*TURN, "backends/engines"),
    "engines": (*TURN, "backends/engines"),
    "people": ("serve", *ENGINES),
    "throughput": (*TURN, "record", "run", "tools"),
    "at_scale": ("scheduler", "dispatch"),
    "peers": ("agent", "record", "run", "tools"),
}
BUDGETS = ("scheduler/budget.py", "dispatch/spending.py")  # nothing of it runs in a measurement
HEADLINES = ("throughput", "kv-vllm", "kv-sglang", "people-vllm", "at_scale", "peers")  # files whose numbers README has


def stale() -> dict[str, str]:
    """Return the results files that are older than the code that they measure, each with its date."""
    found = {}
    for path in sorted(RESULTS.glob("*.json")):
        env = json.loads(path.read_text()).get("environment", {})
        if measured_by(path.stem) and env.get("measures") != digest_of(path.stem):
            found[path.stem] = str(env.get("date", "no date"))[:10]
    return found


def measured_by(name: str) -> tuple[str, ...]:
    """Return what a results file measures: its own line of ``MEASURES``, or that of its name without the engine."""
    return MEASURES.get(name) or MEASURES.get(name.rpartition("-")[0]) or ()


def digest_of(name: str) -> str:
    """Return a digest of the code that a benchmark measures. Comments and docstrings do not count."""
    found = hashlib.sha256()
    for part in measured_by(name):
        place = SOURCE / part
        if not place.exists():
            raise SystemExit(f"MEASURES of {name!r} names {part}, which is not in {SOURCE}")
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            if (file := path.relative_to(SOURCE).as_posix()) not in BUDGETS:
                found.update(f"{file}\n{code_of(path)}\n".encode())
    return found.hexdigest()[:16]


@cache
def code_of(path: Path) -> str:
    """The lines of a module that do something, the same in all versions of Python."""
    text = path.read_text()
    lines: list[str | None] = list(text.splitlines())
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                lines[first.lineno - 1 : first.end_lineno] = [None] * ((first.end_lineno or 0) - first.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line and line.strip() and not line.lstrip().startswith("#"))


def environment() -> dict[str, object]:
    return {
        "date": now(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "commit": _commit(),
        "packages": _versions(),
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    """Of those that are installed; a source tree on the path is none."""
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str | None:
    """What was measured; None outside a clone, or without git."""
    command = ["git", "describe", "--always", "--dirty"]
    with suppress(FileNotFoundError):
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        return done.stdout.strip() or None
    return None


def spread(values: Sequence[float]) -> dict[str, object]:
    """The median, and the repetitions it is the median of."""
    return {"median": statistics.median(values), "repetitions": list(values)}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligned text; the first column to the left, numbers to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])

    def aligned(line: Sequence[str]) -> str:
        cells = zip(line, widths, strict=True)
        return "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(cells))

    return "\n".join(map(aligned, lines))


def finish(name: str, env: Mapping[str, object], bars: Sequence[Bar], measurements: object) -> int:
    """Prints the bars, writes ``results/NAME.json``, and returns the exit status: 1 when a bar was missed."""
    rows = [
        (bar.name, f"{bar.measured:.2f}", f"{bar.relation} {bar.limit:g}", "met" if bar.met else "MISSED")
        for bar in bars
    ]
    print(table(("bar", "measured", "allowed", ""), rows))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    recorded = {**({"measures": digest_of(name)} if measured_by(name) else {}), **env}
    content = {"environment": recorded, "bars": [bar.to_dict() for bar in bars], "measurements": measurements}
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"\nwritten to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return 0 if all(bar.met for bar in bars) else 1
