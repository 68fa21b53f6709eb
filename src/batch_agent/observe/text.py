"""Formats the numbers and foreign texts of a run for people.

Text from models, servers and inputs is shown as plain characters: it can neither move the cursor, nor colour the
screen, nor change the direction of a line.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO

from batch_agent.money import dollars as dollars

_BARE_SECONDS = 10
LONG_WORD = 20  # characters
GAP = 2  # spaces between two columns


def harmless(text: str, limit: int | None = None) -> str:
    r"""Return ``text`` on one line, with unprintable characters escaped (``\x1b``), cut to ``limit`` characters."""
    if limit is not None and len(text) > limit:
        text = text[: max(0, limit - 1)] + "…"
    if text.isprintable():
        return text
    return "".join(map(_visible, text))


def harmless_lines(text: str) -> str:
    """Return text of several lines with unprintable characters escaped."""
    return "\n".join(harmless(line.replace("\t", "    ")) for line in text.split("\n"))


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    if character.isspace() and character not in "\x1c\x1d\x1e\x1f\x85":
        return " "
    return character.encode("unicode_escape").decode("ascii")


def duration(seconds: float) -> str:
    """Return seconds as text: ``0.8 s``, ``1:05``, ``2:01:05``."""
    return f"{seconds:.1f} s" if seconds < _BARE_SECONDS else clock(seconds)


def clock(seconds: float) -> str:
    """Return seconds as text: ``0:08``, ``1:05``, ``2:01:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def amount(number: int) -> str:
    """Return a count in few characters: ``999``, ``12.3k``, ``4.56M``."""
    value = float(number)
    for unit in ("", "k", "M", "G"):
        if value < 999.5 or unit == "G":
            break
        value /= 1000
    return f"{value:.3g}{unit}" if unit else str(number)


def rate(rows_per_second: float) -> str:
    """Return rows per second, or per minute if that is more readable."""
    if rows_per_second <= 0:
        return "- rows/s"
    if rows_per_second < 1:
        return f"{rows_per_second * 60:.2g} rows/min"
    return f"{rows_per_second:.3g} rows/s" if rows_per_second < 1000 else f"{rows_per_second:,.0f} rows/s"


def share(part: int, whole: int) -> str:
    return f"{100 * part // whole} %" if whole else "0 %"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 turn``, ``2,000 turns``, ``3 retries``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def rows(number: int) -> str:
    return counted(number, "row")


def cut(text: str, width: int) -> str:
    """Return the words of ``text`` that fit into ``width`` characters; ``…`` replaces the rest. Only a very long word,
    such as an address, is cut within."""
    if len(text) <= width:
        return text
    head = text[: max(0, width - 1)]
    whole, _, torn = head.rpartition(" ")
    kept = whole if whole.strip() and len(torn) <= LONG_WORD and text[len(head)] != " " else head
    return kept.rstrip() + "…"[:width]


def table(
    heads: Sequence[str], lines: Iterable[Sequence[str]], *, width: int | None = None, numbers: int | None = None
) -> str:
    """Return the cells in columns. Columns from ``numbers`` on are aligned at the right. The last cell of a line that
    is longer or shorter than the heads may have any length. Lines are cut to ``width``, the first column before
    others."""
    lines = [heads, *lines]
    sized = [line if len(line) == len(heads) else line[:-1] for line in lines]
    sizes = [max(len(line[place]) for line in sized if place < len(line)) for place in range(len(heads))]
    if width is not None:
        sizes[0] = min(sizes[0], max(len(heads[0]), width - sum(sizes[1:]) - GAP * len(sizes[1:])))
    aligned = [str.ljust if numbers is None or place < numbers else str.rjust for place in range(len(heads))]
    made = []
    for line, own in zip(lines, sized, strict=True):
        cells = [align(cut(cell, size), size) for align, cell, size in zip(aligned, own, sizes, strict=False)]
        made.append((" " * GAP).join([*cells, *line[len(own) :]]).rstrip())
    return "\n".join(line if width is None else cut(line, width) for line in made)


def wrapped(text: str, width: int | None, indent: int = 2) -> str:
    """Return ``text`` with lines broken between words. Continuation lines are indented by ``indent`` more, or below the
    words of a ``  label    words`` line. Words are never split, so that a path can be copied."""
    if width is None:
        return text
    lines = []
    for line in text.split("\n"):
        start = len(line) - len(line.lstrip())
        words = line.strip().partition("  ")[2].lstrip()
        if start and words:
            start = line.index(words) - indent
        margin = " " * (start + indent)
        lines += textwrap.wrap(
            line,
            max(width, len(margin) + 20),
            subsequent_indent=margin,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
            drop_whitespace=True,
        ) or [""]
    return "\n".join(lines)


def terminal_width(stream: TextIO) -> int | None:
    """Return the width of the terminal; None without a terminal, or if its width is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None if stream.isatty() else None
    except (OSError, ValueError):
        return None
