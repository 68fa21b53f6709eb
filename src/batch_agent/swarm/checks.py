"""Checks numbers that users give. A SpecError says which one is wrong, and what is valid."""

from __future__ import annotations

from numbers import Real
from operator import index

from batch_agent.errors import SpecError


def whole(name: str, value: object, least: int | None = 1) -> int:
    """Return the value as an integer of at least ``least``; None: without a lower limit."""
    try:
        number = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        more = "" if least is None else f", {least} or more"
        raise SpecError(f"{name} is {value!r}: give a whole number{more}")
    return number


def above_zero(name: str, value: object, what: str = "seconds") -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise SpecError(f"{name} is {value!r}: give {what} above 0")
    return float(value)
