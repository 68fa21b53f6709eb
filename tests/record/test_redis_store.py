"""The contract of a shared run, for a Redis server and for a Redis Cluster of three nodes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
from batch_agent.record.shared import RowLease, RunStore
from redis_servers import needs_redis, redis_cluster, redis_server
from run_store_contract import Expire, OpenedRun, RunStoreContract

from batch_agent.record.address import StoreAddress
from batch_agent.record.redis.connection import RedisConnection, connect
from batch_agent.record.redis.store import RedisRunStore

NAMES = (f"run-{number}" for number in count())


def open_run(address: StoreAddress) -> RedisRunStore:
    store = RedisRunStore.open(address)
    store.polite = False
    return store


EXPIRE = """
for _, held in ipairs(redis.call('XPENDING', KEYS[1], 'workers', '-', '+', 1000)) do
  redis.call('XCLAIM', KEYS[1], 'workers', held[2], 0, held[1], 'IDLE', 1000000000, 'RETRYCOUNT', held[4], 'JUSTID')
end
redis.call('DEL', KEYS[2])
"""


def let_time_pass(address: StoreAddress) -> None:
    """Every lease ends now."""
    client = connect(address)
    client.register_script(EXPIRE)(keys=[f"{address.prefix}queue", f"{address.prefix}feeder"])
    client.close()


class OfRedis(RunStoreContract):
    @pytest.fixture
    def address(self, server: StoreAddress) -> StoreAddress:
        return server.at(next(NAMES))

    @pytest.fixture
    def opened_run(self, address: StoreAddress) -> Iterator[OpenedRun]:
        with ExitStack() as stores:

            def opened() -> RunStore:
                store = open_run(address)
                stores.callback(store.close)
                return store

            yield opened

    @pytest.fixture
    def expire(self, address: StoreAddress) -> Expire:
        return lambda: let_time_pass(address)

    def steps_kept(self, store: RunStore, lease: RowLease) -> int:
        assert isinstance(store, RedisRunStore)
        key = store.key(f"steps:{lease.row}")
        return int(store.connection.call(lambda client: client.execute_command("LLEN", key)))


@needs_redis
class TestRedis(OfRedis):
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreAddress]:
        with redis_server(tmp_path_factory.mktemp("redis")) as server:
            yield StoreAddress("redis", "127.0.0.1", server.port)


@needs_redis
class TestRedisCluster(OfRedis):
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreAddress]:
        with redis_cluster(tmp_path_factory.mktemp("cluster")) as address:
            yield address


@needs_redis
def test_a_call_waits_while_the_server_is_full(tmp_path: Path) -> None:
    away: list[bool] = []
    with redis_server(tmp_path) as server, ThreadPoolExecutor(1) as thread:
        address = StoreAddress.parse(f"{server.url}/full")
        connection = RedisConnection(address, on_away=away.append)
        client = connect(address)
        client.execute_command("CONFIG", "SET", "maxmemory", 1)
        call = thread.submit(lambda: connection.call(lambda each: each.execute_command("SET", "a", "b")))
        while not away:
            time.sleep(0.01)
        assert not call.done()
        client.execute_command("CONFIG", "SET", "maxmemory", 0)
        assert call.result(timeout=30)
        connection.close()
        client.close()

    assert away == [True, False]
