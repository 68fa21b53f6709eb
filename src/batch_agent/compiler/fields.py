"""Reads an input as named fields, and a field's value as text.

An input is a dict (its keys), a string or an Image (the one field ``input``), a pydantic model or a dataclass. Text
goes into a prompt unchanged, a missing value (None, NaN) as nothing, any other value as JSON, and a value whose JSON
is a string (a date, a path, an enum) as that string. ``pictures`` handles pictures. ``user.name`` and ``items[0]``
name a place in a field's data: keys, positions, and fields of models and dataclasses, never attributes or methods of
anything else. Reading an input may run the user's code (serializers, properties, ``__iter__``): whatever it raises
becomes an InputError here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from pydantic import BaseModel, RootModel
from pydantic_core import from_json, to_json

from batch_agent.errors import InputError
from batch_agent.foreign import boundary
from batch_agent.messages import Image

ALLOWED = "a dict, a string, an Image, a pydantic model or a dataclass"
ID = "id"  # the field that names a row, where no other is said to
MISSING = ("NAType", "NaTType")  # classes of pandas for a missing value
NAMES_SHOWN = 20
PATH = re.compile(r"([^\W\d]\w*)((?:\.[^\W\d]\w*|\[[^][{}]+\])+)")  # a field's name, and the steps into its data
_STEP = re.compile(r"\.(\w+)|\[([^]]+)\]")


class Unfillable(InputError):
    """The input can be read, but lacks a field that the task needs."""


def field_names(value: object) -> tuple[str, ...]:
    """Return the fields of an input without reading their values. Raises InputError for an invalid input."""
    match value:
        case str() | Image():
            return ("input",)
        case BaseModel():
            kind = type(value)
            return (*kind.model_fields, *kind.model_computed_fields, *(value.model_extra or ()))
        case Mapping():
            with boundary(_unreadable):
                return tuple(name for name in value if isinstance(name, str))
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return tuple(field.name for field in dataclasses.fields(value))
        case _:
            raise InputError(f"an input is {ALLOWED}, not {type(value).__name__}")


def fields_of(value: object) -> Mapping[str, object]:
    if type(value) is dict:
        return value
    if isinstance(value, str | Image):
        return {"input": value}
    with boundary(_unreadable, InputError):
        match value:
            case BaseModel():
                pictures = {name: image for name, image in value if isinstance(image, Image)}
                dumped = value.model_dump(mode="json", exclude=set(pictures))
                return {"root": dumped} if isinstance(value, RootModel) else dumped | pictures
            case Mapping():
                return dict(value)
            case _:
                return {name: getattr(value, name) for name in field_names(value)}


def value_of(fields: Mapping[str, object], name: str) -> object:
    """Return the value of a field, or of the place in a field's data that the name points to. Raises InputError."""
    if name in fields:
        return fields[name]
    path = PATH.fullmatch(name)
    if path is None or path[1] not in fields:
        raise Unfillable(f"the input has no field {name!r} (its fields: {listed(fields)})")
    value, reached = fields[path[1]], path[1]
    with boundary(_unreadable, InputError):
        for step in _STEP.finditer(path[2]):
            value = _inside(value, step[1] or step[2], reached)
            reached += step[0]
    return value


def _inside(value: object, key: str, reached: str) -> object:
    match value:
        case str() | bytes() | bytearray():
            there = "text"
        case Sequence():
            there = f"a list of {len(value)}"
            if re.fullmatch(r"-?\d+", key) and -len(value) <= int(key) < len(value):
                return value[int(key)]
        case type():
            there = "a class"
        case _ if isinstance(value, BaseModel | Mapping) or dataclasses.is_dataclass(value):
            fields = fields_of(value)
            if key in fields:
                return fields[key]
            there = f"its fields: {listed(fields)}"
        case _:
            there = "null" if value is None else type(value).__name__
    raise Unfillable(f"the input has no {key!r} in {reached!r} ({there})")


def text_of(name: str, value: object) -> str:
    """Return a field's value as it appears in a prompt, encodable as UTF-8."""
    if type(value) is str and value.isascii():  # the usual case
        return value
    if type(value) is int:
        return str(value)
    if value is None or (isinstance(value, float) and value != value) or type(value).__name__ in MISSING:
        return ""
    with boundary(lambda raised: InputError(f"the field {name!r} cannot be written as text or JSON: {raised}")):
        if type(value) is str:
            value.encode()
            return value
        encoded = to_json(value, inf_nan_mode="null")
        if encoded.startswith(b'"'):
            return str(from_json(encoded))
        return encoded.decode()


def own_id(fields: Mapping[str, object], column: str | None = None) -> str | None:
    """Return the input's own id, from ``column`` or from ``id``; None if there is none, or if it is neither text nor a
    whole number."""
    own = fields.get(ID if column is None else column)
    if (isinstance(own, str) and own) or (isinstance(own, int) and not isinstance(own, bool)):
        return str(own)
    return None


def listed(names: Iterable[object]) -> str:
    """Return field names as a list in words, for a message."""
    shown = [name for name in names if isinstance(name, str)]
    more = f", … ({len(shown)} in all)" if len(shown) > NAMES_SHOWN else ""
    return (", ".join(shown[:NAMES_SHOWN]) or "none") + more


def _unreadable(raised: str) -> InputError:
    return InputError(f"the input cannot be read as fields: {raised}")
