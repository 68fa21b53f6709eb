"""Converts ``typing`` TypedDicts to a form that pydantic accepts on every supported Python.

Before Python 3.12 a ``typing.TypedDict`` lacks data that pydantic needs, and pydantic refuses the class; that of
``typing_extensions`` works. Both are dicts at run time, so a schema of the first kind is rebuilt with the second: the
class itself, its fields, and the arguments of ``list[…]``, unions and the like.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
import typing
from collections.abc import Callable
from typing import cast

import typing_extensions


def modern_typed_dicts(kind: object) -> object:
    if sys.version_info >= (3, 12):
        return kind
    if isinstance(kind, type) and typing.is_typeddict(kind):
        return _rebuilt(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is None or origin in (typing.Literal, typing.Annotated):
        return kind
    modern = tuple(modern_typed_dicts(argument) for argument in arguments)
    if all(new is old for new, old in zip(modern, arguments, strict=True)):
        return kind
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, modern)
    return origin[modern]


def _rebuilt(kind: type) -> object:
    hints = typing.get_type_hints(kind, include_extras=True)
    required: frozenset[str] = getattr(kind, "__required_keys__", frozenset(hints))
    fields = {name: _marked(hint, name in required) for name, hint in hints.items()}
    make = cast("Callable[[str, dict[str, object]], type]", typing_extensions.TypedDict)
    modern = make(kind.__name__, fields)
    modern.__doc__ = kind.__doc__  # the schema's description
    return modern


def _marked(hint: object, required: bool) -> object:
    origin = typing.get_origin(hint)
    if origin in (typing.Required, typing.NotRequired):
        return origin[modern_typed_dicts(typing.get_args(hint)[0])]
    marker = typing.Required if required else typing.NotRequired
    return marker[modern_typed_dicts(hint)]
