"""Redis servers of the tests: started on a free port with a directory of their own, and stopped."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from batch_agent.record.address import StoreAddress

SERVER = shutil.which("redis-server")
try:
    import redis
except ImportError:  # the extra is not installed
    redis = None  # type: ignore[assignment]
needs_redis = pytest.mark.skipif(SERVER is None or redis is None, reason="needs redis-server and the package redis")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True)
class RedisServer:
    directory: Path
    port: int
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def launch(self) -> None:
        assert SERVER is not None
        command = [SERVER, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory), "--save", ""]
        log = ["--logfile", str(self.directory / "redis.log"), "--appendonly", "yes"]
        self.process = subprocess.Popen([*command, *log, *self.options])

    def start(self) -> None:
        self.launch()
        deadline = time.monotonic() + 30
        while True:
            with suppress(redis.RedisError), redis.Redis(port=self.port) as client:
                client.ping()
                return
            assert self.process is not None and self.process.poll() is None, (self.directory / "redis.log").read_text()
            assert time.monotonic() < deadline, "Redis did not start"
            time.sleep(0.02)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextmanager
def redis_server(directory: Path, *options: str) -> Iterator[RedisServer]:
    directory.mkdir(parents=True, exist_ok=True)
    server = RedisServer(directory, free_port(), options)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextmanager
def redis_cluster(directory: Path) -> Iterator[StoreAddress]:
    """Three masters without replicas. The address names no run."""
    with ExitStack() as servers:
        nodes = []
        for number in range(3):
            while (port := free_port()) > 55000:  # the bus is 10,000 above
                pass
            folder = directory / str(number)
            folder.mkdir(parents=True)
            node = RedisServer(folder, port, ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000"))
            servers.callback(node.kill)
            node.start()
            nodes.append(node)
        hosts = [f"127.0.0.1:{node.port}" for node in nodes]
        subprocess.run(
            ["redis-cli", "--cluster", "create", *hosts, "--cluster-replicas", "0", "--cluster-yes"],
            check=True,
            capture_output=True,
        )
        deadline = time.monotonic() + 30
        for node in nodes:
            with redis.Redis(port=node.port) as client:
                while client.cluster("info")["cluster_state"] != "ok":
                    assert time.monotonic() < deadline, "the cluster did not come up"
                    time.sleep(0.05)
        yield StoreAddress("redis-cluster", "127.0.0.1", nodes[0].port)
