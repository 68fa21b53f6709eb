"""JSON schema → EBNF grammar, for the schemas that pydantic writes.

Every text that the grammar accepts is valid by the schema, but it need not accept every valid text. Properties come in
the schema's order, with one space after colon and comma. Strings and arrays are bounded by the answer's token limit,
because a small model may never end an unbounded string. A schema that a grammar cannot express (a pattern, unique
items, overlapping oneOf) raises Inexpressible with the reason; the caller then sends the request without a grammar.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

import jsonschema_rs
from pydantic import JsonValue

from batch_agent.backends.base import RequestShape
from batch_agent.backends.http.wire import written
from batch_agent.backends.schema.visitor import Inexpressible, SchemaVisitor, listed, named, without
from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject, ToolSpec

LIMIT = 10**15  # bound of an open range: integers below it are exact as doubles
PLACES = (1, 2, 4)  # allowed decimal places, besides those of the bounds

EXACT_CHARS = 200  # the longest string that is counted in characters
REPEATS = 100  # the engine's compiler unrolls up to 127 repetitions; with more, each step takes seconds

# Characters of a JSON string. \u escapes are left out: UTF-8 expresses the same, and one character stays one code
# point.
PLAIN = r'[^"\\\x00-\x1f\x7f]'
IN_WORD = r'[^"\\ \x00-\x1f\x7f]'
ESCAPE = r'"\\" ["\\/bfnrt]'
CHARACTER = f"({PLAIN} | {ESCAPE})"

DATE = (
    '("19" | "20") [0-9]{2} "-" ('
    '("01" | "03" | "05" | "07" | "08" | "10" | "12") "-" ("0" [1-9] | [12] [0-9] | "3" [01])'
    ' | ("04" | "06" | "09" | "11") "-" ("0" [1-9] | [12] [0-9] | "30")'
    ' | "02-" ("0" [1-9] | "1" [0-9] | "2" [0-8]))'
)
TIME = '("0" | "1") [0-9] ":" [0-5] [0-9] ":" [0-5] [0-9] | "2" [0-3] ":" [0-5] [0-9] ":" [0-5] [0-9]'
HEX = "[0-9a-f]"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f'{DATE} "T" ({TIME}) "Z"',
    "duration": '"P" [1-9] [0-9]{0,3} "D" | "PT" [1-9] [0-9]{0,5} ("H" | "M" | "S")',
    "uuid": f'{HEX}{{8}} "-" {HEX}{{4}} "-4" {HEX}{{3}} "-" [89ab] {HEX}{{3}} "-" {HEX}{{12}}',
}


def quote(text: str) -> str:
    """Return an EBNF literal that matches exactly ``text``."""
    out = []
    for char in text:
        if char in '"\\':
            out.append("\\" + char)
        elif " " <= char <= "~":
            out.append(char)
        else:
            code = ord(char)
            out.append(f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}")
    return f'"{"".join(out)}"'


def json_text(value: JsonValue) -> str:
    """Return JSON as the grammar writes it: one space after colon and comma, as in most training data."""
    match value:
        case dict():
            return "{" + ", ".join(f"{json_text(k)}: {json_text(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(json_text, value)) + "]"
        case _:
            return written(value).decode()


def either(options: Iterable[str]) -> str:
    """Return an alternative of the expressions, without duplicates."""
    distinct = list(dict.fromkeys(options))
    return distinct[0] if len(distinct) == 1 else f"({' | '.join(distinct)})"


def string(least: int, most: int) -> str:
    """Return a JSON string of ``least`` to ``most`` characters, at most EXACT_CHARS. It uses no rules of its own: the
    engine precomputes the allowed tokens for every position of a rule, but must test tokens that reach beyond its end
    at every step."""
    if most <= REPEATS:
        return f'"\\"" {CHARACTER}{{{least},{most}}} "\\""'
    needed, rest = [f"{CHARACTER}{{{REPEATS}}}"] * (least // REPEATS), least % REPEATS
    if rest:
        needed.append(f"{CHARACTER}{{{rest}}}")
    return f'"\\"" {" ".join(needed)} {f"({CHARACTER} " * (most - least)}{")?" * (most - least)} "\\""'


def words(least: int, most: int | None) -> str:
    """Return a JSON string of at least ``least`` characters, at most REPEATS, and of about ``most`` words. Counting
    words costs the engine a tenth of counting characters. An escape counts as a word, because small models tend to
    repeat line breaks forever."""
    head = f"{CHARACTER}{{{least}}} " if least else ""
    if most is None:
        return f'"\\"" {head}{CHARACTER}* "\\""'
    return f'"\\"" {head}{IN_WORD}* ((" " | {ESCAPE}) {IN_WORD}*){{0,{most}}} "\\""'


def integer(low: int | None, high: int | None) -> str:
    """Return an integer from ``low`` to ``high``, both included; an open end stops where doubles stop being exact."""
    least = low if low is not None else min(1 - LIMIT, high if high is not None else 0)
    most = high if high is not None else max(LIMIT - 1, least)
    if least > most:
        raise ValueError(f"no integer lies between {least} and {most}")
    return either(_fixed_point(least, most, places=0))


def number(low: Decimal | None, high: Decimal | None, *, above: bool = False, below: bool = False) -> str:
    """Return a decimal between the bounds without exponent; ``above`` and ``below`` exclude the bound itself. A few
    numbers of decimal places are allowed, enough to write the bounds. With the number of places fixed, a range of
    decimals is a range of integers."""
    if low is None:
        low, above = (Decimal(-LIMIT), True) if high is None or high > -LIMIT else (high - 1, False)
    if high is None:
        high, below = (Decimal(LIMIT), True) if low < LIMIT else (low + 1, False)
    options: list[str] = []
    for places in sorted({0, *PLACES, _places(low), _places(high)}):
        first, last = low.scaleb(places), high.scaleb(places)
        start = math.ceil(first) + (above and first == math.ceil(first))
        end = math.floor(last) - (below and last == math.floor(last))
        if start <= end:
            options += _fixed_point(start, end, places)
    if not options:
        raise ValueError(f"no number lies between {low} and {high}")
    return either(options)


def _places(value: Decimal) -> int:
    _, _, fraction = f"{value:f}".partition(".")
    return len(fraction.rstrip("0"))


def _fixed_point(low: int, high: int, places: int) -> list[str]:
    """Return expressions for the numbers ``low`` to ``high``, each divided by 10 ** ``places``. There is no minus
    zero."""
    options = []
    if high >= 0:
        options.append(_natural(max(low, 0), high, places))
    if low < 0:
        options.append(f'"-" {_natural(max(-high, 1), -low, places)}')
    return options


def _natural(low: int, high: int, places: int) -> str:
    options = []
    whole: list[int] = []  # lengths for which every number is in the range
    shortest = places + 1  # at least one digit before the point
    for length in range(max(len(str(low)), shortest), max(len(str(high)), shortest) + 1):
        floor = 10 ** (length - 1) if length > shortest else 0
        ceiling = 10**length - 1
        if length > shortest and low <= floor and ceiling <= high:
            whole.append(length - places - 1)
            continue
        options.append(_digits(_pointed(max(low, floor), length, places), _pointed(min(high, ceiling), length, places)))
    if whole:
        options.append(f"[1-9] [0-9]{{{whole[0]},{whole[-1]}}}" + (f' "." [0-9]{{{places}}}' if places else ""))
    return either(options)


def _pointed(value: int, length: int, places: int) -> str:
    digits = str(value).zfill(length)
    return f"{digits[:-places]}.{digits[-places:]}" if places else digits


def _digits(low: str, high: str) -> str:
    """Return an expression for all texts from ``low`` to ``high``. The two have the same length, and their decimal
    point at the same place."""
    if not low:
        return ""
    zeros, nines = _filled(low[1:], "0"), _filled(low[1:], "9")
    if low[0] == high[0]:
        return f'"{low[0]}" {_digits(low[1:], high[1:])}'.rstrip()
    first, last = int(low[0]), int(high[0])
    if low[1:] == zeros and high[1:] == nines:
        return f"{_one_of(first, last)} {_any_digits(zeros)}".rstrip()
    below = above = ""
    if low[1:] != zeros:
        below = f'"{first}" {_digits(low[1:], nines)}'
        first += 1
    if high[1:] != nines:
        above = f'"{last}" {_digits(zeros, high[1:])}'
        last -= 1
    between = f"{_one_of(first, last)} {_any_digits(zeros)}".rstrip() if first <= last else ""
    return either(option for option in (below, between, above) if option)


def _one_of(first: int, last: int) -> str:
    return f'"{first}"' if first == last else f"[{first}-{last}]"


def _filled(text: str, digit: str) -> str:
    return "".join("." if char == "." else digit for char in text)


def _any_digits(shape: str) -> str:
    """Return an expression for any digits in the form of ``shape``: as many digits, with the decimal point at the same
    place."""
    return ' "." '.join(f"[0-9]{{{len(part)}}}" if part else "" for part in shape.split(".")).strip()


VALUE_RULES: Final = {
    "value": 'text | number | "true" | "false" | "null" | list | mapping',
    "number": '"-"? ("0" | [1-9] [0-9]{0,14}) ("." [0-9]{1,6})?',
    "text": words(0, 12),
    "key": words(1, 2),
    "list": '"[" (value (", " value){0,7})? "]"',
    "mapping": '"{" (key ": " value (", " key ": " value){0,7})? "}"',
}
TERMINAL: Final = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]')
NAME: Final = re.compile(r"[a-z]\w*")
TOKENS_PER_ITEM: Final = 32
TOKENS_PER_WORD: Final = 2
FEWEST_WORDS, MOST_WORDS = 6, 100
UNCOUNTED_WORDS: Final = 400  # with room for this many words the text is meant to be long, and is not bounded

ANNOTATIONS: Final = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
        *("contentEncoding", "contentMediaType", "$schema", "$id", "$comment", "$defs", "definitions"),
    }
)
KEYWORDS: Final[Mapping[str, frozenset[str]]] = {
    "string": frozenset({"minLength", "maxLength", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset(
        {"properties", "required", "additionalProperties", "propertyNames", "minProperties", "maxProperties"}
    ),
    "boolean": frozenset(),
    "null": frozenset(),
}
TYPICAL_ITEMS: Final = 4  # assumed length of an array when room is divided

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FREE_TEXT = r"[^<] [\x00-\U0010FFFF]*"


class Grammar:
    """A grammar under construction. Several schemas may be added; the root combines them."""

    def __init__(self, max_tokens: int) -> None:
        self._items = max(max_tokens // TOKENS_PER_ITEM, 2)
        self._words = max_tokens // TOKENS_PER_WORD
        self._rules: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def add(self, schema: JsonObject) -> str:
        """Return an expression for JSON of ``schema``."""
        share = self._words // max(_OpenStrings(schema).visit(schema, ()), 1)
        words = None if share >= UNCOUNTED_WORDS else min(max(share, FEWEST_WORDS), MOST_WORDS)
        return _Schema(self, schema, words, self._items).visit(schema, "#")

    def root(self, expression: str) -> None:
        self._rules = {"root": expression, **self._rules}

    def rule(self, expression: str) -> str:
        """Return the name of the rule for ``expression``. Equal bodies share a rule, which the engine computes once."""
        if expression not in self._names:
            self._names[expression] = self.unfilled()
            self.fill(self._names[expression], expression)
        return self._names[expression]

    def unfilled(self) -> str:
        name = f"r{len(self._rules)}"
        self._rules[name] = ""
        return name

    def fill(self, name: str, expression: str) -> None:
        """Set the body of a rule that was created first because it may refer to itself."""
        self._rules[name] = expression

    def text(self) -> str:
        rules = {**self._rules, **VALUE_RULES}
        return "".join(f"{name} ::= {rules[name]}\n" for name in _reachable(rules))


def _reachable(rules: Mapping[str, str]) -> list[str]:
    """Return the rules that the root needs, root first. Raises KeyError for a rule that is missing."""
    found = ["root"]
    for name in found:
        found += [one for one in dict.fromkeys(NAME.findall(TERMINAL.sub("", rules[name]))) if one not in found]
    return found


class _Schema(SchemaVisitor[str, str]):
    """One schema being compiled: its references and the bounds of open-ended values. ``where`` is a node's path."""

    def __init__(self, grammar: Grammar, document: JsonObject, words: int | None, items: int) -> None:
        super().__init__(document)
        self._grammar = grammar
        self._words = words
        self._items = items
        self._references: dict[str, str] = {}
        self._bare: tuple[str, ...] = ()  # references followed since the last bracket or brace

    def visit(self, node: JsonValue, where: str) -> str:
        if isinstance(node, dict):
            node = {key: value for key, value in node.items() if key not in ANNOTATIONS}
        return super().visit(node, where)

    def anything(self, node: JsonValue, where: str) -> str:
        if node is True:
            return "value"
        raise Inexpressible(f"{where}: no value satisfies this schema")

    def choice(self, node: JsonObject, where: str) -> str:
        values = [node["const"]] if "const" in node else listed(node, "enum")
        check = jsonschema_rs.validator_for({**node, "$defs": self.document.get("$defs", {})})
        texts = [quote(json_text(value)) for value in values if check.is_valid(value)]
        if not texts:
            raise Inexpressible(f"{where}: no value of the enum satisfies the rest of the schema")
        return either(texts)

    def reference(self, node: JsonObject, pointer: str, where: str) -> str:
        if len(node) > 1:
            raise Inexpressible(f"{where}: $ref beside {', '.join(sorted(node.keys() - {'$ref'}))}")
        if pointer in self._bare:
            raise Inexpressible(f"{where}: {pointer} is defined by itself")
        if pointer not in self._references:
            name = self._references[pointer] = self._grammar.unfilled()
            self._bare = (*self._bare, pointer)
            self._grammar.fill(name, self.visit(self.resolve(pointer), pointer))
            self._bare = self._bare[:-1]
        return self._references[pointer]

    def combined(self, word: str, node: JsonObject, where: str) -> str:
        branches, beside = listed(node, word), node.keys() - {word}
        if word == "allOf" and len(branches) == 1 and not beside:
            return self.visit(branches[0], where)
        if word == "allOf" or beside - {"type"}:
            raise Inexpressible(f"{where}: {word} with several schemas or beside other keywords")
        if word == "oneOf" and not disjoint(self.resolve, branches):
            raise Inexpressible(f"{where}: branches of oneOf overlap")
        if "type" in beside:
            branches = [{"type": node["type"], **branch} if isinstance(branch, dict) else branch for branch in branches]
        return either(self.visit(b, f"{where}/{word}/{i}") for i, b in enumerate(without_decimal_text(branches)))

    def typed(self, node: JsonObject, where: str) -> str:
        kind = node.pop("type", None) or next(
            (implied for implied in ("object", "array") if node and node.keys() <= KEYWORDS[implied]), None
        )
        if kind is None:
            if node:
                raise Inexpressible(f"{where}: {', '.join(sorted(node))} without a type")
            return "value"
        if isinstance(kind, list):
            return either(self._typed(str(one), about(str(one), node), where) for one in kind)
        return self._typed(str(kind), node, where)

    def _typed(self, kind: str, said: JsonObject, at: str) -> str:
        if kind not in KEYWORDS:
            raise Inexpressible(f"{at}: type {kind!r}")
        if unknown := sorted(said.keys() - KEYWORDS[kind]):
            raise Inexpressible(f"{at}: {', '.join(unknown)} of {kind}")
        match kind:
            case "string":
                return self._string(said, at)
            case "integer" | "number":
                return _number(kind, said, at)
            case "array" | "object":
                bare, self._bare = self._bare, ()
                text = self._array(said, at) if kind == "array" else self._object(said, at)
                self._bare = bare
                return text
            case "boolean":
                return '("true" | "false")'
            case _:
                return '"null"'

    def _string(self, said: JsonObject, at: str) -> str:
        if "format" in said:
            pattern = FORMATS.get(str(said["format"]))
            if pattern is None or len(said) > 1:
                raise Inexpressible(f"{at}: a string of format {said['format']}")
            return f'"\\"" ({pattern}) "\\""'
        least = count(said, "minLength") or 0
        most = count(said, "maxLength")
        if most is not None and most < least:
            raise Inexpressible(f"{at}: maxLength is below minLength")
        if least > REPEATS:
            raise Inexpressible(f"{at}: a string of at least {least} characters")
        if most is None:
            return self._grammar.rule(words(least, self._words))
        return self._grammar.rule(string(least, min(most, EXACT_CHARS)))

    def _array(self, said: JsonObject, at: str) -> str:
        prefix = [self.visit(item, f"{at}/{i}") for i, item in enumerate(listed(said, "prefixItems"))]
        least = count(said, "minItems") or 0
        limit = count(said, "maxItems")
        room = max(self._items, least, len(prefix))
        most = room if limit is None else min(limit, room)
        if most < least:
            raise Inexpressible(f"{at}: maxItems is below minItems")
        if most == 0:
            return '"[]"'
        more = said.get("items", True)
        if more is False or most <= len(prefix):
            if most < len(prefix) or least > len(prefix):
                raise Inexpressible(f"{at}: a tuple of {len(prefix)} items that may have another length")
            return f'"[" {_joined(prefix)} "]"'
        item = self._grammar.rule(self.visit(more, f"{at}/items"))
        if prefix:
            rest = f'(", " {item}){{{max(least - len(prefix), 0)},{most - len(prefix)}}}'
            return f'"[" {_joined(prefix)} {rest} "]"'
        some = f'{item} (", " {item}){{{max(least - 1, 0)},{most - 1}}}' if most > 1 else item
        return f'"[" {some} "]"' if least else f'"[" ({some})? "]"'

    def _object(self, said: JsonObject, at: str) -> str:
        properties = named(said, "properties")
        required = set(map(str, listed(said, "required")))
        if unknown := sorted(required - properties.keys()):
            raise Inexpressible(f"{at}: required but not described: {', '.join(unknown)}")
        if not properties:
            return self._mapping(said, at)
        if bounds := sorted(said.keys() & {"propertyNames", "minProperties", "maxProperties"}):
            raise Inexpressible(f"{at}: {', '.join(bounds)} beside properties")
        members = []
        for name, schema in properties.items():
            value = self.visit(schema, f"{at}/{name}")
            members.append((f"{quote(json_text(name) + ': ')} {value}", name in required))
        return f'"{{" {self._members(members)} "}}"'

    def _members(self, members: Sequence[tuple[str, bool]]) -> str:
        """Return an expression for members in order, required or optional, separated by commas."""
        later = ""  # what may follow a written member
        alone = ""  # what may follow an opening brace
        for text, needed in reversed(members):
            with_comma = f'", " {text} {later}'.rstrip()
            first = f"{text} {later}".rstrip()
            if needed:
                later, alone = with_comma, first
            else:
                alone = f"({first} | {alone})" if alone else f"({first})?"
                later = f"({with_comma} | {later})" if later else f"({with_comma})?"
            later = self._grammar.rule(later)  # named, because an optional member mentions twice what follows it
        return alone

    def _mapping(self, said: JsonObject, at: str) -> str:
        least = count(said, "minProperties") or 0
        limit = count(said, "maxProperties")
        if least > 1:  # a repeated key is one property, which a grammar cannot detect
            raise Inexpressible(f"{at}: minProperties {least}")
        most = self._items if limit is None else min(limit, self._items)
        # Empty ``properties`` belong to a tool without arguments.
        values = said.get("additionalProperties", "properties" not in said)
        if values is False or most == 0:
            if least:
                raise Inexpressible(f"{at}: an object that requires properties but allows none")
            return '"{}"'
        names = said.get("propertyNames")
        key = self.visit({"type": "string", **names}, f"{at}/propertyNames") if isinstance(names, dict) else "key"
        member = self._grammar.rule(f'{key} ": " {self.visit(values, f"{at}/additionalProperties")}')
        some = f'{member} (", " {member}){{0,{most - 1}}}' if most > 1 else member
        return f'"{{" {some} "}}"' if least else f'"{{" ({some})? "}}"'


