"""Shares of slots, rate limits and a budget among the workers of one run."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_agent.errors import SpecError
from batch_agent.share.table import BUDGET, RATE, SLOTS, Claim, Grant, Learnt, Steering, Table, shares, steered

POTS = (f"{SLOTS}server", f"{RATE}server requests", f"{BUDGET}tokens")
LIMIT, SECONDS = 100, 15.0
ACTIONS = ("beat", "use", "finish", "sleep")


def beat(table: Table, worker: str, now: float, claim: Claim, pot: str = POTS[0]) -> Grant:
    return table.beat(worker, now, SECONDS, {pot: claim}, {}).grants[pot]


class Worker:
    """A worker that uses no more than it was granted, and less once it is asked to."""

    def __init__(self, name: str, pot: str, part: int = 1) -> None:
        self.name, self.pot, self.part = name, pot, part
        self.share = self.used = self.spent = 0
        self.renewed = 0.0

    def use(self, amount: int) -> None:
        self.used = max(self.used, min(self.share, self.used + amount))

    def finish(self, amount: int) -> None:
        done = min(amount, self.used)
        if self.pot.startswith(BUDGET):
            self.spent = min(self.used, self.spent + done)
        else:
            self.used -= done

    def beat(self, table: Table, now: float, want: int) -> None:
        if now - self.renewed >= SECONDS and not self.pot.startswith(BUDGET):
            self.share = 0
        held = max(self.used, self.share)
        want = self.used + want if self.pot.startswith(BUDGET) else want
        grant = beat(table, self.name, now, Claim(LIMIT, held, want, self.part, self.spent), self.pot)
        self.share, self.renewed = min(grant.held, grant.fair), now


@given(
    st.sampled_from(POTS),
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(("beat", "use", "finish", "sleep")),
            st.integers(0, 150),
            st.integers(1, 9),
        ),
        max_size=60,
    ),
)
def test_in_any_order_the_workers_never_use_more_than_the_limit(
    pot: str, steps: list[tuple[int, str, int, int]]
) -> None:
    table, now = Table(), 1000.0
    workers = [Worker(f"w{number}", pot, part=number + 1) for number in range(3)]
    for number, action, amount, seconds in steps:
        worker = workers[number]
        if action == "sleep":
            now += seconds
        elif action == "beat":
            worker.beat(table, now, amount)
        elif action == "use" and now - worker.renewed < SECONDS:
            worker.use(amount)
        elif action == "finish":
            worker.finish(amount)
        # Requests of a worker that was cut off may still be in flight at the server. Money is never spent twice.
        live = workers if pot.startswith(BUDGET) else [each for each in workers if now - each.renewed < SECONDS]
        assert sum(each.used for each in live) <= LIMIT
        table = Table.from_json(json.loads(json.dumps(table.to_json())))


def test_an_idle_share_moves_to_the_worker_that_wants_it() -> None:
    table = Table()
    alone = beat(table, "a", 0.0, Claim(LIMIT, 0, LIMIT))
    second = beat(table, "b", 1.0, Claim(LIMIT, 0, LIMIT))
    asked = beat(table, "a", 2.0, Claim(LIMIT, 100, LIMIT))
    returned = beat(table, "a", 3.0, Claim(LIMIT, asked.fair, LIMIT))
    moved = beat(table, "b", 3.5, Claim(LIMIT, 0, LIMIT))
    beat(table, "a", 4.0, Claim(LIMIT, 0, 0))
    everything = beat(table, "b", 4.5, Claim(LIMIT, moved.held, LIMIT))

    assert (alone.held, second.held, asked.fair, returned.held, moved.held) == (100, 0, 50, 50, 50)
    assert everything.held == LIMIT


def test_a_dead_workers_slots_are_free_and_its_rate_counts_for_another_minute() -> None:
    for pot, after in ((POTS[0], 16.0), (POTS[1], 16.0 + 61.0)):
        table = Table()
        beat(table, "dead", 0.0, Claim(LIMIT, 0, LIMIT), pot)
        before = beat(table, "b", after - 1.5, Claim(LIMIT, 0, LIMIT), pot)
        at_last = beat(table, "b", after + 0.1, Claim(LIMIT, 0, LIMIT), pot)
        free = beat(table, "b", after + 61.2, Claim(LIMIT, 0, LIMIT), pot)

        assert (before.held, free.held) == (0, LIMIT)
        assert at_last.held == (LIMIT if pot == POTS[0] else 0)


def test_what_a_dead_worker_held_of_the_budget_is_spent_and_what_one_that_left_returned_is_not() -> None:
    table, pot = Table(), POTS[2]
    beat(table, "dead", 0.0, Claim(LIMIT, 0, 40), pot)
    beat(table, "left", 0.0, Claim(LIMIT, 0, 50), pot)
    beat(table, "left", 1.0, Claim(LIMIT, 20, 20, spent=20), pot)
    table.leave("left", 1.0)
    grant = beat(table, "b", 20.0, Claim(LIMIT, 0, LIMIT), pot)

    assert (grant.held, grant.others_spent, grant.others_open) == (40, 60, 0)
    assert table.spent_of(pot) == 60


def test_what_is_of_use_only_alone_is_given_when_no_other_worker_holds_any() -> None:
    table, pot = Table(), POTS[2]
    first = beat(table, "a", 0.0, Claim(LIMIT, 0, 40, 40, alone=True), pot)
    denied = beat(table, "b", 0.1, Claim(LIMIT, 0, 30, 30, alone=True), pot)
    beside = beat(table, "c", 0.2, Claim(LIMIT, 0, 30, 30), pot)
    beat(table, "a", 1.0, Claim(LIMIT, 20, 20, spent=20), pot)
    beat(table, "c", 1.1, Claim(LIMIT, 0, 0), pot)
    granted = beat(table, "b", 1.2, Claim(LIMIT, 0, 30, 30, alone=True), pot)

    assert (first.held, denied.held, denied.others_open, beside.held) == (40, 0, 40, 30)
    assert (granted.held, granted.others_spent, granted.others_open) == (30, 20, 0)


def test_a_part_that_does_not_fit_is_not_given_at_all() -> None:
    assert shares(100, 100, [(80, 80), (80, 80)]) == [80, 0]
    assert shares(100, 100, [(300, 300), (300, 300)]) == [100, 0]  # larger than everything: it goes alone
    assert shares(10, 10, [(100, 1), (100, 1), (2, 1)]) == [4, 4, 2]
    assert shares(2, 2, [(1, 1)] * 4) == [1, 1, 0, 0]


def test_when_there_is_not_enough_for_all_the_workers_take_turns() -> None:
    served = set()
    for minute in range(20):
        table = Table()
        for worker in ("a", "b", "c"):
            beat(table, worker, minute * 60.0, Claim(1, 0, 1))
        for worker in ("a", "b", "c"):
            if beat(table, worker, minute * 60.0 + 1, Claim(1, 0, 1)).fair:
                served.add(worker)

    assert served == {"a", "b", "c"}


def test_a_worker_hears_what_the_others_learnt() -> None:
    table = Table()
    table.beat("a", 0.0, SECONDS, {}, {"gpu-1": Learnt(down=True, reason="refused")})
    heard = table.beat("b", 1.0, SECONDS, {}, {"gpu-1": Learnt()})

    assert heard.learnt == {"gpu-1": [Learnt(down=True, reason="refused")]}
    assert heard.workers == 2


def test_requests_to_all_workers_are_numbered_and_a_wrong_one_is_refused() -> None:
    now = steered(Steering(), {"do": "pause"})
    now = steered(now, {"do": "cancel-row", "row": "7"})
    now = steered(now, {"do": "resize", "inflight": 5})

    assert now == Steering(3, paused=True, max_inflight=5, rows=((2, "cancel-row", "7"),))
    for wrong in ({"do": "dance"}, {"do": "resize", "inflight": 0}):
        with pytest.raises(SpecError):
            steered(now, wrong)


TIME = f"{BUDGET}cost"
RATE_OF_TIME = 10  # per second
AHEAD = 1.5  # seconds


def pay(table: Table, worker: str, now: float, limit: int = 1_000) -> Grant:
    return beat(table, worker, now, Claim(limit, 0, int(AHEAD * RATE_OF_TIME), 0, rate=RATE_OF_TIME), TIME)


def test_running_time_is_charged_once_for_all_workers_and_time_without_workers_is_free() -> None:
    table = Table()
    for second in range(11):
        for worker in ("a", "b", "c"):
            pay(table, worker, 100.0 + second)
    assert table.spent_of(TIME) == 100 + 15
    pay(table, "d", 500.0)  # all others were killed long ago
    assert table.spent_of(TIME) == 115 + 15
    pay(table, "d", 520.0)  # it could not report, but it lived
    assert table.spent_of(TIME) == 115 + 200 + 15
    table.leave("d", 520.5)
    assert table.spent_of(TIME) == 115 + 205
    assert Table.from_json(json.loads(json.dumps(table.to_json()))) == table


def test_a_worker_learns_for_how_long_time_is_paid_and_what_is_left() -> None:
    table = Table()
    first = pay(table, "a", 0.0, limit=30)
    assert (first.held, first.fair) == (15, 15)
    assert pay(table, "a", 2.5, limit=30).held == 5  # 25 are spent, and the last 5 are paid ahead
    last = pay(table, "a", 4.0, limit=30)
    assert (last.held, last.fair) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from((0.1, 0.5, 1.0, 1.2)), st.booleans()), max_size=60))
def test_workers_that_send_only_in_paid_time_stay_within_the_budget_whenever_they_are_killed(
    events: list[tuple[int, float, bool]],
) -> None:
    """Each event: a worker reports, time passes, and the worker may be killed. Used is the time in which some worker
    may send."""
    table, now, limit, used = Table(), 1_000.0, 100, 0.0
    paid: dict[str, float] = {}
    names = {number: f"w{number}-0" for number in range(4)}
    for number, pause, killed in events:
        name = names[number]
        paid[name] = now + pay(table, name, now, limit).held / RATE_OF_TIME
        used += max(0.0, min(pause, max(paid.values()) - now))
        now += pause
        if killed:
            del paid[name]
            names[number] = name.partition("-")[0] + f"-{now}"
    assert used * RATE_OF_TIME <= table.spent_of(TIME) + 1e-6 and used * RATE_OF_TIME <= limit + 1e-6


def test_workers_of_a_new_session_are_not_those_of_the_session_before() -> None:
    table, second = Table(), 1_000
    time = Claim(limit=60 * second, held=0, want=second, part=0, spent=0, rate=second)
    tokens = Claim(limit=10_000, held=0, want=500, part=100, spent=0)
    table.beat("2", 100.0, 15.0, {f"{BUDGET} cost": time, f"{BUDGET} tokens": tokens}, {})
    spent = table.spent_of(f"{BUDGET} cost")
    table.forget_members(5_000.0)  # all processes were killed, and a later session begins
    table.beat("2", 5_000.0, 15.0, {f"{BUDGET} cost": time, f"{BUDGET} tokens": tokens}, {})
    assert table.spent_of(f"{BUDGET} cost") == spent + second  # nothing for the time between the sessions
    assert table.spent_of(f"{BUDGET} tokens") == 500  # what the killed worker held
