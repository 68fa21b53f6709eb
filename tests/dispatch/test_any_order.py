"""Servers that fail in any order, and rows that break them: who is failed, who is asked, and that everything ends.

A Hypothesis state machine drives dispatchers on a virtual clock. Its rules add rows, change what a server does, and let
time pass. At the end one server or all become healthy, and every row must end.
"""

from __future__ import annotations

import asyncio
from math import inf

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.dispatch.world import MODES, Kind, Mode, Row, SimulatedServer, World
from tests.examples import examples

from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.policy import Policy
from batch_agent.errors import BackendError, Timeout
from batch_agent.messages import Reply
from batch_agent.scheduler.core import Ticket
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.ordering import AgentForecast
from batch_agent.scheduler.server_state import Terms
from batch_agent.testing import VirtualClockLoop

TIMEOUT = 30.0
SHORTEST_OUTAGE = 3.0  # a shorter one may be seen by one row alone, and is charged to it
SHORTEST_PAUSE = 0.34  # between two trials


class Asked(Row):
    """A row that checks what it may be sent to."""

    def __init__(self, machine: Dispatching, dispatcher: Dispatcher, kind: Kind) -> None:
        super().__init__(machine.world, kind)
        self.machine, self.dispatcher = machine, dispatcher
        self.blamed = 0  # times that a server changed when it was there
        self.progress = AgentForecast()
        self.ticket: Ticket = dispatcher.start_agent(self.progress)

    async def send(self, endpoint: str) -> Reply:
        self.machine.check_sent(self, endpoint)
        server, sent = self.machine.world.simulated[endpoint], self.machine.loop.time()
        try:
            return await super().send(endpoint)
        except BackendError:
            self.blamed += server.since > sent - N.longest_pause
            raise

    async def ask(self, policy: Policy) -> None:
        try:
            self.result = await self.dispatcher.ask(self, policy, ticket=self.ticket, observer=self)
        except BackendError as error:
            self.result = error
            self.machine.check_failed(self, error)
        except asyncio.CancelledError as error:
            self.result = error
        finally:
            self.dispatcher.end_agent(self.progress, 1)


