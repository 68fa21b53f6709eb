"""One run over several processes, kept in Redis: how it scales and what the record costs.

``python -m benchmarks.cluster``. Needs redis-server, the extra redis and a C compiler. Every process is one of its own,
as on several machines; all of them share this one's cores, so the scaling says something only until those are full.

- ``linear``: 1, 2 and 4 workers with 48 agents each, answers in 200 ms: rows per second over those of one worker
- ``processes``: two and, on a machine with eight cores, four processes over one, both on as many cores: rows per
  second, and the same by CPU time. The server has the other cores if there are any
- ``record``: CPU per turn of one process that feeds and works, with its record in Redis and in a directory
- ``memory``: many rows of one turn through Redis: what the feeder and the worker hold late in the run over what they
  held early, and the bytes that Redis keeps for a row
- ``calls``: a tool with ten different arguments, over 4 workers
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import redis

from benchmarks import environments, report
from benchmarks.server import serving
from benchmarks.shared_tools import CALLS

AGENTS, SLOW = 48, 0.2  # alive in each worker, and seconds that an answer takes
LINEAR_BAR, CPU_BAR, MEMORY_BAR = 0.9, 1.5, 1.2
PROCESS_BARS = {2: 1.8, 4: 3.4}
PROCESS_ROWS, PROCESS_AGENTS = 30_000, 1_024  # agents are alive in each process, so that none waits for rows
SPEC = """\
task: "Review record #{{record}}: what does it say of the topic?"
model: bench
backend: {url}/v1
max_inflight: 1024
max_agents: {agents}
{tools}
"""
TOOLS = 'tools: ["benchmarks.shared_tools:lookup"]'


class Redis:
    """A server of our own, with an append-only file."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        self._process = subprocess.Popen([*command, "--appendonly", "yes"], stdout=subprocess.DEVNULL)
        self._client = redis.Redis(port=self.port, decode_responses=True)
        for _ in range(100):
            with suppress(redis.ConnectionError):
                self._client.ping()
                return
            time.sleep(0.1)
        raise SystemExit("redis-server did not start")

    def info(self, section: str, name: str) -> float:
        return float(self._client.info(section)[name])

    def commands(self) -> dict[str, int]:
        """How often each command was run since the server began."""
        facts = self._client.info("commandstats")
        return {name.removeprefix("cmdstat_"): each["calls"] for name, each in facts.items()}

    @property
    def cpu_seconds(self) -> float:
        return self.info("cpu", "used_cpu_user") + self.info("cpu", "used_cpu_sys")

    def url(self, name: str) -> str:
        return f"redis://127.0.0.1:{self.port}/0/{name}"

    def close(self) -> None:
        self._client.close()
        self._process.terminate()
        self._process.wait()


@contextmanager
def redis_server() -> Iterator[Redis]:
    if shutil.which("redis-server") is None:
        raise SystemExit("this benchmark needs redis-server")
    with tempfile.TemporaryDirectory(prefix="benchmark-redis-") as folder:
        server = Redis(Path(folder))
        try:
            yield server
        finally:
            server.close()


