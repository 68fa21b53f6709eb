"""Spec files of pipelines: ``stages`` lists the stages; the other options apply to all stages.

    inputs: papers.jsonl
    stages:
      - map: {name: read, task: "Read {text}", output_schema: "papers:Paper"}
      - filter: "papers:is_relevant"
      - reduce: {prompt: "Write a survey of {n} papers", output_schema: "papers:Survey"}

Functions are given as ``module:name``. ``join`` takes its own ``stages`` and ``inputs``, ``key`` and ``other_key``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from batch_agent.cli.spec.load import inputs_of, overrides_of, rows_of, spec_file
from batch_agent.cli.spec.specfile import STAGES, SpecFile
from batch_agent.errors import SpecError
from batch_agent.topology.flow import Flow
from batch_agent.topology.pipeline import Pipeline
from batch_agent.topology.plan import PipelinePlan

KINDS = ("map", "flat_map", "filter", "join", "reduce")


def load_flow(options: argparse.Namespace, **more: Any) -> Flow:
    """Return the pipeline of the spec file, overridden by the command line. ``more`` are arguments of Flow."""
    file, pipeline, whole = _loaded(options)
    try:
        return Flow(pipeline.inputs, pipeline.stages, whole, **more)
    except SpecError as error:
        raise file.error(str(error)) from None


def load_plan(options: argparse.Namespace) -> PipelinePlan:
    """Return the plan of the pipeline. Nothing is sent."""
    file, pipeline, whole = _loaded(options)
    try:
        return pipeline.plan(**whole)
    except SpecError as error:
        raise file.error(str(error)) from None


def _loaded(options: argparse.Namespace) -> tuple[SpecFile, Pipeline[Any], dict[str, Any]]:
    """Return the file, its stages, and the options of the whole pipeline."""
    file = spec_file(options)
    inputs: Any = inputs_of(file, options)
    pipeline = _extended(file, Pipeline(inputs), file.options[STAGES], lambda named: rows_of(file, named, options))
    whole = {name: value for name, value in file.options.items() if name not in (STAGES, "inputs")}
    return file, pipeline, file.follow(whole) | overrides_of(file, options)


def _extended(
    file: SpecFile, pipeline: Pipeline[Any], stages: object, read_rows: Callable[[object], Any]
) -> Pipeline[Any]:
    """Return the pipeline with the stages of the file. ``read_rows`` reads the ``inputs`` of a join."""
    if not isinstance(stages, list) or not stages:
        raise file.error(f"stages must be a list of stages, each one of {', '.join(KINDS)}")
    for number, stage in enumerate(stages, 1):
        if not isinstance(stage, dict) or len(stage) != 1 or next(iter(stage)) not in KINDS:
            raise file.error(f"stages: number {number} must be one of {', '.join(KINDS)}, such as map: {{task: …}}")
        [(kind, content)] = stage.items()
        try:
            pipeline = _with(file, pipeline, kind, content, read_rows)
        except SpecError as error:
            raise file.error(f"stages: number {number}, {kind}: {error}") from None
    return pipeline


def _with(
    file: SpecFile, pipeline: Pipeline[Any], kind: str, content: object, read_rows: Callable[[object], Any]
) -> Pipeline[Any]:
    if kind in ("flat_map", "filter"):
        function = _function(file, content)
        return pipeline.flat_map(function) if kind == "flat_map" else pipeline.filter(function)
    if not isinstance(content, dict):
        raise SpecError("must be a mapping of options")
    if kind == "join":
        keys = {name: _function(file, content.get(name)) for name in ("key", "other_key")}
        other = _extended(file, Pipeline(read_rows(content.get("inputs"))), content.get(STAGES), read_rows)
        return pipeline.join(other, key=keys["key"], other_key=keys["other_key"])
    options = file.follow(content)
    needed = "task" if kind == "map" else "prompt"
    if "worker" not in options and not isinstance(options.get(needed), str):
        raise SpecError(f"{needed} is missing, or is not text")
    return pipeline.map(**options) if kind == "map" else pipeline.reduce(**options)


def _function(file: SpecFile, reference: object) -> Callable[[Any], Any]:
    value = file.imported(reference) if isinstance(reference, str) else None
    if not callable(value):
        raise SpecError(f"{reference!r} must be a function, as module:name")
    function: Callable[[Any], Any] = value
    return function
