"""Doubt: how unsure a model was of a field, from the log-probabilities of the tokens that wrote it.

A rank from 0 (certain) to 1, and no probability. It is known only if the tokens can be found: joined, they must be the
answer, byte for byte, and the answer must be JSON as it was written. Otherwise it is None. Pure.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

from pydantic import JsonValue

from batch_agent.messages import TokenChance
from batch_agent.trust.gold import OUTPUT, GoldField

LONGEST = 64  # bytes of a value that is no class
CLASSES = ("class", "boolean", "integer")
DEEPEST = 64  # of the JSON of an answer
Span: TypeAlias = tuple[int, int]  # of bytes
Doubted: TypeAlias = tuple[GoldField, str]  # a field as a model writes it, and its name in the output

_SPACE = re.compile(rb"[ \t\r\n]*")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_PLAIN = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_NUMBER_CONTINUES = re.compile(rb"[\d.eE+-]")
_WHOLE_NUMBER = re.compile(rb"-?\d*")


def doubts_of(
    text: str,
    tokens: Sequence[TokenChance],
    fields: Sequence[GoldField],
    documents: Sequence[str],
    *,
    reasoned: bool = False,
) -> dict[str, float | None]:
    """Return the doubt of each field that is a class, or whose value has at most 64 bytes. ``fields`` are the fields of
    an answer that are no objects. ``documents`` are the parts of the text that may be its JSON, the likeliest first.
    ``reasoned``: the tokens may begin with a reasoning that is not in the text."""
    answer = text.encode("utf-8", "surrogatepass")
    is_text = len(fields) == 1 and _is_text(fields[0])
    spans = _span_of_text(answer) if is_text else _spans(answer, documents)
    found = _Tokens.of(answer, tokens, reasoned=reasoned)
    doubts: dict[str, float | None] = {}
    for field in fields:
        span = spans.get(field.name)
        if span is None:
            doubts[field.name] = None
            continue
        literal = answer[slice(*span)]
        quoted = not is_text and literal[:1] == b'"'
        if field.kind in CLASSES or _size(literal, quoted=quoted) <= LONGEST:
            options = _options(field, literal)
            doubts[field.name] = None if found is None else found.doubt(field, span, quoted=quoted, options=options)
    return doubts


def _size(literal: bytes, *, quoted: bool) -> int:
    """Return the size of a value in bytes. In the text it may be written with escapes."""
    return len(json.loads(literal).encode("utf-8", "surrogatepass")) if quoted else len(literal)


def _is_text(field: GoldField) -> bool:
    """Return whether the answer is plain text, which is the value of the field, and not JSON."""
    return field.name == OUTPUT and field.kind == "text" and not field.schema


def _span_of_text(answer: bytes) -> dict[str, Span]:
    begin = len(answer) - len(answer.lstrip())
    return {OUTPUT: (begin, len(answer.rstrip()))} if answer.strip() else {}


def _spans(answer: bytes, documents: Sequence[str]) -> dict[str, Span]:
    """Return the place of each value in the answer, by the name of its field."""
    for document in documents:
        part = document.encode("utf-8", "surrogatepass")
        begin = answer.rfind(part)
        reader = _Reader(answer, begin + len(part))
        if part and begin >= 0 and reader.read(begin):
            return reader.spans
    return {}


class _Reader:
    """Reads JSON and notes the place of each value, by the names of the fields around it. If a key occurs twice, the
    last value counts."""

    def __init__(self, data: bytes, end: int) -> None:
        self._data, self._end = data, end
        self.spans: dict[str, Span] = {}
        self._seen: set[str] = set()  # names of fields

    def read(self, begin: int) -> bool:
        """Read one JSON value. Returns False if it is not one, or if more text follows."""
        at = self._space(begin)
        end = self._value(at, "", DEEPEST)
        if end is None or self._space(end) != self._end:
            return False
        self.spans[OUTPUT] = self.spans.get(OUTPUT, (at, end))
        return True

    def _space(self, at: int) -> int:
        found = _SPACE.match(self._data, at, self._end)
        return at if found is None else found.end()

    def _value(self, at: int, name: str | None, depth: int) -> int | None:
        first = self._data[at : min(at + 1, self._end)]
        if first in (b"{", b"["):
            end = self._items(at, name, depth - 1, in_object=first == b"{") if depth else None
        else:
            found = (_STRING if first == b'"' else _PLAIN).match(self._data, at, self._end)
            end = None if found is None else found.end()
        if end is not None and name:
            self.spans[name] = (at, end)
        return end

    def _items(self, at: int, above: str | None, depth: int, *, in_object: bool) -> int | None:
        close = b"}" if in_object else b"]"
        at = self._space(at + 1)
        if self._data[at : at + 1] == close:
            return at + 1
        while True:
            name = None  # of an item, which is no field
            if in_object:
                key = _STRING.match(self._data, at, self._end)
                if key is None or (colon := self._space(key.end())) >= self._end or self._data[colon] != ord(":"):
                    return None
                at = self._space(colon + 1)
                name = None if above is None else self._named(above, key.group())
            end = self._value(at, name, depth)
            if end is None:
                return None
            at = self._space(end)
            mark = self._data[at : min(at + 1, self._end)]
            if mark == close:
                return at + 1
            if mark != b",":
                return None
            at = self._space(at + 1)

    def _named(self, above: str, key: bytes) -> str | None:
        """Return the name of a field, and forget an earlier value of it."""
        try:
            own = str(json.loads(key))
        except ValueError:
            return None
        if not own:
            return None
        name = f"{above}.{own}" if above else own
        if name in self._seen:
            for known in [each for each in self.spans if each == name or each.startswith(f"{name}.")]:
                del self.spans[known]
        self._seen.add(name)
        return name


def _whole(tokens: Sequence[TokenChance]) -> Sequence[TokenChance]:
    """Return the tokens without those that are only a part of a character. If the server reports the whole character
    with the last of its tokens, that token gets the product of their probabilities."""
    if all(token.text for token in tokens):
        return tokens
    whole: list[TokenChance] = []
    parts: list[float | None] = []
    for token in tokens:
        if not token.text:
            parts.append(token.logprob)
            continue
        if parts:
            known = [each for each in (*parts, token.logprob) if each is not None]
            token = TokenChance(token.text, sum(known) if len(known) > len(parts) else None)
            parts = []
        whole.append(token)
    return whole


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of an answer, with the place where each begins and ends in it. The first token may begin before the
    answer."""

    answer: bytes
    placed: Sequence[tuple[int, int, TokenChance]]

    @classmethod
    def of(cls, answer: bytes, tokens: Sequence[TokenChance], *, reasoned: bool) -> _Tokens | None:
        """Return the tokens, or None if they do not write this answer. The server may omit spaces around the answer,
        and may report the token that ends it."""
        wanted, tokens = answer.strip(), _whole(tokens)
        for count in (len(tokens), len(tokens) - 1):
            said = b"".join([token.text for token in tokens[:count]]).rstrip()
            if wanted and (said.lstrip() == wanted or (reasoned and said.endswith(wanted))):
                shift = len(answer) - len(answer.lstrip()) - (len(said) - len(wanted))
                ends = accumulate((len(token.text) for token in tokens[:count]), initial=shift)
                return cls(answer, [(*span, token) for span, token in zip(pairwise(ends), tokens, strict=False)])
        return None

    def doubt(self, field: GoldField, span: Span, *, quoted: bool, options: _Options | None) -> float | None:
        """Return the doubt of the value at these bytes; None if the probability of one of its tokens is not known."""
        begin, end = span
        if quoted and end - begin > 2:
            # The quotes are not the value's. They are with a choice: a value may be null, or begin like another.
            begin, end = begin + (not field.nullable), end - (options is None)
        likely = 1.0
        for at, until, token in self.placed:
            shows_end = options is not None and not quoted and at <= end < until  # that a number has no more digits
            if until <= begin or (at >= end and not shows_end):
                continue
            chance = None if options is None else self._share(token, at, span, options)
            if chance is None:
                # Without alternatives, the quotes and what comes after a value say nothing about it.
                if at >= span[1] - quoted or (quoted and until <= span[0] + 1):
                    continue
                chance = token.chance
            if chance is None:
                return None
            likely *= chance
        return min(1.0, max(0.0, 1.0 - likely))

    def _share(self, token: TokenChance, at: int, span: Span, options: _Options) -> float | None:
        """Return the probability of the alternatives that continue this value, divided by that of all alternatives that
        continue an allowed value. None if the server reported no alternatives."""
        others = dict(token.others)
        if token.logprob is None or not others.keys() - {token.text}:
            return None
        others.setdefault(token.text, token.logprob)
        literal = self.answer[slice(*span)]
        before = self.answer[max(0, at) : span[0]].lstrip()
        written = self.answer[span[0] : at] if at > span[0] else b""
        rest = before + literal[len(written) :]
        own = allowed = 0.0
        for text, logprob in others.items():
            said = text if written else text.lstrip()
            is_own = text == token.text or _continues(rest, said, is_number=options.is_number)
            if is_own or options.allows(before, written, said):
                chance = math.exp(min(0.0, logprob))
                own, allowed = own + chance * is_own, allowed + chance
        return own / allowed if allowed > 0 else None


