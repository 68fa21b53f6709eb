"""What the cluster suite is made of: a model server, Ray nodes as processes, a driver, and the
account of what was asked, written and delivered."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.server import NOTES, REQUESTS

ROOT = Path(__file__).parents[2]
MODULES = Path(__file__).parent / "modules"
PATIENCE = 600.0  # seconds that a part of the suite may take
# Ray finds a dead node in 1.5 s instead of 12.
RAY_ENVIRONMENT = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_DEDUP_LOGS": "0",
}
SPEC = """\
task: "Work on row {{row}}"
model: m
backend: {url}
tools: ["cluster_notes:write_note"]
max_inflight: {slots}
"""


def environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), str(ROOT), str(MODULES), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **RAY_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@contextmanager
def model_server(folder: Path, seconds: float) -> Iterator[str]:
    """The URL of a model server that takes this long for an answer."""
    command = [sys.executable, "-m", "tests.cluster.server", str(folder), str(seconds)]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(30)


class RayNodes:
    """A Ray cluster of several nodes on this machine. The head has no CPUs, so no worker is started there."""

    def __init__(self, nodes: int, cpus: int) -> None:
        from ray.cluster_utils import Cluster

        os.environ.update(environment())
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self._nodes: list[Any] = [self._cluster.add_node(num_cpus=cpus) for _ in range(nodes)]

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def workers(self) -> dict[int, int]:
        """The processes of our workers, with the raylet of each."""
        raylets = {raylet(node) for node in self._nodes}
        found = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                if (entry / "cmdline").read_bytes().startswith(b"ray::WorkerActor") and entry.name.isdecimal():
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    if parent in raylets:
                        found[int(entry.name)] = parent
        return found

    def kill_node(self) -> int:
        """kill -9 of a node that has workers, and of everything on it; how many workers it had."""
        workers = self.workers()
        victim = next(node for node in self._nodes if raylet(node) in workers.values())
        self._nodes.remove(victim)
        doomed = [worker for worker, parent in workers.items() if parent == raylet(victim)]
        for pid in (raylet(victim), *doomed):
            os.kill(pid, signal.SIGKILL)
        self._cluster.remove_node(victim, allow_graceful=False)
        return len(doomed)

    def close(self) -> None:
        self._cluster.shutdown()


def raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


@contextmanager
def ray_nodes(nodes: int, cpus: int = 2) -> Iterator[RayNodes]:
    cluster = RayNodes(nodes, cpus)
    try:
        yield cluster
    finally:
        cluster.close()


class Driver:
    """The command line, in a process group of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._log = (folder / "driver.log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "batch_agent", *words],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def interrupt(self) -> None:
        """What Ctrl-C does."""
        os.kill(self._process.pid, signal.SIGINT)

    def wait(self) -> int:
        try:
            return self._process.wait(PATIENCE)
        finally:
            if self._process.poll() is None:
                self.kill()
            self._log.close()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None


def prepare(folder: Path, url: str, rows: int, slots: int) -> None:
    (folder / "spec.yaml").write_text(SPEC.format(url=url, slots=slots))
    (folder / "rows.jsonl").write_text("".join(f'{{"row": "row {row}"}}\n' for row in range(rows)))


def wait_for_notes(folder: Path, count: int, driver: Driver) -> None:
    """Wait until so many writes were done."""
    ends, path = time.monotonic() + PATIENCE, folder / NOTES
    while time.monotonic() < ends:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        assert driver.is_running, (folder / "driver.log").read_text()[-4000:]
        time.sleep(0.1)
    raise AssertionError(f"{count} writes were not done in {PATIENCE:g} s")


@dataclass(frozen=True, slots=True)
class Account:
    """What was asked, written and delivered, by row."""

    asked: Counter[tuple[int, int]]  # by row and turn
    written: Counter[int]
    delivered: Counter[int]
    not_ok: int
    interrupted: set[int]  # rows whose model was told that the outcome of its write is unknown

    @classmethod
    def of(cls, folder: Path, output: Path) -> Account:
        asked: Counter[tuple[int, int]] = Counter()
        interrupted = set()
        for line in (folder / REQUESTS).read_text().splitlines():
            row, turn, told = line.split()
            asked[int(row), int(turn)] += 1
            if told == "interrupted":
                interrupted.add(int(row))
        written = Counter(map(int, (folder / NOTES).read_text().split()))
        results = [json.loads(line) for line in output.read_text().splitlines()]
        delivered = Counter(int(result["index"]) for result in results)
        return cls(asked, written, delivered, sum(not result["ok"] for result in results), interrupted)

    @property
    def asked_again(self) -> int:
        return sum(count - 1 for count in self.asked.values())

    def problems(self, rows: int, again: int) -> list[str]:
        """What is wrong; ``again`` is how many requests may have been asked twice."""
        twice = [row for row, count in self.written.items() if count > 1]
        missing = set(range(rows)) - self.written.keys() - self.interrupted
        wrong = [
            f"{len(self.delivered)} rows of {rows} were delivered" * (len(self.delivered) != rows),
            f"delivered twice: {[row for row, count in self.delivered.items() if count > 1][:5]}"
            * (max(self.delivered.values(), default=1) > 1),
            f"{self.not_ok} rows failed" * (self.not_ok > 0),
            f"written twice: {twice[:5]}" * bool(twice),
            f"{len(missing)} writes are missing: {sorted(missing)[:5]}" * bool(missing),
            f"{self.asked_again} requests were asked again, {again} allowed" * (self.asked_again > again),
        ]
        return [line for line in wrong if line]
