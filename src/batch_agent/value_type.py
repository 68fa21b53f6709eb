"""Value types of the hot path."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value_type(cls: type[T]) -> type[T]:
    """A dataclass with slots that type checkers treat as frozen.

    At run time an assignment is not refused. A frozen dataclass sets each field with ``object.__setattr__``, which
    makes creating one five times slower, and each turn creates about twenty.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
