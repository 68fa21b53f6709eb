"""What an engine's KV cache holds, by its reports, its counters and our own answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batch_agent.scheduler.cache_size import CacheSize
from batch_agent.scheduler.engine_load import Load
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.server_events import Reading, ReadingLost
from batch_agent.scheduler.server_state import ServerState

RECORDED = json.loads((Path(__file__).parent / "recordings" / "kv_readings.json").read_text())["series"]


@pytest.mark.parametrize("series", RECORDED, ids=lambda series: series["engine"])
def test_the_late_gauges_of_real_engines_take_nothing_from_what_they_report(series: dict[str, object]) -> None:
    """vLLM showed 9 of 24 requests, SGLang 1 of 16, while the reported size was right."""
    server, rows = ServerState(), series["rows"]
    assert isinstance(rows, list)
    for seconds, reported, running, waiting, inflight, usage, _ in rows:
        server.inflight = inflight
        load = Load(running=running, waiting=waiting, kv_usage=usage, kv_tokens=reported)
        server.on(Reading(load), seconds)
        assert server.memory.is_believed
        assert (server.memory.capacity, server.memory.margin) == (reported, 1.0)


def counted(size: CacheSize, share: float, *, seconds: int = 60, lag: int = 2, frozen: int = 0) -> None:
    """An engine answers one of our requests per second, and has counted ``share`` of them ``lag`` seconds later; for
    the first ``frozen`` seconds it counts none."""
    for now in range(seconds):
        ended = 0 if now < frozen else max(0, now - lag)
        size.read(Load(kv_tokens=10_000, finished=round(share * ended)), now, 1, float(now))


@pytest.mark.parametrize(("share", "several"), [(1.0, False), (3.0, False), (0.7, False), (0.3, True), (0.125, True)])
def test_an_engine_that_counts_few_of_our_requests_is_one_of_several(share: float, several: bool) -> None:
    size = CacheSize()
    counted(size, share)
    assert size.is_one_of_several is several
    assert size.capacity == (None if several else 10_000)


def test_counters_that_start_late_show_nothing() -> None:
    size = CacheSize()
    counted(size, 1.0, frozen=18)
    assert size.capacity == 10_000


def test_an_engine_that_restarts_counts_from_zero() -> None:
    size = CacheSize()
    counted(size, 1.0)
    size.read(Load(kv_tokens=10_000, finished=0), 60, 1, 60.0)
    assert size.capacity == 10_000


def test_a_cache_that_holds_more_than_it_reports_is_learnt_from_evictions() -> None:
    """A store behind the engine is in no metric."""
    size = CacheSize()
    size.read(Load(kv_tokens=10_000), 0, 0, 0.0)
    for _ in range(20):  # requests in flight may still wait in the engine, so their contexts prove nothing
        size.found(15_000, certain=9_000)
    assert size.capacity == 10_000
    for _ in range(N.several):
        size.found(15_000, certain=15_000)
    assert size.capacity is None
    size.evicted(40_000)
    assert size.capacity == 40_000


def test_a_context_that_was_evicted_although_it_fitted_shows_that_others_use_a_part() -> None:
    size = CacheSize()
    size.read(Load(kv_tokens=10_000), 0, 0, 0.0)
    size.evicted(9_500)  # as expected near the end of the cache
    assert size.margin == 1.0
    for _ in range(100):
        size.evicted(4_000)
    assert size.margin * 10_000 * N.full == pytest.approx(4_000, rel=0.06)
    for _ in range(1_000):
        size.found(4_000, certain=4_000)
    assert size.margin == 1.0


def test_preempted_requests_need_more_memory_than_there_is() -> None:
    size = CacheSize()
    for preemptions in (7, 7, 8):
        size.read(Load(kv_tokens=10_000, preemptions=preemptions), 0, 0, 0.0)
    assert size.margin == N.margin_loss


def test_the_size_is_learnt_from_evictions_where_it_is_not_reported() -> None:
    size = CacheSize()
    size.found(5_000, certain=5_000)
    assert size.capacity is None
    size.evicted(10_000)
    size.evicted(9_000)
    assert size.capacity == 9_000
    size.evicted(100)  # one eviction that others caused does not undo it
    assert size.capacity == 7_200
    size.found(9_500, certain=9_500)
    assert size.capacity == 9_500


def test_a_larger_memory_behind_the_cache_and_lost_readings_end_the_report() -> None:
    server = ServerState()
    server.on(Reading(Load(kv_tokens=10_000)), 0.0)
    server.on(Reading(Load(kv_tokens=10_000, offloads=True)), 1.0)
    assert server.memory.capacity is None
    server.on(Reading(Load(kv_tokens=10_000)), 2.0)
    assert server.memory.capacity == 10_000
    server.on(ReadingLost(), 3.0)
    assert server.memory.capacity is None
