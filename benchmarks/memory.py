"""Peak memory and time to first result of ``BatchAgent.stream``, as the number of rows grows; and what a live agent
and a finished row hold.

``python -m benchmarks.memory``. Rows come from a generator and results are dropped as they come: neither the rows nor
the results are held by the benchmark. Each measurement is a process of its own (``stream_rows``), and they take turns.
For agents that wait for a tool, two sizes of their rows tell apart what grows with the text: how often a text is held.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

from benchmarks import environments, report
from benchmarks.server import Server, serving

ROWS = (1_000, 10_000, 100_000)
PEAK_BAR = 1.3
FIRST_BAR = 1.3  # independent of the number of rows, up to the noise of a few milliseconds
COST_BAR = 1.2
AGENTS, SHORT, LONG = 1_000, 200, 20_200  # agents that wait, and bytes of their rows' texts
COPIES_BAR = 2.1  # of a text: one in the input, one in the conversation

Sample = dict[str, float]


def run_once(server: Server, rows: int, *options: str) -> Sample:
    command = [sys.executable, "-m", "benchmarks.stream_rows", "--url", server.url, "--rows", str(rows), *options]
    done = subprocess.run(command, cwd=environments.ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(command)}")
    sample: Sample = json.loads(done.stdout)
    return sample


def measure(server: Server, repetitions: int, *options: str) -> dict[int, list[Sample]]:
    samples: dict[int, list[Sample]] = {rows: [] for rows in ROWS}
    for _ in range(repetitions):
        for rows in ROWS:
            samples[rows].append(run_once(server, rows, *options))
    return samples


def medians(samples: dict[int, list[Sample]], key: str) -> list[float]:
    return [statistics.median(sample[key] for sample in samples[rows]) for rows in ROWS]


def line(name: str, values: list[float], scale: float) -> tuple[str, ...]:
    return (name, *(f"{value * scale:.1f}" for value in values), f"{values[-1] / values[0]:.2f}")


def held(server: Server) -> dict[str, float]:
    """Bytes of a waiting agent and of a result, without the text of the row, and how often each holds that text."""
    short, long = (run_once(server, AGENTS, "--text", str(size)) for size in (SHORT, LONG))
    found = {}
    for name in ("live", "result"):
        few, many = short[f"{name}_bytes"], long[f"{name}_bytes"]
        found[f"{name}_copies"] = copies = (many - few) / (LONG - SHORT)
        found[f"{name}_bytes"] = few - copies * SHORT
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description="Memory and time to first result.")
    parser.add_argument("--repetitions", type=int, default=3, help="whole runs of each size")
    parser.add_argument("--first-repetitions", type=int, default=9, help="runs of each size up to the first result")
    options = parser.parse_args()
    env = report.environment()
    with serving() as server:
        first = measure(server, options.first_repetitions, "--first-only")
        first_of_list = measure(server, options.first_repetitions, "--first-only", "--list")
        whole = measure(server, options.repetitions)
        waiting = held(server)

    peaks, costs = medians(whole, "peak_bytes"), medians(whole, "cpu_per_row_s")
    firsts, list_firsts = medians(first, "first_result_s"), medians(first_of_list, "first_result_s")
    table = [
        line("peak memory, MiB", peaks, 2**-20),
        line("CPU per row, µs", costs, 1e6),
        line("first result, ms", firsts, 1e3),
        line("first result, rows in a list, ms", list_firsts, 1e3),
    ]
    print(report.table(("", *(f"{rows:,} rows" for rows in ROWS), "last/first"), table), "\n")

    print(
        f"a waiting agent: {waiting['live_bytes']:,.0f} bytes and {waiting['live_copies']:.2f} times its text; "
        f"a finished row: {waiting['result_bytes']:,.0f} bytes and {waiting['result_copies']:.2f} times\n"
    )

    bars = [
        report.Bar("copies of a text that a waiting agent holds", waiting["live_copies"], "<=", COPIES_BAR),
        report.Bar("peak memory, 100,000 rows over 1,000", peaks[-1] / peaks[0], "<=", PEAK_BAR),
        report.Bar("time to first result, 100,000 rows over 1,000", firsts[-1] / firsts[0], "<=", FIRST_BAR),
        report.Bar("CPU per row, 100,000 rows over 1,000", costs[-1] / costs[0], "<=", COST_BAR),
    ]
    measurements: list[object] = [
        {
            "rows": rows,
            "peak_bytes": report.spread([sample["peak_bytes"] for sample in whole[rows]]),
            "cpu_per_row_s": report.spread([sample["cpu_per_row_s"] for sample in whole[rows]]),
            "first_result_s": report.spread([sample["first_result_s"] for sample in first[rows]]),
            "first_result_from_list_s": report.spread([sample["first_result_s"] for sample in first_of_list[rows]]),
        }
        for rows in ROWS
    ]
    measurements.append({"waiting_agents": AGENTS, **waiting})
    return report.finish("memory", env, bars, measurements)


if __name__ == "__main__":
    sys.exit(main())
