"""The contract of a record, for every store of this package."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
from tests.record.redis_servers import needs_redis, redis_cluster, redis_server

from batch_agent.errors import StoreError
from batch_agent.job import AgentResult, BaseResult
from batch_agent.record.address import StoreAddress
from batch_agent.record.directory import DirectoryStore
from batch_agent.record.memory import MemoryStore
from batch_agent.record.private import socket_folder
from batch_agent.record.redis.connection import connect
from batch_agent.record.redis.store import RedisRunStore
from batch_agent.record.row_json import decode_result, encode_result
from batch_agent.record.rundir import JOURNAL
from batch_agent.record.store import Commit, Lease, Resuming, RowChange, RunStore, WorkStore
from batch_agent.record.store_server import Answer, Call, Connections, ServedStore, StoreDesk, StoreServer, open_served
from batch_agent.testing.run_store_contract import RunStoreContract
from batch_agent.testing.store_place import (
    FRESH,
    LEASE_SECONDS,
    StorePlace,
    begin,
    bodies,
    copied,
    facts,
    new_row,
    turn,
)

NAMES = (f"run-{number}" for number in count())


class Clock:
    """The time of this machine, and what was added to it."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class MemoryPlace(StorePlace):
    keeps = "nothing"

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()

    def open(self) -> RunStore:
        return self.opened(MemoryStore(self.clock))

    def result(self, text: str, index: int) -> object:
        result = cast("AgentResult[object]", BaseResult(index, str(index), "the input", True, text))
        return encode_result(result, None, worker=1, messages=False)

    def read_result(self, result: object) -> object:
        return decode_result(cast(bytes, result), 0, None, resumed=False)[0].output

    def reopen(self, killed: RunStore) -> RunStore:
        raise NotImplementedError

    def expire(self) -> None:
        self.clock.ahead += 2 * LEASE_SECONDS

    def wait_half(self) -> bool:
        self.clock.ahead += LEASE_SECONDS / 2
        return True


class DirectoryPlace(MemoryPlace):
    keeps = "steps"
    ledger = True

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.file, self.log = folder / "run" / JOURNAL, folder / "run" / f"{JOURNAL}-wal"

    def open(self) -> DirectoryStore:
        return self.opened(DirectoryStore(self.folder / "run", clock=self.clock))

    def reopen(self, killed: RunStore) -> RunStore:
        copy = copied(cast(DirectoryStore, killed).path, self.folder / next(NAMES))
        return self.opened(DirectoryStore(copy, clock=self.clock))

    def unwritable(self) -> RunStore:
        (self.folder / "file").touch()
        return self.opened(DirectoryStore(self.folder / "file" / "run"))


class Served(StorePlace):
    """Workers reach the store through a real socket."""

    def __init__(self) -> None:
        super().__init__()
        self.servers: list[StoreServer] = []
        self.workers: list[ServedStore] = []

    def worker(self, store: RunStore) -> WorkStore:
        server = StoreServer(StoreDesk(cast(MemoryStore, store)))
        self.servers.append(server)
        self.workers.append(open_served(server.path))
        return self.workers[-1]

    def value(self, text: str) -> object:
        return text

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for server in self.servers:
            server.close()
        super().close()


class ServedMemoryPlace(Served, MemoryPlace): ...


class ServedDirectoryPlace(Served, DirectoryPlace):
    def __init__(self, folder: Path) -> None:
        DirectoryPlace.__init__(self, folder)
        self.servers, self.workers = [], []


class RedisPlace(StorePlace):
    shared = True

    def __init__(self, address: StoreAddress) -> None:
        super().__init__()
        self.address = address

    def open(self) -> RedisRunStore:
        return self.opened(open_run(self.address))

    def reopen(self, killed: RunStore) -> RunStore:
        self.expire()
        return self.open()

    def expire(self) -> None:
        let_time_pass(self.address, 1000 * LEASE_SECONDS)
        with closing(connect(self.address)) as client:
            client.execute_command("DEL", f"{self.address.prefix}feeder")

    def wait_half(self) -> bool:
        let_time_pass(self.address, LEASE_SECONDS / 2)
        return True

    def steps_kept(self, store: RunStore, lease: Lease) -> int:
        key = cast(RedisRunStore, store).key(f"steps:{lease.name}")
        return int(cast(RedisRunStore, store).connection.call(lambda client: client.execute_command("LLEN", key)))


