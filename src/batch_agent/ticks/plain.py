"""Any value of the user's as JSON or as text: bounded, and without raising.

Observations are the user's objects. They may be deep, cyclic, huge, not UTF-8, or raise when they are read. Whatever
writes one (a prompt, a memory, a trace, an HTTP response) uses the functions here, so an odd value is at worst
unreadable in one place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from itertools import islice
from numbers import Integral, Real
from typing import Any, cast

from pydantic import BaseModel, JsonValue
from pydantic_core import to_json

from batch_agent.foreign import describe

DEPTH = 32
ITEMS = 10_000  # values in all
CHARACTERS = 1_000_000  # of one text
INTEGER_BITS = 4096  # Python refuses to write far longer ones
CUT = "[...]"


def plain(value: object) -> JsonValue:
    """Return the value as what JSON can hold. Floats stay as they are, NaN included."""
    return _Walk().value(value, 0)


def json_of(value: object) -> bytes:
    """Return the value as JSON. NaN and infinities become null."""
    return to_json(plain(value), inf_nan_mode="null")


def text_of(value: object) -> str:
    """Return the value as text: its own ``str`` if its class defines one, else that of its plain form."""
    try:
        text = str(value if type(value).__str__ is not object.__str__ else plain(value))
    except KeyboardInterrupt:
        raise
    except BaseException:
        text = str(plain(value))
    return _cut(text)


def encodable(text: str) -> str:
    """Return the text with "?" in place of lone surrogates, which UTF-8 cannot carry."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _cut(text: str) -> str:
    return encodable(text if len(text) <= CHARACTERS else text[:CHARACTERS] + CUT)


class _Walk:
    def __init__(self) -> None:
        self._items = 0
        self._around: set[int] = set()  # the containers that the current value is in

    def value(self, value: object, depth: int) -> JsonValue:
        self._items += 1
        try:
            return self._scalar(value) if _is_scalar(value) else self._container(value, depth)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return f"<{type(value).__name__}, unreadable: {describe(error)}>"

    def _scalar(self, value: object) -> JsonValue:
        if value is None or value is True or value is False:
            return value
        if isinstance(value, str):
            return _cut(str.__str__(value))
        if isinstance(value, Integral):
            number = int(value)
            bits = number.bit_length()
            return number if bits <= INTEGER_BITS else f"<integer of {bits} bits>"
        if isinstance(value, Real):
            return float(value)
        return bytes(cast(bytes, value)[:CHARACTERS]).decode(errors="replace")

    def _container(self, value: object, depth: int) -> JsonValue:
        items = _items(value)
        if items is None:
            return _cut(str(value))
        if id(value) in self._around:
            return "<cycle>"
        if depth >= DEPTH or self._items >= ITEMS:
            return CUT
        self._around.add(id(value))
        try:
            shown = ITEMS - self._items
            is_cut = len(items) > shown
            if isinstance(items, Mapping):
                pairs = [(text_of(key), self.value(items[key], depth + 1)) for key in islice(items, shown)]
                return dict([*pairs, (CUT, CUT)] if is_cut else pairs)
            written = [self.value(item, depth + 1) for item in islice(items, shown)]
            return [*written, CUT] if is_cut else written
        finally:
            self._around.discard(id(value))


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, str | Real | bytes | bytearray | memoryview)


def _items(value: object) -> Mapping[Any, object] | Sequence[object] | None:
    """Return what a container holds, or None for any other object. Numbers of numpy are numbers, arrays are objects."""
    if isinstance(value, Mapping | Sequence):
        return value
    if isinstance(value, Set):
        return sorted(islice(value, ITEMS), key=text_of)  # in one order, whatever the hashes are
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None
