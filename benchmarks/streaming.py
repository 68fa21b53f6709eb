"""What streaming costs against a server that writes one event per token, as real engines do.

``python -m benchmarks.streaming``. Two kinds of work, each done streamed and whole, in turns, in processes of their
own. Where streaming does not pay (the call is the end of its answer and the tool is quick) the run finds out and stops,
and its CPU is held against that of the same turns whole. Where it pays (the model goes on behind its first call, and
the tool is slow) it goes on, and what it takes more is divided by the tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass

from benchmarks import environments, report
from benchmarks.server import Server, serving
from benchmarks.workload import Work

LATENCY_SECONDS = 0.6  # of each answer: about ten milliseconds a token
RATIO_BAR, TOKEN_BAR = 1.3, 15.0
# Events of the two turns as the server writes them: the tokens, and four that open and close an answer.
TOKENS = {"benchmarks.contenders.ours": 11 + 61, "benchmarks.contenders.ours_slow_tool": 65 + 61}


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one run: seconds of CPU per agent, and of the clock."""

    cpu_per_agent: float
    wall: float


def run_once(module: str, work: Work, server: Server) -> Cost:
    command = [sys.executable, "-m", module, *work.arguments()]
    done = subprocess.run(command, cwd=environments.ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"it failed: {' '.join(command)}")
    stats = server.stats()
    if stats.answers != 2 * work.agents:
        raise SystemExit(f"{module} was to take {2 * work.agents} turns; the server saw {stats}")
    cost = json.loads(done.stdout.splitlines()[-1])
    return Cost(cost["cpu_s"] / work.agents, cost["wall_s"])


def measure(module: str, agents: int, inflight: int, repetitions: int, server: Server) -> dict[str, list[Cost]]:
    costs: dict[str, list[Cost]] = {"streamed": [], "whole": []}
    for _ in range(repetitions):
        for name, its in costs.items():
            its.append(run_once(module, Work(server.url, agents, 2, inflight, name == "streamed"), server))
    return costs


def ratio(costs: dict[str, list[Cost]]) -> float:
    pairs = zip(costs["streamed"], costs["whole"], strict=True)
    return statistics.median(streamed.cpu_per_agent / whole.cpu_per_agent for streamed, whole in pairs)


def token_cost(costs: dict[str, list[Cost]], tokens: int) -> float:
    """Microseconds of CPU that a streamed token takes more than the same in a whole answer."""
    pairs = zip(costs["streamed"], costs["whole"], strict=True)
    return statistics.median((streamed.cpu_per_agent - whole.cpu_per_agent) * 1e6 / tokens for streamed, whole in pairs)


def measurement(module: str, costs: dict[str, list[Cost]]) -> dict[str, object]:
    return {
        "work": module,
        "tokens_per_agent": TOKENS[module],
        "cpu_ratio": ratio(costs),
        "us_per_token": token_cost(costs, TOKENS[module]),
        **{
            name: {
                "cpu_per_agent_s": report.spread([cost.cpu_per_agent for cost in its]),
                "wall_s": report.spread([cost.wall for cost in its]),
            }
            for name, its in costs.items()
        },
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streaming", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--agents", type=int, default=500)
    parser.add_argument("--inflight", type=int, default=64)
    return parser.parse_args()


def main() -> int:
    options, env = arguments(), report.environment()
    quick, slow = TOKENS
    rows, results = [], {}
    with serving(latency=LATENCY_SECONDS, stream_writes=0) as server:
        for module in TOKENS:
            costs = results[module] = measure(module, options.agents, options.inflight, options.repetitions, server)
            for name, its in costs.items():
                cpu = statistics.median(cost.cpu_per_agent for cost in its)
                wall = statistics.median(cost.wall for cost in its)
                rows.append((f"{module.rpartition('.')[2]}, {name}", f"{cpu * 1e6:,.0f}", f"{wall:.2f}"))
    print(report.table(("", "µs CPU/agent", "seconds"), rows))
    bars = [
        report.Bar("CPU, streamed/whole, where it does not pay", ratio(results[quick]), "<=", RATIO_BAR),
        report.Bar("µs per token, where it pays", token_cost(results[slow], TOKENS[slow]), "<=", TOKEN_BAR),
    ]
    print()
    return report.finish("streaming", env, bars, [measurement(module, costs) for module, costs in results.items()])


if __name__ == "__main__":
    sys.exit(main())
