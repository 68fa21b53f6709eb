"""A small version of ``benchmarks/at_scale.py``: many endpoints that fail, on a virtual clock."""

from __future__ import annotations

from benchmarks.at_scale import TURNS, play

from batch_agent.testing.clock import run_virtual


def test_many_endpoints_that_fail_now_and_then_are_kept_busy_and_cost_no_agent() -> None:
    agents = 2_000
    played = run_virtual(play(endpoints=40, agents=agents, slots=4))

    assert played.agents_failed == 0
    assert played.answers == TURNS * agents
    assert played.failed_attempts > 0
    assert played.throughput_over_ideal > 0.6  # the batch is short: its end, with idle slots, is a good part of it
