"""The connection to Redis; ``test_run_stores`` has the contract of the store."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.record.redis_servers import needs_redis, redis_server

from batch_agent.errors import StoreError
from batch_agent.record.address import StoreAddress
from batch_agent.record.redis.connection import RedisConnection, connect
from batch_agent.record.redis.reading import delete_run
from batch_agent.record.redis.store import RedisRunStore
from batch_agent.record.store import Commit, Resuming


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


@needs_redis
def test_a_worker_leaves_no_key_of_a_run_that_was_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(tmp_path) as server, ThreadPoolExecutor(1) as thread:
        address = StoreAddress.parse(f"{server.url}/deleted")
        client: Any = connect(address)
        store, waits = RedisRunStore.at(address), RedisRunStore.at(address)
        store.open_feed({"fingerprint": "0f"}, Resuming())
        worker = store.join({"host": "here"})
        store.beat("one", 10.0, {}, {}, {})
        store.take(worker, 1, 0.0)
        taking = thread.submit(waits.take, worker, 1, 30.0)
        while not any(each["cmd"] == "xreadgroup" and each["flags"] == "b" for each in client.client_list()):
            time.sleep(0.01)

        delete_run(address)
        with pytest.raises(StoreError, match="deleted"):
            taking.result(timeout=30)
        store.beat("one", 10.0, {}, {}, {})
        assert store.commit(worker, 1, Commit()) == set()
        store.resign("one")
        with pytest.raises(StoreError, match="deleted"):
            store.join({"host": "here"})
        assert client.execute_command("KEYS", "*") == []
        assert "No request is sent" not in caplog.text  # a deleted run is no outage
        for each in (store, waits, client):
            each.close()
