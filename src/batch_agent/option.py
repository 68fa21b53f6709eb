"""Notes in the annotation of a BatchSpec option, beside its type, default and description.

Errors, ``help``, the command line, pipelines and docs/options.md are generated from them, so that none needs its own
list of options.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, Field, StringConstraints, ValidationError

from batch_agent.errors import SpecError

N = TypeVar("N")


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a value must be, as worded in the error about an invalid one."""

    words: str


@dataclass(frozen=True, slots=True)
class Unset:
    """What happens if the option is not given, for options whose default does not show it. ``is_none``: False if None
    means something else."""

    words: str
    is_none: bool = True


class Scope(Enum):
    """Where a pipeline accepts the option: only for the whole pipeline, or only for a stage. An option without this
    note is accepted for both."""

    WHOLE = "whole"
    STAGE = "stage"


class Compared(Enum):
    """Answers depend on the option: ``resume`` reports changes. A possible secret is kept as a hash."""

    VALUE = "value"
    HASH = "hash"


class FlagGroup(Enum):
    QUESTION = "task and output"
    WHERE = "backend and limits"


@dataclass(frozen=True, slots=True)
class Flag:
    """The option's flag for ``batch-agent run``. The default ``help`` is the first sentence of the description; the
    default ``name`` is the option's own."""

    metavar: str | None = None
    help: str = ""
    name: str = ""
    group: FlagGroup = FlagGroup.WHERE


@dataclass(frozen=True, slots=True)
class NotSettable:
    """Why ``--set`` refuses the option, and what to use instead. ``in_files``: a spec file refuses it too."""

    reason: str
    in_files: bool = False


Count = Annotated[int, Field(gt=0, strict=True)]
Whole = Annotated[int, Field(strict=True)]
NotNegative = Annotated[int, Field(ge=0, strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]  # True and "1" are not numbers
Positive = Annotated[Number, Field(gt=0)]
Seconds = Positive
Word = Annotated[str, StringConstraints(strict=True)]

Text = Annotated[Word, Allowed("text")]
OptionalText = Annotated[Word | None, Allowed("text, or None")]
Texts = Annotated[Word | Sequence[Word] | None, Allowed("a text or a list of texts, or None to leave it to the server")]
Switch = Annotated[bool, Allowed("True or False")]
Limit = Annotated[Count | None, Allowed("a whole number above 0, or None for no limit")]
Retries = Annotated[
    Annotated[int, Field(ge=0, strict=True)],
    Allowed("a whole number, 0 or more: without a limit, what fails every time would cost without end"),
]
TimeLimit = Annotated[Seconds | None, Allowed("a number of seconds above 0, or None for no limit")]
Directory = Annotated[Word | Path | None, Allowed("a directory, or None")]


def notes(model: type[BaseModel], kind: type[N]) -> Mapping[str, N]:
    """Return the notes of this kind, by option."""
    fields = model.model_fields.items()
    return {name: note for name, field in fields for note in field.metadata if isinstance(note, kind)}


def noted(model: type[BaseModel], note: object) -> frozenset[str]:
    """Return the options with exactly this note."""
    return frozenset(name for name, found in notes(model, type(note)).items() if found == note)


def kinds(model: type[BaseModel], name: str) -> frozenset[object]:
    """Return the types of values that an option may have, without checks and type parameters: for a list of texts,
    Sequence."""
    return frozenset(_members(model.model_fields[name].annotation))


def _members(kind: object) -> Iterator[object]:
    if get_origin(kind) is Annotated:
        yield from _members(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for member in get_args(kind):
            yield from _members(member)
    else:
        yield get_origin(kind) or kind


def check_names(model: type[BaseModel], options: Iterable[str], old_names: Mapping[str, str]) -> None:
    """Raise SpecError for a name that is not an option of ``model``. For a name similar to one of ``old_names``, the
    error suggests the current name."""
    for name in set(options) - model.model_fields.keys():
        near = difflib.get_close_matches(name, [*model.model_fields, *old_names], n=1)
        meant = [old_names.get(word, word) for word in near]
        hint = f"; did you mean {meant[0]!r}?" if meant else f". Options: {', '.join(sorted(model.model_fields))}"
        raise SpecError(f"there is no option {name!r}{hint}")


def explain(model: type[BaseModel], error: ValidationError, options: Mapping[str, object]) -> str:
    """Return what is wrong with these options, with what is allowed."""
    lines, allowed = [], notes(model, Allowed)
    for item in error.errors(include_url=False, include_input=False):
        name = str(item["loc"][0]) if item["loc"] else ""
        if name in allowed:
            lines.append(f"{name}: must be {allowed[name].words} (got {_kind(options[name])})")
        else:
            lines.append(item["msg"].removeprefix("Value error, "))
    return "; ".join(dict.fromkeys(lines))


def _kind(value: object) -> str:
    """Return the kind of a given value, for a message. The value itself is only shown if it is a number: anything else
    may be a secret in the wrong option."""
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    kinds: dict[type, str] = {str: "text", list: "a list of something else", dict: "a mapping of something else"}
    return kinds.get(type(value), type(value).__name__)


def check_positive(kind: type | UnionType, *, or_zero: bool = False, **options: object) -> None:
    """Raise SpecError unless each option is a finite number of this kind above 0."""
    for option, value in options.items():
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        number = cast(float, value) if is_number else -1.0
        if value is None or (math.isfinite(number) and (number > 0 or (or_zero and number == 0))):
            continue
        what = "a whole number" if kind is int else "a number"
        raise SpecError(f"{option} is {value!r}; it must be {what}{', 0 or more' if or_zero else ' above 0'}, or None")


def check_kind(kind: object, what: str, **options: object) -> None:
    for option, value in options.items():
        is_flag = isinstance(value, bool) and kind is int  # a bool is an int in Python
        if value is not None and (is_flag or not isinstance(value, cast(type, kind))):
            raise SpecError(f"{option} is {value!r}; it must be {what}, or None")
