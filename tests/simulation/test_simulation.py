"""A fixed set of seeds, and the simulator's own promises: a seed plays the same each time, and a fault is found."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from typing import Any

import pytest
from tests.simulation.evidence import play_evidence
from tests.simulation.faults import Fault, Kill, Stop
from tests.simulation.play import play, play_against, play_with
from tests.simulation.process import Process
from tests.simulation.shrink import shrink
from tests.simulation.workload import SHAPES, Edition, Outcome, Workload

SEEDS = (8, 9, 10, 13, 14, 18, 28, 36, 57, 73, 77, 111, 113, 195)  # cheap ones; make soak plays the first thousand


def test_the_fixed_seeds_play_every_shape_alone_with_processes_and_with_workers_that_join() -> None:
    played = [Workload.of(seed, SHAPES) for seed in SEEDS]
    found = {(each.shape, each.workers > 0, each.joins is not None) for each in played}
    kinds = {(False, False), (True, False), (True, True)}
    assert {each[0] for each in found} == set(SHAPES)
    assert {each for each in found if "batch" not in each[0]} >= {
        (shape, *kind) for shape in SHAPES for kind in kinds if "batch" not in shape
    }


@pytest.mark.parametrize("seed", [*SEEDS, pytest.param(1243, marks=pytest.mark.soak)])
def test_nothing_is_lost_and_nothing_is_done_twice(seed: int) -> None:
    workload, faults, played = play(seed)
    assert not played.problems, f"make soak SEED={seed}\n{workload}\n{faults}\n" + "\n".join(played.problems)


@pytest.mark.parametrize("seed", [*range(5), 518, 828, 2904, 8334, 11137, 30481])
def test_bad_rows_and_bad_servers_are_told_apart_in_time_and_without_waste(seed: int) -> None:
    trial, played = play_evidence(seed)
    assert not played.problems, f"make soak SEED={seed}\n{trial}\n" + "\n".join(played.problems)


def test_a_seed_plays_the_same_each_time() -> None:
    first, second = (play(77) for _ in range(2))
    assert first == second


ALONE = Workload(
    seed=0,
    shape="tool loop",
    first=Edition(0, ("k4", "k5", "k6", "k7")),
    servers=1,
    capacity=None,
    max_inflight=None,
    rpm=None,
    max_retries=1,
    hedge=None,
    streaming=False,
    budget=None,
)
FOUND: dict[str, tuple[Workload, list[Fault]]] = {
    "a run that was paused before a worker joined is resumed": (
        replace(ALONE, workers=1, joins=5.0),
        [Stop(0, "request", 2, "pause")],
    ),
    "the feeder's worker takes a row that comes back while the inputs of its stage wait": (
        replace(ALONE, seed=485, shape="pipeline", workers=1, joins=2.657, max_inflight=16),
        [Stop(0, "request", 1, "pause"), Kill(0, "before thread", 701, 1)],
    ),
    "a tool call that waits for another worker's is cancelled, and then the feeder is dead": (
        replace(ALONE, seed=1191, first=Edition(0, ("k1",)), max_retries=3, workers=3),
        [Kill(0, "after thread", 100, -1), Kill(0, "tool", 3, 3)],
    ),
    "a worker joins while the run ends": (
        replace(ALONE, seed=352, shape="user worker", first=Edition(0, ("k4", "k5")), workers=1, joins=0.07655434),
        [],
    ),
}


@pytest.mark.parametrize(("workload", "faults"), FOUND.values(), ids=FOUND)
def test_a_fault_that_was_found_stays_mended(workload: Workload, faults: list[Fault]) -> None:
    assert play_against(workload, faults).problems == []


class Waiting(Workload):
    """Opens the run when it has waited for ever, and looks about meanwhile."""

    async def play(self, process: Process, edition: Edition) -> Outcome:
        while True:
            await asyncio.sleep(1.0)


def test_a_run_that_makes_no_progress_is_reported_with_its_state() -> None:
    usual = Workload.of(0, ["tool loop"])
    played = play_with(Waiting(**{field.name: getattr(usual, field.name) for field in fields(usual)}), [])
    assert "process 0 makes no progress for 1800 s" in played.problems[0]
    assert "Waiting.play > sleep" in played.problems[0]


class Forgetful(Workload):
    """Records nothing."""

    def options(self, process: Process) -> dict[str, Any]:
        return super().options(process) | {"run_dir": None, "resume": False, "on_change": None}


def test_what_must_not_happen_is_found_and_made_smaller() -> None:
    usual = Workload.of(0, ["tool loop"])
    options = {field.name: getattr(usual, field.name) for field in fields(usual)}
    workload = Forgetful(**options | {"first": Edition(0, ("k0", "k1", "k2", "k3")), "budget": None})
    faults: list[Fault] = [Kill(0, "result", 1), Kill(1, "request", 3)]
    smaller, left, played = shrink(workload, faults, play_against(workload, faults))
    assert "is not on disk" in played.problems[0]
    assert len(left) <= 1 and len(smaller.first.rows) < 4
