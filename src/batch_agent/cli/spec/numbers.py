"""Numeric arguments for argparse. This module imports little, so that help texts appear quickly."""

from __future__ import annotations

import argparse
import math
import os
import secrets
from collections.abc import Callable
from typing import TypeVar

V = TypeVar("V")


def add_address(parser: argparse.ArgumentParser, port: int) -> None:
    """Add the arguments for the address on which a command listens."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=port_number, default=port, help="0: a free port (default %(default)s)")


def add_key(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the key that clients of a command must send."""
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument(
        "--key",
        metavar="KEY",
        help="key that clients must send as a bearer token (default: BATCH_AGENT_DOOR_KEY; else a new one if --host "
        "can be reached from other machines)",
    )
    keys.add_argument("--no-key", action="store_true", help="let everyone who can reach the address use it")


def key_of(options: argparse.Namespace) -> tuple[str, str]:
    """Return the key that clients must send ("": none), and the words in which the command reports it. Only a new key
    is shown."""
    from batch_agent.door import DOOR_KEY_VARIABLE, is_loopback

    if options.no_key:
        return "", ""
    given = (options.key or os.environ.get(DOOR_KEY_VARIABLE, "")).strip()
    if given or is_loopback(options.host):
        return given, ""
    key = secrets.token_urlsafe(24)
    return key, f"; clients must send the key {key}"


def number(kind: Callable[[str], V], fits: Callable[[V], bool], words: str) -> Callable[[str], V]:
    """Return a function that reads a number of this kind. ``words`` describes valid values in the error."""

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
    """Read a number of bytes, with an optional K, M, G or T after it."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    unit = units.get(text[-1:].upper(), 1)
    return int(amount(text[:-1] if unit > 1 else text) * unit)
