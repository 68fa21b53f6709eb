"""The task template: which braces are fields, which are text, and filling them.

A brace pair is a field when what stands between is an identifier, ``{path}``, or exactly the name of a field of the
first input, ``{First Name}``. An identifier that the input does not have is an error, because it is nearly always a
misspelling. Every other brace is text: ``{"a": {"b": 1}}``, ``{}``, ``{a.b}``, ``{ x }`` are sent as written.

Doubled braces stand for single ones, as in ``str.format``: ``{{name}}`` and ``{{"a": 1}}`` are literal. Braces count as
doubled when two adjacent ones open and two adjacent ones close the same stretch, or when neither of two adjacent ones
has a partner. So the ``}}`` that closes two nested JSON objects stays two braces, and a template of names and doubled
braces that ``str.format`` accepts means the same here. Values are inserted once and never looked at: a brace in a value
is text.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from batch_agent.compiler.fields import listed
from batch_agent.errors import SpecError

_BRACE = re.compile(r"[{}]")
Partners = dict[int, int | None]


@dataclass(frozen=True, slots=True)
class Template:
    """Literal text and field names in turn: ``literals[0] names[0] literals[1] … names[-1] literals[-1]``."""

    literals: tuple[str, ...]
    names: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, fields: Collection[str]) -> Template:
        """SpecError for an identifier in braces that is not one of ``fields``, those of the first input."""
        partners = _partners(text)
        kept, dropped = _doubled(text, partners)
        literals, names = [""], []
        done = 0
        for at, close in partners.items():
            if at < done:
                continue
            if at in dropped:
                literals[-1] += text[done:at]
                done = at + 1
            elif close is not None and at < close and at not in kept:
                name = text[at + 1 : close]
                if _is_field(name, fields):
                    literals[-1] += text[done:at]
                    literals.append("")
                    names.append(name)
                    done = close + 1
        literals[-1] += text[done:]
        return cls(tuple(literals), tuple(names))

    def fill(self, values: Sequence[str]) -> str:
        """The text with one value for each of ``names``, in their order."""
        parts = [""] * (2 * len(self.names) + 1)
        parts[::2] = self.literals
        parts[1::2] = values
        return "".join(parts)

    def bind(self, values: Mapping[str, str]) -> Template:
        """The template with some fields filled in for good."""
        literals, names = [self.literals[0]], []
        for name, literal in zip(self.names, self.literals[1:], strict=True):
            if name in values:
                literals[-1] += values[name] + literal
            else:
                names.append(name)
                literals.append(literal)
        return Template(tuple(literals), tuple(names))


def _partners(text: str) -> Partners:
    """Each brace's position, in order, with the position of the brace it opens or closes, if there is one."""
    partners: Partners = {}
    open_at: list[int] = []
    for match in _BRACE.finditer(text):
        at = match.start()
        partners[at] = None
        if match[0] == "{":
            open_at.append(at)
        elif open_at:
            opening = open_at.pop()
            partners[at], partners[opening] = opening, at
    return partners


def _doubled(text: str, partners: Partners) -> tuple[set[int], set[int]]:
    """The braces that stand for a literal brace, and those that go because they only double one."""
    kept: set[int] = set()
    dropped: set[int] = set()
    for at, partner in partners.items():
        beside = at + 1
        if at in kept or at in dropped or beside not in partners or text[at] != text[beside]:
            continue
        inner = partners[beside]
        if partner is None and inner is None:
            kept.add(at)
            dropped.add(beside)
        elif partner is not None and inner is not None and at < inner == partner - 1:
            kept.update((at, inner))
            dropped.update((beside, partner))
    return kept, dropped


def _is_field(name: str, fields: Collection[str]) -> bool:
    if "{" in name or not name:
        return False
    if name in fields:
        return True
    if not name.isidentifier():
        return False
    near = difflib.get_close_matches(name, fields, n=1)
    hint = f"Did you mean {{{near[0]}}}? " if near else ""
    raise SpecError(
        f"task names the field {{{name}}}, which the first input does not have (its fields: {listed(fields)}). "
        f"{hint}Write {{{{{name}}}}} to send the braces as text."
    )
