"""The connection to Redis; ``test_run_stores`` has the contract of the store."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from redis_servers import needs_redis, redis_server

from batch_agent.record.address import StoreAddress
from batch_agent.record.redis.connection import RedisConnection, connect


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