def open_run(address: StoreAddress) -> RedisRunStore:
    store = RedisRunStore.at(address)
    store.polite = False
    return store


EXPIRE = """
for _, held in ipairs(redis.call('XPENDING', KEYS[1], 'workers', '-', '+', 1000)) do
  redis.call('XCLAIM', KEYS[1], 'workers', held[2], 0, held[1], 'IDLE', ARGV[1], 'RETRYCOUNT', held[4], 'JUSTID')
end
"""


def let_time_pass(address: StoreAddress, seconds: float) -> None:
    """Let the leases of rows be that old."""
    with closing(connect(address)) as client:
        client.register_script(EXPIRE)(keys=[f"{address.prefix}queue"], args=[int(1000 * seconds)])


class TestMemoryStore(RunStoreContract):
    @pytest.fixture
    def place(self) -> Iterator[StorePlace]:
        with closing(MemoryPlace()) as place:
            yield place


class TestDirectoryStore(RunStoreContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[StorePlace]:
        with closing(DirectoryPlace(tmp_path)) as place:
            yield place


class TestServedMemoryStore(RunStoreContract):
    @pytest.fixture
    def place(self) -> Iterator[StorePlace]:
        with closing(ServedMemoryPlace()) as place:
            yield place


class TestServedDirectoryStore(RunStoreContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[StorePlace]:
        with closing(ServedDirectoryPlace(tmp_path)) as place:
            yield place


@needs_redis
class TestRedis(RunStoreContract):
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreAddress]:
        with redis_server(tmp_path_factory.mktemp("redis")) as server:
            yield StoreAddress("redis", "127.0.0.1", server.port)

    @pytest.fixture
    def place(self, server: StoreAddress) -> Iterator[StorePlace]:
        with closing(RedisPlace(server.at(next(NAMES)))) as place:
            yield place


@needs_redis
class TestRedisCluster(TestRedis):
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreAddress]:
        with redis_cluster(tmp_path_factory.mktemp("cluster")) as address:
            yield address


class SlowStore(MemoryStore):
    """Its files are written when the test lets it."""

    writes = True

    def __init__(self) -> None:
        super().__init__()
        self.writing, self.may_write = threading.Event(), threading.Event()

    def _record(self, *given: Any) -> Any:
        self.writing.set()
        assert self.may_write.wait(10)
        return super()._record(*given)


def test_a_commit_that_is_repeated_while_the_first_is_being_written_is_applied_once() -> None:
    store, place = SlowStore(), MemoryPlace()
    now = begin(place, store, new_row(place, 0))
    (row,) = now.take()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(store.commit, now.worker, 1, Commit([now.ended(row)]))
        assert store.writing.wait(10)
        again = threads.submit(store.commit, now.worker, 1, Commit([now.ended(row)]))
        store.may_write.set()
        assert first.result() == again.result() == set()
    assert len(now.delivered()) == 1


