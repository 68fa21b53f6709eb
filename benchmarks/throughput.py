"""CPU per turn and agents per second of ``BatchAgent.run``, against a hand-written loop and against other clients.

``python -m benchmarks.throughput``. Every contender does the same work (``workload``) against the same server, each run
in a process of its own, which first does a small batch: imports and whatever else happens once are not counted. The
contenders take turns, and a ratio is the median of the ratios of neighbouring runs, which saw the same load. Other
people's clients are slow and get fewer runs. The instructions per turn are counted too, because CPU time depends on
what else the machine does (``instructions``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import environments, instructions, report
from benchmarks.server import Server, serving
from benchmarks.server.capacity import capacity
from benchmarks.workload import Work

RATE_BAR, SERVER_BAR = 0.6, 5.0


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    module: str
    environment: str | None = None  # None: the one this runs in

    @property
    def python(self) -> Path:
        return environments.python_of(self.environment) if self.environment else Path(sys.executable)


OURS = Contender("batch_agent", "benchmarks.contenders.ours")
RECORDED = Contender("batch_agent, recorded", "benchmarks.contenders.ours_recorded")
LOOP = Contender("aiohttp loop", "benchmarks.loop")
OWN_CLIENT = Contender("loop on our client", "benchmarks.contenders.own_client")
FLOOR = Contender("bare protocol", "benchmarks.contenders.bare_protocol")
OTHERS = (
    Contender("httpx", "benchmarks.contenders.httpx_loop", "httpx"),
    Contender("openai SDK", "benchmarks.contenders.openai_sdk", "openai"),
    Contender("batch-agent 0.2.0", "benchmarks.contenders.old_batch_agent", "old"),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of work. ``allowed`` is the most CPU per turn over that of the loop, by contender; ``others`` is how
    often the slow contenders do it at most."""

    agents: int
    turns: int
    stream: bool = False
    inflight: int = 64
    allowed: Mapping[Contender, float] = field(default_factory=dict)
    others: int = 0
    counted: bool = False  # whether instructions are counted

    @property
    def name(self) -> str:
        out = f"{self.agents:,} agents, {self.turns} turn{'s' if self.turns > 1 else ''}"
        out += ", streamed" if self.stream else ""
        return out if self.inflight == 64 else f"{out}, {self.inflight:,} in flight"


