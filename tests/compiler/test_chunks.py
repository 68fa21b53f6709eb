"""Pieces of a long text: together they are the text, each fits, and borders are where the text has them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_agent.compiler.plan import head, split
from batch_agent.compiler.tokens import estimate_tokens

texts = st.text(st.sampled_from("ab \n#é漢🙂"), max_size=400) | st.text(max_size=200)


@given(texts, st.integers(2, 60))
def test_pieces_fit_and_overlap_and_leave_nothing_out(text: str, most: int) -> None:
    pieces = split(text, most)
    assert all(estimate_tokens(piece) <= most for piece in pieces)
    at = 0
    for piece in pieces:
        began = text.rfind(piece, 0, at + len(piece))  # the last place that leaves nothing out: texts repeat themselves
        assert began >= 0
        at = max(at, began + len(piece))
    assert at == len(text)
    assert len(pieces) == 1 or all(pieces)


@given(texts)
def test_a_text_that_fits_is_left_whole(text: str) -> None:
    assert split(text, max(2, estimate_tokens(text))) == [text]


@pytest.mark.parametrize(
    "text, border",
    [
        ("".join(f"# Part {n}\n\n{'A sentence. ' * 30}\n\n" for n in range(40)), "# Part"),
        ("\n\n".join(f"P{n} {'word ' * 20}" for n in range(200)), "P"),
        ("\n".join(f"L{n} {'word ' * 5}" for n in range(800)), "L"),
    ],
    ids=["headings", "paragraphs", "lines"],
)
def test_a_piece_ends_where_the_text_has_a_border(text: str, border: str) -> None:
    pieces = split(text, 600)
    assert len(pieces) > 3
    for piece, following in pairwise(pieces):
        assert piece.endswith(("\n", " "))
        beginning = text[text.index(piece) + len(piece) :]
        assert beginning.startswith(border)
        assert following != beginning[: len(following)]  # it begins with the end of the piece before


def test_pieces_are_about_equally_long() -> None:
    pieces = split("\n".join("a line of the text" for _ in range(5_000)), 2_000)
    lengths = [len(piece) for piece in pieces]
    assert max(lengths) < 1.25 * min(lengths)


def test_the_head_of_a_text_ends_at_a_border() -> None:
    text = "one two\nthree four\n" * 20
    assert head(text, 20) == "one two\nthree four\n" * 4
    assert head("short", 20) == "short"
    assert head(text, 0) == ""
