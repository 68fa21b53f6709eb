"""A fixed set of seeds, and the simulator's own promises: a seed plays the same each time, and a fault is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.simulation.faults import Fault, Kill
from tests.simulation.play import play, play_against
from tests.simulation.shrink import shrink
from tests.simulation.workload import KINDS, NOT_YET, Edition, Workload

PROMISED = tuple(kind for kind in KINDS if kind not in NOT_YET)


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_lost_and_nothing_is_done_twice(seed: int) -> None:
    workload, faults, played = play(seed, PROMISED)
    assert not played.problems, f"make soak SEED={seed}\n{workload}\n{faults}\n" + "\n".join(played.problems)


def test_a_seed_plays_the_same_each_time() -> None:
    first, second = (play(45, PROMISED) for _ in range(2))
    assert first == second


def test_what_must_not_happen_is_found_and_made_smaller() -> None:
    workload = replace(
        Workload.of(0, ["pondering worker"]), first=Edition(0, ("k0", "k1", "k2", "k3")), max_inflight=None, budget=None
    )
    faults: list[Fault] = [Kill(0, "result", 1), Kill(1, "request", 3), Kill(2, "answer", 2)]
    workload, faults, played = shrink(workload, faults, play_against(workload, faults))
    assert played.problems and len(faults) == 1 and len(workload.first.rows) < 4
