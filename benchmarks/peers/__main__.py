"""What a user would pick instead, measured on the same server, rows and machine: ``make bench-peers``.

Each peer runs in an environment of its own (``.bench-venv``), in processes that take turns:

- CPU per turn, wall time and time to the first result: AGENTS rows of two turns and one tool, INFLIGHT at a time
- rows lost in an outage: the server process is killed while a third of the answers are given, and back after OUTAGE s
- requests paid again: the peer is killed with SIGKILL after half of the answers and started a second time

Peers are used as their documentation shows it, with their default retries.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks import environments, report
from benchmarks.server import Server, compiled
from benchmarks.workload import Work

AGENTS, INFLIGHT, OUTAGE = 1_000, 64, 12.0
LATENCY_US, LIMIT = 20_000, 600.0
SLOW_LATENCY_US = 200_000  # of the two tests with a failure, so that something is in flight when it comes


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    module: str
    environment: str | None = None  # None: the one this runs in
    package: str = ""  # whose version is shown
    turns: int = 2  # that it takes for each row

    @property
    def python(self) -> str:
        return str(environments.python_of(self.environment)) if self.environment else sys.executable

    @property
    def version(self) -> str:
        if self.environment is None:
            return ""
        return environments.versions_of(self.environment).get(self.package, "")


PEERS = (
    Peer("batch_agent (recorded)", "ours"),
    Peer("openai SDK", "openai_sdk", "openai", "openai"),
    Peer("litellm", "litellm_loop", "litellm", "litellm"),
    Peer("pydantic-ai", "pydantic_ai_agents", "pydantic-ai", "pydantic-ai-slim"),
    Peer("openai-agents", "openai_agents", "openai-agents", "openai-agents"),
    Peer("LangChain", "langchain_agents", "langchain", "langchain"),
    Peer("inspect_ai", "inspect_eval", "inspect", "inspect_ai"),
    Peer("curator (one turn)", "curator_rows", "curator", "bespokelabs-curator", turns=1),
    Peer("batch-agent", "old", "old", "batch-agent"),
)


@contextmanager
def process(program: Path, latency_us: int, port: int = 0) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    command = [str(program), str(latency_us), "4", str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        try:
            yield Server(int(running.stdout.readline())), running
        finally:
            running.kill()


@contextmanager
def started(peer: Peer, server: Server, agents: int, keep: str, *more: str) -> Iterator[subprocess.Popen[str]]:
    work = Work(server.url, agents, peer.turns if peer.turns == 2 else 1, INFLIGHT, False)
    command = [peer.python, "-m", f"benchmarks.peers.{peer.module}", *work.arguments(), "--keep", keep, *more]
    with subprocess.Popen(
        command,
        cwd=environments.ROOT,
        # A path to this source would hide the older package of the same name.
        env=None if peer.environment is None else {k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            yield running
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)


def finish(running: subprocess.Popen[str]) -> Mapping[str, float] | None:
    """What it printed; None if it failed or was not done in time."""
    try:
        said, _ = running.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return None
    lines = said.splitlines()
    if running.returncode or not lines:
        return None
    numbers: Mapping[str, float] = json.loads(lines[-1])
    return numbers


def wait_for(server: Server, answers: int, running: subprocess.Popen[str]) -> int:
    """Until the server has given this many answers, or the peer has ended; how many it gave."""
    given = 0
    while given < answers and running.poll() is None:
        time.sleep(0.02)
        given += server.stats().answers
    return given


def speed(peer: Peer, program: Path, agents: int) -> Mapping[str, float] | None:
    with (
        process(program, LATENCY_US) as (server, _),
        tempfile.TemporaryDirectory() as keep,
        started(peer, server, agents, keep) as running,
    ):
        return finish(running)


def lost_in_outage(peer: Peer, program: Path, agents: int) -> int | None:
    """Rows without an answer after the server was away for OUTAGE seconds."""
    with (
        tempfile.TemporaryDirectory() as keep,
        process(program, SLOW_LATENCY_US) as (server, before),
        started(peer, server, agents, keep, "--cold") as running,
    ):
        wait_for(server, agents * peer.turns // 3, running)
        before.kill()
        before.wait()
        time.sleep(OUTAGE)
        with process(program, SLOW_LATENCY_US, server.port):
            numbers = finish(running)
    return None if numbers is None else agents - round(numbers["right"])


def paid_again(peer: Peer, program: Path, agents: int) -> int | None:
    """Requests beyond those that the rows need, after a kill in the middle and a second start."""
    with process(program, SLOW_LATENCY_US) as (server, _), tempfile.TemporaryDirectory() as keep:
        with started(peer, server, agents, keep, "--cold") as running:
            given = wait_for(server, agents * peer.turns // 2, running)
            with suppress(ProcessLookupError):  # it has ended
                os.killpg(running.pid, signal.SIGKILL)
        time.sleep(1.0)  # what was in flight is answered, and counted
        given += server.stats().answers
        with started(peer, server, agents, keep, "--cold") as running:
            numbers = finish(running)
        given += server.stats().answers
    if numbers is None or round(numbers["right"]) != agents:
        return None
    return given - agents * peer.turns


def measure(peers: Sequence[Peer], agents: int, repetitions: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    with compiled("server") as program:
        for peer in peers:
            _ = peer.python  # the environment is made before anything is timed
        runs: dict[str, list[Mapping[str, float]]] = {peer.name: [] for peer in peers}
        for _ in range(repetitions):
            for peer in peers:
                if (numbers := speed(peer, program, agents)) is not None:
                    runs[peer.name].append(numbers)
        for peer in peers:
            done = runs[peer.name]
            cell = {name: statistics.median(each[name] for each in done) for name in done[0]} if done else {}
            rows.append(
                {
                    "peer": peer.name,
                    "version": peer.version,
                    "turns": peer.turns,
                    "cpu_ms_per_turn": 1e3 * cell["cpu_s"] / agents / peer.turns if cell else None,
                    "wall_s": cell.get("wall_s"),
                    "first_result_s": cell.get("first_s"),
                    "right": cell.get("right"),
                    "rows_lost_in_outage": lost_in_outage(peer, program, agents),
                    "requests_paid_again": paid_again(peer, program, agents),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def table(rows: Sequence[Mapping[str, object]], agents: int) -> str:
    head = ["", "CPU per turn", "wall", "first result", f"rows lost in {OUTAGE:g} s outage", "requests paid again"]
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join(["---"] * len(head)) + " |"]
    for row in rows:
        cpu, wall, first = (row[name] for name in ("cpu_ms_per_turn", "wall_s", "first_result_s"))
        cells = [
            " ".join(filter(None, (str(row["peer"]), str(row["version"])))),
            f"{cpu:.2f} ms" if isinstance(cpu, float) else "failed",
            f"{wall:.1f} s" if isinstance(wall, float) else "failed",
            f"{first:.2f} s" if isinstance(first, float) else "failed",
            *(
                "failed" if row[name] is None else f"{row[name]:,} of {total:,}"
                for name, total in (
                    ("rows_lost_in_outage", agents),
                    ("requests_paid_again", agents * int(str(row["turns"]))),
                )
            ),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--agents", type=int, default=AGENTS)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", action="append", help="a module of benchmarks/peers; again for more")
    given = parser.parse_args()
    peers = [peer for peer in PEERS if given.only is None or peer.module in given.only]
    machine = report.environment()
    rows = measure(peers, given.agents, given.repetitions)
    print(table(rows, given.agents))
    report.finish(
        "peers", machine, [], {"agents": given.agents, "inflight": INFLIGHT, "outage_s": OUTAGE, "peers": rows}
    )


if __name__ == "__main__":
    main()
