"""A run over four Ray nodes while its processes die: every row once, every write once. ``make test-cluster``.

10,000 agents of two turns with one writing tool each. A node, a worker and the driver are killed with SIGKILL, and a
worker is stopped for longer than its lease. Redis is killed too, and started again with its append-only file.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.cluster.harness import Account, Driver, RayNodes, model_server, prepare, ray_nodes, wait_for_notes
from tests.store.redis_servers import redis_server

WANTED = "BATCH_AGENT_TEST_CLUSTER"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not os.environ.get(WANTED), reason=f"make test-cluster sets {WANTED}"),
    pytest.mark.filterwarnings("ignore"),
]

ROWS = int(os.environ.get(f"{WANTED}_ROWS", "10000"))
NODES, SLOTS, SECONDS = 4, 64, 0.05
STOPPED = 30.0  # seconds
LEASE = "15"


def begin(folder: Path, cluster: RayNodes, run: str, *words: str) -> Driver:
    where = ("--run-dir", run, "--output", str(folder / "out.jsonl"))
    rows = ("spec.yaml", "--inputs", "rows.jsonl", "--lease", LEASE)
    return Driver(folder, "run", *rows, *where, "--ray", cluster.address, "--workers", str(NODES), *words)


def stop_for_a_while(cluster: RayNodes) -> None:
    """A worker comes back after its leases have ended."""
    victim = next(iter(cluster.workers()))
    os.kill(victim, signal.SIGSTOP)
    time.sleep(STOPPED)
    os.kill(victim, signal.SIGCONT)


def check(folder: Path, again: int) -> None:
    account = Account.of(folder, folder / "out.jsonl")
    asked = f"{account.asked_again} of {2 * ROWS} requests were asked again, {again} allowed"
    print(f"{asked}; {len(account.interrupted)} writes were interrupted")  # noqa: T201
    assert account.problems(ROWS, again) == []


def test_in_the_drivers_own_directory(tmp_path: Path) -> None:
    with model_server(tmp_path, SECONDS) as url, ray_nodes(NODES) as cluster:
        prepare(tmp_path, url, ROWS, SLOTS)
        run = str(tmp_path / "run")
        driver = begin(tmp_path, cluster, run)
        wait_for_notes(tmp_path, ROWS // 10, driver)
        cluster.kill_node()
        wait_for_notes(tmp_path, ROWS * 3 // 10, driver)
        os.kill(next(iter(cluster.workers())), signal.SIGKILL)
        wait_for_notes(tmp_path, ROWS // 2, driver)
        stop_for_a_while(cluster)
        wait_for_notes(tmp_path, ROWS * 7 // 10, driver)
        driver.kill()
        assert Driver(tmp_path, "resume", run).wait() == 0
    # A node, a worker, a worker that was stopped, and the driver with all workers.
    check(tmp_path, again=2 * (3 * SLOTS // NODES + SLOTS))


def test_in_a_redis_that_is_restarted(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path / "redis", "--appendfsync", "always") as redis,
        model_server(tmp_path, SECONDS) as url,
        ray_nodes(NODES) as cluster,
    ):
        prepare(tmp_path, url, ROWS, SLOTS)
        run = f"{redis.url}/notes"
        driver = begin(tmp_path, cluster, run)
        wait_for_notes(tmp_path, ROWS // 10, driver)
        redis.kill()
        time.sleep(5)
        redis.start()
        wait_for_notes(tmp_path, ROWS * 2 // 10, driver)
        cluster.kill_node()
        wait_for_notes(tmp_path, ROWS * 3 // 10, driver)
        os.kill(next(iter(cluster.workers())), signal.SIGKILL)
        wait_for_notes(tmp_path, ROWS // 2, driver)
        stop_for_a_while(cluster)
        wait_for_notes(tmp_path, ROWS * 7 // 10, driver)
        driver.kill()
        assert Driver(tmp_path, "resume", run).wait() == 0
    check(tmp_path, again=2 * (3 * SLOTS // NODES + SLOTS))
