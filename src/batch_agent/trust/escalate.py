"""Which answers of an entry of a cascade escalate to the next entry: a rule such as ``doubt > 0.3 or output.unsure``.

A rule is a text, which this module parses, or a function of the result. A row that failed by its content escalates
under every rule. So does a row with an unknown value that the rule needs, such as a doubt that is None. Pure.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn, TypeAlias, cast

from pydantic import JsonValue

from batch_agent.errors import (
    Cancelled,
    Interrupted,
    RateLimited,
    RecordUnreadable,
    ReplayMismatch,
    SpecError,
    Timeout,
    Unavailable,
    WorkerFailed,
)
from batch_agent.job import AgentError, AgentResult

INVALID = "invalid"  # the default rule
# Failures that say nothing about the content of a row.
OUTSIDE = frozenset(
    kind.type
    for kind in (
        *(Unavailable, RateLimited, Timeout, Cancelled, Interrupted),
        *(ReplayMismatch, RecordUnreadable, WorkerFailed),
    )
)
Function: TypeAlias = Callable[[AgentResult[object]], object]
Test: TypeAlias = Callable[[AgentResult[object], JsonValue], object]  # of a result, and its output as plain JSON


def failed_by_content(error: AgentError | None) -> bool:
    """Return whether a row failed because of its content, and not because a server was unreachable or the row was
    stopped."""
    return error is not None and error.type not in OUTSIDE


class _UnknownError(Exception):
    """Raised for a value that the rule needs and that is unknown."""


@dataclass(frozen=True, slots=True)
class Escalation:
    """A rule. ``text`` is as the user wrote it; for a function, its name. ``doubts``, ``votes`` and ``outputs`` are the
    fields that it reads; a doubt without a field is ``""``."""

    text: str
    _test: Test
    doubts: frozenset[str] = frozenset()
    votes: frozenset[str] = frozenset()
    outputs: frozenset[str] = frozenset()
    function: Function | None = None

    @property
    def needs_doubt(self) -> bool:
        return bool(self.doubts)

    def decides(self, result: AgentResult[object], output: JsonValue = None) -> bool:
        """Return whether the row escalates. ``output`` is its output as plain JSON. If the rule is a function of the
        user, it may raise anything."""
        if not result.ok:
            return failed_by_content(result.error)
        try:
            return bool(self._test(result, output))
        except _UnknownError:
            return True


def rule_of(given: str | Function) -> Escalation:
    """Return the rule for a text or a function. Raises SpecError, which shows the place of the mistake in the text."""
    if callable(given):
        function = given
        name = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', type(function).__name__)}"
        return Escalation(name, lambda result, output: function(result), function=function)
    return _RuleReader(given).rule()


def is_reference(text: str) -> bool:
    """Return whether a text names a function, as ``module:function``."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", text) is not None


_TOKEN = re.compile(
    r"""\s*(?:
        (?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
      | (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<sign>>=|<=|==|!=|>|<|\(|\)|=)
      | (?P<name>[^\W\d][\w-]*(?:\.(?:[\w-]+|"[^"]*"))*)
    )""",
    re.VERBOSE,
)
COMPARE: Mapping[str, Callable[[object, object], bool]] = {
    **{
        ">": cast(Callable[[object, object], bool], operator.gt),
        "<": cast(Callable[[object, object], bool], operator.lt),
    },
    **{
        ">=": cast(Callable[[object, object], bool], operator.ge),
        "<=": cast(Callable[[object, object], bool], operator.le),
    },
    **{"==": operator.eq, "!=": operator.ne},
}
WORDS = ("and", "or", "not")
CONSTANTS: Mapping[str, JsonValue] = {
    "true": True,
    "false": False,
    "null": None,
    "True": True,
    "False": False,
    "None": None,
}
TERMS = "doubt, doubts.FIELD, votes.FIELD.against, output.FIELD or invalid"
Kind: TypeAlias = Literal["number", "text", "sign", "name", "end"]


@dataclass(frozen=True, slots=True)
class _Token:
    kind: Kind
    text: str
    at: int


@dataclass(frozen=True, slots=True)
class _Term:
    """A value in a rule. ``alone``: it may stand without a comparison. ``is_number``: it is always a number."""

    value: Test
    what: str
    alone: bool = False
    is_number: bool = False
    constant: bool = False


