"""Which endpoint a turn goes to, without a socket or a clock."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.scheduler.held import slot_of

from batch_agent.messages import Usage
from batch_agent.scheduler.core import Scheduler, Ticket
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.ordering import AgentForecast
from batch_agent.scheduler.routing import PrefixCost, Router
from batch_agent.scheduler.server import Endpoint
from batch_agent.scheduler.server_state import ServerState, Terms


def serving(
    name: str,
    ceiling: int | None = None,
    *,
    weight: float = 1.0,
    models: frozenset[str] | None = None,
    context: int | None = None,
) -> Endpoint:
    return Endpoint(ServerState(name, weight=weight, models=models, context=context), Terms(ceiling), name)


def fleet(count: int, ceiling: int | None = 4, **limits: int) -> Scheduler:
    return Scheduler(endpoints=[serving(f"e{number}", ceiling) for number in range(count)], **limits)


def ask(scheduler: Scheduler, progress: AgentForecast | None = None, turns: int = 0) -> Ticket:
    if progress is None:
        progress = AgentForecast()
        scheduler.start_agent()
    return scheduler.request(progress, turns, now=0.0)


def granted(scheduler: Scheduler, now: float = 0.0) -> list[Ticket]:
    out = []
    while (slot := scheduler.grant(now)) is not None:
        out.append(slot.ticket)
    return out


def answer(scheduler: Scheduler, ticket: Ticket, seconds: float = 1.0, tokens: int = 1000, cached: int = 0) -> None:
    usage = Usage(prompt_tokens=tokens, cached_tokens=cached)
    slot = slot_of(ticket)
    slot.endpoint.server.learn(seconds, 0.0)
    scheduler.answered(slot, seconds, usage, now=0.0)
    scheduler.give_back(slot)


def has_answered(scheduler: Scheduler, endpoint: Endpoint, seconds: float, times: int = 1) -> None:
    for _ in range(times):
        endpoint.server.learn(seconds, 0.0)
        scheduler.router.answered(seconds)


def places(tickets: list[Ticket]) -> Counter[str]:
    return Counter(slot_of(ticket).endpoint.name for ticket in tickets)


def test_agents_without_a_key_use_all_endpoints_evenly() -> None:
    scheduler = fleet(4, ceiling=None)
    for _ in range(40):
        ask(scheduler)
    assert set(places(granted(scheduler)).values()) == {10}


def test_a_fast_endpoint_has_more_on_its_way_than_a_slow_one() -> None:
    scheduler = fleet(2, ceiling=None, max_inflight=27)
    for _ in range(2):
        ask(scheduler)
    for ticket in granted(scheduler):
        answer(scheduler, ticket, seconds=8.0 if slot_of(ticket).endpoint is scheduler.endpoints[0] else 1.0)
    for _ in range(27):
        ask(scheduler)
    found = places(granted(scheduler))
    assert found["e1"] == 24 and found["e0"] == 3


def test_slots_lent_to_one_run_do_not_bound_another_run_of_the_process_at_the_same_server() -> None:
    server = ServerState("gpu")
    lent, own = Endpoint(server, Terms(start=64), "gpu"), Endpoint(server, Terms(4), "gpu")
    lent.allotted = 0  # between two grants
    assert (lent.slots, own.slots) == (0, server.capacity.limit)


def test_a_weight_is_a_share() -> None:
    scheduler = Scheduler(endpoints=[serving("a", None, weight=3.0), serving("b", None)])
    for _ in range(40):
        ask(scheduler)
    assert places(granted(scheduler)) == {"a": 30, "b": 10}


def test_an_agents_turns_stay_on_one_endpoint() -> None:
    scheduler = fleet(8)
    progress = AgentForecast()
    scheduler.start_agent()
    first = ask(scheduler, progress)
    assert granted(scheduler) == [first]
    home = slot_of(first).endpoint
    answer(scheduler, first)
    for turn in range(1, 5):
        again = ask(scheduler, progress, turn)
        granted(scheduler)
        assert slot_of(again).endpoint is home
        answer(scheduler, again)


def a_full_home(scheduler: Scheduler, *, seconds: float, tokens: int) -> tuple[AgentForecast, Ticket]:
    """An agent that was answered at the first endpoint, whose slots are then all taken."""
    progress = AgentForecast()
    scheduler.start_agent()
    first = ask(scheduler, progress)
    granted(scheduler)
    home = slot_of(first).endpoint
    answer(scheduler, first, seconds, tokens)
    assert home.capacity.limit is not None
    last = first
    for _ in range(home.capacity.limit):
        other = AgentForecast()
        other.home = home
        scheduler.start_agent()
        last = ask(scheduler, other)
        granted(scheduler)
        assert slot_of(last).endpoint is home
    return progress, last


def test_a_turn_waits_for_its_own_endpoint_where_the_prefix_is_worth_more_than_the_wait() -> None:
    scheduler = fleet(2)
    progress, last = a_full_home(scheduler, seconds=0.1, tokens=100_000)
    waits = ask(scheduler, progress, 1)
    assert granted(scheduler) == []
    others = [ask(scheduler) for _ in range(2)]
    assert granted(scheduler) == others, "it holds up nobody behind it"
    home = slot_of(last).endpoint
    scheduler.give_back(slot_of(last))
    assert granted(scheduler) == [waits]
    assert slot_of(waits).endpoint is home


def test_a_turn_goes_elsewhere_at_once_where_the_wait_is_longer_than_the_prefix_is_worth() -> None:
    scheduler = fleet(2)
    progress, last = a_full_home(scheduler, seconds=100.0, tokens=100)
    spills = ask(scheduler, progress, 1)
    assert granted(scheduler) == [spills]
    assert slot_of(spills).endpoint is not slot_of(last).endpoint


def test_nobody_waits_for_longer_than_its_prefix_is_worth() -> None:
    scheduler = fleet(2)
    progress, last = a_full_home(scheduler, seconds=0.1, tokens=100_000)
    waits = ask(scheduler, progress, 1)
    assert granted(scheduler) == []
    assert granted(scheduler, now=scheduler.due) == [waits]
    assert slot_of(waits).endpoint is not slot_of(last).endpoint


def test_a_parked_turn_that_is_withdrawn_leaves_nothing_behind() -> None:
    scheduler = fleet(2)
    progress, last = a_full_home(scheduler, seconds=0.1, tokens=100_000)
    waits = ask(scheduler, progress, 1)
    granted(scheduler)
    scheduler.withdraw(waits)
    scheduler.give_back(slot_of(last))
    assert granted(scheduler) == []
    assert scheduler.waiting == 0


def test_a_new_agent_may_start_while_others_wait_for_their_own_endpoint() -> None:
    scheduler = fleet(2)
    progress, _ = a_full_home(scheduler, seconds=0.1, tokens=100_000)
    ask(scheduler, progress, 1)
    granted(scheduler)
    assert scheduler.waiting == 1
    assert scheduler.has_room()


def test_turns_that_wait_for_an_endpoint_that_goes_down_go_elsewhere() -> None:
    scheduler = fleet(2)
    progress, last = a_full_home(scheduler, seconds=0.1, tokens=100_000)
    waits = ask(scheduler, progress, 1)
    assert granted(scheduler) == []
    home = slot_of(last).endpoint
    assert home is not None
    home.health.go_down(0.0)
    scheduler.touch(home)
    assert granted(scheduler) == [waits]
    assert slot_of(waits).endpoint is not home


def test_suspects_go_one_at_a_time_also_while_an_endpoint_waits_for_its_trial() -> None:
    scheduler = fleet(3)
    down = scheduler.endpoints[0]
    for _ in range(3):
        ask(scheduler)
    for ticket in granted(scheduler):
        slot = slot_of(ticket)
        ticket.row.hits, ticket.avoid = N.twice, frozenset({down})
        scheduler.give_back(slot)
        scheduler.again(slot)
    down.health.go_down(0.0)
    down.health.ready = True
    scheduler.touch(down)
    scheduler.router.trials.append(down)
    assert len(granted(scheduler)) == 1


def test_agents_with_one_key_share_an_endpoint_and_keys_are_spread() -> None:
    scheduler = fleet(10, ceiling=None)
    homes: dict[str, set[str]] = {}
    for number in range(400):
        scheduler.start_agent()
        ticket = ask(scheduler, AgentForecast(key=f"site {number % 100}"))
        granted(scheduler)
        homes.setdefault(f"site {number % 100}", set()).add(slot_of(ticket).endpoint.name)
    assert all(len(found) == 1 for found in homes.values())
    assert len({name for found in homes.values() for name in found}) == 10


def moved(before: Router, after: Router) -> float:
    keys = [f"key {number}" for number in range(5000)]
    names = [(before.home(key), after.home(key)) for key in keys]
    return sum(a.name != b.name for a, b in names if a is not None and b is not None) / len(keys)


def test_one_endpoint_less_moves_only_its_share_of_the_keys() -> None:
    names = [f"vllm://gpu-{number}:8000" for number in range(100)]
    share = moved(Router(map(serving, names)), Router(map(serving, names[:50] + names[51:])))
    assert 0.003 < share <= 0.02


def test_one_endpoint_more_moves_only_its_share_of_the_keys() -> None:
    names = [f"vllm://gpu-{number}:8000" for number in range(50)]
    assert moved(Router(map(serving, names)), Router(map(serving, [*names, "new"]))) <= 0.04


def test_a_heavy_endpoint_is_home_to_more_keys() -> None:
    router = Router([serving("heavy", weight=3.0), serving("light")])
    homes = Counter(home.name for number in range(4000) if (home := router.home(str(number))) is not None)
    assert 0.7 < homes["heavy"] / 4000 < 0.8


def test_a_model_goes_only_where_it_is_served() -> None:
    small, large = frozenset({"small"}), frozenset({"large"})
    endpoints = [serving("a", None, models=small), serving("b", None, models=large), serving("c", 1, models=large)]
    scheduler = Scheduler(endpoints=endpoints)
    for _ in range(6):
        scheduler.start_agent()
        ask(scheduler, AgentForecast(model="large"))
    assert set(places(granted(scheduler))) == {"b", "c"}


def test_a_turn_that_waits_for_a_model_without_a_free_endpoint_holds_up_no_other() -> None:
    endpoints = [serving("a", 2, models=frozenset({"small"})), serving("b", 1, models=frozenset({"large"}))]
    scheduler = Scheduler(endpoints=endpoints)
    first, second = (ask(scheduler, AgentForecast(model="large")) for _ in range(2))
    small = ask(scheduler, AgentForecast(model="small"))
    assert granted(scheduler) == [first, small]
    scheduler.give_back(slot_of(first))
    assert granted(scheduler) == [second]
    assert slot_of(second).endpoint is endpoints[1]


def test_a_long_conversation_goes_where_the_context_is_long_enough() -> None:
    scheduler = Scheduler(endpoints=[serving("short", None, context=1000), serving("long", None, context=9000)])
    progress = AgentForecast()
    progress.tokens = 5000
    scheduler.start_agent()
    ticket = ask(scheduler, progress)
    granted(scheduler)
    assert slot_of(ticket).endpoint is scheduler.endpoints[1]


def test_the_end_of_a_batch_does_not_wait_for_an_endpoint_that_is_much_slower() -> None:
    scheduler = fleet(2, ceiling=1)
    scheduler.forecast.rows = 100
    for _ in range(2):
        ask(scheduler)
    for ticket in granted(scheduler):
        answer(scheduler, ticket, seconds=8.0 if slot_of(ticket).endpoint is scheduler.endpoints[0] else 1.0)
        scheduler.end_agent(ticket.progress, 1)
    has_answered(scheduler, scheduler.endpoints[1], 1.0, times=50)
    both = [ask(scheduler) for _ in range(2)]
    assert len(granted(scheduler)) == 2, "there is much to do"
    for ticket in both:
        scheduler.give_back(slot_of(ticket))
        scheduler.end_agent(ticket.progress, 1)
    scheduler.forecast.rows = 0
    last = [ask(scheduler) for _ in range(2)]
    (one,) = granted(scheduler)
    assert slot_of(one).endpoint is scheduler.endpoints[1]
    scheduler.give_back(slot_of(one))
    (two,) = granted(scheduler)
    assert slot_of(two).endpoint is scheduler.endpoints[1]
    assert {one, two} == set(last)


def test_a_slow_endpoint_is_asked_when_it_is_the_only_one_left() -> None:
    scheduler = fleet(2, ceiling=1)
    scheduler.forecast.rows = 0
    slow, fast = scheduler.endpoints
    has_answered(scheduler, slow, 8.0)
    has_answered(scheduler, fast, 1.0, times=50)
    fast.health.go_down(0.0)
    scheduler.touch(fast)
    ticket = ask(scheduler)
    assert granted(scheduler) == [ticket]
    assert slot_of(ticket).endpoint is slow


def test_a_turn_that_failed_at_the_only_other_endpoint_goes_to_the_slow_one() -> None:
    scheduler = fleet(2, ceiling=2)
    scheduler.forecast.rows = 0
    slow, fast = scheduler.endpoints
    has_answered(scheduler, slow, 8.0)
    has_answered(scheduler, fast, 1.0, times=50)
    scheduler.touch(slow)
    scheduler.touch(fast)
    scheduler.router.rest(slow, 1.0)
    failed = ask(scheduler)
    failed.avoid = frozenset({fast})
    assert granted(scheduler) == [failed]
    assert slot_of(failed).endpoint is slow


def test_endpoints_join_and_leave_while_turns_are_in_flight() -> None:
    scheduler = fleet(1, ceiling=2)
    (only,) = scheduler.endpoints
    first = [ask(scheduler) for _ in range(4)]
    assert len(granted(scheduler)) == 2
    joined = serving("new", 2)
    scheduler.add(joined)
    assert [slot_of(ticket).endpoint for ticket in granted(scheduler)] == [joined, joined]
    scheduler.leave(only)
    ask(scheduler)
    scheduler.give_back(slot_of(first[0]))
    assert granted(scheduler) == [], "an endpoint that leaves gets nothing more"
    scheduler.give_back(slot_of(first[1]))
    assert scheduler.endpoints == [joined]
    scheduler.give_back(slot_of(first[2]))
    assert len(granted(scheduler)) == 1


def test_what_a_token_costs_that_is_not_cached_is_learnt_from_answers() -> None:
    cost = PrefixCost()
    for number in range(200):
        tokens = 10_000 * (number % 7)
        cost.learn(tokens, 2.0 + tokens * 0.001)
    assert cost.seconds(1000) == pytest.approx(1.0, rel=0.05)
