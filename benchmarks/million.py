"""A recorded run of a million rows: memory, rows per second, and how soon the finished run is found to be complete.

``python -m benchmarks.million``. Single-turn rows from a JSONL file, against a backend in the same process that answers
at once: what is left is what the package and its journal cost. Every measurement is a process of its own (``--work``);
the small runs stand before and after the large ones, so that a change of the machine's own speed shows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from batch_agent.agent.prepare import prepare
from batch_agent.backends.base import Backend, Capabilities, ModelRequest, OnToolCall
from batch_agent.cli.spec.rows import read_rows
from batch_agent.cli.spec.specfile import read_specfile
from batch_agent.messages import Reply, Usage
from batch_agent.run.run import Run
from benchmarks import environments, report
from benchmarks.stream_rows import peak_bytes

ROWS = (10_000, 100_000, 1_000_000)
SMALL_RUNS = 5
PEAK_BAR, RATE_BAR, CPU_BAR, RESUME_BAR = 1.5, 0.8, 1.2, 10.0
SPEC = """\
task: "Judge this record: {text}"
model: instant
backend: simulated://instant
max_inflight: 64
"""

Sample = dict[str, float]


class Instant(Backend):
    """Answers in no time."""

    name = "instant://"
    capabilities = Capabilities(native_schema=True, streaming=False)

    async def models(self) -> list[str]:
        return ["instant"]

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        await asyncio.sleep(0)
        return Reply("The record is clean.", usage=Usage(100, 0, 6))


def write_rows(path: Path, count: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            file.write(json.dumps({"id": number, "text": f"entry {number} of a long log, harmless as it seems"}) + "\n")


async def work(directory: Path, name: str) -> Sample:
    rows = directory / f"{name}.jsonl"
    spec = read_specfile(directory / "spec.yaml").resolve(
        {"inputs": read_rows(str(rows)), "backend": Instant(), "run_dir": directory / name}
    )
    command = {"spec": str(directory / "spec.yaml"), "inputs": str(rows)}
    done = 0
    wall, cpu = time.perf_counter(), time.process_time()
    async with Run(prepare(spec), command=command) as run:
        async for result in run.results():
            if not result.ok:
                raise SystemExit(f"row {result.index} failed: {result.error}")
            done += 1
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"rows": done, "wall_s": wall, "cpu_per_row_s": cpu / done, "peak_bytes": peak_bytes()}


def run_once(directory: Path, rows: int, number: int) -> tuple[Sample, Path]:
    name = f"run-{rows}-{number}"
    source = directory / f"{rows}.jsonl"
    if not source.exists():
        write_rows(source, rows)
    (directory / f"{name}.jsonl").symlink_to(source)
    command = [sys.executable, "-m", "benchmarks.million", "--work", str(directory), name]
    done = subprocess.run(command, cwd=environments.ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(command)}")
    sample: Sample = json.loads(done.stdout)
    if sample["rows"] != rows:
        raise SystemExit(f"{sample['rows']} results for {rows} rows")
    rate = rows / sample["wall_s"]
    print(f"{rows:>9,} rows: {rate:,.0f} rows/s, {sample['peak_bytes'] / 2**20:.0f} MiB", flush=True)
    return sample, directory / name


def resume_seconds(run: Path) -> float:
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "batch_agent", "resume", str(run)],
        cwd=environments.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or "is complete" not in done.stderr:
        raise SystemExit(f"resume failed: {done.stderr}")
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.million", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="sizes, the smallest first")
    parser.add_argument("--work", nargs=2, metavar=("DIR", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(asyncio.run(work(Path(options.work[0]), options.work[1]))))
        return 0

    env = report.environment()
    small, *larger = options.rows
    samples: dict[int, list[Sample]] = {rows: [] for rows in options.rows}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        (directory / "spec.yaml").write_text(SPEC)
        for number, rows in enumerate([*[small] * SMALL_RUNS, *larger, *[small] * SMALL_RUNS]):
            sample, last = run_once(directory, rows, number)
            samples[rows].append(sample)
            if rows == options.rows[-1]:
                resumed = [resume_seconds(last) for _ in range(3)]

    peaks = {rows: statistics.median(sample["peak_bytes"] for sample in of) for rows, of in samples.items()}
    rates = {rows: statistics.median(rows / sample["wall_s"] for sample in of) for rows, of in samples.items()}
    costs = {rows: statistics.median(sample["cpu_per_row_s"] for sample in of) for rows, of in samples.items()}
    table = [
        (f"{rows:,} rows", f"{rates[rows]:,.0f}", f"{peaks[rows] / 2**20:.1f}", f"{costs[rows] * 1e6:.0f}")
        for rows in samples
    ]
    print(report.table(("", "rows/s", "peak MiB", "µs CPU/row"), table), "\n")
    most = options.rows[-1]
    bars = [
        report.Bar(f"peak memory, {most:,} rows over {small:,}", peaks[most] / peaks[small], "<=", PEAK_BAR),
        report.Bar(f"rows per second, {most:,} rows over {small:,}", rates[most] / rates[small], ">=", RATE_BAR),
        report.Bar(f"CPU per row, {most:,} rows over {small:,}", costs[most] / costs[small], "<=", CPU_BAR),
        report.Bar(f"seconds to resume {most:,} finished rows", statistics.median(resumed), "<=", RESUME_BAR),
    ]
    measurements = {str(rows): of for rows, of in samples.items()} | {"resume_s": resumed}
    return report.finish("million", env, bars, measurements)


if __name__ == "__main__":
    sys.exit(main())
