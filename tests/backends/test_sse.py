from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_agent.http.connection import EventTooLarge, SSEParser


def parse(*chunks: bytes) -> list[tuple[str, bytes]]:
    parser = SSEParser()
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    return events + parser.close()


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", [("", b"a")]),
        (b"data: a\n\ndata: b\n\ndata: [DONE]\n\n", [("", b"a"), ("", b"b"), ("", b"[DONE]")]),
        (b"data: a\n\n\n\ndata: \n\n", [("", b"a"), ("", b"")]),
        (b"data:a\n\ndata:  b\n\n", [("", b"a"), ("", b" b")]),
        (b"event: error\ndata: a\n\ndata: b\n\n", [("error", b"a"), ("", b"b")]),
        (b"data: a\ndata\ndata: b\n\n", [("", b"a\n\nb")]),
        (b": ping\n\n:\n\ndata: a\n\n", [("", b"a")]),
        (b"id: 1\nretry: 5\nnonsense\ndata: a\n\n", [("", b"a")]),
        (b"event: lonely\n\ndata: a\n\n", [("", b"a")]),
        (b"\xef\xbb\xbfdata: a\n\n", [("", b"a")]),
        (b"data: a\r\rdata: b\r\n\r\n", [("", b"a"), ("", b"b")]),
        (b"data: a", [("", b"a")]),
        (b"data: a\n", [("", b"a")]),
        (b"data: \xf0\x9f\x98\x80\n\n", [("", "😀".encode())]),
        (b"data:\n\n", [("", b"")]),
        (b"", []),
        (b"\n\n\n", []),
    ],
)
def test_a_stream_is_read_the_same_whole_and_byte_by_byte(stream: bytes, events: list[tuple[str, bytes]]) -> None:
    assert parse(stream) == events
    assert parse(*(stream[i : i + 1] for i in range(len(stream)))) == events


@given(
    st.lists(
        st.sampled_from(
            [b"data: a\n\n", b"data: a", b"data:", b": c", b"event: e", b"\r", b"\n", b"\r\n", b"\xef\xbb\xbf", b"x"]
        )
    ),
    st.lists(st.integers(0, 200)),
)
def test_where_the_chunks_are_cut_makes_no_difference(pieces: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(pieces)
    bounds = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    chunks = [stream[a:b] for a, b in pairwise(bounds)]
    assert parse(*chunks) == parse(stream)


@pytest.mark.parametrize("piece", [b"x", b"data: x\n", b"data: " + b"x" * 50])
def test_an_event_that_never_ends_is_refused(piece: bytes) -> None:
    parser = SSEParser(max_event_bytes=100)
    with pytest.raises(EventTooLarge, match="100 bytes"):
        for _ in range(200):
            parser.feed(piece)


def test_the_bound_is_of_one_event_not_of_the_stream() -> None:
    parser = SSEParser(max_event_bytes=100)
    count = sum(len(parser.feed(half)) for _ in range(100) for half in (b"data: xxxxxxxxxx", b"yyyy\n\n"))
    assert count == 100
