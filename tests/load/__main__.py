"""``python -m tests.load --seeds 1000``: plays that many seeds of each scenario, and prints those that miss a bar."""

from __future__ import annotations

import argparse
import sys
from time import process_time

from tests.load.scenarios import SCENARIOS, play


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.load", description="Whole runs at servers that are full.")
    parser.add_argument("--seeds", type=int, default=20, help="how many of each scenario")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--scenario", action="append", choices=[*SCENARIOS], help="only these")
    parser.add_argument("--verbose", action="store_true", help="print every outcome")
    arguments = parser.parse_args()
    missed = 0
    for name in arguments.scenario or SCENARIOS:
        began, worst_wall, worst_requests = process_time(), 0.0, 0.0
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            outcome = play(name, seed)
            worst_wall, worst_requests = max(worst_wall, outcome.wall), max(worst_requests, outcome.requests)
            missed += bool(outcome.problems)
            if outcome.problems or arguments.verbose:
                print(f"seed {seed}, {outcome}", *outcome.problems, sep="\n  ", flush=True)
        seconds = process_time() - began
        print(
            f"{name}: worst wall {worst_wall:.2f}, worst requests {worst_requests:.2f}; {seconds:.1f} s of CPU",
            flush=True,
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
