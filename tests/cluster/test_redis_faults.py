"""Real processes on a real Redis: workers, the feeder and Redis itself are killed. Run by ``make test-cluster``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "record"))
from tests.record.redis_servers import RedisServer, needs_redis, redis_server

from batch_agent.record.reader import FinishedRows, open_run
from batch_agent.testing import CallTools, Request, Say, ScriptedServer, ToolUse

pytestmark = [
    needs_redis,
    pytest.mark.skipif("BATCH_AGENT_TEST_CLUSTER" not in os.environ, reason="takes a minute: make test-cluster"),
]
SOURCE = Path(__file__).parents[2] / "src"
SLOTS, LEASE, ROWS = 8, 3.0, 300
MODULE = """
import os
from batch_agent import Tool

@Tool.define(effect="write")
def note(row: str) -> str:
    descriptor = os.open("{log}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, (row + "\\n").encode())
    os.close(descriptor)
    return "written"

def halves(text):
    return [text + " a", text + " b"]
"""
SPEC = """
task: "Do {{row}}"
model: m
backend: {url}
tools: ["fault_notes:note"]
max_turns: 4
max_inflight: {slots}
"""
PIPELINE = """
model: m
backend: {url}
max_inflight: {slots}
stages:
  - map: {{name: work, task: "Do {{row}}", tools: ["fault_notes:note"], max_turns: 4}}
  - flat_map: "fault_notes:halves"
  - map: {{name: check, task: "Check {{input}}"}}
  - reduce: {{name: sum, prompt: "Sum up {{n}}", tree: 10}}
"""


@dataclass
class Scene:
    """A run of ROWS rows, its server and the processes that work on it."""

    folder: Path
    redis: RedisServer
    asked: Counter[tuple[str, int]] = field(default_factory=Counter)
    by: dict[str, str] = field(default_factory=dict)  # request → number of the process that sent it first
    told: set[str] = field(default_factory=set)  # rows whose model read that the outcome of its write is unknown
    times: list[float] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"{self.redis.url}/faults"

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        number = str(len(self.processes))
        log = (self.folder / f"process-{number}.log").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-m", "batch_agent", *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(SOURCE), "BATCH_AGENT_API_KEY": number},
            stdout=log,
            stderr=log,
        )
        log.close()
        self.processes.append(process)
        return process

    def worker(self) -> subprocess.Popen[bytes]:
        return self.start("work", self.url, "--import-from", str(self.folder))

    def feeder(self, *words: str, spec: str = "spec.yaml") -> subprocess.Popen[bytes]:
        record = ("--run-dir", self.url, "--lease", str(LEASE))
        return self.start("run", spec, "--inputs", "rows.jsonl", "--output", "out.jsonl", *record, *words)

    def of(self, kind: str) -> list[str]:
        """The different requests that begin so."""
        return list({row for row, _ in self.asked if row.startswith(kind)})

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            assert not any((process.poll() or 0) > 0 for process in self.processes), self.logs()
            await asyncio.sleep(0.05)

    async def ended(self, process: subprocess.Popen[bytes]) -> int:
        await self.until(lambda: process.poll() is not None)
        return int(process.returncode)

    def recorded(self, stage: str) -> set[str]:
        """The requests of a stage whose answers are in the record."""
        with open_run(f"{self.url}/{stage}") as reader:
            return {cast("dict[str, str]", row["input"])["prompt"] for row in FinishedRows(reader.lines)}

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("process-*.log")))

    def check(self, *, asked_again: int) -> None:
        results = [json.loads(line) for line in (self.folder / "out.jsonl").read_text().splitlines()]
        assert sorted(result["index"] for result in results) == list(range(ROWS)), self.logs()
        assert all(result["ok"] for result in results), self.logs()
        self.check_writes()
        assert sum(count - 1 for count in self.asked.values()) <= asked_again, self.asked.most_common(5)

    def check_writes(self) -> None:
        """A write runs once. If its worker was killed after it was recorded as begun, perhaps not at all: the model is
        told."""
        written = Counter((self.folder / "notes.log").read_text().split("\n")[:-1])
        assert max(written.values()) == 1, "a write ran twice"
        assert {f"Do row {row}" for row in range(ROWS)} - written.keys() <= self.told, "a write is missing"


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    with redis_server(tmp_path / "redis") as redis:
        scene = Scene(tmp_path, redis)
        try:
            async with _server(scene) as server:
                (tmp_path / "fault_notes.py").write_text(MODULE.format(log=tmp_path / "notes.log"))
                (tmp_path / "spec.yaml").write_text(SPEC.format(url=server.backend_url, slots=SLOTS))
                (tmp_path / "pipeline.yaml").write_text(PIPELINE.format(url=server.backend_url, slots=SLOTS))
                (tmp_path / "rows.jsonl").write_text("".join(f'{{"row": "row {row}"}}\n' for row in range(ROWS)))
                yield scene
        finally:
            for process in scene.processes:
                if process.poll() is None:
                    process.kill()
                process.wait()


@asynccontextmanager
async def _server(scene: Scene) -> AsyncIterator[ScriptedServer]:
    def answer(request: Request) -> Say:
        row = str(next(message["content"] for message in request.messages if message["role"] == "user"))
        scene.asked[row, request.turn] += 1
        scene.by.setdefault(row, request.headers["authorization"].removeprefix("Bearer "))
        if "unknown" in str(request.messages[-1]["content"]):
            scene.told.add(row)
        scene.times.append(time.monotonic())
        if request.turn == 0 and row.startswith("Do"):
            return CallTools(ToolUse("note", {"row": row}), latency=0.2)
        return Say(f"done {row[:12]}", latency=0.2)

    async with ScriptedServer(answer, models=["m"]) as server:
        yield server


@contextmanager
def stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


async def test_workers_and_the_feeder_are_killed_and_one_comes_back_with_old_leases(scene: Scene) -> None:
    feeder = scene.feeder("--no-work")
    workers = [scene.worker() for _ in range(3)]
    await scene.until(lambda: len(scene.asked) >= 60)
    workers[0].kill()
    await scene.until(lambda: len(scene.asked) >= 120)
    with stopped(workers[1]):
        await asyncio.sleep(2 * LEASE)
    await scene.until(lambda: len(scene.asked) >= 300)
    feeder.kill()
    again = scene.feeder("--no-work", "--resume")
    assert await scene.ended(again) == 0, scene.logs()
    assert [await scene.ended(worker) for worker in workers[1:]] == [0, 0]
    scene.check(asked_again=2 * SLOTS * 2)


async def test_redis_is_killed_and_restarted_from_its_log(scene: Scene) -> None:
    feeder, workers = scene.feeder("--no-work"), [scene.worker() for _ in range(2)]
    await scene.until(lambda: len(scene.asked) >= 100)
    scene.redis.kill()
    killed = time.monotonic()
    await asyncio.sleep(3 * LEASE)
    scene.redis.start()
    back = time.monotonic()
    assert await scene.ended(feeder) == 0, scene.logs()
    assert [await scene.ended(worker) for worker in workers] == [0, 0]
    late = [at for at in scene.times if killed + LEASE < at < back]
    assert not late, f"{len(late)} requests were sent although their answers could not be recorded"
    scene.check(asked_again=0)


async def test_a_feeder_with_a_worker_is_killed_and_resumed_alone(scene: Scene) -> None:
    feeder = scene.feeder()
    await scene.until(lambda: len(scene.asked) >= 100)
    feeder.kill()
    again = scene.feeder("--resume", "--keep", "results")
    assert await scene.ended(again) == 0, scene.logs()
    scene.check(asked_again=2 * SLOTS)


async def test_a_worker_that_gets_sigterm_hands_back_at_once(scene: Scene) -> None:
    feeder, leaver, stayer = scene.feeder("--no-work"), scene.worker(), scene.worker()
    await scene.until(lambda: len(scene.asked) >= 100)
    leaver.terminate()
    assert await scene.ended(leaver) == 0, scene.logs()
    assert await scene.ended(feeder) == 0, scene.logs()
    assert await scene.ended(stayer) == 0
    scene.check(asked_again=2 * SLOTS)


async def test_a_worker_and_the_feeder_of_a_pipeline_are_killed(scene: Scene) -> None:
    """The worker dies while all stages are at work, which may cost the requests that it has in flight. The feeder dies
    later, which costs nothing: it sends none."""
    feeder = scene.feeder("--no-work", spec="pipeline.yaml")
    workers = [scene.worker() for _ in range(2)]
    await scene.until(lambda: len(scene.of("Check")) >= 60)
    workers[0].kill()
    workers[0].wait()
    recorded = scene.recorded("sum")
    await scene.until(lambda: len(scene.of("Sum up")) >= 20)
    feeder.kill()
    assert await scene.ended(scene.start("resume", scene.url, "--no-work")) == 0, scene.logs()
    assert await scene.ended(workers[1]) == 0
    [survey] = [json.loads(line) for line in (scene.folder / "out.jsonl").read_text().splitlines()]
    assert survey["ok"] and len(scene.of("Check")) == 2 * ROWS and len(scene.of("Sum up")) == 60 + 6 + 1
    scene.check_writes()
    again = {row: count - 1 for (row, _), count in scene.asked.items() if count > 1}
    assert sum(again.values()) <= 2 * SLOTS, again
    sums = {row for row in again if row.startswith("Sum up")}
    killed = str(scene.processes.index(workers[0]))
    assert not sums & recorded and {scene.by[row] for row in sums} <= {killed}, "an answer of the reduction was lost"
