"""The stages of a pipeline as a graph, for drawing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from batch_agent.messages import JsonObject
from batch_agent.topology.stages import Agents, Filter, FlatMap, Join, Reduce, Stage


def graph_of(stages: Sequence[Stage]) -> list[JsonObject]:
    """Return each stage with its ``name``, its ``kind``, and the stages whose rows it takes (``after``)."""
    graph: list[JsonObject] = []
    _add(stages, graph)
    return graph


def _add(stages: Sequence[Stage], graph: list[JsonObject]) -> str | None:
    """Add the stages and return the name of the last one."""
    before: str | None = None
    for stage in stages:
        after = [] if before is None else [before]
        match stage:
            case Agents() | Reduce():
                name, kind = stage.name, "map" if isinstance(stage, Agents) else "reduce"
            case FlatMap() | Filter():
                kind = "flat map" if isinstance(stage, FlatMap) else "filter"
                name = _new(getattr(stage.function, "__name__", kind), graph)
            case Join():
                kind, name = "join", _new("join", graph)
                other = _add(stage.other.stages, graph)
                after += [] if other is None else [other]
            case _:
                assert_never(stage)
        graph.append({"name": name, "kind": kind, "after": [*after]})
        before = name
    return before


def _new(name: str, graph: Sequence[JsonObject]) -> str:
    """Return a name that no stage of the graph has."""
    taken = {node["name"] for node in graph}
    name = "function" if name == "<lambda>" else name
    number = 1
    while (numbered := name if number == 1 else f"{name} {number}") in taken:
        number += 1
    return numbered