@dataclass(frozen=True, slots=True)
class _Options:
    """The values that a field may have, as JSON. ``whole``: any whole number is allowed. ``is_number``: the field is a
    number."""

    literals: Sequence[bytes]
    whole: bool
    is_number: bool

    def allows(self, before: bytes, written: bytes, said: bytes) -> bool:
        """Return whether ``said`` continues an allowed value. ``written`` is the part of the value that is already in
        the answer; ``before`` is text that ``said`` must have in front of the value."""
        for literal in self.literals:
            rest = before + literal[len(written) :]
            if literal.startswith(written) and _continues(rest, said, is_number=literal[:1] not in b'"tfn'):
                return True
        if not self.whole:
            return False
        if not said.startswith(before):
            return bool(said) and before.startswith(said)
        value = said[len(before) :]
        begun = _WHOLE_NUMBER.match(value)
        digits = written + (b"" if begun is None else begun.group())
        after = value[len(digits) - len(written) :]
        ends = not after or (digits[-1:].isdigit() and _NUMBER_CONTINUES.match(after) is None)
        return bool(value) and _WHOLE_NUMBER.fullmatch(digits) is not None and ends


def _continues(rest: bytes, said: bytes, *, is_number: bool) -> bool:
    """Return whether ``said`` is the beginning of ``rest``, or is ``rest`` followed by text that may come after a
    value."""
    if not said or rest.startswith(said):
        return bool(said) and bool(rest)
    return said.startswith(rest) and not (is_number and _NUMBER_CONTINUES.match(said, len(rest)))


def _options(field: GoldField, literal: bytes) -> _Options | None:
    """Return the values that a field may have; None if they cannot be listed."""
    values: list[JsonValue] = [True, False] if field.kind == "boolean" else [*field.allowed]
    if field.kind not in CLASSES:
        return None
    if field.nullable:
        values.append(None)
    written = [
        json.dumps(value, ensure_ascii=ascii).encode("utf-8", "surrogatepass")
        for value in values
        for ascii in (False, True)
    ]
    is_number = literal[:1] not in (b'"', b"t", b"f", b"n")
    return _Options([*dict.fromkeys([literal, *written])], field.kind == "integer", is_number)
