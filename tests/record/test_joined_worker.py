"""What a worker does that joins a run which takes no more rows, for every record that a worker can reach."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.record.redis_servers import needs_redis
from tests.record.test_run_stores import RedisPlace, ServedDirectoryPlace, ServedMemoryPlace

from batch_agent.record.address import StoreAddress
from batch_agent.record.store import WorkStore
from batch_agent.run.joined_worker import JoinedWorker, NoRunCame
from batch_agent.run.leases import Over
from batch_agent.run.trust import Trust
from batch_agent.testing.store_place import StorePlace, begin, facts, new_row

REDIS = pytest.param("redis", marks=needs_redis)


@pytest.fixture(params=["memory", "directory", REDIS])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StorePlace]:
    places = {
        "memory": ServedMemoryPlace,
        "directory": lambda: ServedDirectoryPlace(tmp_path),
        "redis": lambda: RedisPlace(StoreAddress.parse(request.getfixturevalue("url"))),
    }
    with closing(places[request.param]()) as place:
        yield place


async def why_it_left(store: WorkStore) -> Over:
    """Why a worker leaves at once. Raises NoRunCame if it would wait for a run."""
    report = await JoinedWorker(store, Trust(everything=True), wait=0.0).work()
    assert report.rows == 0
    return report.why


async def test_a_worker_that_joins_a_run_which_drains_leaves_at_once_and_says_so(place: StorePlace) -> None:
    now = begin(place, place.open(), new_row(place, 0), new_row(place, 1))
    now.take(1)
    now.store.set_phase(now.number, "draining")
    assert await why_it_left(now.work) == "the run is draining"


async def test_a_worker_that_joins_a_run_which_has_ended_leaves_unless_it_can_be_resumed(place: StorePlace) -> None:
    """The record of a process ends with it. A run in Redis can get a new feeder, for which workers may wait."""
    now = begin(place, place.open(), new_row(place, 0))
    now.store.close_feed(now.number, facts(state="drained"), "ended")
    if place.shared:
        with pytest.raises(NoRunCame, match=r"the run has ended \(drained\), and no process has resumed it"):
            await why_it_left(now.work)
    else:
        assert await why_it_left(now.work) == "the run has ended"


@pytest.mark.parametrize("failed", [0, 1])
async def test_a_worker_that_joins_a_run_which_is_complete_is_done(place: StorePlace, failed: int) -> None:
    now = begin(place, place.open())
    now.store.close_feed(now.number, facts(state="complete", summary={"rows": {"failed": failed}}), "ended")
    assert await why_it_left(now.work) == "done"


@needs_redis
async def test_a_worker_waits_for_a_run_whose_feeder_was_killed_while_it_drained(url: str) -> None:
    """A new feeder lets workers take rows again."""
    with closing(RedisPlace(StoreAddress.parse(url))) as place:
        now = begin(place, place.open(), new_row(place, 0))
        now.store.set_phase(now.number, "draining")
        place.expire()
        with pytest.raises(NoRunCame, match="the run has no feeder"):
            await why_it_left(now.work)
