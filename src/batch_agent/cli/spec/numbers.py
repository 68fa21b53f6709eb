"""Arguments that are numbers, as argparse reads them. Nothing else is imported for them: help is there at once."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

V = TypeVar("V")


def add_address(parser: argparse.ArgumentParser, port: int) -> None:
    """Where a command listens."""
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default %(default)s)")
    parser.add_argument("--port", type=port_number, default=port, help="0 takes a free one (default %(default)s)")


def number(kind: Callable[[str], V], fits: Callable[[V], bool], words: str) -> Callable[[str], V]:
    """What reads a number of this kind, and says what it must be."""

    def read(text: str) -> V:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"must be {words}, not {text!r}")
        return value

    return read


positive = number(int, lambda value: value > 0, "a whole number above 0")
amount = number(float, lambda value: 0 < value < math.inf, "a number above 0")
fraction = number(float, lambda value: 0 < value <= 1, "above 0 and at most 1")
port_number = number(int, lambda value: 0 <= value < 65536, "0 to 65535")


def byte_count(text: str) -> int:
    """Bytes, as a number with or without K, M, G or T behind it."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    unit = units.get(text[-1:].upper(), 1)
    return int(amount(text[:-1] if unit > 1 else text) * unit)
