"""Notes that an option of BatchSpec carries in its annotation, beside its type, its default and its description.

They say what an error, ``help``, the command line, pipelines and docs/options.md need to know of an option, so that
none of them has a list of options of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, Field, StringConstraints

N = TypeVar("N")


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a value must be, in the words of the error about one that is not."""

    words: str


@dataclass(frozen=True, slots=True)
class Unset:
    """What happens when the option is not given, where its default does not say it. ``is_none`` is False where None
    means something else."""

    words: str
    is_none: bool = True


class Scope(Enum):
    """Where a pipeline takes the option: for the whole only, or for a stage only. Without this note, for both."""

    WHOLE = "whole"
    STAGE = "stage"


class Compared(Enum):
    """Answers depend on the option: ``resume`` says how it has changed. What may hold a secret is kept as a hash."""

    VALUE = "value"
    HASH = "hash"


class FlagGroup(Enum):
    QUESTION = "what is asked"
    WHERE = "where and how much"


@dataclass(frozen=True, slots=True)
class Flag:
    """Its flag for ``batch-agent run``. Without a ``help`` of its own, that is the first sentence of the description;
    ``name`` is given where it is not the option's own."""

    metavar: str | None = None
    help: str = ""
    name: str = ""
    group: FlagGroup = FlagGroup.WHERE


@dataclass(frozen=True, slots=True)
class NotSettable:
    """Why ``--set`` refuses the option, and what to give instead. ``in_files``: so does a spec file."""

    reason: str
    in_files: bool = False


Count = Annotated[int, Field(gt=0, strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]  # True and "1" are none
Seconds = Annotated[Number, Field(gt=0)]
Word = Annotated[str, StringConstraints(strict=True)]

Text = Annotated[Word, Allowed("text")]
OptionalText = Annotated[Word | None, Allowed("text, or None")]
Switch = Annotated[bool, Allowed("True or False")]
Limit = Annotated[Count | None, Allowed("a whole number above 0, or None for no limit")]
TimeLimit = Annotated[Seconds | None, Allowed("a number of seconds above 0, or None for no limit")]
Directory = Annotated[Word | Path | None, Allowed("a directory, or None")]


def notes(model: type[BaseModel], kind: type[N]) -> Mapping[str, N]:
    """The notes of this kind, by the option that carries them."""
    fields = model.model_fields.items()
    return {name: note for name, field in fields for note in field.metadata if isinstance(note, kind)}


def noted(model: type[BaseModel], note: object) -> frozenset[str]:
    """The options that carry exactly this note."""
    return frozenset(name for name, found in notes(model, type(note)).items() if found == note)


def kinds(model: type[BaseModel], name: str) -> frozenset[object]:
    """The types that an option may have, without checks and parameters: that of a list of texts is Sequence."""
    return frozenset(_members(model.model_fields[name].annotation))


def _members(kind: object) -> Iterator[object]:
    if get_origin(kind) is Annotated:
        yield from _members(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for member in get_args(kind):
            yield from _members(member)
    else:
        yield get_origin(kind) or kind
