"""``python -m tests.simulation --seeds 1000`` plays seeds; ``--seed 123`` plays one again and makes it smaller."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.play import play
from tests.simulation.shrink import shrink
from tests.simulation.workload import NOT_YET, SHAPES

USUAL = tuple(shape for shape in SHAPES if shape not in NOT_YET)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--shapes", default=",".join(USUAL))
    arguments = parser.parse_args()
    shapes = tuple(shape for shape in SHAPES if shape in arguments.shapes.split(","))
    seeds = [arguments.seed] if arguments.seed is not None else range(arguments.first, arguments.first + arguments.seeds)
    bad = 0
    began = time.process_time()
    seconds = kills = sittings = requests = 0.0
    for seed in seeds:
        workload, faults, played = play(seed, shapes)
        seconds += played.seconds; kills += played.kills; sittings += played.sittings; requests += played.requests
        if played.problems:
            bad += 1
            if arguments.seed is not None:
                workload, faults, played = shrink(workload, faults, played)
            print(f"seed {seed} {workload}\n  " + "\n  ".join(map(str, faults)))
            print("  " + "\n  ".join(p[:3000] for p in played.problems[:3]))
    print(bad, "bad", seconds / 3600, "h", kills, "kills", sittings, "sittings", requests, "requests", time.process_time() - began, "s cpu")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