class Dispatching(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualClockLoop()
        self.rows: list[Asked] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.wrong: list[str] = []
        self.trials: dict[str, tuple[float, float]] = {}  # of each server: the outage's beginning, the latest trial

    @initialize(
        servers=st.lists(st.booleans(), min_size=1, max_size=4),
        ceiling=st.sampled_from([1, 4, None]),
        max_retries=st.integers(0, 3),
        hedge=st.sampled_from([None, None, 1.0]),
        dispatchers=st.integers(1, 2),
        all_heal=st.booleans(),
    )
    def start(
        self,
        servers: list[bool],
        ceiling: int | None,
        max_retries: int,
        hedge: float | None,
        dispatchers: int,
        all_heal: bool,
    ) -> None:
        self.policy = Policy(max_retries, timeout=TIMEOUT, hedge=hedge)
        self.ceiling, self.all_heal = ceiling, all_heal
        self.loop.run_until_complete(self._open(servers, dispatchers))
        for _ in range(len(servers) * dispatchers):
            self.add(1, "good")
            self.wait(0.5)

    async def _open(self, servers: list[bool], dispatchers: int) -> None:
        self.world = World(SimulatedServer(f"s{n}", has_probe=has) for n, has in enumerate(servers))
        self.servers = list(self.world.simulated.values())
        terms = Terms(self.ceiling) if self.ceiling else Terms(None, 8)
        self.dispatchers = [
            Dispatcher(self.world, servers=self.world.servers, terms=terms, max_outage=inf) for _ in range(dispatchers)
        ]

    @rule(count=st.sampled_from([1, 2, 8, 30]), kind=st.sampled_from(["good", "good", "refused", "breaks", "crashes"]))
    def add(self, count: int, kind: Kind) -> None:
        self.loop.run_until_complete(self._add(count, kind))

    async def _add(self, count: int, kind: Kind) -> None:
        if kind == "breaks" and sum(row.kind == kind and row.result is None for row in self.rows) >= N.several - 1:
            return  # several rows that break everywhere are an outage, as far as anybody can tell
        for _ in range(count if kind == "good" else 1):
            row = Asked(self, self.dispatchers[len(self.rows) % len(self.dispatchers)], kind)
            self.rows.append(row)
            self.tasks.append(self.loop.create_task(row.ask(self.policy)))

    @rule(which=st.integers(0, 3), mode=st.sampled_from(MODES))
    def change(self, which: int, mode: Mode) -> None:
        self.loop.run_until_complete(self._change(self.servers[which % len(self.servers)], mode))

    async def _change(self, server: SimulatedServer, mode: Mode) -> None:
        if server.mode not in ("good", "slow"):
            await asyncio.sleep(max(0.0, server.since + SHORTEST_OUTAGE - self.loop.time()))
        server.set_mode(mode)

    @rule(seconds=st.sampled_from([0.05, 0.5, 3.0, 15.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        """Somebody no longer wants the answer."""
        self.tasks[which % len(self.tasks)].cancel()
        self.wait(0.05)

    @rule(which=st.integers(0, 3))
    def replace(self, which: int) -> None:
        """A server leaves the fleet, and another joins."""
        self.loop.run_until_complete(self._replace(which % len(self.servers)))

    async def _replace(self, which: int) -> None:
        gone, new = self.servers[which], SimulatedServer(f"s{len(self.world.simulated)}")
        self.servers[which] = self.world.simulated[new.name] = new
        for dispatcher in self.dispatchers:
            dispatcher.add(new.name, new.known)
            for endpoint in tuple(dispatcher.scheduler.endpoints):
                if endpoint.name == gone.name:
                    dispatcher.leave(endpoint)

    # What must hold

    def check_sent(self, row: Asked, name: str) -> None:
        """An endpoint that is down gets one trial at a time, with pauses; one that is up, no more than its limit."""
        ticket, now = row.ticket, self.loop.time()
        server = self.world.simulated[name].known
        health = server.health
        beside = 2 if health.is_down else 0  # the trial, and one that is waited for
        if self.ceiling is not None and server.inflight > (self.ceiling + beside) * len(self.dispatchers):
            self.wrong.append(f"{server.inflight} in flight")
        if not health.is_down or health.down_since == now:  # it goes down in this moment
            return
        if not (ticket.slot and ticket.slot.trial) and self.policy.hedge is None:
            self.wrong.append("a request that is no trial, to an endpoint that is down")
        outage, latest = self.trials.get(server.name, (-1.0, 0.0))
        if outage == health.down_since and now - latest < SHORTEST_PAUSE:
            self.wrong.append(f"two trials in {now - latest} s")
        self.trials[server.name] = health.down_since, now

    def check_failed(self, row: Asked, error: BackendError) -> None:
        """No row fails that a healthy server would answer, if the trouble shows to the probe or to several rows."""
        others = [other for other in self.rows if other.result is None and other.dispatcher is row.dispatcher]
        since = self.loop.time() - 2 * TIMEOUT
        hidden = any(server.is_hidden or server.hidden_at >= since for server in self.world.simulated.values())
        few = sum(other.kind != "refused" for other in others) < N.several
        alone = few or isinstance(error, Timeout) or not self.policy.max_retries
        if row.kind == "good" and not (hidden and alone) and not (len(row.ticket.row.crashes) >= 2 <= row.blamed):
            self.wrong.append(f"failed: {error}, asked {row.asked}, {row.ticket.row}")

    @invariant()
    def nothing_is_wrong(self) -> None:
        assert not self.wrong
        for row in self.rows:
            assert row.ticket.row.charges <= self.policy.max_retries + 1
            assert row.starts - row.ends in ((0,) if isinstance(row.result, Reply | BackendError) else (0, 1))

    def teardown(self) -> None:
        try:
            if self.rows:
                self.loop.run_until_complete(self._finish())
                self.nothing_is_wrong()
                for row in self.rows:
                    assert row.kind == "good" or not isinstance(row.result, Reply)
        finally:
            self.loop.close()

    async def _finish(self) -> None:
        for server in self.servers if self.all_heal else self.servers[:1]:
            await self._change(server, "good")
        bad = sum(row.kind != "good" and row.result is None for row in self.rows)
        _, pending = await asyncio.wait(self.tasks, timeout=2 * TIMEOUT + 100 + 60 * bad)
        waits = [(row.kind, row.asked[-1:], row.ticket.state, row.ticket.row) for row in self.rows if not row.result]
        for task in pending:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for dispatcher in self.dispatchers:
            dispatcher.close()
        await asyncio.sleep(0)  # probes end
        assert not pending, f"{len(pending)} rows wait for ever: {waits}"
        await asyncio.gather(*self.tasks)
        for dispatcher in self.dispatchers:
            assert dispatcher.scheduler.busy == dispatcher.endpoints.deciding == 0


TestDispatching = Dispatching.TestCase
TestDispatching.settings = settings(
    max_examples=examples(100), stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_row_that_breaks_beside_one_that_crashes_the_server_is_answered_without_any_retry() -> None:
    machine = Dispatching()
    machine.start(servers=[False], ceiling=1, max_retries=0, hedge=None, dispatchers=2, all_heal=False)
    machine.add(1, "crashes")
    machine.add(1, "good")
    machine.teardown()
    assert isinstance(machine.rows[-1].result, Reply)
    assert isinstance(machine.rows[-2].result, BackendError)


def test_of_two_suspects_that_break_together_neither_has_crashed_the_server_whichever_fails_first() -> None:
    machine = Dispatching()
    machine.start(servers=[True], ceiling=4, max_retries=3, hedge=None, dispatchers=1, all_heal=False)
    machine.add(1, "crashes")
    machine.add(1, "good")
    for row in machine.rows[-2:]:
        row.ticket.row.hits = N.twice
    machine.wait(0.5)
    assert [(len(row.asked), row.ticket.row.crashes) for row in machine.rows[-2:]] == [(1, [])] * 2
    machine.teardown()
    assert [isinstance(row.result, Reply) for row in machine.rows[-2:]] == [False, True]


def test_rows_that_failed_at_one_server_go_back_to_it_if_the_other_is_silent() -> None:
    machine = Dispatching()
    machine.start(servers=[False, False], ceiling=1, max_retries=0, hedge=None, dispatchers=1, all_heal=False)
    machine.change(1, "slow")
    machine.change(0, "garbage")
    machine.add(30, "good")
    machine.wait(3.0)
    machine.change(1, "stuck")
    machine.wait(15.0)
    machine.teardown()  # the first is healed
    assert all(isinstance(row.result, Reply) for row in machine.rows)
