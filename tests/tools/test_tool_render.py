import dataclasses
import datetime
import enum
import pathlib

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from batch_agent.tools.schema import cut_tokens, render


class Colour(enum.Enum):
    RED = "red"


class Point(BaseModel):
    x: int
    when: datetime.date


@dataclasses.dataclass
class Pair:
    left: int
    right: object


class Odd:
    def __str__(self) -> str:
        return "odd"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (None, "null"),
        (True, "true"),
        ([1, 2.5], "[1,2.5]"),
        ({"a": {1}}, '{"a":[1]}'),
        (Point(x=1, when=datetime.date(2024, 1, 2)), '{"x":1,"when":"2024-01-02"}'),
        (Pair(1, Colour.RED), '{"left":1,"right":"red"}'),
        (pathlib.PurePosixPath("a/b"), '"a/b"'),
        ([Odd()], '["odd"]'),
        (2**70, str(2**70)),
        (float("nan"), '"NaN"'),
        ("ä".encode(), "ä"),
        (b"\xff\x00", "[2 bytes that are not text, in base64]\n/wA="),
        ([b"\xff"], '["_w=="]'),
        ((n for n in (1, 2)), "[1,2]"),
        ("a\ud800b", "a?b"),
    ],
)
def test_a_result_becomes_text(value: object, text: str) -> None:
    assert render(value, None) == text


def test_what_fits_is_not_touched() -> None:
    assert cut_tokens("x" * 40, 10) == "x" * 40
    assert cut_tokens("x" * 400, None) == "x" * 400


@pytest.mark.parametrize("text", ["x" * 4000, "ä" * 2000, "\U0001f600" * 1000])
def test_a_cut_says_that_and_how_much(text: str) -> None:
    cut = cut_tokens(text, 10)
    assert len(cut.partition("\n[cut")[0].encode()) == 40
    assert "about 990 of 1000 tokens" in cut


def test_whatever_a_tool_returns_is_cut() -> None:
    for value in ("x" * 4000, b"x" * 4000, ["xx"] * 1000):
        assert len(render(value, 10)) < 120
    assert "\ud800" not in render("\ud800" * 4000, 10)


@given(st.text(min_size=1), st.integers(1, 20))
def test_a_cut_falls_between_characters_and_keeps_a_beginning(text: str, max_tokens: int) -> None:
    cut = cut_tokens(text, max_tokens)
    orjson.dumps(cut)
    if cut != text:
        shown = cut.rpartition("\n[cut")[0]
        assert text.startswith(shown)
        assert len(shown.encode()) <= max_tokens * 4
