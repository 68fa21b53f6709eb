"""Tools that keep attributes on the hot path fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, dataclass_transform, overload

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value_type(cls: type[T]) -> type[T]:
    """Make a dataclass with slots. Type checkers refuse to assign its fields; Python does not.

    A frozen dataclass sets each field with ``object.__setattr__``, which makes creating one five times slower, and each
    turn creates about twenty. Only the code that has just made a value may still set a field, with a ``type: ignore``
    that shows it.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


class lazy_property(Generic[T]):  # noqa: N801 -- used as ``property`` is
    """A property that is computed on first use, and then an attribute.

    ``functools.cached_property`` reads ``__dict__`` of the instance. From then on CPython 3.11 and 3.12 look up each of
    its attributes in that dictionary, instead of reading it at its place: 3 % of the instructions of a turn.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self._name = compute, compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> lazy_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> lazy_property[T] | T:
        if instance is None:
            return self
        value = self._compute(instance)
        setattr(instance, self._name, value)
        return value
