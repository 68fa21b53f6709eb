"""``python docs/words.py``: lists phrases of ``docs/words.txt`` in the prose of the source and of the documentation.

The prose of a Python file is its comments and strings. Paths in ``NOT_YET`` are not checked until they are rewritten.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
ALLOWED = "words: ok"
# CONTRIBUTING.md quotes such phrases as examples, and CHANGELOG.md records the past.
CHECKED = ("src", "docs", "design", "ARCHITECTURE.md", "README.md")
NOT_YET: tuple[str, ...] = ()
_CODE = re.compile(r"``.*?``|`[^`\n]*`", re.DOTALL)
_STRINGS = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))


def phrases(text: str) -> Mapping[str, str]:
    """Return the refused phrases of a list, in lower case, with what to write instead."""
    pairs = (line.partition("=") for line in text.splitlines() if line.strip() and not line.startswith("#"))
    return {phrase.strip().lower(): advice.strip() for phrase, _, advice in pairs}


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments and strings of a Python file, or the text of a page, with their first lines."""
    source = path.read_text()
    if path.suffix == ".py":
        lines = source.splitlines()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in _STRINGS and ALLOWED not in lines[token.end[0] - 1]:
                yield token.start[0], token.string
        return
    fenced = False
    for number, line in enumerate(source.splitlines(), start=1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and ALLOWED not in line:
            yield number, line


def found(path: Path, refused: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each refused phrase in the file."""
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, refused))})\b", re.IGNORECASE)
    for number, text in prose(path):
        # Code keeps its length and line breaks, so that positions stay right; a phrase may continue on the next line.
        words = _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)
        for match in pattern.finditer(re.sub(r"\n[ #]*", lambda gap: " " * len(gap[0]), words)):
            at, phrase = number + text.count("\n", 0, match.start()), match[0].lower()
            yield f"{path}:{at}: {match[0]!r}: write {refused[phrase]}"


def checked(root: Path = ROOT) -> Iterator[Path]:
    """Yield the files to check."""
    left_out = tuple(root / name for name in NOT_YET)
    for name in CHECKED:
        place = root / name
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.suffix in (".py", ".md") and not any(path.is_relative_to(skipped) for skipped in left_out):
                yield path


def main() -> None:
    refused = phrases(Path(__file__).with_suffix(".txt").read_text())
    if problems := [line for path in checked() for line in found(path, refused)]:
        sys.exit("\n".join(problems) + "\n\nThe list is docs/words.txt; CONTRIBUTING.md has examples.")


if __name__ == "__main__":
    main()
