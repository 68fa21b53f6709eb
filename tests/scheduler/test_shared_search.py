"""A searched number of slots that several workers share, on a model of a server."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from itertools import count
from random import Random

import pytest

from batch_agent.scheduler.capacity import FLEET_START, MOST, START
from batch_agent.scheduler.server import Endpoint
from batch_agent.scheduler.server_state import ServerState, Terms
from batch_agent.share.table import SLOTS, Claim, Table

POT, MEMBER = f"{SLOTS}gpu ", 15.0


class Worker:
    """A worker that always has more requests to send."""

    def __init__(self, name: str, by_clock: bool) -> None:
        self.name = name
        self.endpoint = Endpoint(
            ServerState("gpu"), Terms(MOST, START if by_clock else FLEET_START, by_clock=by_clock), "gpu"
        )
        self.endpoint.allotted = 0

    def beat(self, table: Table, now: float) -> float:
        """Report, apply the grant, and return the time of the next beat."""
        capacity = self.endpoint.capacity
        assert capacity.search is not None
        held = max(self.endpoint.inflight, self.endpoint.allotted or 0)
        limit, progress = capacity.search.limit, capacity.search.progress
        grant = table.beat(self.name, now, MEMBER, {POT: Claim(limit, held, limit, search=progress)}, {}).grants[POT]
        self.endpoint.allotted = min(grant.held, grant.fair)
        if grant.leads:
            capacity.lead(grant.held, grant.others_open, grant.even)
        elif grant.search is not None:
            capacity.follow(grant.search)
        return now + (0.25 if grant.search is not None and grant.search[1] else 1.0)


class Simulation:
    """A server that answers ``sequences`` requests at once, each in about a second, and has a queue for the others."""

    def __init__(self, workers: Sequence[Worker], sequences: int) -> None:
        self.sequences, self.workers = sequences, list(workers)
        self.table, self.now = Table(), 0.0
        self._order, self._random = count(), Random(7)
        self._queue: deque[tuple[Worker, float]] = deque()
        self._events: list[tuple[float, int, Worker, float | None]] = []  # time; the sending time of an answer
        self._running = 0
        for number, worker in enumerate(workers):
            self._push(0.01 * number, worker)

    def _push(self, at: float, worker: Worker, sent_at: float | None = None) -> None:
        heapq.heappush(self._events, (at, next(self._order), worker, sent_at))

    def run(self, seconds: float) -> float:
        """Play, and return the mean number of requests in flight in the last tenth."""
        end, area, since = self.now + seconds, 0.0, self.now + 0.9 * seconds
        while self._events[0][0] < end:
            at, _, worker, sent_at = heapq.heappop(self._events)
            area += self.inflight * max(0.0, at - max(self.now, since))
            self.now = at
            if worker not in self.workers:
                continue
            if sent_at is None:
                self._push(worker.beat(self.table, at), worker)
            else:
                self._running -= 1
                worker.endpoint.give_back()
                worker.endpoint.capacity.succeeded(sent_at, at - sent_at, 10, at)
            self._send()
        area += self.inflight * (end - max(self.now, since))
        self.now = end
        return area / (0.1 * seconds)

    def _send(self) -> None:
        for worker in self.workers:
            worker.endpoint.capacity.ramp(worker.endpoint.server.inflight, self.now)
            while worker.endpoint.has_slot(self.now):
                worker.endpoint.take(self.now)
                self._queue.append((worker, self.now))
        while self._queue and self._running < self.sequences:
            worker, sent_at = self._queue.popleft()
            self._running += 1
            self._push(self.now + self._random.uniform(0.7, 1.3), worker, sent_at)

    @property
    def inflight(self) -> int:
        return sum(worker.endpoint.server.inflight for worker in self.workers)

    @property
    def limits(self) -> list[int | None]:
        return [worker.endpoint.capacity.limit for worker in self.workers]


def simulation(count: int, sequences: int, by_clock: bool = True) -> Simulation:
    return Simulation([Worker(str(number), by_clock) for number in range(1, count + 1)], sequences)


@pytest.mark.parametrize("sequences", [100, 300])
def test_several_workers_together_find_the_number_that_one_would_find(sequences: int) -> None:
    alone = simulation(1, sequences).run(40.0)
    for workers in (2, 4):
        together = simulation(workers, sequences)
        # One alone may take another step at its first answer. It brings nothing at a server of this size.
        assert 0.9 * min(alone, 1.28 * sequences) <= together.run(40.0) <= 1.1 * alone
        assert len(set(together.limits)) == 1


def test_several_workers_do_not_overload_the_servers_of_a_fleet() -> None:
    together = simulation(4, 40, by_clock=False)
    assert 0.6 * 40 <= together.run(40.0) <= 2 * 40


def test_the_number_is_kept_when_the_worker_that_searched_is_gone() -> None:
    simulated = simulation(4, 300)
    before = simulated.run(30.0)
    del simulated.workers[0]  # its requests in flight are lost with it
    simulated._running = sum(event[2] in simulated.workers for event in simulated._events if event[3] is not None)
    after = simulated.run(40.0)

    assert 0.7 * before <= after <= 1.1 * before
    assert simulated.workers[0].endpoint.capacity.leads
    assert not simulated.workers[1].endpoint.capacity.leads


def test_workers_that_join_share_the_number() -> None:
    simulated = simulation(1, 100)
    alone = simulated.run(30.0)
    for number in range(2, 5):
        simulated.workers.append(Worker(str(number), by_clock=True))
        simulated._push(simulated.now, simulated.workers[-1])
    assert 0.7 * alone <= simulated.run(20.0) <= 1.3 * alone
    inflight = [worker.endpoint.server.inflight for worker in simulated.workers]
    assert max(inflight) <= 1.3 * min(inflight)
