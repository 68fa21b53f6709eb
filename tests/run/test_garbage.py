"""The threshold of the garbage collector is raised while a run works, and set back at its end."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from batch_agent import BatchAgent
from batch_agent.run.garbage import THRESHOLD
from batch_agent.testing import Request, Say, ScriptedBackend

PYTHONS = (700, 10, 10)


@pytest.fixture(autouse=True)
def threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*PYTHONS)
    yield
    gc.set_threshold(*before)


async def seen_in_a_run(change: tuple[int, int, int] | None = None) -> tuple[int, int, int]:
    """Return the thresholds while a run works, which then sets them to ``change``."""
    seen = []

    def answer(request: Request) -> Say:
        seen.append(gc.get_threshold())
        if change is not None:
            gc.set_threshold(*change)
        return Say("yes")

    await BatchAgent.run(task="{input}", inputs=["row"], model="m", backend=ScriptedBackend(answer))
    return seen[0]


async def test_a_run_raises_the_threshold_and_sets_it_back() -> None:
    assert await seen_in_a_run() == (THRESHOLD, *PYTHONS[1:])
    assert gc.get_threshold() == PYTHONS


@pytest.mark.parametrize("given", [(0, 10, 10), (50_000, 20, 20)])
async def test_a_higher_threshold_and_a_collector_that_is_off_stay(given: tuple[int, int, int]) -> None:
    gc.set_threshold(*given)
    assert await seen_in_a_run() == given
    assert gc.get_threshold() == given


async def test_a_threshold_that_the_program_sets_meanwhile_is_kept() -> None:
    await seen_in_a_run((5_000, 5, 5))
    assert gc.get_threshold() == (5_000, 5, 5)
