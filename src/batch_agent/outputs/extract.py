"""Finds where in a model's text the answer may be: after its reasoning, in a code fence, or in prose.

This file only cuts text out and changes none of it; ``validate`` decides whether a part is the answer. All scans are
linear, even on adversarial text.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from batch_agent.errors import OutputError

_REASONING = re.compile(r"\s*<(think|thinking|reasoning)>.*?</\1>", re.DOTALL | re.IGNORECASE)
_UNCLOSED = re.compile(r"\s*<(?:think|thinking|reasoning)>", re.IGNORECASE)
# Some chat templates open the block in the prompt, so that the answer contains only its end, on its own line.
_REASONING_END = re.compile(r"^[ \t]*</(?:think|thinking|reasoning)>[ \t]*$", re.MULTILINE | re.IGNORECASE)
_FENCE = re.compile(r"^[ \t]*```([^\n`]*)$", re.MULTILINE)
# A bracket that JSON or near-JSON can start with; not those of prose, "[see below]" or "{name}".
_OPENING = re.compile(r"""\{\s*+(?:["'}/]|\w++\s*+:)|\[\s*+(?:["'\[\]{/\d-]|(?:true|false|null)\b)""")
# Tokens of near-JSON: strings, brackets, commas and colons, Python's words. A single quote starts a string only where a
# key or a value may be, and ends it only where the structure continues: others are apostrophes.
TOKEN = re.compile(
    r"""
      "(?:[^"\\]++|\\.)*+"?
    | (?P<mark>[{\[,:]) (?:\s*+'(?P<single>(?:[^'\\]++|\\.|'(?!\s*+(?:[,:}\]]|\Z)))*+)(?P<end>'?))?+
    | [}\]]
    | \b(?:True|False|None)\b
    """,
    re.DOTALL | re.VERBOSE,
)
_LONE_FENCE = re.compile(r"\s*```[^\n`]*\n(.*)\n[ \t]*```\s*", re.DOTALL)
# Characters between prose and JSON that belong to neither: space, and marks of quotation, code and emphasis.
_LEFT_MARKS, _RIGHT_MARKS = " \t\r`*_\"'({[", " \t\r`*_\"')}]"
_LED_TO = re.compile(r"(?:[:=>]|```\w*)\Z")  # "Here it is:", "answer =", "<answer>", a fence
_SENTENCE_END = re.compile(r"[.!?\u2026]\Z")
_GOES_ON = re.compile(r"(?!\n|</|[.;!](?:\s|\Z)|\Z)")


@dataclass(frozen=True, slots=True)
class Region:
    """An outermost object or array in a text, or a part that looks like one. ``depth`` is its deepest nesting.
    ``apart``: it is not part of a sentence."""

    text: str
    depth: int
    apart: bool


def strip_reasoning(text: str) -> str:
    """Return the text after its leading reasoning blocks. Raises OutputError if a block is never closed: the model was
    still thinking, and its thoughts are not an answer."""
    end = 0
    while block := _REASONING.match(text, end):
        end = block.end()
    if end == 0 and (closing := _REASONING_END.search(text)):
        end = closing.end()
    if opening := _UNCLOSED.match(text, end):
        raise OutputError(f"there is reasoning and no answer: {opening[0].strip()} is never closed")
    return text[end:].strip() if end else text


def fences(text: str) -> list[str]:
    """Return the contents of the code fences. A fence cannot be part of valid JSON: its strings have no newlines."""
    contents: list[str] = []
    start: int | None = None
    for line in _FENCE.finditer(text):
        if start is None:
            start = line.end()
        elif not line[1].strip():
            contents.append(text[start : line.start()].strip())
            start = None
    return contents


def last_regions(text: str, limit: int) -> list[Region]:
    """Return the outermost bracketed regions that may be JSON, the last one first. The inside of a region is never
    returned by itself, even if the whole region does not parse: a part of an answer is not an answer. The last region
    may be incomplete."""
    found = deque(_regions(text), maxlen=limit)
    return [Region(text[start:end], depth, _stands_apart(text, start, end)) for start, end, depth in reversed(found)]


def documents_in(text: str) -> list[str]:
    """Return the parts of a text that are read as the answer without repair: the whole text, the text after its
    reasoning, and the content of a code fence if that text is one fence."""
    found = [text.strip().removeprefix("\ufeff")]
    with suppress(OutputError):
        found.append(strip_reasoning(found[0]))
        found.append(lone_fence(found[1]) or "")
    return found


def lone_fence(text: str) -> str | None:
    """Return the content of a code fence that is the whole text."""
    whole, contents = _LONE_FENCE.fullmatch(text), fences(text)
    return contents[0] if whole is not None and contents == [whole[1].strip()] else None


def _regions(text: str) -> Iterator[tuple[int, int, int]]:
    """Yield start, end and depth of each region."""
    at = 0
    while opening := _OPENING.search(text, at):
        start = opening.start()
        at, depth = _end(text, start)
        yield start, at, depth


def _stands_apart(text: str, start: int, end: int) -> bool:
    """Return whether the region is not part of a sentence. For that it must begin the text or follow a colon, or stand
    on its own lines, after the end of a sentence or at the end of the text; and its line or sentence must end with
    it."""
    after = text[end:].lstrip(_RIGHT_MARKS)
    if _GOES_ON.match(after):
        return False
    before = text[:start].rstrip(_LEFT_MARKS)
    said = before.rstrip()
    if not said or _LED_TO.search(said.rstrip(_LEFT_MARKS)):
        return True
    own_line = before.endswith("\n")
    return own_line and (_SENTENCE_END.search(said) is not None or not after.strip(" \r\n.;!"))


def _end(text: str, start: int) -> tuple[int, int]:
    """Return where the bracket at ``start`` is closed, or the end of the text if it is not; and the deepest nesting."""
    depth = deepest = 0
    for token in TOKEN.finditer(text, start):
        first = token[0][0]
        if first in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif first in "}]":
            depth -= 1
            if depth == 0:
                return token.end(), deepest
    return len(text), deepest