@dataclass(slots=True)
class _RuleReader:
    text: str
    _tokens: list[_Token] = field(default_factory=list)
    _next: int = 0
    _doubts: set[str] = field(default_factory=set)
    _votes: set[str] = field(default_factory=set)
    _outputs: set[str] = field(default_factory=set)

    def rule(self) -> Escalation:
        self._read()
        test = self._either()
        if self._now.kind != "end":
            self._fail(self._now, f"{self._now.text!r} is not expected; join conditions by and, or, not and brackets")
        return Escalation(
            self.text.strip(), test, frozenset(self._doubts), frozenset(self._votes), frozenset(self._outputs)
        )

    def _read(self) -> None:
        at = 0
        while self.text[at:].strip():
            found = _TOKEN.match(self.text, at)
            if found is None:
                at += len(self.text[at:]) - len(self.text[at:].lstrip())
                self._fail(_Token("end", "", at), f"{self.text[at]!r} is not part of a rule")
            kind = cast(Kind, found.lastgroup)
            self._tokens.append(_Token(kind, found[kind], found.start(kind)))
            at = found.end()
        self._tokens.append(_Token("end", "the end", len(self.text.rstrip())))
        if len(self._tokens) == 1:
            raise SpecError(f"escalate is empty: write a rule of {TERMS}, such as 'doubt > 0.3'")

    @property
    def _now(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._now
        self._next += token.kind != "end"
        return token

    def _fail(self, token: _Token, what: str) -> NoReturn:
        shown = " ".join(self.text.splitlines())
        raise SpecError(f"escalate: {what} (at character {token.at + 1}):\n  {shown}\n  {' ' * token.at}^")

    def _is(self, word: str) -> bool:
        """Read this word or sign if it is next. Returns whether it was."""
        if self._now.text != word or self._now.kind not in ("name", "sign"):
            return False
        self._next += 1
        return True

    def _either(self) -> Test:
        tests = [self._both()]
        while self._is("or"):
            tests.append(self._both())
        return tests[0] if len(tests) == 1 else _any_of(tests)

    def _both(self) -> Test:
        tests = [self._one()]
        while self._is("and"):
            tests.append(self._one())
        return tests[0] if len(tests) == 1 else _all_of(tests)

    def _one(self) -> Test:
        if self._is("not"):
            inner = self._one()
            return lambda result, output: not inner(result, output)
        if self._is("("):
            begun = self._tokens[self._next - 1]
            inner = self._either()
            if not self._is(")"):
                self._fail(begun, "this bracket is never closed")
            return inner
        return self._comparison()

    def _comparison(self) -> Test:
        first = self._now
        left = self._term()
        sign = self._now
        if sign.text not in COMPARE or sign.kind != "sign":
            if sign.text == "=":
                self._fail(sign, "write == to compare")
            if not left.alone:
                self._fail(first, f"{left.what} is compared with a number, such as {left.what} > 0.3")
            return left.value
        self._next += 1
        other = self._now
        right = self._term()
        if left.constant and right.constant:
            self._fail(first, f"a comparison needs one of {TERMS}")
        if sign.text not in ("==", "!=") or left.is_number or right.is_number:
            for token, term in ((first, left), (other, right)):
                if term.constant and not term.is_number:
                    self._fail(token, "a number is expected")
                if term.alone and term.what == INVALID:
                    self._fail(token, "invalid is true or false, and is not compared")
        return _compared(left.value, COMPARE[sign.text], right.value, ordered=sign.text not in ("==", "!="))

    def _term(self) -> _Term:
        token = self._take()
        if token.kind == "number":
            number = float(token.text)
            return _Term(lambda result, output: number, token.text, is_number=True, constant=True)
        if token.kind == "text":
            text = re.sub(r"\\(.)", r"\1", token.text[1:-1])
            return _Term(lambda result, output: text, token.text, constant=True)
        if token.kind != "name" or token.text in WORDS:
            self._fail(
                token, f"{TERMS} is expected before {token.text!r}" if token.kind != "end" else f"{TERMS} is expected"
            )
        if token.text in CONSTANTS:
            constant = CONSTANTS[token.text]
            return _Term(lambda result, output: constant, token.text, constant=True)
        return self._named(token)

    def _named(self, token: _Token) -> _Term:
        if token.text == INVALID:
            return _Term(lambda result, output: result.truncated, INVALID, alone=True)
        if token.text == "doubt":
            self._doubts.add("")
            return _Term(_doubt, "doubt", is_number=True)
        head, *parts = [part.strip('"') for part in re.findall(r'"[^"]*"|[^."]+', token.text)]
        name = ".".join(parts)
        if head == "doubts" and parts:
            self._doubts.add(name)
            return _Term(lambda result, output: _known((result.doubts or {}).get(name)), token.text, is_number=True)
        if head == "votes" and len(parts) > 1 and parts[-1] == "against":
            voted = ".".join(parts[:-1])
            self._votes.add(voted)
            return _Term(
                lambda result, output: _known((result.votes or {}).get(voted, {}).get("against")),
                token.text,
                is_number=True,
            )
        if head == "output":
            self._outputs.add(name)
            return _Term(lambda result, output: _at(output, parts), token.text, alone=True)
        self._fail(token, f"there is no {token.text!r}: a rule has {TERMS}")


def _doubt(result: AgentResult[object], output: JsonValue) -> object:
    return _known(result.doubt)


def _known(value: object) -> object:
    if value is None:
        raise _UnknownError
    return value


def _at(output: JsonValue, parts: Sequence[str]) -> JsonValue:
    """Return a field of the output, or a field within a field; None if it does not exist."""
    for part in parts:
        output = output.get(part) if isinstance(output, Mapping) else None
    return output


def _any_of(tests: Sequence[Test]) -> Test:
    return lambda result, output: any(test(result, output) for test in tests)


def _all_of(tests: Sequence[Test]) -> Test:
    return lambda result, output: all(test(result, output) for test in tests)


def _compared(left: Test, how: Callable[[object, object], bool], right: Test, *, ordered: bool) -> Test:
    def test(result: AgentResult[object], output: JsonValue) -> bool:
        one, other = left(result, output), right(result, output)
        if ordered and not (_is_number(one) and _is_number(other)):
            raise _UnknownError  # nothing, or no number
        return how(one, other)

    return test


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