@pytest.mark.parametrize("kept", ["memory", "directory"])
def test_a_row_is_handed_on_with_the_steps_from_before_the_first_other_worker_came(kept: str, tmp_path: Path) -> None:
    with closing(MemoryPlace() if kept == "memory" else DirectoryPlace(tmp_path)) as place:
        row, store = new_row(place, 0), place.open()
        for session, how in enumerate((FRESH,) if kept == "memory" else (FRESH, Resuming(resume=True))):
            store = place.reopen(store) if session else store
            store.open(how)
            store.feed(store.open_feed(facts(), how).number, [row])
            own = store.join({"feeder": True})
            (held,) = store.take(own, 1, 0)
            one, two = held.steps[0].agent if held.steps else 1, 7 + session  # the first goes on with its own record
            steps = [turn(row, f"{session} {number}", agent) for number, agent in enumerate((one, two, one, two))]
            store.commit(own, 1, Commit([RowChange(held, tuple(steps[:2]))]))
            other = store.join({})
            store.commit(own, 2, Commit([RowChange(held, tuple(steps[2:]))]))
            store.hand_back(own, [held])
            (taken,) = store.take(other, 1, 0)
            for agent in (one, two):
                found = [step for step in taken.steps if step.agent == agent]
                assert bodies(found)[-2:] == bodies([step for step in steps if step.agent == agent])
            assert len(taken.steps) == len(held.steps) + len(steps)


def test_no_row_is_taken_from_a_run_that_ends() -> None:
    """Its record is closed as soon as no row is leased, and an answer that came later would be lost."""
    place = MemoryPlace()
    now = begin(place, place.open(), new_row(place, 0), new_row(place, 1))
    (row,) = now.work.take(now.worker, 1, 0.0)
    now.store.set_phase(now.number, "draining")
    assert now.work.take(now.worker, 1, 0.0) == []
    assert now.work.commit(now.worker, 1, Commit([now.ended(row)])) == set()


def test_a_worker_never_reaches_the_run_that_listens_at_the_path_of_its_own(tmp_path: Path) -> None:
    """In a resumed run its number belongs to another worker, whose rows it would hand back."""
    place, ended = MemoryPlace(), threading.Event()
    before, after = MemoryStore(), MemoryStore()
    first = StoreServer(StoreDesk(before), tmp_path)
    worker = open_served(first.path)
    worker.listen(ended.set)
    number = begin(place, before).worker
    assert worker.standing().phase == "running"
    first.close()
    resumed = begin(place, after, new_row(place, 0))
    assert resumed.worker == number
    with closing(StoreServer(StoreDesk(after), tmp_path)) as second:
        assert second.path == first.path
        (row,) = resumed.take()
        for call in (lambda: worker.leave(number), lambda: worker.renew(number, [row])):
            with pytest.raises(StoreError, match="has ended"):
                call()
        assert ended.wait(10)
        assert after.renew(number, [row])[0] == set()
    worker.close()


def test_a_connection_that_is_in_use_when_a_worker_closes_is_closed_after_its_answer(tmp_path: Path) -> None:
    asked, go, opened = threading.Event(), threading.Event(), list[socket.socket]()

    class SlowDesk(StoreDesk):
        def answer(self, call: Call) -> Answer:
            asked.set()
            assert go.wait(10)
            return super().answer(call)

    class Counted(Connections):
        def _connect(self) -> socket.socket:
            opened.append(super()._connect())
            return opened[-1]

    with closing(StoreServer(SlowDesk(MemoryStore()), tmp_path)) as server, ThreadPoolExecutor(1) as threads:
        connections = Counted(server.path)
        calling = threads.submit(connections.exchange, ("", "standing", ()))
        assert asked.wait(10)
        connections.close()
        go.set()
        calling.result(10)
    assert [each.fileno() for each in opened[1:]] == [-1]  # the first is closed by its own thread


def test_directories_that_killed_processes_left_for_their_sockets_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as extent:
        temporary = extent.enter_context(tempfile.TemporaryDirectory())  # the path of a socket is short
        monkeypatch.setattr("tempfile.tempdir", temporary)
        listening, killed, young = (extent.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3))
        folders = [socket_folder() for _ in range(3)]
        for each, folder in zip((listening, killed, young), folders, strict=True):
            each.bind(str(folder / "control"))
        listening.listen()
        for folder in folders[:2]:
            os.utime(folder / "control", (0, 0))
        new = socket_folder()
        assert sorted(Path(temporary).iterdir()) == sorted([folders[0], folders[2], new])
