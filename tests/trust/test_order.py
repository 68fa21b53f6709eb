"""The order of rows by keyed hash: prefixes are nested random samples, the same in every process."""

from __future__ import annotations

import subprocess
import sys

from batch_agent.trust.order import KeyedOrder

NAMES = [f"row-{number}" for number in range(2_000)]


def test_a_larger_prefix_contains_a_smaller_one() -> None:
    order = KeyedOrder()
    assert order.first(NAMES, 200)[:50] == order.first(NAMES, 50)
    assert sorted(order.first(NAMES, 3_000)) == list(range(2_000))


def test_rows_that_are_added_move_only_what_they_push_out() -> None:
    before = {NAMES[place] for place in KeyedOrder().first(NAMES, 100)}
    more = [*NAMES, *(f"new-{number}" for number in range(200))]
    after = {more[place] for place in KeyedOrder().first(more, 100)}
    assert {name for name in after if not name.startswith("new")} <= before


def test_another_key_gives_another_order_and_the_constant_one_is_the_same_everywhere() -> None:
    assert KeyedOrder().first(NAMES, 20) != KeyedOrder("another").first(NAMES, 20)
    code = "from batch_agent.trust.order import KeyedOrder; print(KeyedOrder().first([str(n) for n in range(99)], 5))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(KeyedOrder().first([str(number) for number in range(99)], 5))
    assert printed.strip() == "[0, 3, 19, 63, 78]"


def test_a_prefix_is_spread_over_the_table() -> None:
    places = KeyedOrder().first(NAMES, 400)
    assert 160 < sum(place < 1_000 for place in places) < 240
    assert 900 < sum(KeyedOrder("sealed").in_first_half(name) for name in NAMES) < 1_100


def test_names_that_come_twice_or_hold_surrogates_have_a_place() -> None:
    assert sorted(KeyedOrder().first(["a", "a", "\ud800"], 3)) == [0, 1, 2]
