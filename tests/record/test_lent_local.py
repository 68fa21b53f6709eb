"""What the workers of a run share in the process of the driver: it passes what Redis passes."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from test_redis_lent import (  # the tests of Redis, with the fixture of this module
    test_a_call_runs_at_one_worker_and_the_others_find_its_result,
    test_a_file_is_found_by_its_name,
    test_a_result_that_is_not_kept_is_for_those_who_waited,
    test_a_worker_that_dies_in_the_middle_of_a_call_frees_it_and_cannot_end_it_later,
    test_a_worker_that_leaves_returns_its_slots_and_a_dead_one_loses_them,
    test_requests_reach_every_worker,
    test_workers_that_claim_at_once_never_hold_more_than_the_limit,
)

from batch_agent.record.lent_local import LocalLent
from batch_agent.record.shared_sqlite import SHARED, SqliteRunStore
from batch_agent.scheduler.lending import BUDGET, Claim

__all__ = [
    "test_a_call_runs_at_one_worker_and_the_others_find_its_result",
    "test_a_file_is_found_by_its_name",
    "test_a_result_that_is_not_kept_is_for_those_who_waited",
    "test_a_worker_that_dies_in_the_middle_of_a_call_frees_it_and_cannot_end_it_later",
    "test_a_worker_that_leaves_returns_its_slots_and_a_dead_one_loses_them",
    "test_requests_reach_every_worker",
    "test_workers_that_claim_at_once_never_hold_more_than_the_limit",
]


@pytest.fixture
def lent() -> LocalLent:
    ticks = count()  # a millisecond passes between two calls
    return LocalLent({}, lambda table: None, clock=lambda: next(ticks) / 1000)


def test_a_budget_outlives_the_driver(tmp_path: Path) -> None:
    pot = f"{BUDGET}tokens"
    store = SqliteRunStore(tmp_path / SHARED)
    store.lent().beat("worker", 60.0, {pot: Claim(100, 70, 70, 1, 70)}, {}, {})
    store.close()

    again = SqliteRunStore(tmp_path / SHARED)
    granted = again.lent().beat("another", 60.0, {pot: Claim(100, 0, 100)}, {}, {}).grants[pot]
    again.close()

    assert granted.held == 30
