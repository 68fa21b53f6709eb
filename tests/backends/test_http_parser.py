"""The parser of responses, without sockets: any response in any pieces, and anything that is no response."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batch_agent.http.connection import MAX_HEAD_BYTES, ResponseParser
from batch_agent.http.failures import BrokenOff, ClosedEarly, NotHttp, TooLarge, TransportError

PLENTY = 1 << 30


def parse(
    *chunks: bytes, method: str = "POST", limit: int = PLENTY, closed: bool = True
) -> tuple[ResponseParser, bytes]:
    """The response in these bytes; ``closed``: the connection ends behind them."""
    parser, body = ResponseParser(method, limit), b""
    for chunk in chunks:
        parser.feed(chunk)
        body += parser.take()
    if closed and not parser.complete:
        parser.feed_end()
        body += parser.take()
    parser.close()
    return parser, body


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


CODINGS = {
    "": lambda data: data,
    "identity": lambda data: data,
    "gzip": gzip.compress,
    "x-gzip": lambda data: gzip.compress(data[:5]) + gzip.compress(data[5:]),  # two members
    "deflate": zlib.compress,
    "Deflate": raw_deflate,
}


@dataclass(frozen=True)
class Sample:
    wire: bytes
    status: int
    headers: dict[str, str]
    body: bytes
    reusable: bool


@st.composite
def responses(draw: st.DrawFn) -> Sample:
    body = draw(st.binary(max_size=60))
    coding = draw(st.sampled_from(sorted(CODINGS)))
    packed = CODINGS[coding](body)
    framing = draw(st.sampled_from(["length", "chunked", "close"]))
    status = draw(st.sampled_from([200, 201, 400, 404, 429, 500, 503]))
    names = st.text("abcdefXYZ-", min_size=1, max_size=8).map("X-".__add__)
    headers = draw(st.dictionaries(names, st.text("abc XYZ:;=0é", max_size=10).map(str.strip), max_size=4))
    headers = {name.title(): value for name, value in headers.items()}
    if coding:
        headers["Content-Encoding"] = coding
    end = draw(st.sampled_from([b"\r\n", b"\n"]))
    if framing == "length":
        headers["Content-Length"] = str(len(packed))
    elif framing == "chunked":
        headers["Transfer-Encoding"] = "chunked"
        cuts = sorted({0, len(packed), *draw(st.lists(st.integers(0, len(packed)), max_size=4))})
        extension = draw(st.sampled_from([b"", b";a=b"]))
        trailer = draw(st.sampled_from([b"", b"X-Trailer: late\r\n"]))
        pieces = [b"%x%b\r\n%b\r\n" % (b - a, extension, packed[a:b]) for a, b in pairwise(cuts)]
        packed = b"".join(pieces) + b"0\r\n" + trailer + b"\r\n"
    keep = framing != "close" and draw(st.booleans())
    if not keep:
        headers["Connection"] = "close"
    interim = draw(
        st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n"])
    )
    lines = [f"HTTP/1.1 {status} Reason", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    wire = interim + end.join(line.encode() for line in lines) + packed
    return Sample(wire, status, headers, body, keep)


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    return [data[a:b] for a, b in pairwise(sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)}))]


@given(responses(), st.lists(st.integers(0, 1000), max_size=20))
def test_a_response_is_the_same_in_any_pieces(sample: Sample, cuts: list[int]) -> None:
    for chunks in ([sample.wire], pieces_of(sample.wire, cuts), [bytes([byte]) for byte in sample.wire]):
        parser, body = parse(*chunks)
        assert parser.complete
        assert (parser.status, parser.reason) == (sample.status, "Reason")
        assert dict(parser.headers) == sample.headers
        assert body == sample.body
        assert parser.reusable is sample.reusable


@given(
    responses(), st.integers(0, 1000), st.binary(min_size=1, max_size=30), st.lists(st.integers(0, 1000), max_size=5)
)
@example(Sample(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab", 200, {}, b"ab", True), 0, b"\x16\x03\x01", [])
def test_garbage_anywhere_is_a_transport_error_or_some_response(
    sample: Sample, place: int, garbage: bytes, cuts: list[int]
) -> None:
    place %= len(sample.wire) + 1
    wire = sample.wire[:place] + garbage + sample.wire[place:]
    try:
        parser, _ = parse(*pieces_of(wire, cuts))
    except TransportError:
        return
    assert parser.complete
    assert 200 <= parser.status <= 999


@given(responses(), st.integers(1, 1000))
def test_a_response_that_ends_early_is_broken_off(sample: Sample, missing: int) -> None:
    missing = 1 + missing % len(sample.wire)
    whole_body = "Content-Length" in sample.headers or "Transfer-Encoding" in sample.headers
    wire = sample.wire[:-missing]
    if not wire:
        with pytest.raises(ClosedEarly):
            parse(wire)
    elif whole_body:
        # A head that lost its last line end is still waited for; nothing of a body is ever guessed.
        with pytest.raises(BrokenOff):
            parse(wire)


@given(st.binary(min_size=1, max_size=200))
def test_bytes_that_are_not_http_are_a_transport_error(data: bytes) -> None:
    with pytest.raises(TransportError):
        parse(b"\x00" + data)


def test_what_follows_a_response_spoils_the_connection_and_not_the_response() -> None:
    wire = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab"
    for surplus in (b"HTTP/1.1 500 Evil\r\nX-Evil: 1\r\nContent-Length: 4\r\n\r\nevil", b"\x00garbage"):
        parser, body = parse(wire + surplus)
        assert (parser.status, body, parser.reusable) == (200, b"ab", False)
        assert "X-Evil" not in parser.headers


@pytest.mark.parametrize("status", [204, 304])
def test_a_status_without_a_body_ends_with_its_head(status: int) -> None:
    parser, body = parse(b"HTTP/1.1 %d X\r\nContent-Length: 5\r\n\r\n" % status, closed=False)
    assert (parser.complete, body, parser.reusable) == (True, b"", True)


def test_the_answer_to_head_ends_with_its_head() -> None:
    for surplus in (b"", b"body"):
        parser, body = parse(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n" + surplus, method="HEAD", closed=False)
        assert (parser.complete, body, parser.reusable) == (True, b"", False)


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 200 OK\r\n" + b"X-Long: " + b"x" * MAX_HEAD_BYTES,
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * (MAX_HEAD_BYTES // 4) + b"\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * (MAX_HEAD_BYTES // 20),
        b"HTTP/1.1 101 Switching\r\nUpgrade: other\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\nContent-Length: 1\r\n\r\nx",
    ],
    ids=["a long line", "many lines", "only interim responses", "another protocol", "an encoding not offered"],
)
def test_a_head_that_cannot_be_used_is_not_http(wire: bytes) -> None:
    for size in (len(wire), 1000):
        with pytest.raises(NotHttp):
            parse(*(wire[start : start + size] for start in range(0, len(wire), size)), closed=False)


@pytest.mark.parametrize("coding", ["", "gzip"])
def test_a_body_is_cut_at_the_limit_also_when_it_is_small_on_the_wire(coding: str) -> None:
    packed = CODINGS[coding](b"x" * 100_000)
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: %b\r\nContent-Length: %d\r\n\r\n" % (coding.encode(), len(packed))
    assert parse(head + packed, limit=100_200)[1] == b"x" * 100_000
    with pytest.raises(TooLarge, match="99,999 bytes"):
        parse(head + packed, limit=99_999)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "Deflate"])
def test_a_compressed_body_that_is_broken_is_broken_off(coding: str) -> None:
    packed = CODINGS[coding](b"some text that is packed")
    for broken in (packed[:-3], b"\xff" + packed[1:], packed + b"more"):
        head = b"HTTP/1.1 200 OK\r\nContent-Encoding: %b\r\nContent-Length: %d\r\n\r\n" % (coding.encode(), len(broken))
        with pytest.raises(BrokenOff):
            parse(head + broken)


def test_an_empty_body_needs_no_compression() -> None:
    assert parse(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 0\r\n\r\n")[1] == b""


def packed_head(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)


def test_a_body_of_many_empty_gzip_members_is_broken_off() -> None:
    body = gzip.compress(b"") * 20_000
    with pytest.raises(BrokenOff, match="members"):
        parse(packed_head(body), body)


def test_a_body_with_a_gzip_member_for_each_event_is_read() -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"word"},"finish_reason":null}]}\n\n' * 4
    body = gzip.compress(event) * 3_000
    assert parse(packed_head(body), body)[1] == event * 3_000


def test_a_body_that_unpacks_to_far_more_than_text_can_is_broken_off() -> None:
    body = gzip.compress(b"\0" * 40_000_000)
    with pytest.raises(BrokenOff, match="256 times"):
        parse(packed_head(body), body)
    small = gzip.compress(b"\0" * 1_000_000)
    assert len(parse(packed_head(small), small)[1]) == 1_000_000


def test_text_that_repeats_itself_is_read() -> None:
    text = b'{"role": "assistant", "content": "the same words again and again"}\n' * 60_000
    body = gzip.compress(text)
    assert parse(packed_head(body), body)[1] == text


def test_trailers_without_end_take_no_memory() -> None:
    parser = ResponseParser("POST", PLENTY)
    parser.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
    tracemalloc.start()
    try:
        for _ in range(100):
            parser.feed(b"X: y\r\n" * 1_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    parser.feed(b"\r\n")
    assert parser.complete and parser.take() == b"{}" and "X" not in parser.headers
    assert peak < 1_000_000  # 100,000 kept trailers take 15 times that
    parser.close()
