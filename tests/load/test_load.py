"""A seed of each scenario; ``make soak-load`` plays more."""

from __future__ import annotations

import pytest
from tests.load.scenarios import SCENARIOS, play

SEEDS = {
    "metrics of a part": (0, 1, 2),  # one of each kind
    "growing server": (0,),  # answers of 3.5 s
    "random refusals": (26,),  # 26: twelve of the first 64 requests are refused by chance
    "minute limit": (1, 53),  # 53: requests arrive in another order than they left
    "two clients": (1,),
    # All slots in the first wave; answers of different length; a slow server that seems down before its first answer.
    "long answers": (1, 19, 36),
}


@pytest.mark.parametrize(
    ("name", "seed"),
    [(name, seed) for name in SCENARIOS for seed in SEEDS.get(name, (1,))],
)
def test_a_run_is_near_the_ideal_and_sends_little_more_than_needed(name: str, seed: int) -> None:
    outcome = play(name, seed)
    assert not outcome.problems, f"python -m tests.load --scenario {name!r} --first {seed} --seeds 1: {outcome}"