CELLS = (
    Cell(2_000, 2, allowed={OURS: 1.0, RECORDED: 1.25}, others=2, counted=True),
    Cell(2_000, 2, stream=True, allowed={OURS: 0.8}, others=2, counted=True),
    Cell(10_000, 1, allowed={OURS: 1.5}),
    # Not a bar: where clients whose pool is searched for each request fall behind.
    Cell(2_000, 1, inflight=1_000, others=1),
)
QUICK = CELLS[:2]


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run cost: seconds of CPU per turn, and agents finished per second."""

    cpu_per_turn: float
    agents_per_second: float


Costs = dict[str, list[Cost]]  # by contender's name, one per repetition
Counts = dict[str, float]  # instructions per turn by contender's name


def run_once(contender: Contender, cell: Cell, server: Server, limit: float) -> Cost | None:
    """None when it was not done within ``limit`` seconds."""
    work = Work(server.url, cell.agents, cell.turns, cell.inflight, cell.stream)
    command = [str(contender.python), "-m", contender.module, *work.arguments()]
    try:
        done = subprocess.run(
            command, cwd=environments.ROOT, stdout=subprocess.PIPE, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        raise SystemExit(f"{contender.name} failed: {' '.join(command)}")
    stats, turns = server.stats(), cell.agents * cell.turns
    if stats.answers != turns or stats.peak_in_flight > cell.inflight:
        raise SystemExit(f"{contender.name} was to take {turns} turns, {cell.inflight} at once; the server saw {stats}")
    cost = json.loads(done.stdout.splitlines()[-1])
    return Cost(cost["cpu_s"] / turns, cell.agents / cost["wall_s"])


def measure(cell: Cell, repetitions: int, with_others: bool, server: Server, limit: float) -> Costs:
    ours = [OURS, *(contender for contender in cell.allowed if contender is not OURS)]
    contenders = [*ours, LOOP, OWN_CLIENT, FLOOR, *(OTHERS if with_others else ())]
    costs: Costs = defaultdict(list)
    for repetition in range(repetitions):
        for contender in tuple(contenders):
            if contender in OTHERS and repetition >= cell.others:
                continue
            cost = run_once(contender, cell, server, limit)
            if cost is None:
                print(f"  {contender.name}: not done in {limit:.0f} s, left out of: {cell.name}")
                contenders.remove(contender)
            else:
                costs[contender.name].append(cost)
    return costs


def count(cell: Cell, server: Server) -> Counts:
    counts: Counts = {}
    for contender in (OURS, *(each for each in cell.allowed if each is not OURS), LOOP, OWN_CLIENT):
        work = Work(server.url, instructions.FEW, cell.turns, cell.inflight, cell.stream).arguments()
        place = work.index("--agents")
        command = [str(contender.python), "-m", contender.module, *work[:place], *work[place + 2 :]]
        if (counted := instructions.per_turn(command, cell.turns)) is not None:
            counts[contender.name] = counted
    return counts


def print_counts(counts: Counts) -> None:
    for name, counted in counts.items():
        over = counted / counts[LOOP.name] if LOOP.name in counts else 0.0
        print(f"{name}: {counted / 1e3:,.0f} thousand instructions per turn, {over:.2f} of the loop")


def median(costs: Sequence[Cost]) -> Cost:
    return Cost(
        statistics.median(cost.cpu_per_turn for cost in costs),
        statistics.median(cost.agents_per_second for cost in costs),
    )


def cpu_ratio(ours: Sequence[Cost], its: Sequence[Cost]) -> float:
    return statistics.median(a.cpu_per_turn / b.cpu_per_turn for a, b in zip(ours, its, strict=False))


def rate_ratio(ours: Sequence[Cost], its: Sequence[Cost]) -> float:
    return statistics.median(a.agents_per_second / b.agents_per_second for a, b in zip(ours, its, strict=False))


def print_cell(cell: Cell, costs: Costs) -> None:
    ours = costs[OURS.name]
    rows = []
    for name, its in costs.items():
        cost, cpu, rate = median(its), cpu_ratio(ours, its), rate_ratio(ours, its)
        rows.append(
            (
                name,
                f"{cost.cpu_per_turn * 1e6:,.0f}",
                f"{cost.agents_per_second:,.0f}",
                f"{cpu:.2f}",
                f"{1 / cpu:.2f}",
                f"{rate:.2f}",
            )
        )
    print(f"\n{cell.name}")
    print(report.table(("", "µs CPU/turn", "agents/s", "ours/its CPU", "its/our CPU", "ours/its agents/s"), rows))


def bars_of(cell: Cell, costs: Costs) -> list[report.Bar]:
    loop, bars = costs[LOOP.name], []
    for contender, allowed in cell.allowed.items():
        its, what = costs[contender.name], f"{contender.name}/loop: {cell.name}"
        bars.append(report.Bar(f"CPU per turn, {what}", cpu_ratio(its, loop), "<=", allowed))
        bars.append(report.Bar(f"agents per second, {what}", rate_ratio(its, loop), ">=", RATE_BAR))
    return bars


def measurement(cell: Cell, costs: Costs, counts: Counts) -> dict[str, object]:
    return {
        "work": cell.name,
        "instructions_per_turn": counts,
        "contenders": {
            name: {
                "cpu_per_turn_s": report.spread([cost.cpu_per_turn for cost in its]),
                "agents_per_second": report.spread([cost.agents_per_second for cost in its]),
                "cpu_over_ours": 1 / cpu_ratio(costs[OURS.name], its),
                "rate_over_ours": 1 / rate_ratio(costs[OURS.name], its),
            }
            for name, its in costs.items()
        },
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5, help="runs of each contender (the slow ones: fewer)")
    parser.add_argument("--quick", action="store_true", help="only the batches of 2,000 with two turns")
    parser.add_argument("--loop-only", action="store_true", help="only the baseline; needs no network")
    parser.add_argument("--no-instructions", action="store_true", help="do not count instructions, which takes minutes")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds one run may take")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    env = report.environment()
    if not options.loop_only:
        env["environments"] = {name: environments.versions_of(name) for name in environments.REQUIREMENTS}
    rates = capacity(seconds=1.0)
    print("the server alone, answers/s:", ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items()))

    bars: list[report.Bar] = []
    measurements: list[object] = [{"server_answers_per_second": rates}]
    fastest = 0.0
    with serving() as server:
        for cell in QUICK if options.quick else CELLS:
            costs = measure(cell, options.repetitions, not options.loop_only, server, options.limit)
            print_cell(cell, costs)
            counts = count(cell, server) if cell.counted and not options.no_instructions else {}
            print_counts(counts)
            bars += bars_of(cell, costs)
            measurements.append(measurement(cell, costs, counts))
            fastest = max(fastest, *(median(its).agents_per_second * cell.turns for its in costs.values()))
    bars.append(
        report.Bar(
            "the server's answers/s, over the fastest contender's", min(rates.values()) / fastest, ">=", SERVER_BAR
        )
    )
    print()
    return report.finish("throughput", env, bars, measurements)


if __name__ == "__main__":
    sys.exit(main())
