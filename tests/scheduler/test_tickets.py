"""Tickets in all of their states: limits hold, counts are right, and no ticket is lost.

A Hypothesis state machine drives the scheduler with endpoints that go down, come back, join and leave, and with tickets
that are pinned, parked, set aside, suspected and withdrawn.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.examples import examples

from batch_agent.messages import Usage
from batch_agent.scheduler.core import Scheduler, Slot, Ticket
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.ordering import AgentForecast
from batch_agent.scheduler.server import Endpoint
from batch_agent.scheduler.server_state import ServerState, Terms

CEILING, MOST = 2, 5  # requests in flight: at one endpoint, and in all
NUMBER = st.integers(0, 99)
MODELS = (None, None, frozenset({"m"}), frozenset({"n"}))  # that endpoints say they serve


class Tickets(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.joined = 0
        self.waiting: list[Ticket] = []  # those that are set aside too
        self.held: list[Slot] = []
        self.failed: list[Slot] = []  # they back off
        self.resting: list[AgentForecast] = []

    @initialize(endpoints=st.integers(1, 3), models=st.sampled_from(MODELS))
    def start(self, endpoints: int, models: frozenset[str] | None) -> None:
        self.scheduler = Scheduler(MOST, endpoints=[self._endpoint(models) for _ in range(endpoints)])

    def _endpoint(self, models: frozenset[str] | None) -> Endpoint:
        self.joined += 1
        name = f"e{self.joined}"
        return Endpoint(ServerState(name, models=models), Terms(CEILING), name)

    def _one(self, number: int) -> Endpoint:
        return self.scheduler.endpoints[number % len(self.scheduler.endpoints)]

    # Tickets

    @rule(key=st.sampled_from(["", "k1", "k2"]), model=st.sampled_from(["", "m", "n"]), count=st.integers(1, 4))
    def ask(self, key: str, model: str, count: int) -> None:
        """Every second ticket is pinned to an endpoint."""
        for number in range(count):
            endpoint = self._one(number) if number % 2 and not self._one(number).leaving else None
            self.scheduler.start_agent()
            self.waiting.append(self.scheduler.request(AgentForecast(key=key, model=model), 0, self.now, endpoint))

    @precondition(lambda self: self.resting)
    @rule(number=NUMBER)
    def go_on(self, number: int) -> None:
        progress = self.resting.pop(number % len(self.resting))
        self.waiting.append(self.scheduler.request(progress, progress.turns + 1, self.now))

    @precondition(lambda self: self.held)
    @rule(number=NUMBER, tokens=st.sampled_from([0, 1000, 100_000]))
    def answer(self, number: int, tokens: int) -> None:
        slot = self.held.pop(number % len(self.held))
        slot.endpoint.server.learn(1.0, self.now)
        self.scheduler.answered(slot, 1.0 + number % 5, Usage(prompt_tokens=tokens), self.now)
        self._set_up(slot.endpoint)
        self.scheduler.give_back(slot)
        if slot.ticket.pinned is None:
            self.resting.append(slot.ticket.progress)

    @precondition(lambda self: self.held)
    @rule(number=NUMBER, how=st.sampled_from(["", "crash", "move", "down", "down"]), backs_off=st.booleans())
    def fail(self, number: int, how: str, backs_off: bool) -> None:
        slot = self.held.pop(number % len(self.held))
        if how == "crash":
            slot.ticket.row.hits = N.twice
        elif how == "move":
            slot.ticket.avoid |= {slot.endpoint}
        elif how == "down":
            self._set_down(slot.endpoint)
        assert self.scheduler.give_back(slot)
        assert not self.scheduler.give_back(slot)  # twice is harmless
        self.failed.append(slot)
        if not backs_off:
            self.ask_again(-1)

    @precondition(lambda self: self.failed)
    @rule(number=NUMBER)
    def ask_again(self, number: int) -> None:
        slot = self.failed.pop(number % len(self.failed))
        self.scheduler.again(slot)
        self.waiting.append(slot.ticket)

    @precondition(lambda self: self.waiting)
    @rule(number=NUMBER)
    def withdraw(self, number: int) -> None:
        ticket = self.waiting.pop(number % len(self.waiting))
        self.scheduler.withdraw(ticket)
        self.scheduler.withdraw(ticket)  # twice is harmless

    # Endpoints

    @rule(number=NUMBER, to=st.sampled_from(["up", "down", "worth a trial"]))
    def change(self, number: int, to: str) -> None:
        endpoint = self._one(number)
        if to == "up":
            self._set_up(endpoint)
        elif to == "down":
            self._set_down(endpoint)
        elif endpoint.health.state == "down":
            endpoint.health.ready = True
            self.scheduler.router.trials.append(endpoint)

    def _set_down(self, endpoint: Endpoint) -> None:
        endpoint.health.go_down(self.now)
        self.scheduler.touch(endpoint)

    def _set_up(self, endpoint: Endpoint) -> None:
        endpoint.health.recover()
        self.scheduler.touch(endpoint)
        self.scheduler.rejoin()

    @rule(models=st.sampled_from(MODELS))
    def join(self, models: frozenset[str] | None) -> None:
        self.scheduler.add(self._endpoint(models))

    @rule(number=NUMBER)
    def leave(self, number: int) -> None:
        endpoint, staying = self._one(number), [each for each in self.scheduler.endpoints if not each.leaving]
        tickets = [*self.waiting, *(slot.ticket for slot in (*self.held, *self.failed))]
        if len(staying) > 1 and not any(ticket.pinned is endpoint for ticket in tickets):
            self.scheduler.leave(endpoint)

    # Grants

    @rule(seconds=st.sampled_from([0.2, 5.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for endpoint in self.scheduler.endpoints:
            self.scheduler.touch(endpoint)

    def grant(self) -> None:
        while (slot := self.scheduler.grant(self.now)) is not None:
            assert slot.ticket.pinned in (None, slot.endpoint)
            self.waiting.remove(slot.ticket)
            self.held.append(slot)

    @invariant()
    def counts_are_right(self) -> None:
        if not self.joined:
            return
        self.grant()
        scheduler = self.scheduler
        aside = sum(ticket.state == "set aside" for ticket in self.waiting)
        assert aside == len(scheduler.aside) + len(scheduler.suspects)
        assert scheduler.waiting == len(self.waiting) - aside
        assert scheduler.inflight == len(self.held) <= MOST
        for endpoint in scheduler.endpoints:
            there = [slot for slot in self.held if slot.endpoint is endpoint]
            assert endpoint.inflight == len(there)
            assert sum(not slot.trial for slot in there) <= CEILING

    def teardown(self) -> None:
        if not self.joined:
            return
        while self.failed:
            self.ask_again(0)
        self.join(None)
        for endpoint in self.scheduler.endpoints:
            self._set_up(endpoint)
        while self.held or self.waiting:
            self.wait(1e6)
            self.counts_are_right()
            assert self.held, [ticket.state for ticket in self.waiting]
            self.scheduler.give_back(self.held.pop())


def test_a_pinned_ticket_that_was_set_aside_waits_with_the_others_when_an_endpoint_joins() -> None:
    scheduler = Scheduler()
    (only,) = scheduler.endpoints
    ticket = scheduler.request(AgentForecast(), 0, 0.0, only)
    only.health.go_down(0.0)
    slot = scheduler.grant(10.0)
    assert slot is not None and slot.ticket is ticket and slot.trial
    scheduler.give_back(slot)
    scheduler.again(slot)
    scheduler.add(Endpoint(name="joins"))
    assert scheduler.grant(10.0) is None
    assert scheduler.waiting == 1
    scheduler.withdraw(ticket)
    assert not scheduler.wanted


TestTickets = Tickets.TestCase
TestTickets.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
