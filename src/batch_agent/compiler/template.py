"""The task template: decides which braces are fields and which are text, and fills the fields.

A brace pair is a field if it contains an identifier, ``{path}``, a place in a field's data, ``{user.name}`` or
``{items[0]}``, or exactly the name of a field of the first input, ``{First Name}``. A field that the input does not
have is an error, because it is nearly always a misspelling. So are words that differ from a field's name only in case,
spaces or a few letters: ``{first name}``, ``{ path }``, ``{Frist Name}``. Every other brace is text: ``{"a": {"b":
1}}``, ``{}``, ``{a: b}``, ``{ x }`` without a field ``x`` are sent as written.

Doubled braces stand for single ones, as in ``str.format``: ``{{"a": 1}}`` and ``{{other}}`` are literal. Braces count
as doubled if two adjacent ones open and two adjacent ones close the same range, or if neither of two adjacent ones has
a partner. So the ``}}`` that closes two nested JSON objects stays two braces. Values are inserted once and never
parsed: a brace in a value is text.

A construct of another template language is an error, not text: ``{{ text }}`` if ``text`` is a field, ``{stars:>5}``,
``{text!r}``, ``{% for … %}``. So a template that ``str.format`` accepts means the same here or is refused.
So is ``{text`` without a closing brace.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from batch_agent.compiler.fields import PATH, listed, text_of, value_of
from batch_agent.errors import SpecError

_BRACE = re.compile(r"[{}]")
# What str.format accepts after a field's name: a conversion, a format or both. Other words after a colon are text.
_FORMAT = re.compile(r"(![rsa])?(:(.?[<>=^])?[-+ ]?z?#?0?\d*[,_]?(\.\d+)?[bcdeEfFgGnosxX%]?)?")
_WORDS = re.compile(r"[^\n\"'`:;,=<>{}]{1,80}")  # possible names; JSON and code contain other characters too
_BETWEEN = re.compile(r"[\W_]+")
RESEMBLES = 0.8  # share of equal letters above which a name of at least LEAST letters counts as misspelt
LEAST = 4
Partners = dict[int, int | None]
Piece = tuple[str, bool]  # a part of a prompt, and whether it was filled in


class TaskTemplate(Protocol):
    """A task, ready for rows. ``names`` are the fields it uses, ``head`` is the text before the first one."""

    @property
    def names(self) -> Collection[str]: ...
    @property
    def head(self) -> str: ...
    def render(self, fields: Mapping[str, object]) -> str:
        """Return one row's message. Raises InputError."""

    def pieces(self, fields: Mapping[str, object]) -> Sequence[Piece]:
        """Return the message of one row in pieces, of which the filled-in values are marked."""


@dataclass(frozen=True, slots=True)
class Template:
    """Literal text and field names in turn: ``literals[0] names[0] literals[1] … names[-1] literals[-1]``."""

    literals: tuple[str, ...]
    names: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, fields: Collection[str]) -> Template:
        """Parse a task. Raises SpecError for a name in braces that is not in ``fields``, those of the first input."""
        partners = _partners(text)
        kept, dropped = _doubled(text, partners)
        _refuse_doubled_fields(text, partners, kept, fields)
        lone = {at for at, partner in partners.items() if partner is None} - kept - dropped
        _refuse_unclosed(text, lone, fields)
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
                    _refuse_half_doubled(text, at, close, lone)
                    literals[-1] += text[done:at]
                    literals.append("")
                    names.append(name)
                    done = close + 1
        literals[-1] += text[done:]
        return cls(tuple(literals), tuple(names))

    def fill(self, values: Sequence[str]) -> str:
        """Return the text with one value for each of ``names``, in order."""
        parts = [""] * (2 * len(self.names) + 1)
        parts[::2] = self.literals
        parts[1::2] = values
        return "".join(parts)

    @property
    def head(self) -> str:
        return self.literals[0]

    def render(self, fields: Mapping[str, object]) -> str:
        return self.fill([text_of(name, value_of(fields, name)) for name in self.names])

    def pieces(self, fields: Mapping[str, object]) -> Sequence[Piece]:
        return list(self._pieces(fields))

    def _pieces(self, fields: Mapping[str, object]) -> Iterator[Piece]:
        yield self.literals[0], False
        for name, literal in zip(self.names, self.literals[1:], strict=True):
            yield text_of(name, value_of(fields, name)), True
            yield literal, False

    def bind(self, values: Mapping[str, str]) -> Template:
        """Return the template with some fields filled in permanently."""
        literals, names = [self.literals[0]], []
        for name, literal in zip(self.names, self.literals[1:], strict=True):
            if name in values:
                literals[-1] += values[name] + literal
            else:
                names.append(name)
                literals.append(literal)
        return Template(tuple(literals), tuple(names))


