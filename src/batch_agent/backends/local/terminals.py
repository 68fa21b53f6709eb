"""The leaves of a JSON grammar as EBNF expressions: literals, strings of bounded length, numbers in ranges.

Each function returns one parenthesis-safe expression. ``grammar`` combines them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal

from pydantic import JsonValue

from batch_agent.backends.http.wire import written

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
    """Return the numbers ``low`` to ``high``, each divided by 10 ** ``places``. There is no minus zero."""
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
        floor, ceiling = 10 ** (length - 1) if length > shortest else 0, 10**length - 1
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
    """Return all texts from ``low`` to ``high``, which have the same length and the same place of the point."""
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
    """Return as many digits as ``shape`` has, with its point."""
    return ' "." '.join(f"[0-9]{{{len(part)}}}" if part else "" for part in shape.split(".")).strip()
