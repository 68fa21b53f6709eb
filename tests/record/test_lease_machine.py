"""Leases in any order: three workers take, renew, record, finish, hand back and lose rows, in every store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.examples import examples
from tests.record.redis_servers import needs_redis, redis_server
from tests.record.test_broken_stores import ToyPlace
from tests.record.test_run_stores import NAMES, DirectoryPlace, MemoryPlace, RedisPlace, ServedDirectoryPlace
from tests.record.toy_store import ToyStore

from batch_agent.record.address import StoreAddress
from batch_agent.record.store import Commit, Lease, RowChange
from batch_agent.testing.store_place import FRESH, StorePlace, facts, new_row, turn

WORKERS = st.integers(0, 2)


class Leases(RuleBasedStateMachine):
    """``held`` is what each worker believes to hold. A worker is told of a loss only when it renews or commits."""

    make_place: ClassVar[Callable[[], StorePlace]]

    @initialize()
    def begin(self) -> None:
        self.place = type(self).make_place()
        self.feeder = self.place.open()
        self.feeder.open(FRESH)
        opened = self.feeder.open_feed(facts(), FRESH)
        self.session, self.position = opened.number, opened.position
        self.store = self.place.worker(self.feeder)
        self.workers = [self.store.join({}) for _ in range(3)]
        self.numbers = [count(1) for _ in range(3)]
        self.held: list[list[Lease]] = [[], [], []]
        self.fed = 0
        self.tokens: dict[int, int] = {}  # the latest of each row
        self.recorded: dict[int, int] = {}  # steps of each row
        self.ended: set[int] = set()
        self.read: list[int] = []  # rows whose results were read
        self.expired: set[tuple[int, int]] = (
            set()
        )  # rows and tokens of leases whose time has passed: a store may refuse them

    @rule(rows=st.integers(1, 4), worker=WORKERS, taken=st.integers(1, 4))
    def feed(self, rows: int, worker: int, taken: int) -> None:
        self.feeder.feed(self.session, [new_row(self.place, self.fed + number) for number in range(rows)])
        self.fed += rows
        self.take(worker, taken)

    @rule(worker=WORKERS, rows=st.integers(1, 4))
    def take(self, worker: int, rows: int) -> None:
        for row in self.store.take(self.workers[worker], rows, 0):
            name = row.row.index
            assert name not in self.ended, "a row that has its result was leased again"
            assert row.token > self.tokens.get(name, 0), "two leases of a row have one token"
            assert len(row.steps) == self.recorded.get(name, 0), "what was recorded did not travel with the row"
            self.tokens[name] = row.token
            self._forget(worker, {row.place})  # its own row again
            self.held[worker].append(row)

    @precondition(lambda self: any(self.held))
    @rule()
    def time_passes(self) -> None:
        self._expire()

    @precondition(lambda self: any(self.held))
    @rule(by=WORKERS, then=WORKERS, ends=st.booleans())
    def take_over(self, by: int, then: int, ends: bool) -> None:
        """Leases end, a worker takes the rows, and one that may have had them goes on as if nothing had happened."""
        self._expire()
        self.take(by, 4)
        self.commit(then, ends, False, "")

    @precondition(lambda self: any(self.held))
    @rule(worker=WORKERS)
    def renew(self, worker: int) -> None:
        lost, _ = self.store.renew(self.workers[worker], self.held[worker])
        for row in self.held[worker]:
            if self.tokens[row.row.index] == row.token:
                assert row.place not in lost or self._may_be_lost(row)
                if row.place not in lost:
                    self.expired.discard((row.row.index, row.token))
        self._forget(worker, lost)

    @precondition(lambda self: any(self.held))
    @rule(worker=WORKERS, ends=st.booleans(), repeated=st.booleans(), error=st.sampled_from(["", "Invalid"]))
    def commit(self, worker: int, ends: bool, repeated: bool, error: str) -> None:
        rows = self.held[worker][:2]
        changes = [
            RowChange(
                row,
                (turn(new_row(self.place, row.row.index), "turn"),),
                self.place.result("done", row.row.index) if ends else None,
                error if ends else "",
            )
            for row in rows
        ]
        number = next(self.numbers[worker])
        lost = self.store.commit(self.workers[worker], number, Commit(changes))
        if repeated:
            assert self.store.commit(self.workers[worker], number, Commit(changes)) == lost
        for row in rows:
            if self.tokens[row.row.index] == row.token:
                if row.place in lost:
                    assert self._may_be_lost(row), "a lease that holds was refused"
                    continue
                self.recorded[row.row.index] = self.recorded.get(row.row.index, 0) + 1
                if ends:
                    self.ended.add(row.row.index)
            else:
                assert row.place in lost, "an old lease could record"
        self.held[worker] = [row for row in self.held[worker] if not (ends and row in rows)]
        self._forget(worker, lost)

    @precondition(lambda self: any(self.held))
    @rule(worker=WORKERS)
    def hand_back(self, worker: int) -> None:
        self.store.hand_back(self.workers[worker], self.held[worker])
        self.held[worker] = []

    @precondition(lambda self: any(self.held))
    @rule(worker=WORKERS)
    def die(self, worker: int) -> None:
        """Its leases end with time; a new worker comes."""
        self.held[worker] = []
        self.workers[worker], self.numbers[worker] = self.store.join({}), count(1)

    @invariant()
    def nothing_is_lost_or_done_twice(self) -> None:
        if not hasattr(self, "store"):
            return
        counts = self.feeder.standing().counts
        assert counts.unstarted + counts.leased + len(self.ended) == self.fed
        for result in self.feeder.results(self.session, self.position, 10_000, 0):
            self.read.append(result.index)
            self.position = result.position
        assert len(self.read) == len(set(self.read)) == len(self.ended)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        self._expire()
        taken = -1
        while taken < len(self.held[0]):  # a call may return fewer rows than it asks for
            taken = len(self.held[0])
            self.take(0, 10_000)
        self.held[0] = [
            row for row in self.held[0] if self.tokens[row.row.index] == row.token and row.row.index not in self.ended
        ]
        while self.held[0]:
            self.commit(0, True, False, "")
        assert len(self.ended) == self.fed
        self.nothing_is_lost_or_done_twice()
        self.place.close()

    def _expire(self) -> None:
        self.place.expire()
        self.expired |= {(row.row.index, row.token) for held in self.held for row in held}

    def _forget(self, worker: int, lost: set[str]) -> None:
        self.held[worker] = [row for row in self.held[worker] if row.place not in lost]

    def _may_be_lost(self, row: Lease) -> bool:
        return (row.row.index, row.token) in self.expired


def play(make_place: Callable[[], StorePlace], most: int) -> None:
    Leases.make_place = staticmethod(make_place)  # type: ignore[method-assign]
    run_state_machine_as_test(
        Leases,
        settings=settings(
            max_examples=examples(most), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("kind", ["memory", "directory", "served", "toy"])
def test_in_any_order_of_events_no_row_is_done_twice_and_none_is_lost(kind: str, tmp_path: Path) -> None:
    def make_place() -> StorePlace:
        folder = tmp_path / next(NAMES)
        match kind:
            case "memory":
                return MemoryPlace()
            case "directory":
                return DirectoryPlace(folder)
            case "served":
                return ServedDirectoryPlace(folder)
        return ToyPlace(folder, ToyStore)

    play(make_place, 30 if kind == "memory" else 10)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreAddress]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield StoreAddress("redis", "127.0.0.1", server.port)


@needs_redis
def test_in_any_order_of_events_no_row_of_a_run_in_redis_is_done_twice_and_none_is_lost(server: StoreAddress) -> None:
    play(lambda: RedisPlace(server.at(next(NAMES))), 15)
