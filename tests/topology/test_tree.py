"""The tree of a reduction, without a model."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from batch_agent.topology.reduce import Part, Piece, Shape, Tree


def row(index: int, tokens: int = 1) -> Piece:
    return Piece(str(index), tokens, index, index, covers=(index,))


def run(tree: Tree, order: list[tuple[int, Piece | None]], answer_tokens: int = 1) -> list[Part]:
    """All parts, in the order in which they could be reduced; the last one has the answer."""
    parts: list[Part] = []

    def reduce(ready: list[Part]) -> None:
        for part in ready:
            parts.append(part)
            if not part.last:
                reduce(tree.reduced(part, part.covered("answer", answer_tokens)))

    for index, leaf in order:
        reduce(tree.add(index, leaf))
    reduce(tree.end(len(order)))
    return parts


def test_rows_that_fit_are_reduced_at_once() -> None:
    [part] = run(Tree("auto", 10), [(index, row(index)) for index in range(10)])
    assert (part.last, part.count, part.level) == (True, 10, 0)


def test_groups_go_by_tokens_and_not_by_count() -> None:
    parts = run(Tree("auto", 10), [(index, row(index, tokens)) for index, tokens in enumerate([5, 5, 9, 1, 1, 12, 3])])
    leaves = [[leaf.first for leaf in part.rows] for part in parts if part.level == 0]
    assert leaves == [[0, 1], [2, 3], [4], [5], [6]]
    assert parts[-1].last and parts[-1].count == 7


def test_a_number_of_rows_groups_by_that() -> None:
    parts = run(Tree(3, 1), [(index, row(index)) for index in range(7)])
    assert [(part.level, len(part.rows)) for part in parts] == [(0, 3), (0, 3), (0, 1), (1, 3)]


def test_flat_never_groups() -> None:
    assert len(run(Tree("flat", 2), [(index, row(index)) for index in range(50)])) == 1


def test_a_group_can_be_reduced_before_the_last_row_is_there() -> None:
    tree = Tree(2, None)
    assert tree.add(2, row(2)) == tree.add(0, row(0)) == []
    [part] = tree.add(1, row(1))
    assert [leaf.first for leaf in part.rows] == [0, 1]


def test_rows_that_are_left_out_hold_nobody_up() -> None:
    parts = run(Tree(2, None), [(0, None), (1, row(1)), (2, None), (3, row(3)), (4, row(4))])
    assert [[leaf.first for leaf in part.rows] for part in parts if part.level == 0] == [[1, 3], [4]]
    assert run(Tree(2, None), [(0, None)]) == []


def test_a_part_that_is_too_much_is_halved_and_its_answers_are_merged() -> None:
    tree = Tree("auto", None)
    for index in range(5):
        assert tree.add(index, row(index)) == []
    [whole] = tree.end(5)
    first, second = tree.split(whole)
    assert ([len(first.rows), len(second.rows)], first.name, second.name) == ([3, 2], "0.0a", "0.0b")
    assert tree.reduced(second, second.covered("b", 1)) == []
    [merged] = tree.reduced(first, first.covered("a", 1))
    assert ([part.text for part in merged.rows], merged.last, merged.merges) == (["a", "b"], True, True)
    assert merged.covered("", 0).covers == (0, 1, 2, 3, 4) and not merged.divisible


def test_halving_answers_passes_on_one_that_stands_alone() -> None:
    tree = Tree(3, None)
    parts = [part for index in range(9) for part in tree.add(index, row(index))] + tree.end(9)
    [merge] = [ready for part in parts for ready in tree.reduced(part, part.covered(part.name, 1))]
    [half] = tree.split(merge)
    [merged] = tree.reduced(half, half.covered("half", 1))
    assert [part.text for part in merged.rows] == ["half", "0.2"]


def test_the_rows_of_a_part_that_failed_are_lost_and_named() -> None:
    part = Part(0, 0, (row(0), Piece("", 1, 1, 1, failed=(1,)), row(2)), False, merges=False)
    lost = part.lost("error", 1)
    assert (lost.covers, lost.failed, lost.lost, lost.count) == ((), (1,), (0, 2), 3)


@given(
    tokens=st.lists(st.one_of(st.none(), st.integers(1, 12)), max_size=60),
    shape=st.one_of(st.just("auto"), st.integers(2, 5)),
    answer=st.integers(1, 12),
    random=st.randoms(use_true_random=False),
)
def test_in_any_order_of_arrival_the_tree_is_the_same_and_covers_every_row_once(
    tokens: list[int | None], shape: Shape, answer: int, random: object
) -> None:
    rows = [(index, None if size is None else row(index, size)) for index, size in enumerate(tokens)]
    shuffled = list(rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    straight, mixed = run(Tree(shape, 10), rows, answer), run(Tree(shape, 10), shuffled, answer)

    def seen(parts: list[Part]) -> list[tuple[str, tuple[int, ...]]]:
        return sorted((part.name, part.covered("", 0).covers) for part in parts)

    assert seen(straight) == seen(mixed)
    last = [part for part in mixed if part.last]
    kept = tuple(index for index, leaf in rows if leaf is not None)
    assert [part.covered("", 0).covers for part in last] == ([kept] if kept else [])


@given(st.integers(1, 40), st.integers(2, 4), st.randoms(use_true_random=False), st.data())
def test_the_index_of_a_part_is_its_own_and_does_not_depend_on_the_order_of_answers(
    count: int, fan_in: int, order: Random, data: st.DataObject
) -> None:
    """Some parts are too long, and are split."""
    long = data.draw(st.sets(st.integers(0, 40)))

    def indexes(shuffled: bool) -> dict[tuple[str, bool], int]:
        tree, found, ready = Tree(fan_in, None), {}, list[Part]()
        for index in range(count):
            ready += tree.add(index, row(index))
        ready += tree.end(count)
        while ready:
            part = ready.pop(order.randrange(len(ready)) if shuffled else 0)
            found[part.name, part.joins is not None] = part.index
            if part.divisible and part.joins is None and part.rows[0].first in long:
                ready += tree.split(part)
            elif not part.last:
                ready += tree.reduced(part, part.covered("answer", 1))
        return found

    first = indexes(shuffled=False)
    assert indexes(shuffled=True) == first
    assert len(set(first.values())) == len(first)
