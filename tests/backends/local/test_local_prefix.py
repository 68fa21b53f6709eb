"""Leader first: who computes a shared prefix, who waits, and what counts as cached."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from batch_agent.backends.local.child import BLOCK_TOKENS, Chain, PrefixCache, chain_of


def chain(*blocks: int) -> Chain:
    return chain_of(array("q", [token for token in blocks for _ in range(BLOCK_TOKENS)]))


def test_equal_beginnings_have_equal_chains_and_a_part_of_a_block_does_not_count() -> None:
    assert chain(1, 2, 3)[:2] == chain(1, 2, 4)[:2]
    assert chain(1, 2)[1] != chain(3, 2)[1]
    assert chain_of(array("q", [1] * (BLOCK_TOKENS - 1))) == ()


def test_a_sibling_waits_for_the_leaders_first_token_and_then_shares_its_blocks() -> None:
    cache = PrefixCache(100)
    leader, sibling = chain(1, 2, 3), chain(1, 2, 4)
    assert cache.begin(1, leader) == 0
    assert cache.begin(2, sibling) is None
    cache.computed(1, leader)
    assert cache.begin(2, sibling) == 2
    assert cache.begin(3, chain(1, 2, 5)) == 2, "siblings with blocks of their own do not wait for each other"


def test_a_stranger_does_not_wait() -> None:
    cache = PrefixCache(100)
    assert cache.begin(1, chain(1, 2)) == 0
    assert cache.begin(2, chain(7, 2)) == 0


def test_when_a_leader_is_cancelled_the_next_in_line_leads() -> None:
    cache = PrefixCache(100)
    assert cache.begin(1, chain(1, 2)) == 0
    assert cache.begin(2, chain(1, 3)) is None
    cache.drop(1, chain(1, 2))
    assert cache.begin(2, chain(1, 3)) == 0
    assert cache.begin(3, chain(1, 4)) is None


def test_a_full_cache_gives_up_what_was_used_longest_ago_and_the_end_of_a_chain_before_its_beginning() -> None:
    cache = PrefixCache(3)
    for number, blocks in enumerate([chain(1, 2), chain(3, 4)]):
        cache.begin(number, blocks)
        cache.computed(number, blocks)
    assert cache.begin(9, chain(3, 4)) == 2
    assert cache.begin(10, chain(1, 2)) == 1


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=12))
def test_everyone_gets_in_as_long_as_those_who_are_in_finish(prompts: list[list[int]]) -> None:
    cache = PrefixCache(50)
    waiting = {number: chain(*blocks) for number, blocks in enumerate(prompts)}
    while waiting:
        started = [number for number, blocks in waiting.items() if cache.begin(number, blocks) is not None]
        assert started
        for number in started:
            cache.computed(number, waiting.pop(number))
