"""What the workers of a run share, in Redis and in a Redis Cluster."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from redis_servers import needs_redis, redis_cluster, redis_server

from batch_agent.errors import SpecError
from batch_agent.record.address import StoreAddress
from batch_agent.record.redis.connection import RedisConnection
from batch_agent.record.redis.lent import RedisLent
from batch_agent.share.table import BUDGET, SLOTS, Claim, Learnt

pytestmark = [needs_redis]
SLOT_POT, MONEY = f"{SLOTS}server", f"{BUDGET}tokens"
MEMBER = 60.0  # seconds
DEAD = 1e-4


@pytest.fixture(scope="module", params=["server", "cluster"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreAddress]:
    folder = tmp_path_factory.mktemp("redis")
    if request.param == "cluster":
        with redis_cluster(folder) as cluster:
            yield cluster
    else:
        with redis_server(folder) as server:
            yield StoreAddress.parse(server.url, named=False)


@pytest.fixture
def lent(address: StoreAddress, request: pytest.FixtureRequest) -> Iterator[RedisLent]:
    run = address.at(f"run-{abs(hash(request.node.name))}")
    connection = RedisConnection(run, patience=0.0)
    yield RedisLent(run, connection)
    connection.close()


def test_workers_that_claim_at_once_never_hold_more_than_the_limit(lent: RedisLent) -> None:
    def claim(number: int) -> int:
        held = 0
        for _ in range(10):
            grants = lent.beat(f"w{number}", MEMBER, {MONEY: Claim(1000, held, held + 30, 30)}, {}, {}).grants
            held = grants[MONEY].held
        return held

    with ThreadPoolExecutor(8) as threads:
        held = list(threads.map(claim, range(8)))

    assert sum(held) == 990  # 33 parts of 30
    table, _ = lent.table()
    assert sum(member.claims[MONEY].held for member in table.members.values()) == 990


def test_a_worker_that_leaves_returns_its_slots_and_a_dead_one_loses_them(lent: RedisLent) -> None:
    everything = {SLOT_POT: Claim(8, 0, 8)}
    first = lent.beat("left", MEMBER, everything, {}, {}).grants[SLOT_POT].held
    none = lent.beat("b", MEMBER, everything, {}, {}).grants[SLOT_POT].held
    lent.leave("left")
    again = lent.beat("b", DEAD, everything, {}, {}).grants[SLOT_POT].held
    after = lent.beat("c", MEMBER, everything, {}, {}).grants[SLOT_POT].held

    assert (first, none, again, after) == (8, 0, 8, 8)


def test_a_call_runs_at_one_worker_and_the_others_find_its_result(lent: RedisLent) -> None:
    lent.beat("a", MEMBER, {}, {}, {})
    mine = lent.begin_call("a", "key", "t1", "")
    theirs = lent.begin_call("b", "key", "t2", "")
    lent.end_call("key", "t1", "the result", True, 60.0)
    position, ended = lent.wait_calls(theirs.position, 5.0)
    done = lent.begin_call("b", "key", "t2", theirs.token)

    assert (mine.state, theirs.state, theirs.token, ended) == ("mine", "theirs", "t1", {"key"})
    assert (done.state, done.text, done.ok) == ("done", "the result", True)
    assert lent.wait_calls(position, 0.001) == (position, set())


def test_a_result_that_is_not_kept_is_for_those_who_waited(lent: RedisLent) -> None:
    lent.beat("a", MEMBER, {}, {}, {})
    lent.begin_call("a", "key", "t1", "")
    lent.end_call("key", "t1", "it failed", False, 0.0)

    waited = lent.begin_call("b", "key", "t2", "t1")
    late = lent.begin_call("c", "key", "t3", "")

    assert (waited.state, waited.text, waited.ok) == ("done", "it failed", False)
    assert late.state == "mine"


def test_a_worker_that_dies_in_the_middle_of_a_call_frees_it_and_cannot_end_it_later(lent: RedisLent) -> None:
    lent.beat("dead", DEAD, {}, {}, {})
    lent.begin_call("dead", "key", "t1", "")
    taken = lent.begin_call("b", "key", "t2", "t1")
    lent.end_call("key", "t1", "an old result", True, 60.0)
    lent.beat("b", MEMBER, {}, {}, {})
    still = lent.begin_call("c", "key", "t3", "")
    lent.end_call("key", "t2", None, False, 0.0)
    free = lent.begin_call("c", "key", "t3", "t2")

    assert (taken.state, still.state, still.token, free.state) == ("mine", "theirs", "t2", "mine")


def test_requests_reach_every_worker(lent: RedisLent) -> None:
    before = lent.beat("a", MEMBER, {}, {"gpu": Learnt(down=True)}, {"host": "one"}).steering
    lent.steer({"do": "pause"})
    lent.steer({"do": "retry-row", "row": 7})
    heard = lent.beat("b", MEMBER, {}, {"gpu": Learnt()}, {"host": "two"})
    table, now = lent.table()

    assert (before.number, heard.steering.paused, heard.steering.rows) == (0, True, ((2, "retry-row", "7"),))
    assert heard.learnt == {"gpu": [Learnt(down=True)]}
    assert [member.status for member in table.live(now).values()] == [{"host": "one"}, {"host": "two"}]
    with pytest.raises(SpecError, match="does not support"):
        lent.steer({"do": "dance"})


def test_a_file_is_found_by_its_name(lent: RedisLent) -> None:
    lent.put_file("hosts.txt", "gpu-1\ngpu-2 8001\n")

    assert lent.get_file("hosts.txt") == "gpu-1\ngpu-2 8001\n"
    assert lent.get_file("others.txt") is None
