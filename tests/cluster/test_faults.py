"""A run over four Ray nodes while its processes die: every row once, every write once. ``make test-cluster``.

10,000 agents of two turns with one writing tool each. A node, a worker and the driver are killed with SIGKILL, and a
worker is stopped for longer than its lease. Redis is killed too, and started again with its append-only file.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from threading import Timer

import pytest
from tests.cluster.harness import Account, Driver, RayNodes, model_server, prepare, ray_nodes, wait_for_notes
from tests.record.redis_servers import redis_server

WANTED = "BATCH_AGENT_TEST_CLUSTER"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not os.environ.get(WANTED), reason=f"make test-cluster sets {WANTED}"),
    pytest.mark.filterwarnings("ignore"),
]

ROWS = int(os.environ.get(f"{WANTED}_ROWS", "10000"))
NODES, SLOTS, SECONDS = 4, 64, 0.2
STOPPED = 30.0  # seconds
LEASE = "15"


def begin(folder: Path, cluster: RayNodes, run: str, *words: str) -> Driver:
    where = ("--run-dir", run, "--output", str(folder / "out.jsonl"))
    rows = ("spec.yaml", "--inputs", "rows.jsonl", "--lease", LEASE)
    return Driver(folder, "run", *rows, *where, "--ray", cluster.address, "--workers", str(NODES), *words)


def stop_a_worker(cluster: RayNodes) -> Timer:
    """Stop a worker, and let it go on after its leases have ended."""
    victim = next(iter(cluster.workers()))
    os.kill(victim, signal.SIGSTOP)
    timer = Timer(STOPPED, os.kill, (victim, signal.SIGCONT))
    timer.start()
    return timer


def check(folder: Path) -> None:
    """Twice the slots of a node, of a worker, of one that was stopped, and of all that died with the driver."""
    again = 2 * (3 * SLOTS // NODES + SLOTS)
    account = Account.of(folder, folder / "out.jsonl")
    asked = f"{account.asked_again} of {2 * ROWS} requests were asked again, {again} allowed"
    print(f"{asked}; {len(account.interrupted)} writes were interrupted")  # noqa: T201
    assert account.problems(ROWS, again) == []


def play(folder: Path, cluster: RayNodes, driver: Driver, run: str) -> None:
    """Kill what can be killed, and resume."""
    wait_for_notes(folder, ROWS // 10, driver)
    timer = stop_a_worker(cluster)
    wait_for_notes(folder, ROWS * 2 // 10, driver)
    cluster.kill_node()
    wait_for_notes(folder, ROWS * 3 // 10, driver)
    os.kill(cluster.workers().popitem()[0], signal.SIGKILL)
    timer.join()
    wait_for_notes(folder, ROWS * 7 // 10, driver)
    driver.kill()
    assert Driver(folder, "resume", run).wait() == 0


def test_in_the_drivers_own_directory(tmp_path: Path) -> None:
    with model_server(tmp_path, SECONDS) as url, ray_nodes(NODES) as cluster:
        prepare(tmp_path, url, ROWS, SLOTS)
        run = str(tmp_path / "run")
        play(tmp_path, cluster, begin(tmp_path, cluster, run), run)
    check(tmp_path)


def test_in_a_redis_that_is_restarted(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path / "redis", "--appendfsync", "always") as redis,
        model_server(tmp_path, SECONDS) as url,
        ray_nodes(NODES) as cluster,
    ):
        prepare(tmp_path, url, ROWS, SLOTS)
        run = f"{redis.url}/notes"
        driver = begin(tmp_path, cluster, run)
        wait_for_notes(tmp_path, ROWS // 20, driver)
        redis.kill()
        time.sleep(5)
        redis.start()
        play(tmp_path, cluster, driver, run)
    check(tmp_path)
