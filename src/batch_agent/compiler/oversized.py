"""Handles a row that does not fit the model's context: which field is too long, and what is sent instead.

The longest field is shortened, because it is nearly always the text that the task is about. It is cut to its head, or
into pieces, each of which becomes a request of its own. Each of them is marked as incomplete.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from batch_agent.compiler.tokens import BYTES_PER_TOKEN, ContextRoom, estimate_tokens

How = Literal["fail", "chunk", "truncate"]

# Tokens are estimates, and texts differ: a piece sized to fill the context would often be refused. With tools, the
# conversation also grows.
CAREFUL = 0.75
CAREFUL_WITH_TOOLS = 0.5
LEAST_TOKENS = 64  # a shorter piece is useless
MARK_TOKENS = 32  # the text around a piece

OVERLAP = 0.04  # of a piece
# The kinds of border, best first, and how far before the end of a piece each is acceptable. All are ASCII, so that
# bytes can be searched for them.
BORDERS = (
    (re.compile(rb"[\n\f](?=#{1,6}[ \t])|\f"), 0.3),
    (re.compile(rb"\n[ \t\r]*\n"), 0.25),
    (re.compile(rb"\n"), 0.2),
    (re.compile(rb"[ \t]"), 0.1),
)

AROUND_TOKENS = 8  # the text around one answer
INSTRUCTION = """\
A task was given with a text that is too long to be read at once, so the text was read in parts, which overlap a \
little, and the task was done for each part.

The task:
{task}

The answers, in the order of the parts:
{answers}

Give the one answer to the task that holds for the whole text. Keep what the answers found, in its order; say once \
what several say; where they contradict each other, the one that read the passage in question is right. Add nothing."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """The size limit of a row that is made to fit. ``max_tokens`` is the answer's limit, if set."""

    how: How
    limit: ContextRoom
    max_tokens: int | None = None
    tools: bool = False

    @property
    def room(self) -> int:
        """Return the token limit of a request, shared part included."""
        context, least = self.limit.model_max_context or 0, self.limit.min_response_tokens
        answer = max(least, min(self.max_tokens or 0, context // 2))
        return int((context - answer) * (CAREFUL_WITH_TOOLS if self.tools else CAREFUL))

    def fits(self, tokens: int) -> bool:
        return self.limit.room is None or tokens <= self.limit.room

    def cut(self, names: Sequence[str], texts: Mapping[str, str], tokens: int) -> list[dict[str, str]]:
        """Return the texts of the fields for each request that replaces one of ``tokens`` tokens; ``names`` are
        repeated as often as they occur in the task. Raises Oversized if cutting the longest field is not enough."""
        if not names:
            self.limit.check(tokens)
        name = longest(names, texts)
        text, times = texts[name], names.count(name)
        others = tokens - estimate_tokens(text) * times
        most = (self.room - others) // times - MARK_TOKENS
        if most < LEAST_TOKENS:
            self.limit.check(tokens, f"; cutting {name!r} is not enough, about {others:,} are without it")
        pieces = _headed(text, most) if self.how == "truncate" else _numbered(split(text, most))
        return [{**texts, name: piece} for piece in pieces]


def longest(names: Sequence[str], texts: Mapping[str, str]) -> str:
    """Return the field that takes the most room in the task."""
    return max(texts, key=lambda name: estimate_tokens(texts[name]) * names.count(name))


def _numbered(pieces: Sequence[str]) -> list[str]:
    return [f"[Part {number} of {len(pieces)}]\n{piece}" for number, piece in enumerate(pieces, start=1)]


def _headed(text: str, most: int) -> list[str]:
    kept = head(text, most)
    left = estimate_tokens(text[len(kept) :])
    return [f"{kept.rstrip()}\n[Cut here to fit: about {left:,} tokens more are left out.]"]


# The best border near the end of a piece is a heading, then a blank line, the end of a line, a space; a text without
# any is cut between two characters. Each piece except the first starts with the end of the previous one, so that a
# passage across a border is complete in one of them. The pieces have about the same length, because a batch waits for
# its longest piece.
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


def merge_prompt(task: str, answers: Sequence[str]) -> str:
    numbered = (f"<answer part={number}>\n{answer}\n</answer>" for number, answer in enumerate(answers, start=1))
    return INSTRUCTION.format(task=task, answers="\n".join(numbered))


def groups(answers: Sequence[str], room: int) -> list[Sequence[str]]:
    """Return the groups of answers that fit into ``room`` tokens each."""
    grouped: list[list[str]] = []
    used = 0
    for answer in answers:
        tokens = estimate_tokens(answer) + AROUND_TOKENS
        if not grouped or (used + tokens > room and len(grouped[-1]) > 1):
            grouped.append([])
            used = 0
        grouped[-1].append(answer)
        used += tokens
    if len(grouped) > 1 and len(grouped[-1]) == 1:
        grouped[-2] += grouped.pop()
    return [*grouped]
