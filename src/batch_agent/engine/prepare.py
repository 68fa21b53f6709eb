"""From a spec to everything a run needs, without sending anything: this is also what a dry run shows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batch_agent.backends.base import Backend
from batch_agent.backends.registry import open_backend
from batch_agent.compiler.plan import Plan, compile_plan
from batch_agent.compiler.schema import OutputSchema
from batch_agent.engine.shapes import Shapes, build_shapes
from batch_agent.errors import BackendError, RunRejected, SpecError
from batch_agent.spec import BatchSpec
from batch_agent.tools.base import Tool, resolve_tools


@dataclass(frozen=True, slots=True)
class Prepared:
    spec: BatchSpec
    backend: Backend
    model: str | None  # None: the backend is asked when the run starts
    tools: tuple[Tool, ...]
    schema: OutputSchema[object] | None
    shapes: Shapes
    plan: Plan
    max_inflight: int | None


def prepare(spec: BatchSpec) -> Prepared:
    """Resolve and check everything. Raises SpecError; sends nothing."""
    where = spec.runtime if spec.backend is None else spec.backend
    backend, model = open_backend(where, model=spec.model, api_key=spec.api_key)
    tools = resolve_tools(spec.tools)
    specs = tuple(tool.spec for tool in tools)
    schema = OutputSchema.of(spec.output_schema)
    shapes = build_shapes(spec, model or "", specs, schema, backend.capabilities)
    plan = compile_plan(spec, schema=schema, inject_schema=shapes.schema_in_prompt, tools=specs)
    inflight = spec.max_inflight if spec.given("max_inflight") else backend.capabilities.default_inflight
    return Prepared(spec, backend, model, tools, schema, shapes, plan, inflight)


async def choose_model(prepared: Prepared) -> Prepared:
    """The one model an entered backend serves, where the user named none."""
    if prepared.model is not None:
        return prepared
    try:
        names = await prepared.backend.models()
    except BackendError as error:
        raise RunRejected(f"no model is named, and asking {prepared.backend.name} for one failed: {error}") from None
    if len(names) != 1:
        raise SpecError(f"model: {prepared.backend.name} serves {', '.join(names) or 'none'}; name one with model=")
    shapes = prepared.shapes
    named = {shape: replace(shape, model=names[0]) for shape in (shapes.first, shapes.later, shapes.repair)}
    return replace(
        prepared,
        model=names[0],
        shapes=replace(shapes, first=named[shapes.first], later=named[shapes.later], repair=named[shapes.repair]),
    )
