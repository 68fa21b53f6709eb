"""A Redis server that refuses for a while is away, not broken: calls wait, and are repeated when it accepts again."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.record.redis_servers import RedisServer, needs_redis, redis_server

from batch_agent.errors import StoreError
from batch_agent.record.address import StoreAddress
from batch_agent.record.redis.connection import RedisConnection, connect

redis = pytest.importorskip("redis")
pytestmark = needs_redis
WRITE = "redis.call('SET', KEYS[1], 'x'); return 'written'"
PATIENCE = 60.0  # seconds after which a test gives up


@contextmanager
def too_few_replicas(server: RedisServer) -> Iterator[None]:
    with redis.Redis(port=server.port) as client:
        client.config_set("min-replicas-to-write", 1)
        yield
        client.config_set("min-replicas-to-write", 0)


@contextmanager
def a_replica(server: RedisServer) -> Iterator[None]:
    with redis.Redis(port=server.port) as client:
        client.replicaof("127.0.0.1", "1")
        yield
        client.replicaof("NO", "ONE")


@contextmanager
def a_long_script(server: RedisServer) -> Iterator[None]:
    with redis.Redis(port=server.port) as client, ThreadPoolExecutor() as threads:
        client.config_set("lua-time-limit", 1)
        running = threads.submit(
            lambda: redis.Redis(port=server.port, socket_timeout=PATIENCE).eval("while true do end", 0)
        )
        until = time.monotonic() + PATIENCE
        while not refused(client):
            assert time.monotonic() < until, "it was not seen while it was loading"
        yield
        client.script_kill()
        assert running.exception() is not None


@contextmanager
def a_failed_snapshot(server: RedisServer) -> Iterator[None]:
    with redis.Redis(port=server.port) as client:
        client.config_set("save", "3600 1")
        shutil.rmtree(server.directory)
        client.bgsave()
        while client.info("persistence")["rdb_last_bgsave_status"] == "ok":
            pass
        yield
        client.config_set("save", "")


@contextmanager
def loading(server: RedisServer) -> Iterator[None]:
    """A server that was started again, and reads its file."""
    with redis.Redis(port=server.port) as client:
        client.mset({f"key {number}": os.urandom(2048) for number in range(200)})
        client.save()
    server.kill()
    server.options = (*server.options, "--key-load-delay", "50000", "--loading-process-events-interval-bytes", "1024")
    server.launch()
    with redis.Redis(port=server.port) as client:
        while not refused(client):
            pass
        yield
        client.config_set("key-load-delay", 0)


def refused(client: Any) -> bool:
    try:
        client.ping()
    except (redis.ResponseError, redis.exceptions.BusyLoadingError):
        return True
    except redis.ConnectionError:  # it has not started yet
        return False
    return False


@pytest.mark.parametrize(
    ("refusing", "says"),
    [
        (too_few_replicas, "NOREPLICAS"),
        (a_replica, "read only"),
        (a_long_script, "BUSY"),
        (a_failed_snapshot, "MISCONF"),
        (loading, "loading"),
    ],
)
def test_a_call_waits_while_the_server_refuses(
    tmp_path: Path,
    refusing: Callable[[RedisServer], AbstractContextManager[None]],
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_away, is_back = threading.Event(), threading.Event()
    with redis_server(tmp_path, "--appendonly", "no") as server, ThreadPoolExecutor() as threads:
        connection = RedisConnection(
            StoreAddress.parse(f"{server.url}/run"), on_away=lambda away: (is_away if away else is_back).set()
        )
        with refusing(server):
            with pytest.raises(StoreError, match=says):
                connection.call(lambda client: client.execute_command("SET", "a", "b"), patience=0.0)
            script = threads.submit(connection.call, lambda client: client.register_script(WRITE)(keys=["c"]))
            assert is_away.wait(PATIENCE) and not script.done()
        assert script.result(PATIENCE) == b"written" and is_back.wait(PATIENCE)
        assert says in caplog.text and "No request is sent meanwhile" in caplog.text
        connection.close()


def test_a_blocking_call_that_a_failover_ends_is_repeated(tmp_path: Path) -> None:
    blocking = ("XREAD", "BLOCK", 30_000, "STREAMS", "a", "$")
    with redis_server(tmp_path, "--appendonly", "no") as server, ThreadPoolExecutor() as threads:
        address = StoreAddress.parse(f"{server.url}/run")
        connection = RedisConnection(address)
        other: Any = connect(address)
        waiting = threads.submit(connection.call, lambda client: client.execute_command(*blocking))
        ended = 0
        while ended < 2:  # as a server does that becomes a replica
            blocked = [each["id"] for each in other.client_list() if each["cmd"] == "xread" and each["flags"] == "b"]
            ended += sum(other.client_unblock(int(each), error=True) for each in blocked)
        while not waiting.done():
            other.execute_command("XADD", "a", "*", "b", "c")
        assert waiting.result(PATIENCE)
        connection.close()
        other.close()