class Process:
    """A command of this package. Its CPU time and memory are read from /proc."""

    def __init__(self, *words: str, calls: Path | None = None) -> None:
        secret = {"BATCH_AGENT_CLUSTER_SECRET": "benchmark"}  # workers start before the run
        environ = os.environ | secret | ({} if calls is None else {CALLS: str(calls)})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "batch_agent", *words],
            cwd=environments.ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        _, said = self._process.communicate()
        if self._process.returncode:
            raise SystemExit(f"{' '.join(map(str, self._process.args))} failed:\n{said}")  # type: ignore[arg-type]

    def wait_cpu(self) -> float:
        """Wait for the end, and return the CPU seconds of the process and of those that it started."""
        assert self._process.stderr is not None
        said = self._process.stderr.read()
        _, status, used = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        if self._process.returncode:
            raise SystemExit(said)
        return used.ru_utime + used.ru_stime

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def resident_mib(self) -> float:
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * 4096 / 2**20

    def cpu_seconds(self) -> float:
        """So far, by /proc."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def prepared(folder: Path, url: str, rows: int, *, agents: int = AGENTS, tools: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "spec.yaml").write_text(SPEC.format(url=url, agents=agents, tools=TOOLS if tools else ""))
    with (folder / "rows.jsonl").open("w") as file:
        file.writelines(f'{{"record": {row}}}\n' for row in range(rows))
    return folder


def feeding(folder: Path, run: str, *words: str, calls: Path | None = None) -> Process:
    inputs, output = str(folder / "rows.jsonl"), str(folder / f"results-{time.monotonic_ns()}.jsonl")
    spec = str(folder / "spec.yaml")
    return Process("run", spec, "--inputs", inputs, "--output", output, "--run-dir", run, *words, calls=calls)


def shared_run(folder: Path, url: str, workers: int, calls: Path | None = None) -> float:
    """Seconds from the first result to the last of a run that this many workers do. Their start is not counted."""
    with ExitStack() as running:
        work = [Process("work", url, calls=calls) for _ in range(workers)]
        for process in work:
            running.callback(process.kill)
        time.sleep(4.0)  # for all of them to be there
        feeder = feeding(folder, url, "--no-work")
        running.callback(feeder.kill)
        times = result_times(folder, feeder)
        feeder.wait()
        for process in work:
            process.wait()
    return times


def result_times(folder: Path, feeder: Process) -> float:
    """Seconds from a tenth to nine tenths of the rows, times 1.25: the start and the end are not counted."""
    rows = (folder / "rows.jsonl").read_bytes().count(b"\n")
    first = last = 0.0
    while feeder.is_running:
        done = 0
        with suppress(StopIteration, FileNotFoundError):
            newest = max(folder.glob("results-*.jsonl*"), key=lambda path: path.stat().st_mtime, default=None)
            done = 0 if newest is None else newest.read_bytes().count(b"\n")
        if done >= rows // 10 and not first:
            first, first_done = time.monotonic(), done
        if done >= rows * 9 // 10 and first:
            last = time.monotonic()
            return (last - first) * rows / max(1, done - first_done)
        time.sleep(0.05)
    raise SystemExit("the run was over before it was measured: give it more rows")


def linear(folder: Path, counts: Sequence[int], rows_each: int) -> dict[int, float]:
    """Rows per second by number of workers."""
    rates = {}
    with serving(SLOW) as server, redis_server() as store:
        for workers in counts:
            rows = rows_each * workers
            seconds = shared_run(
                prepared(folder / f"linear-{workers}", server.url, rows), store.url(f"w{workers}"), workers
            )
            rates[workers] = rows / seconds
            print(f"{workers} workers: {rates[workers]:,.0f} rows/s", flush=True)
    return rates


def usable_cores() -> list[int]:
    """The numbers of this machine's cores: one of each physical core first, then the other threads of these."""

    def thread(number: int) -> int:
        told = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        first = re.match(r"\d+", told.read_text() if told.exists() else "")
        return 0 if first is None or int(first[0]) == number else 1

    return sorted(os.sched_getaffinity(0), key=lambda number: (thread(number), number))


