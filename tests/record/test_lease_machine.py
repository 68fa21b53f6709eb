"""Leases in any order: three workers take, renew, record, finish, hand back and lose rows of a run in Redis."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import ClassVar

import pytest
from batch_agent.record.shared import LeasedRow, RowChange
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
from redis_servers import needs_redis, redis_server
from run_store_contract import delivered, facts, new_row, step
from test_redis_store import let_time_pass, open_run

from batch_agent.record.address import StoreAddress
from batch_agent.record.redis.store import RedisRunStore

NAMES = (f"machine-{number}" for number in count())
WORKERS = st.integers(0, 2)


class Leases(RuleBasedStateMachine):
    """``held`` is what each worker believes to hold. A worker is told of a loss only when it renews or commits."""

    server: ClassVar[StoreAddress]

    @initialize()
    def begin(self) -> None:
        self.address = self.server.at(next(NAMES))
        self.store: RedisRunStore = open_run(self.address)
        self.sitting = self.store.open_feed(facts(), resume=False, keep_results_only=False).sitting  # type: ignore[arg-type]
        self.workers = [self.store.join({}) for _ in range(3)]
        self.numbers = [count(1) for _ in range(3)]
        self.held: list[list[LeasedRow]] = [[], [], []]
        self.fed = 0
        self.tokens: dict[str, int] = {}  # the latest of each row
        self.recorded: dict[str, int] = {}  # steps of each row
        self.ended: set[str] = set()

    @rule(rows=st.integers(1, 4), worker=WORKERS, taken=st.integers(1, 4))
    def feed(self, rows: int, worker: int, taken: int) -> None:
        self.store.feed(self.sitting, [new_row(self.fed + place) for place in range(rows)], True)
        self.fed += rows
        self.take(worker, taken)

    @rule(worker=WORKERS, rows=st.integers(1, 4))
    def take(self, worker: int, rows: int) -> None:
        for row in self.store.take(self.workers[worker], rows, 0):
            name = row.lease.row
            assert name not in self.ended, "a row that has its result was leased again"
            assert row.lease.token > self.tokens.get(name, 0), "two leases of a row have one token"
            assert len(row.steps) == self.recorded.get(name, 0), "what was recorded did not travel with the row"
            self.tokens[name] = row.lease.token
            self.held[worker].append(row)

    @precondition(lambda self: any(self.held))
    @rule()
    def time_passes(self) -> None:
        let_time_pass(self.address)

    @precondition(lambda self: any(self.held))
    @rule(by=WORKERS, then=WORKERS, ends=st.booleans())
    def take_over(self, by: int, then: int, ends: bool) -> None:
        """Leases end, a worker takes the rows, and one that may have had them goes on as if nothing had happened."""
        let_time_pass(self.address)
        self.take(by, 4)
        self.commit(then, ends, False, "")

    @precondition(lambda self: any(self.held))
    @rule(worker=WORKERS)
    def renew(self, worker: int) -> None:
        lost, _ = self.store.renew(self.workers[worker], [row.lease for row in self.held[worker]])
        for row in self.held[worker]:
            if self.tokens[row.lease.row] == row.lease.token:
                assert row.lease.place not in lost or self._is_held_twice(worker, row)
        self._forget(worker, lost)

    @precondition(lambda self: any(self.held))
    @rule(worker=WORKERS, ends=st.booleans(), repeated=st.booleans(), error=st.sampled_from(["", "Invalid"]))
    def commit(self, worker: int, ends: bool, repeated: bool, error: str) -> None:
        rows = self.held[worker][:2]
        changes = [
            RowChange(row.lease, (step("turn"),), b"done" if ends else None, error if ends else "") for row in rows
        ]
        number = next(self.numbers[worker])
        lost = self.store.commit(self.workers[worker], number, changes)
        if repeated:
            assert self.store.commit(self.workers[worker], number, changes) == lost
        for row in rows:
            if self.tokens[row.lease.row] == row.lease.token:
                assert row.lease.place not in lost or self._is_held_twice(worker, row), "a lease that holds was refused"
                self.recorded[row.lease.row] = self.recorded.get(row.lease.row, 0) + 1
                if ends:
                    self.ended.add(row.lease.row)
            else:
                assert row.lease.place in lost, "an old lease could record"
        self.held[worker] = [row for row in self.held[worker] if not (ends and row in rows)]
        self._forget(worker, lost)

    @precondition(lambda self: any(self.held))
    @rule(worker=WORKERS)
    def hand_back(self, worker: int) -> None:
        self.store.hand_back(self.workers[worker], [row.lease for row in self.held[worker]])
        self.held[worker] = []

    @precondition(lambda self: any(self.held))
    @rule(worker=WORKERS)
    def die(self, worker: int) -> None:
        """Its leases end with time; a new worker comes."""
        self.held[worker] = []
        self.workers[worker], self.numbers[worker] = self.store.join({}), count(1)

    @precondition(lambda self: any(self.held))
    @rule()
    def another_feeder(self) -> None:
        let_time_pass(self.address)
        self.store.close()
        self.store = open_run(self.address)
        self.sitting = self.store.open_feed(facts(), resume=True, keep_results_only=False).sitting  # type: ignore[arg-type]
        answers = self.store.feed(self.sitting, [new_row(place) for place in range(self.fed)], False)
        assert sum(answer is not None for answer in answers) == len(self.ended)

    @invariant()
    def nothing_is_lost_or_done_twice(self) -> None:
        if not hasattr(self, "store"):
            return
        counts = self.store.standing().counts
        assert counts.unstarted + counts.leased + len(self.ended) == self.fed
        rows = [each.row for each in self.store.results(self.sitting, "0-0", 10_000, 0)]
        assert len(rows) == len(set(rows)) == len(self.ended)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        let_time_pass(self.address)
        self.take(0, 10_000)
        self.held[0] = [
            row
            for row in self.held[0]
            if self.tokens[row.lease.row] == row.lease.token and row.lease.row not in self.ended
        ]
        while self.held[0]:
            self.commit(0, True, False, "")
        assert len(self.ended) == self.fed
        assert len(delivered(self.store, self.sitting)) <= self.fed
        self.store.close()

    def _forget(self, worker: int, lost: set[str]) -> None:
        self.held[worker] = [row for row in self.held[worker] if row.lease.place not in lost]

    def _is_held_twice(self, worker: int, row: LeasedRow) -> bool:
        """The worker took its own row again: the older of its two leases is lost, and both have one place."""
        return sum(other.lease.place == row.lease.place for other in self.held[worker]) > 1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreAddress]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield StoreAddress("redis", "127.0.0.1", server.port)


@needs_redis
def test_in_any_order_of_events_no_row_is_done_twice_and_none_is_lost(server: StoreAddress) -> None:
    Leases.server = server
    run_state_machine_as_test(
        Leases,
        settings=settings(
            max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
