"""Descriptions of the stages of a pipeline; ``nodes`` and ``reduce`` implement them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batch_agent.errors import SpecError
from batch_agent.option import Scope, noted
from batch_agent.spec import OLD_NAMES, BatchSpec
from batch_agent.topology.reduce import Shape

if TYPE_CHECKING:
    from batch_agent.topology.pipeline import Pipeline

# Options of the whole pipeline, and options of one stage. All others may be given for both.
OF_THE_WHOLE = noted(BatchSpec, Scope.WHOLE)
OF_THE_WHOLE |= {old for old, new in OLD_NAMES.items() if new in OF_THE_WHOLE}
OF_A_STAGE = noted(BatchSpec, Scope.STAGE)


@dataclass(frozen=True, slots=True)
class Agents:
    """A stage of agents. ``carry`` are the fields of its rows that the rows of later stages also get."""

    name: str
    options: Mapping[str, Any]
    carry: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FlatMap:
    """A function that returns any number of rows for each row. ``fields`` are the fields that these rows are known to
    have."""

    function: Callable[[Any], Iterable[object]]
    fields: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Filter:
    function: Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class Join:
    other: Pipeline[Any]
    key: Callable[[Any], Hashable]
    other_key: Callable[[Any], Hashable]


@dataclass(frozen=True, slots=True)
class Reduce:
    name: str
    prompt: str
    tree: Shape
    options: Mapping[str, Any]


Stage = Agents | FlatMap | Filter | Join | Reduce


def carried_after(stages: Sequence[Stage]) -> tuple[str, ...]:
    """Return the fields that rows carry after these stages. An answer made from many rows carries none."""
    names: list[str] = []
    for stage in stages:
        if isinstance(stage, Reduce):
            names.clear()
        elif isinstance(stage, Agents):
            names += (name for name in stage.carry if name not in names)
    return tuple(names)


def check_stage_options(name: str, options: Mapping[str, Any]) -> None:
    for option in options:
        if option in OF_THE_WHOLE:
            raise SpecError(f"{option} is an option of the whole pipeline, not of the stage {name!r}")


def check_options_of_the_whole(options: Mapping[str, Any]) -> None:
    for option in options:
        if option in OF_A_STAGE:
            raise SpecError(f"{option} is an option of a stage, not of the whole pipeline")
    if options.get("promise") is not None:
        raise SpecError(
            "promise is about the rows of one run, and stages of a pipeline may drop or add rows: run the pipeline "
            "without its last stage, write its results to a file with batch-agent export, and run the last stage with "
            "promise on that file"
        )