def _partners(text: str) -> Partners:
    """Return the position of each brace, in order, with the position of its partner; None if it has none."""
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
    """Return two sets of positions: of braces that stand for a literal brace, and of braces that only double another
    one and are dropped."""
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


def _refuse_doubled_fields(text: str, partners: Partners, kept: set[int], fields: Collection[str]) -> None:
    """Raise SpecError for ``{{ text }}`` if ``text`` is a field: in other template languages this is a field.
    ``{{{{text}}}}`` writes it literally."""
    for at in sorted(kept):
        close = partners[at]
        if close is None or text[at] != "{" or text[at - 1 : at] == "{":
            continue
        inside, _, _ = text[at + 2 : close - 1].partition("|")  # Jinja's filters follow a bar
        name = inside.strip()
        path = PATH.fullmatch(name)
        if name and (path[1] if path else name) in fields:
            raise SpecError(
                f"task has {text[at : close + 1]}, and doubled braces are text here: write {{{name}}} to fill in the "
                f"field. (template='jinja' reads the task as a Jinja template; {{{{{{{{{name}}}}}}}}} sends "
                f"{{{{{name}}}}}, and the system prompt is never filled in.)"
            )


def _refuse_unclosed(text: str, lone: Collection[int], fields: Collection[str]) -> None:
    """Raise SpecError for ``{text`` without a closing brace: the value of the row would not be sent."""
    names = sorted(filter(None, fields), key=len, reverse=True)
    for at in sorted(lone):
        name = next((name for name in names if text[at] == "{" and _begins_with(text[at + 1 :], name)), None)
        if name is not None:
            raise SpecError(
                f"task has {{{name} without a closing brace: write {{{name}}} to fill in the field ({{{{{name} sends "
                f"the brace as text)"
            )


def _begins_with(text: str, name: str) -> bool:
    return text.startswith(name) and re.match(r"\w", text[len(name) :]) is None


def _refuse_half_doubled(text: str, at: int, close: int, lone: Collection[int]) -> None:
    """Raise SpecError for ``{{text}`` and ``{text}}``, in which one brace has no partner."""
    if at - 1 in lone or close + 1 in lone:
        written = text[at - (at - 1 in lone) : close + 1 + (close + 1 in lone)]
        raise SpecError(f"task has {written}: write {text[at : close + 1]} to fill in the field")


def _is_field(name: str, fields: Collection[str]) -> bool:
    if "{" in name or not name:
        return False
    if name in fields:
        return True
    path = PATH.fullmatch(name)
    root = path[1] if path else name
    if root in fields:
        return True
    if root.isidentifier():
        near = _nearest(root, fields, 0.6)
        _refuse_unknown(name, root, near and near + name.removeprefix(root), fields)
    _refuse_other_languages(name, fields)
    if _WORDS.fullmatch(name) and (near := _nearest(name, fields, RESEMBLES)):
        _refuse_unknown(name, name, near, fields)
    return False


def _nearest(name: str, fields: Collection[str], cutoff: float) -> str:
    """Return the field with the same letters and digits; else a field with mostly the same letters; else ""."""
    plain = {_plain(field): field for field in fields}
    if (same := plain.get(_plain(name))) is not None and _plain(name):
        return same
    long_enough = [field for field in plain if len(field) >= LEAST or cutoff < RESEMBLES]
    near = difflib.get_close_matches(_plain(name), long_enough, n=1, cutoff=cutoff)
    return plain[near[0]] if near else ""


def _plain(name: str) -> str:
    return _BETWEEN.sub("", name).casefold()


def _refuse_unknown(name: str, unknown: str, near: str, fields: Collection[str]) -> NoReturn:
    hint = f"Did you mean {{{near}}}? " if near else ""
    raise SpecError(
        f"task names the field {{{unknown}}}, which the first input does not have (its fields: {listed(fields)}). "
        f"{hint}Write {{{{{name}}}}} to send the braces as text."
    )


def _refuse_other_languages(inside: str, fields: Collection[str]) -> None:
    literally = f"{{{{{inside}}}}} sends the braces as text"
    if len(inside) > 1 and inside[0] == inside[-1] == "%":
        raise SpecError(f"task has {{{inside}}}, which is Jinja: say template='jinja' ({literally})")
    at = min((inside.index(mark) for mark in "!:" if mark in inside), default=0)
    name = inside[:at]
    root = path[1] if (path := PATH.fullmatch(name)) else name
    if root in fields and _FORMAT.fullmatch(inside, at):
        raise SpecError(
            f"task has {{{inside}}}, and values go in as they are: write {{{name}}}, and give the rows the value as it "
            f"is to be read ({literally})"
        )
