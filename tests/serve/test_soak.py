"""Weeks of a server in virtual time. ``make soak-serve`` plays more of them."""

from __future__ import annotations

import logging

import pytest
from tests.serve.soak import play_seed

SEEDS = 50


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_week_of_faults_loses_nothing(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    world = play_seed(seed)
    assert not world.problems, f"make soak-serve SEED={seed}\n" + "\n".join(world.problems)
