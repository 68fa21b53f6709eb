"""``make soak SEEDS=1000``: plays that many seeds, over all cores or ``JOBS=``. ``make soak SEED=123`` plays one again,
makes it smaller if it fails, and says what is left."""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from time import process_time

from tests.simulation.evidence import play_evidence
from tests.simulation.play import play
from tests.simulation.shrink import shrink
from tests.simulation.workload import SHAPES, Shape

MOST_MEMORY_MB = 400  # that a process may take, however many seeds it has played


@dataclass(slots=True)
class Tally:
    runs: int = 0
    sessions: int = 0
    kills: int = 0
    requests: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    memory_mb: int = 0
    failed: dict[int, str] = field(default_factory=dict)  # seeds, and what is wrong

    def add(self, other: Tally) -> None:
        self.runs += other.runs
        self.sessions += other.sessions
        self.kills += other.kills
        self.requests += other.requests
        self.seconds += other.seconds
        self.cpu += other.cpu
        self.memory_mb = max(self.memory_mb, other.memory_mb)
        self.failed |= other.failed

    def __str__(self) -> str:
        return (
            f"{self.runs} runs, {self.seconds / 3600:,.0f} simulated hours, {self.sessions} sessions, "
            f"{self.kills} kills, {self.requests} requests; {self.cpu:.0f} s of CPU, {self.memory_mb} MB; "
            f"{len(self.failed)} failed"
        )


def one(seed: int, shapes: tuple[Shape, ...]) -> Tally:
    began = process_time()
    _, _, played = play(seed, shapes)
    trial, blamed = play_evidence(seed)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    problems = [*played.problems[:3], *(f"{trial}: {problem}" for problem in blamed.problems)]
    failed = {seed: "\n  ".join(problems)} if problems else {}
    return Tally(
        1, played.sessions, played.kills, played.requests, played.seconds, process_time() - began, memory, failed
    )


def soak(seeds: Iterable[int], shapes: tuple[Shape, ...], jobs: int) -> Tally:
    total = Tally()
    for tally in _played(seeds, shapes, jobs):
        total.add(tally)
        for seed, problem in tally.failed.items():
            print(f"seed {seed} fails:\n  {problem}", flush=True)
        if total.runs % 200 == 0:
            print(total, flush=True)
    return total


def _played(seeds: Iterable[int], shapes: tuple[Shape, ...], jobs: int) -> Iterator[Tally]:
    if jobs == 1:
        yield from map(partial(one, shapes=shapes), seeds)
        return
    from tests.simulation import __main__ as here  # another process does not import what was started with -m

    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        yield from pool.map(partial(here.one, shapes=shapes), seeds, chunksize=10)


def explain(seed: int, shapes: tuple[Shape, ...]) -> bool:
    """Play one seed, and make it smaller if it fails. True if it does not."""
    workload, faults, played = play(seed, shapes)
    trial, blamed = play_evidence(seed)
    if blamed.problems:
        print("\n".join([f"seed {seed} fails: {trial}", *(f"  {problem}" for problem in blamed.problems)]))
        return False
    if not played.problems:
        print(
            f"seed {seed}: {played.sessions} sessions, {played.kills} kills, {played.seconds:.0f} s; nothing is wrong"
        )
        return True
    workload, faults, played = shrink(workload, faults, played)
    print(
        "\n".join([f"seed {seed} fails. The smallest that does:", f"  {workload}", *(f"  {each}" for each in faults)])
    )
    print("\n".join(f"  {problem}" for problem in played.problems))
    return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Whole runs with random faults.")
    parser.add_argument("--seed", type=int, help="play this one alone, and make it smaller if it fails")
    parser.add_argument("--seeds", type=int, default=1000, help="how many to play")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that play")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of the runs: some of %(default)s")
    arguments = parser.parse_args()
    asked = arguments.shapes.split(",")
    if wrong := set(asked) - set(SHAPES):
        parser.error(f"there is no shape {', '.join(sorted(wrong))}; there are {', '.join(SHAPES)}")
    shapes = tuple(shape for shape in SHAPES if shape in asked)
    if arguments.seed is not None:
        return 0 if explain(arguments.seed, shapes) else 1
    total = soak(range(arguments.first, arguments.first + arguments.seeds), shapes, arguments.jobs)
    print(total)
    for seed in total.failed:
        print(f"make soak SEED={seed}")
    if total.memory_mb > MOST_MEMORY_MB:
        print(f"a process took {total.memory_mb} MB: something is kept that should not be")
        return 1
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