def processes(folder: Path, rows: int, repetitions: int) -> dict[int, dict[int, dict[str, float]]]:
    """Seconds of a run of ``rows`` rows of two turns beyond those of a third of them, by number of cores and of
    processes: wall time and CPU time, the best of several repetitions. The first third is long enough for all processes
    to start in it."""
    best: dict[tuple[int, int, int], tuple[float, float]] = {}
    every = usable_cores()
    counts = [cores for cores in PROCESS_BARS if cores <= max(2, len(every) // 2)]
    with serving() as server:
        for number, cores, size in product(range(repetitions), counts, (rows // 3, rows)):
            place = prepared(folder / f"rows-{size}", server.url, size, agents=PROCESS_AGENTS, tools=True)
            os.sched_setaffinity(0, every[:cores])  # the processes that are started inherit it
            for count in (1, cores):
                run, begun = place / f"run-{cores}-{count}-{number}", time.monotonic()
                words = ("--processes", str(count)) if count > 1 else ()
                cpu = feeding(place, str(run), *words).wait_cpu()
                wall, (least_wall, least_cpu) = time.monotonic() - begun, best.get((cores, count, size), (inf, inf))
                best[cores, count, size] = min(wall, least_wall), min(cpu, least_cpu)
            os.sched_setaffinity(0, every)
    found: dict[int, dict[int, dict[str, float]]] = {}
    for (cores, count, size), (wall, cpu) in best.items():
        if size == rows:
            few_wall, few_cpu = best[cores, count, rows // 3]
            found.setdefault(cores, {})[count] = {"wall_s": wall - few_wall, "cpu_s": cpu - few_cpu}
            print(f"{cores} cores, {count} processes: {found[cores][count]}", flush=True)
    return found


def record(folder: Path, rows: int, repetitions: int) -> dict[str, list[float]]:
    """CPU seconds per turn, by where the record is; of the process that feeds and works, and of Redis."""
    found: dict[str, list[float]] = {"sqlite": [], "redis": [], "redis server": [], "commands per turn": []}
    with serving() as server, redis_server() as store:
        place = prepared(folder / "record", server.url, rows, agents=256, tools=True)
        for number in range(repetitions):
            for kind in ("sqlite", "redis"):
                run = str(place / f"run-{number}") if kind == "sqlite" else store.url(f"record-{number}")
                before, asked = store.cpu_seconds, sum(store.commands().values())
                command = [sys.executable, "-m", "benchmarks.cluster", "--child", str(place), run]
                done = subprocess.run(command, cwd=environments.ROOT, stdout=subprocess.PIPE, text=True, check=True)
                found[kind].append(json.loads(done.stdout)["cpu_s"] / (2 * rows))
                if kind == "redis":
                    found["redis server"].append((store.cpu_seconds - before) / (2 * rows))
                    found["commands per turn"].append((sum(store.commands().values()) - asked) / (2 * rows))
    return found


def child(folder: Path, run: str) -> dict[str, float]:
    """The CPU time of one run from the command line, imports and start left out."""
    from batch_agent.cli.main import main as command

    def go(rows: Path, where: str) -> float:
        output, before = folder / f"out-{time.monotonic_ns()}.jsonl", time.process_time()
        words = ["run", str(folder / "spec.yaml"), "--inputs", str(rows), "--output", str(output), "--run-dir", where]
        if command(words):
            raise SystemExit("the run failed")
        return time.process_time() - before

    few = folder / "few.jsonl"
    few.write_text("".join(f'{{"record": {row}}}\n' for row in range(100)))
    go(few, f"{run}-warm-up")
    return {"cpu_s": go(folder / "rows.jsonl", run)}


def memory(folder: Path, rows: int, workers: int, limit: float) -> dict[str, Any]:
    """MiB of the feeder and of the workers early and late, and the bytes that Redis has for each row.

    After ``limit`` seconds the run is stopped, and the numbers are those of the rows that were finished.
    """
    with serving(0.001) as server, redis_server() as store, ExitStack() as running:
        place = prepared(folder / "memory", server.url, rows, agents=256)
        empty = store.info("memory", "used_memory")
        processes = {f"worker {number}": Process("work", store.url("memory")) for number in range(1, workers + 1)}
        processes["feeder"] = feeding(place, store.url("memory"), "--no-work")
        for process in processes.values():
            running.callback(process.kill)
        samples: list[dict[str, float]] = []
        cpu: dict[str, float] = {}
        began, done = time.monotonic(), Lines(place)
        while processes["feeder"].is_running and (now := time.monotonic() - began) < limit:
            sample = {"second": now, "rows": done.count(), "redis": store.info("memory", "used_memory") / 2**20}
            with suppress(OSError, IndexError):  # a process has just ended
                sample |= {name: process.resident_mib() for name, process in processes.items()}
                cpu = {name: process.cpu_seconds() for name, process in processes.items()}
                samples.append(sample)
            if len(samples) % 60 == 1:
                print({name: round(value) for name, value in sample.items()}, flush=True)
            time.sleep(1.0)
        if is_whole := not processes["feeder"].is_running:
            for process in processes.values():
                process.wait()
        finished, seconds = done.count(), time.monotonic() - began
        kept = (store.info("memory", "used_memory") - empty) / finished
        file = store.info("persistence", "aof_current_size") / finished
        commands = sum(store.commands().values()) / finished
        cpu["redis"] = store.cpu_seconds
    found: dict[str, Any] = {"rows": finished, "is_whole": is_whole, "seconds": seconds}
    found |= {"rows_per_second": finished / seconds, "redis_bytes_per_row": kept}
    found |= {"redis_file_bytes_per_row": file, "redis_commands_per_row": commands}
    found |= {"cpu_per_row_us": {name: used / finished * 1e6 for name, used in cpu.items()}}
    tenth = max(1, len(samples) // 10)
    for when, part in ("early", samples[tenth : 2 * tenth]), ("late", samples[-2 * tenth : -tenth]):
        found[f"{when}_mib"] = {name: statistics.median(each[name] for each in part) for name in processes}
    return found | {"samples": samples[:: max(1, len(samples) // 100)]}


class Lines:
    """Counts the lines of the results file of a run, reading what is new."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._read, self._lines = folder, 0, 0

    def count(self) -> int:
        for path in self._folder.glob("results-*.jsonl*"):
            with path.open("rb") as file:
                file.seek(self._read)
                while block := file.read(2**20):
                    self._read += len(block)
                    self._lines += block.count(b"\n")
        return self._lines


def calls(folder: Path, workers: int, rows: int) -> Counter[str]:
    """How often the tool ran with each argument."""
    log = folder / "calls.log"
    with serving(0.05) as server, redis_server() as store:
        shared_run(prepared(folder / "calls", server.url, rows, tools=True), store.url("calls"), workers, log)
    return Counter(log.read_text().splitlines())


def linear_bars(folder: Path, options: argparse.Namespace) -> tuple[list[report.Bar], object]:
    rates = linear(folder, (1, 2, 4), 4_000)
    bars = [
        report.Bar(f"{n} workers: rows per second over {n} times one", rate / (n * rates[1]), ">=", LINEAR_BAR)
        for n, rate in rates.items()
        if n > 1
    ]
    return bars, rates


def record_bars(folder: Path, options: argparse.Namespace) -> tuple[list[report.Bar], object]:
    costs = record(folder, 2_000, options.repetitions)
    ratio = statistics.median(r / s for r, s in zip(costs["redis"], costs["sqlite"], strict=True))
    return [report.Bar("CPU per turn, record in Redis over SQLite", ratio, "<=", CPU_BAR)], costs


def memory_bars(folder: Path, options: argparse.Namespace) -> tuple[list[report.Bar], object]:
    held = memory(folder, options.rows, options.workers, options.time_limit)
    for name, value in held.items():
        if name != "samples":
            print(f"{name}: {value}")
    bars = [
        report.Bar(f"{held['rows']:,} rows: MiB of {name}, late over early", late / early, "<=", MEMORY_BAR)
        for (name, late), early in zip(held["late_mib"].items(), held["early_mib"].values(), strict=True)
    ]
    return [report.Bar("rows finished", held["rows"], ">=", options.rows), *bars], held


def processes_bars(folder: Path, options: argparse.Namespace) -> tuple[list[report.Bar], object]:
    found, bars = processes(folder, PROCESS_ROWS, options.repetitions), []
    for cores, runs in found.items():
        one, many, bar = runs[1], runs[cores], PROCESS_BARS[cores]
        on = f"{cores} processes on {cores} cores"
        bars += [
            report.Bar(f"{on}: rows per second over 1", one["wall_s"] / many["wall_s"], ">=", bar),
            report.Bar(f"{on}: the same by CPU time", cores * one["cpu_s"] / many["cpu_s"], ">=", bar),
        ]
    return bars, found


def calls_bars(folder: Path, options: argparse.Namespace) -> tuple[list[report.Bar], object]:
    ran = calls(folder, 4, 2_000)
    return [report.Bar("a tool with 10 different arguments over 4 workers: runs", ran.total(), "<=", 10)], ran


PARTS = {
    "linear": linear_bars,
    "processes": processes_bars,
    "record": record_bars,
    "calls": calls_bars,
    "memory": memory_bars,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description="One run over several processes.")
    parser.add_argument("--only", choices=PARTS, help="measure this part alone")
    parser.add_argument("--repetitions", type=int, default=3, help="of the comparison of CPU times")
    parser.add_argument("--rows", type=int, default=1_000_000, help="that go through Redis for the memory")
    parser.add_argument("--workers", type=int, default=1, help="that work on these rows")
    parser.add_argument("--time-limit", type=float, default=7200.0, help="seconds after which these rows are stopped")
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "RUN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(Path(options.child[0]), options.child[1])))
        return 0
    env, bars, measured = report.environment(), [], {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        for name in [options.only] if options.only else PARTS:
            found, measured[name] = PARTS[name](Path(temporary), options)
            bars += found
    name = Path(__file__).stem
    return report.finish(f"{name}-{options.only}" if options.only else name, env, bars, measured)


if __name__ == "__main__":
    sys.exit(main())
