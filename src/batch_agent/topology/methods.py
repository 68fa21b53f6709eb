"""``BatchAgent.run_with_reduce`` and ``run_with_map_reduce``, as users and type checkers see them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from batch_agent.topology.map_reduce import Reduced
    from batch_agent.topology.reduce import Shape

T = TypeVar("T")
R = TypeVar("R")


class MapReduce:
    @overload
    @classmethod
    async def run_with_reduce(
        cls, *, reduce: str, output_schema: type[T], reduce_schema: type[R], reduce_tree: Shape = ..., **options: Any
    ) -> Reduced[T, R]: ...
    @overload
    @classmethod
    async def run_with_reduce(
        cls,
        *,
        reduce: str,
        output_schema: type[T],
        reduce_schema: None = None,
        reduce_tree: Shape = ...,
        **options: Any,
    ) -> Reduced[T, str]: ...
    @overload
    @classmethod
    async def run_with_reduce(
        cls,
        *,
        reduce: str,
        output_schema: None = None,
        reduce_schema: type[R],
        reduce_tree: Shape = ...,
        **options: Any,
    ) -> Reduced[str, R]: ...
    @overload
    @classmethod
    async def run_with_reduce(
        cls,
        *,
        reduce: str,
        output_schema: None = None,
        reduce_schema: None = None,
        reduce_tree: Shape = ...,
        **options: Any,
    ) -> Reduced[str, str]: ...
    @overload
    @classmethod
    async def run_with_reduce(
        cls, *, reduce: str, output_schema: Any, reduce_schema: Any, reduce_tree: Shape = ..., **options: Any
    ) -> Reduced[Any, Any]: ...
    @classmethod
    async def run_with_reduce(cls, *, reduce: str, progress: bool | None = None, **options: Any) -> Reduced[Any, Any]:
        """Return ``(results, reduced)``: the results of ``run``, and one answer made from all of them. ``{n}`` in
        ``reduce`` is the number of results. If the reduction fails, ``reduced`` is an AgentResult with its error."""
        from batch_agent.topology.map_reduce import reduce_pipeline, run_reduced

        return await run_reduced(*reduce_pipeline(reduce=reduce, **options), progress)

    @overload
    @classmethod
    async def run_with_map_reduce(
        cls,
        *,
        plan_prompt: str,
        plan_inputs: Iterable[object] | Mapping[str, object] = ...,
        plan_output_schema: Any = ...,
        output_schema: type[T],
        reduce: str,
        reduce_schema: type[R],
        reduce_tree: Shape = ...,
        **options: Any,
    ) -> Reduced[T, R]: ...
    @overload
    @classmethod
    async def run_with_map_reduce(
        cls,
        *,
        plan_prompt: str,
        plan_inputs: Iterable[object] | Mapping[str, object] = ...,
        plan_output_schema: Any = ...,
        output_schema: Any = ...,
        reduce: str,
        reduce_schema: Any = ...,
        reduce_tree: Shape = ...,
        **options: Any,
    ) -> Reduced[Any, Any]: ...
    @classmethod
    async def run_with_map_reduce(
        cls, *, plan_prompt: str, reduce: str, progress: bool | None = None, **options: Any
    ) -> Reduced[Any, Any]:
        """Return ``(results, reduced)``: a planner lists the items, an agent works on each, and one answer is made from
        all of them. The task may use ``{item}``, ``{index}`` and the fields of an item that is an object."""
        from batch_agent.topology.map_reduce import map_reduce_pipeline, run_reduced

        return await run_reduced(*map_reduce_pipeline(plan_prompt=plan_prompt, reduce=reduce, **options), progress)
