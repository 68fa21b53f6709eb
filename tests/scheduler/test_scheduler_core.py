"""The scheduler in any order of events: the limit holds, nobody is lost, the nearest to its end goes first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from batch_agent.errors import InternalError
from batch_agent.scheduler.core import Scheduler, Slot, Ticket
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.ordering import AgentForecast


def request(scheduler: Scheduler, turns: int = 0) -> Ticket:
    """Of a new agent that has taken so many turns, as one that follows its record has."""
    scheduler.start_agent()
    return scheduler.request(AgentForecast(), turns, now=0.0)


def granted(scheduler: Scheduler) -> list[Slot]:
    out = []
    while (slot := scheduler.grant()) is not None:
        out.append(slot)
    return out


def test_the_agent_that_has_come_furthest_goes_first() -> None:
    scheduler = Scheduler(max_inflight=1)
    far, near, middle = (request(scheduler, turns) for turns in (1, 9, 5))
    order = []
    while (slot := scheduler.grant()) is not None:
        order.append(slot.ticket)
        scheduler.give_back(slot)
    assert order == [near, middle, far]


def test_a_lowered_limit_is_reached_as_slots_come_back_and_a_raised_one_at_once() -> None:
    scheduler = Scheduler(max_inflight=4)
    for _ in range(8):
        request(scheduler)
    held = granted(scheduler)
    assert len(held) == 4
    scheduler.max_inflight = 2
    scheduler.give_back(held[0])
    scheduler.give_back(held[1])
    assert granted(scheduler) == []
    scheduler.give_back(held[2])
    assert len(granted(scheduler)) == 1
    scheduler.max_inflight = 5
    assert len(granted(scheduler)) == 3


def test_there_is_no_room_for_a_new_agent_while_a_ready_one_waits() -> None:
    scheduler = Scheduler(max_inflight=2)
    assert scheduler.has_room()
    request(scheduler)
    assert not scheduler.has_room()
    assert len(granted(scheduler)) == 1
    assert scheduler.has_room()


def test_max_agents_counts_agents_that_hold_no_slot() -> None:
    scheduler = Scheduler(max_inflight=8, max_agents=2)
    scheduler.start_agent()
    scheduler.start_agent()
    assert not scheduler.has_room()
    scheduler.end_agent(AgentForecast(), 1)
    assert scheduler.has_room()


@given(
    limit=st.integers(1, 3),
    steps=st.lists(st.sampled_from(["ask", "answer", "fail", "pause", "down", "control"]), max_size=30),
)
def test_a_turn_that_may_go_at_once_goes_when_grant_would_let_it(limit: int, steps: list[str]) -> None:
    """Two schedulers see the same events. One gives slots at once where it can, the other only with ``grant``."""
    pair = [(Scheduler(max_inflight=limit), list[Slot]()) for _ in range(2)]
    at_once = 0
    for step in steps:
        for place, (scheduler, held) in enumerate(pair):
            if step == "ask":
                scheduler.start_agent()
                ticket = scheduler.request(AgentForecast(), 0, 0.0, at_once=place == 0)
                if ticket.slot is not None:
                    at_once += 1
                    held.append(ticket.slot)
            elif step in ("answer", "fail") and held:
                slot = held.pop(0)
                scheduler.give_back(slot)
                if step == "fail":
                    scheduler.again(slot)
            elif step == "pause":
                scheduler.paused = not scheduler.paused
            elif step == "down":
                scheduler.endpoints[0].health.go_down(0.0)
            elif step == "control":
                scheduler.control(scheduler.endpoints[0])
            held += granted(scheduler)
        (first, its), (second, others) = pair
        assert [slot.trial for slot in its] == [slot.trial for slot in others]
        assert (first.inflight, first.waiting, len(first.aside)) == (second.inflight, second.waiting, len(second.aside))
    assert at_once or "ask" not in steps[:1]


def test_an_agent_cannot_end_twice() -> None:
    with pytest.raises(InternalError):
        Scheduler().end_agent(AgentForecast(), 0)


def an_ending_batch(**limits: int) -> Scheduler:
    """Nine agents took five turns of a second each; one is under way, and one more row is to be started."""
    scheduler = Scheduler(**limits)
    for _ in range(9):
        progress = AgentForecast()
        scheduler.start_agent()
        scheduler.forecast.answered(progress, seconds=1.0, now=1.0)
        scheduler.end_agent(progress, 5)
    scheduler.forecast.rows = 1
    request(scheduler)
    return scheduler


def test_what_is_left_starts_at_once_when_the_batch_comes_to_its_end() -> None:
    scheduler = an_ending_batch(max_inflight=4)
    for _ in range(4):
        request(scheduler)
    granted(scheduler)
    assert scheduler.waiting
    assert scheduler.has_room()


@pytest.mark.parametrize(("rows", "start"), [(N.few, True), (N.few + 1, False), (None, False)])
def test_while_a_server_is_down_new_agents_start_if_fewer_rows_are_left_than_turns_have_failed(
    rows: int | None, start: bool
) -> None:
    """These rows can tell whether the server or the rows are bad. The others have failed while it answered."""
    scheduler = Scheduler(N.few)
    for _ in range(N.few):
        request(scheduler)
    slots = granted(scheduler)
    scheduler.endpoints[0].health.go_down(0.0)
    scheduler.touch(scheduler.endpoints[0])
    for slot in slots:
        slot.ticket.row.charges = 1
        scheduler.give_back(slot)
        scheduler.again(slot)
    scheduler.forecast.rows = rows
    assert not scheduler.waiting
    assert scheduler.has_room() == start


def test_max_agents_holds_at_the_end_too() -> None:
    scheduler = an_ending_batch(max_inflight=4, max_agents=1)
    assert not scheduler.has_room()


def test_a_run_that_drains_or_pauses_starts_nothing_at_its_end() -> None:
    scheduler = an_ending_batch(max_inflight=4)
    scheduler.paused = True
    assert not scheduler.has_room()
    scheduler.paused, scheduler.closed = False, True
    assert not scheduler.has_room()


operations = st.lists(
    st.tuples(
        st.sampled_from(["request", "slot", "give_back", "withdraw", "resize", "pause", "resume"]), st.integers(0, 50)
    ),
    max_size=200,
)


@settings(max_examples=examples(300), deadline=None)
@given(operations, st.one_of(st.none(), st.integers(1, 5)))
def test_in_any_interleaving_the_limit_holds_and_no_slot_is_lost(
    steps: list[tuple[str, int]], limit: int | None
) -> None:
    scheduler = Scheduler(max_inflight=limit)
    waiting: list[Ticket] = []
    held: list[Slot] = []
    for step, number in steps:
        if step == "request":
            waiting.append(request(scheduler, number % 7))
        elif step == "slot":
            before = len(held)
            slot = scheduler.grant()
            if slot is not None:
                assert not scheduler.paused
                assert scheduler.max_inflight is None or before < scheduler.max_inflight
                waiting.remove(slot.ticket)
                held.append(slot)
            else:
                full = scheduler.max_inflight is not None and len(held) >= scheduler.max_inflight
                assert scheduler.paused or not waiting or full
        elif step == "give_back" and held:
            scheduler.give_back(held.pop(number % len(held)))
        elif step == "withdraw" and waiting:
            scheduler.withdraw(waiting.pop(number % len(waiting)))
        elif step == "resize":
            scheduler.max_inflight = None if number == 0 else 1 + number % 6
        elif step in ("pause", "resume"):
            scheduler.paused = step == "pause"
        assert scheduler.inflight == len(held)
        assert scheduler.waiting == len(waiting)
    scheduler.paused = False
    scheduler.max_inflight = None
    assert {slot.ticket for slot in granted(scheduler)} == set(waiting)
