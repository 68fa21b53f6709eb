"""Random texts of an EBNF grammar, in the notation our compiler writes. For tests: says what a grammar accepts without
the engine that will read it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Node = Callable[["Sampler", int], str]
DEEP = 12  # nested rules after which the first alternative is taken: our recursive rules name their leaves first


@dataclass
class Sampler:
    rules: dict[str, Node]
    random: random.Random

    def text(self) -> str:
        return self.rules["root"](self, 0)


def sampler(grammar: str, seed: int) -> Sampler:
    rules = {}
    for line in grammar.strip().splitlines():
        name, _, body = line.partition(" ::= ")
        parser = _Parser(body)
        rules[name] = parser.alternatives()
        assert parser.at == len(body), f"unread: {body[parser.at :]}"
    return Sampler(rules, random.Random(seed))


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def peek(self) -> str:
        while self.text[self.at : self.at + 1] == " ":
            self.at += 1
        return self.text[self.at : self.at + 1]

    def alternatives(self) -> Node:
        options = [self.sequence()]
        while self.peek() == "|":
            self.at += 1
            options.append(self.sequence())
        return lambda s, d: (options[0] if d > DEEP else s.random.choice(options))(s, d)

    def sequence(self) -> Node:
        parts = []
        while self.peek() not in ("", "|", ")"):
            parts.append(self.repeated())
        return lambda s, d: "".join(part(s, d) for part in parts)

    def repeated(self) -> Node:
        node = self.atom()
        low, high = 1, 1
        mark = self.text[self.at : self.at + 1]
        if mark in ("?", "*"):
            low, high = 0, 1 if mark == "?" else 6
            self.at += 1
        elif mark == "{":
            end = self.text.index("}", self.at)
            low_text, comma, high_text = self.text[self.at + 1 : end].partition(",")
            low, high = int(low_text), int(high_text if comma else low_text)
            self.at = end + 1
        if (low, high) == (1, 1):
            return node

        def repeat(s: Sampler, d: int) -> str:
            most = low if d > DEEP else s.random.choice((low, high, s.random.randint(low, high)))
            return "".join(node(s, d) for _ in range(most))

        return repeat

    def atom(self) -> Node:
        start = self.peek()
        if start == "(":
            self.at += 1
            inner = self.alternatives()
            assert self.peek() == ")"
            self.at += 1
            return inner
        if start == '"':
            literal = self.literal()
            return lambda s, d: literal
        if start == "[":
            return self.char_class()
        begin = self.at
        while self.text[self.at : self.at + 1].isalnum():
            self.at += 1
        name = self.text[begin : self.at]
        assert name, self.text[begin:]
        return lambda s, d: s.rules[name](s, d + 1)

    def literal(self) -> str:
        self.at += 1
        out = ""
        while self.text[self.at] != '"':
            out += self.character()
        self.at += 1
        return out

    def char_class(self) -> Node:
        self.at += 1
        negated = self.text[self.at] == "^"
        self.at += negated
        ranges = []
        while self.text[self.at] != "]":
            first = last = self.character()
            if self.text[self.at] == "-":
                self.at += 1
                last = self.character()
            ranges.append((ord(first), ord(last)))
        self.at += 1

        def inside(code: int) -> bool:
            return any(first <= code <= last for first, last in ranges)

        if negated:
            pool = [c for c in (*range(32, 127), 0xE9, 0x4E2D, 0x1F600) if not inside(c)]
            return lambda s, d: chr(s.random.choice(pool))
        return lambda s, d: chr(s.random.randint(*s.random.choice(ranges)))

    def character(self) -> str:
        char = self.text[self.at]
        self.at += 1
        if char != "\\":
            return char
        kind = self.text[self.at]
        self.at += 1
        width = {"x": 2, "u": 4, "U": 8}.get(kind)
        if width is None:
            return kind
        digits = self.text[self.at : self.at + width]
        self.at += width
        return chr(int(digits, 16))
