"""Splits a long text into pieces at natural borders, with a small overlap.

The best border near the end of a piece is a heading, then a blank line, the end of a line, a space; a text without any
is cut between two characters. Each piece except the first starts with the end of the previous one, so that a passage
across a border is complete in one of them. The pieces have about the same length, because a batch waits for its longest
piece.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from batch_agent.compiler.tokens import BYTES_PER_TOKEN

OVERLAP = 0.04  # of a piece
# The kinds of border, best first, and how far before the end of a piece each is acceptable. All are ASCII, so that
# bytes can be searched for them.
BORDERS = (
    (re.compile(rb"[\n\f](?=#{1,6}[ \t])|\f"), 0.3),
    (re.compile(rb"\n[ \t\r]*\n"), 0.25),
    (re.compile(rb"\n"), 0.2),
    (re.compile(rb"[ \t]"), 0.1),
)


def split(text: str, most_tokens: int) -> list[str]:
    """Return pieces of at most ``most_tokens`` estimated tokens; the text itself if it is short enough."""
    most = most_tokens * BYTES_PER_TOKEN
    if most < 8:
        raise ValueError("a piece has at least a few tokens")
    data = text.encode()
    return [data[start:end].decode() for start, end in _pieces(data, most)]


def head(text: str, most_tokens: int) -> str:
    """Return the first piece, which ends at a border."""
    data = text.encode()
    most = max(0, most_tokens) * BYTES_PER_TOKEN
    return text if len(data) <= most else data[: _border(data, 0, most)].decode()


def _pieces(data: bytes, most: int) -> Iterator[tuple[int, int]]:
    overlap = int(most * OVERLAP)
    start = end = 0
    while True:
        left = len(data) - start
        if left <= most:
            yield start, len(data)
            return
        # Divide the rest evenly, with room for better borders further on.
        count = -(-(left - overlap) // (most - overlap))
        even = (left - overlap) // count + overlap
        end = _border(data, start, min(most, even + int(most * OVERLAP)))
        yield start, end
        start = _overlapping(data, start, end, overlap)


def _border(data: bytes, start: int, most: int) -> int:
    """Return the end of the piece that begins at ``start``: after the last of the best borders near its end."""
    limit = start + most
    for pattern, reach in BORDERS:
        ends = [found.end() for found in pattern.finditer(data, limit - int(most * reach), limit)]
        if ends:
            return ends[-1]
    return _between_characters(data, limit)


def _overlapping(data: bytes, start: int, end: int, overlap: int) -> int:
    """Return the start of the next piece: the first line or word within ``overlap`` of this one's end."""
    earliest = _between_characters(data, max(start + 1, end - overlap))
    for border in (b"\n", b" "):
        found = data.find(border, earliest, end)
        if found >= 0:
            return found + 1
    return earliest if earliest > start else end


def _between_characters(data: bytes, at: int) -> int:
    while at < len(data) and data[at] & 0xC0 == 0x80:  # the middle of a character
        at -= 1
    return at
