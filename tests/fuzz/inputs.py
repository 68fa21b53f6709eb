"""Inputs for the targets: entries of the corpus, changed in a few places."""

from __future__ import annotations

from hypothesis import strategies as st
from tests.fuzz.targets import corpus

# Pieces that readers treat specially, somewhere.
WORDS = [
    *(b"\r\n", b"\n\n", b"\r", b"\0", b"\xef\xbb\xbf", b"\xff", b"\xed\xa0\x80", b"\\ud800", b'"', b"'", b"\\", b"```"),
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b"{}",
        b"[]",
        b",",
        b":",
        b"null",
        b"true",
        b"NaN",
        b"-1",
        b"1e999",
        b"9" * 30,
        b"<think>",
    ),
    *(b"data: ", b"event: ", b"0\r\n\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"gzip"),
    *(b"[" * 300, b'{"a":' * 300, b"- " * 200, b"&a ", b"*a", b"<<: ", b"!!python/object:x", b"\t"),
]
BYTES = st.sampled_from(WORDS) | st.binary(max_size=8)
EDITS = st.lists(
    st.tuples(st.sampled_from(["insert", "replace", "delete", "repeat"]), st.integers(0, 1 << 16), BYTES), max_size=6
)


@st.composite
def inputs(draw: st.DrawFn, name: str) -> bytes:
    entries = corpus(name)
    data = draw(st.sampled_from(entries)) if draw(st.integers(0, 9)) else draw(st.binary(max_size=64))
    if not draw(st.integers(0, 4)):
        data += draw(st.sampled_from(entries))
    for edit, place, piece in draw(EDITS):
        at = place % (len(data) + 1)
        match edit:
            case "insert":
                data = data[:at] + piece + data[at:]
            case "replace":
                data = data[:at] + piece + data[at + len(piece) :]
            case "delete":
                data = data[:at] + data[at + max(1, len(piece)) :]
            case "repeat":
                data = data[:at] + data[at : at + 16] * 3 + data[at + 16 :]
    return data