def _number(kind: str, said: JsonObject, at: str) -> str:
    lows = [(Decimal(str(said[key])), key[0] == "e") for key in ("minimum", "exclusiveMinimum") if key in said]
    highs = [(Decimal(str(said[key])), key[0] == "e") for key in ("maximum", "exclusiveMaximum") if key in said]
    low, above = max(lows, default=(None, False))
    high, below = min(highs, key=lambda bound: (bound[0], not bound[1]), default=(None, False))
    if any(bound is not None and abs(bound) > 10 * LIMIT for bound in (low, high)):
        raise Inexpressible(f"{at}: a bound beyond {10 * LIMIT}")
    try:
        if kind == "integer":
            first = None if low is None else -(-low // 1) + (above and low == low // 1)
            last = None if high is None else high // 1 - (below and high == high // 1)
            return integer(None if first is None else int(first), None if last is None else int(last))
        return number(low, high, above=above, below=below)
    except ValueError as error:
        raise Inexpressible(f"{at}: {error}") from None


def _joined(parts: Sequence[str]) -> str:
    return ' ", " '.join(parts)


def count(said: JsonObject, key: str) -> int | None:
    value = said.get(key)
    return int(value) if isinstance(value, (int, float)) else None


def about(kind: str, said: JsonObject) -> JsonObject:
    """Return the keywords that apply to one type; JSON schema ignores the others for values of that type."""
    others = frozenset().union(*(words for name, words in KEYWORDS.items() if name != kind))
    return {key: value for key, value in said.items() if key in KEYWORDS.get(kind, ()) or key not in others}


def without_decimal_text(branches: Sequence[JsonValue]) -> list[JsonValue]:
    """Drop the string branch of a Decimal (a number, or a string with a pattern): the number is enough."""
    kinds = [branch.get("type") if isinstance(branch, dict) else None for branch in branches]
    if "number" not in kinds:
        return list(branches)
    return [branch for branch in branches if not (isinstance(branch, dict) and "pattern" in branch)]


def disjoint(resolve: Callable[[str], JsonValue], branches: Sequence[JsonValue]) -> bool:
    """Return whether no value can satisfy two of the branches, judged by type and by literal properties."""
    resolved = []
    for branch in branches:
        while isinstance(branch, dict) and "$ref" in branch:
            branch = resolve(str(branch["$ref"]))
        if not isinstance(branch, dict):
            return False
        resolved.append(branch)
    return all(_apart(first, second) for index, first in enumerate(resolved) for second in resolved[index + 1 :])


def _apart(first: JsonObject, second: JsonObject) -> bool:
    if (ours := _options(first)) is not None and (theirs := _options(second)) is not None:
        return not ours & theirs
    kinds = (first.get("type"), second.get("type"))
    if None in kinds or any(isinstance(kind, list) for kind in kinds):
        return False
    if kinds[0] != kinds[1]:
        return set(kinds) != {"integer", "number"}
    our_tags, their_tags = _tags(first), _tags(second)
    return any(not our_tags[name] & their_tags[name] for name in our_tags.keys() & their_tags.keys())


def _tags(schema: JsonObject) -> dict[str, frozenset[str]]:
    """Return the required properties that are literals, with their allowed values."""
    required = listed(schema, "required")
    found = {
        name: _options(value)
        for name, value in named(schema, "properties").items()
        if name in required and isinstance(value, dict)
    }
    return {name: options for name, options in found.items() if options is not None}


def _options(schema: JsonObject) -> frozenset[str] | None:
    """Return the values of a literal or an enum, as JSON."""
    if "const" in schema:
        return frozenset({json_text(schema["const"])})
    return frozenset(map(json_text, listed(schema, "enum"))) if "enum" in schema else None


class _OpenStrings(SchemaVisitor[tuple[str, ...], int]):
    """Counts the unbounded strings that an answer may have, so that they can share the available length. ``where``
    holds the references that led to a node."""

    def anything(self, node: JsonValue, where: tuple[str, ...]) -> int:
        return 0

    def choice(self, node: JsonObject, where: tuple[str, ...]) -> int:
        return 0

    def reference(self, node: JsonObject, pointer: str, where: tuple[str, ...]) -> int:
        return 0 if pointer in where else self.visit(self.resolve(pointer), (*where, pointer))

    def combined(self, word: str, node: JsonObject, where: tuple[str, ...]) -> int:
        most = max((self.visit(branch, where) for branch in listed(node, word)), default=0)
        return most + self.visit(without(node, word), where)

    def typed(self, node: JsonObject, where: tuple[str, ...]) -> int:
        total = int(node.get("type") == "string" and not node.keys() & {"maxLength", "format"})
        for inner in [*named(node, "properties").values(), *listed(node, "prefixItems")]:
            total += self.visit(inner, where)
        for word, limit in (("items", "maxItems"), ("additionalProperties", "maxProperties")):
            most = count(node, limit)
            if node.get(word) and not (word == "additionalProperties" and "properties" in node):
                each = self.visit(node[word], where) + (word == "additionalProperties")
                total += each * min(TYPICAL_ITEMS, TYPICAL_ITEMS if most is None else most)
        return total


@dataclass(frozen=True, slots=True)
class TurnGrammar:
    """The grammar of a turn: the model calls one of the offered tools, or answers. A call is written
    ``<tool_call>{"name": …, "arguments": …}</tool_call>``, so its first character distinguishes it from an answer. One
    call per turn: a small model that may continue always does. ``text`` is None if the model is unconstrained.
    ``unforced`` names what only validation checks; ``schema_unforced``: that includes the answer's schema."""

    text: str | None
    unforced: str = ""
    schema_unforced: bool = False


def compile_turn(shape: RequestShape, max_tokens: int) -> TurnGrammar:
    """Return the grammar for the tool calls and the answer that the shape allows."""
    offered, may_answer = _choice(shape)
    grammar = Grammar(max_tokens)
    unforced: list[str] = []
    options = [grammar.rule(_call(grammar, tool, unforced)) for tool in offered]
    answer, reason = _answer(grammar, shape)
    if reason:
        unforced.append(f"the answer's schema ({reason})")
    said = "; ".join(unforced)
    if may_answer and answer is None and not offered:
        return TurnGrammar(None, said, bool(reason))
    if may_answer:
        options.append(grammar.rule(answer or FREE_TEXT))
    grammar.root(" | ".join(options))
    return TurnGrammar(grammar.text(), said, bool(reason))


def _answer(grammar: Grammar, shape: RequestShape) -> tuple[str | None, str]:
    """Return the expression of the schema, or the reason why there is none."""
    if shape.schema is None:
        return None, ""
    try:
        return grammar.add(shape.schema), ""
    except Inexpressible as reason:
        return None, str(reason)


def _call(grammar: Grammar, tool: ToolSpec, unforced: list[str]) -> str:
    head = f'{OPEN}{{"name": {json_text(tool.name)}, "arguments": '
    try:
        arguments = grammar.add(tool.parameters)
    except Inexpressible as reason:
        unforced.append(f"the arguments of {tool.name} ({reason})")
        arguments = "mapping"
    return f"{quote(head)} {arguments} {quote('}' + CLOSE)}"


def _choice(shape: RequestShape) -> tuple[tuple[ToolSpec, ...], bool]:
    """Return the tools that may be called in this turn, and whether the model may answer instead."""
    choice = shape.tool_choice
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        choice = function.get("name") if isinstance(function, dict) else None
    if choice == "none" or not shape.tools:
        return (), True
    if choice is None or choice == "auto":
        return shape.tools, True
    if choice in ("required", "any"):
        return shape.tools, False
    named = tuple(tool for tool in shape.tools if tool.name == choice)
    if not named:
        names = ", ".join(tool.name for tool in shape.tools)
        raise SpecError(f"tool_choice: {choice!r} is not auto, none, required or one of the tools: {names}")
    return named, False
