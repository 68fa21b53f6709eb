"""Where in a model's text the answer may be: after its reasoning, in a code fence, or amid prose.

Everything here cuts text out and changes none of it; whether a cutting is the answer is for ``validate`` to say. All
scans are linear, also on text that was made to hurt.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from batch_agent.errors import OutputError

_REASONING = re.compile(r"\s*<(think|thinking|reasoning)>.*?</\1>", re.DOTALL | re.IGNORECASE)
_UNCLOSED = re.compile(r"\s*<(?:think|thinking|reasoning)>", re.IGNORECASE)
# Some chat templates open the block in the prompt, so that the answer has only its end, on a line of its own.
_REASONING_END = re.compile(r"^[ \t]*</(?:think|thinking|reasoning)>[ \t]*$", re.MULTILINE | re.IGNORECASE)
_FENCE = re.compile(r"^[ \t]*```([^\n`]*)$", re.MULTILINE)
# A bracket that JSON, or something meant to be JSON, can begin with; not the ones of prose, "[see below]" or "{name}".
_OPENING = re.compile(r"""\{\s*+(?:["'}/]|\w++\s*+:)|\[\s*+(?:["'\[\]{/\d-]|(?:true|false|null)\b)""")
# What nearly-JSON is made of: strings, brackets, commas and colons, words of Python. A single quote begins a string
# only where a key or a value may stand, and ends it only where the structure goes on: others are apostrophes.
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
# What may stand between prose and JSON that is no part of it: space, and the marks of quotations, code and emphasis.
_LEFT_MARKS, _RIGHT_MARKS = " \t\r`*_\"'({[", " \t\r`*_\"')}]"
_LED_TO = re.compile(r"(?:[:=>]|```\w*)\Z")  # "Here it is:", "answer =", "<answer>", a fence
_SENTENCE_END = re.compile(r"[.!?\u2026]\Z")
_GOES_ON = re.compile(r"(?!\n|</|[.;!](?:\s|\Z)|\Z)")


@dataclass(frozen=True, slots=True)
class Region:
    """An outermost object or array in a text, or what looks like one. ``depth`` is its deepest nesting. ``apart`` says
    that it is no part of a sentence."""

    text: str
    depth: int
    apart: bool


def strip_reasoning(text: str) -> str:
    """The text after the reasoning blocks it begins with. An OutputError where a block is opened and never closed:
    the model was still thinking, and what it thought is not what it answers."""
    end = 0
    while block := _REASONING.match(text, end):
        end = block.end()
    if end == 0 and (closing := _REASONING_END.search(text)):
        end = closing.end()
    if opening := _UNCLOSED.match(text, end):
        raise OutputError(f"there is reasoning and no answer: {opening[0].strip()} is never closed")
    return text[end:].strip() if end else text


def fences(text: str) -> list[str]:
    """The contents of the code fences. A fence's lines cannot be part of valid JSON: its strings have no newlines."""
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
    """The outermost bracketed stretches that may be JSON, the last one first.

    What stands inside one is never offered by itself, even when the whole does not parse: a part of an answer is not
    an answer. The last one may lack its end.
    """
    found = deque(_regions(text), maxlen=limit)
    return [Region(text[start:end], depth, _stands_apart(text, start, end)) for start, end, depth in reversed(found)]


def lone_fence(text: str) -> str | None:
    """The content of the code fence that is the whole text."""
    whole, contents = _LONE_FENCE.fullmatch(text), fences(text)
    return contents[0] if whole is not None and contents == [whole[1].strip()] else None


def _regions(text: str) -> Iterator[tuple[int, int, int]]:
    """Start, end and depth of each."""
    at = 0
    while opening := _OPENING.search(text, at):
        start = opening.start()
        at, depth = _end(text, start)
        yield start, at, depth


def _stands_apart(text: str, start: int, end: int) -> bool:
    """Whether no sentence goes on around what stands there. It begins the text, or a colon leads to it, or it has lines
    of its own, after the end of a sentence or at the end of the text; and its line or sentence ends with it."""
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
    """Where the bracket that opens at ``start`` is closed, or the end of the text; and the deepest nesting."""
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
