"""What the journal costs: CPU per turn with it, without it, and of a hand-written loop that records nothing.

``python -m benchmarks.journal``. The work, the server and the way of comparing are those of ``throughput``. The gap is
the longest that the event loop was late for a timer, the collector's walks over imported modules left out; it is
measured with and without the journal, because other people's load makes it late too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

from benchmarks import environments, report
from benchmarks.server import Server, serving
from benchmarks.throughput import LOOP, OURS, RECORDED, Cell, Costs, cpu_ratio, median, run_once
from benchmarks.workload import Work

LOOP_BAR, BARE_BAR, GAP_BAR_MS = 2.0, 1.4, 20.0
CELLS = (Cell(2_000, 1), Cell(2_000, 2, stream=True), Cell(2_000, 2))


def measure(cell: Cell, repetitions: int, server: Server) -> Costs:
    costs: Costs = {contender.name: [] for contender in (RECORDED, OURS, LOOP)}
    for _ in range(repetitions):
        for contender in (RECORDED, OURS, LOOP):
            cost = run_once(contender, cell, server, limit=300.0)
            assert cost is not None
            costs[contender.name].append(cost)
    return costs


def gaps_ms(cell: Cell, repetitions: int, server: Server) -> dict[str, list[float]]:
    work = Work(server.url, cell.agents, cell.turns, cell.inflight, cell.stream)
    command = [sys.executable, "-m", RECORDED.module, "--gap", *work.arguments()]
    gaps: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(repetitions):
        done = subprocess.run(command, cwd=environments.ROOT, stdout=subprocess.PIPE, text=True, check=True)
        for name, seconds in json.loads(done.stdout).items():
            gaps[name].append(seconds * 1e3)
    return gaps


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.journal", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    env = report.environment()
    bars: list[report.Bar] = []
    measurements: list[object] = []
    with serving() as server:
        for cell in CELLS:
            costs = measure(cell, options.repetitions, server)
            recorded, bare, loop = costs[RECORDED.name], costs[OURS.name], costs[LOOP.name]
            to_loop, to_bare = cpu_ratio(recorded, loop), cpu_ratio(recorded, bare)
            print(f"\n{cell.name}")
            rows = [
                (name, f"{median(its).cpu_per_turn * 1e6:,.0f}", f"{median(its).agents_per_second:,.0f}")
                for name, its in costs.items()
            ]
            print(report.table(("", "µs CPU/turn", "agents/s"), rows))
            bars += [
                report.Bar(f"CPU per turn, with journal/loop: {cell.name}", to_loop, "<=", LOOP_BAR),
                report.Bar(f"CPU per turn, with journal/without: {cell.name}", to_bare, "<=", BARE_BAR),
            ]
            spreads = {name: report.spread([cost.cpu_per_turn for cost in its]) for name, its in costs.items()}
            measurements.append({"work": cell.name, "cpu_per_turn_s": spreads})
        gaps = gaps_ms(CELLS[0], options.repetitions, server)
    for name, values in gaps.items():
        print(f"\nlargest gap of the event loop, journal {name}: {statistics.median(values):.1f} ms")
    bars.append(report.Bar("largest event-loop gap with journal, ms", statistics.median(gaps["on"]), "<=", GAP_BAR_MS))
    measurements.append({"largest_gap_ms": gaps})
    print()
    return report.finish("journal", env, bars, measurements)


if __name__ == "__main__":
    sys.exit(main())
