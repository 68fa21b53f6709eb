"""The spec of a run from the command line, with or without a spec file.

The rows, the task and every option can be given as arguments, which override the file. References (``module:name``,
files) are resolved in the directory in which the command was started.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from pydantic import JsonValue

from batch_agent.cli.output.results import refuse_overwriting
from batch_agent.cli.spec.arguments import CLUSTER, FLAGS, RUNS, json_or_text
from batch_agent.cli.spec.rows import STDIN, read_rows
from batch_agent.cli.spec.specfile import STAGES, SpecFile, load_env_file, read_specfile, read_text
from batch_agent.compiler.schema import is_json_schema, written_out
from batch_agent.errors import SpecError, about
from batch_agent.files.gold import is_gold_file
from batch_agent.files.rows import as_row
from batch_agent.messages import JsonObject
from batch_agent.option import NotSettable, kinds, notes
from batch_agent.record.address import place_of
from batch_agent.record.people import is_run
from batch_agent.spec import MCP, OLD_NAMES, BatchSpec
from batch_agent.topology.flow import Flow
from batch_agent.topology.pipeline import Pipeline
from batch_agent.topology.plan import PipelinePlan


def take_settings(options: argparse.Namespace) -> None:
    """Move each ``--set`` of an option that has a flag to that flag, so that each value is in one place. None stays in
    ``--set``: no flag can express it."""
    left = []
    for item in options.set or ():
        name, value = _setting(item)
        if name not in FLAGS or value is None:
            left.append(item)
        elif name == "output_schema":
            options.schema = value if isinstance(value, str) else json.dumps(value)
        elif name == "tools":
            options.tool = [value] if isinstance(value, str) else value
        else:
            setattr(options, FLAGS[name], value)
    options.set = left or None


def resolve_paths(options: argparse.Namespace) -> None:
    """Decide whether a path without a flag is the spec or the rows, and treat the output ``-`` as standard output."""
    asks = options.task is not None or options.worker is not None
    if options.spec_path is not None and (options.spec is not None or asks):
        if options.inputs is not None:
            raise SpecError(f"the rows are given twice: {options.spec_path} and --inputs {options.inputs}")
        options.inputs, options.spec_path = options.spec_path, None
    options.spec = options.spec or options.spec_path
    options.spec_path = None
    if options.spec is None and not asks:
        raise SpecError("give a spec file, or --task and a file of rows; batch-agent init writes an example")
    if options.output == STDIN:
        options.output = None


def load_spec(options: argparse.Namespace) -> BatchSpec:
    """Return the spec of the file, overridden by the command line."""
    file = spec_file(options)
    overrides = {"inputs": inputs_of(file, options), **overrides_of(file, options)}
    if any(name in given for given in (overrides, file.options) for name in ("images", "document_column")):
        overrides = {"image_root": _beside_the_rows(file, options), **overrides}
    return file.resolve(overrides)


def _beside_the_rows(file: SpecFile, options: argparse.Namespace) -> Path:
    """Return the directory for relative paths of images and documents: that of the rows unless the file gives one."""
    if "image_root" in file.options:
        return file.path.parent / str(file.options["image_root"])
    rows = options.inputs or file.inputs_path()
    return file.path.parent if rows is None or rows == STDIN else Path(rows).parent


def overrides_of(file: SpecFile, options: argparse.Namespace) -> dict[str, object]:
    """Return the options that the command line overrides, except the rows."""
    return given_options(options) | recording_of(options, file) | _cluster_of(options)


def _cluster_of(options: argparse.Namespace) -> dict[str, object]:
    """Return the option ``cluster``; {} without ``--ray``."""
    given = {name: value for name in CLUSTER if (value := getattr(options, name)) is not None}
    address = given.pop("ray", None)
    if address is None:
        for name in given:
            raise SpecError(f"--{name.replace('_', '-')} is for a Ray cluster: also give --ray")
        return {}
    from batch_agent.ray.workers import Ray

    return {"cluster": Ray(str(address), **given)}


def is_pipeline(options: argparse.Namespace) -> bool:
    """Return whether the spec file describes a pipeline."""
    return options.spec is not None and STAGES in read_specfile(Path(options.spec)).options


def inputs_of(file: SpecFile, options: argparse.Namespace) -> object:
    path = options.inputs or file.inputs_path()
    if path is not None:
        if options.output and path != STDIN:
            refuse_overwriting(Path(options.output), Path(path), "inputs")
        return read_rows(path, options.limit, options.format)
    if file.options.get("inputs") is None:
        raise file.error("there are no inputs; give a file of rows, or - for standard input")
    return rows_of(file, file.options["inputs"], options)


def rows_of(file: SpecFile, named: object, options: argparse.Namespace) -> object:
    """Return the rows that the spec file lists, or the rows of the file that it names."""
    if isinstance(named, str):
        return read_rows(str(file.path.parent / named), options.limit)
    if not isinstance(named, list):
        raise file.error("inputs must be a list of rows or the path of a file")
    return [as_row(item, f"{file.path} input {number}") for number, item in enumerate(named[: options.limit], 1)]


def spec_file(options: argparse.Namespace) -> SpecFile:
    """Return the given spec file, or an empty one whose path resolves references. Loads ``--env-file`` before."""
    if options.env_file is not None:
        load_env_file(Path(options.env_file))
    if options.spec is not None:
        return read_specfile(Path(options.spec))
    return SpecFile(_directory(options) / name_of_run(options), "", {})


def name_of_run(options: argparse.Namespace) -> str:
    """Return the name of a run without a spec file: the name of its input file, or ``run``."""
    source = options.inputs
    return Path(source).name if source is not None and source != STDIN else "run"


def given_options(options: argparse.Namespace) -> dict[str, object]:
    """Return the options of BatchSpec that the command line gives, with references resolved."""
    place = _directory(options)
    flags = {name: getattr(options, argument) for name, argument in FLAGS.items()}
    given = {name: value for name, value in flags.items() if value is not None}
    if options.schema is not None:
        with about("--schema "):
            given["output_schema"] = schema_of(options.schema, place)
    given |= dict(map(_setting, options.set or ()))
    return SpecFile(place / name_of_run(options), "", given).followed()


def settings_beside(options: argparse.Namespace, settings: Iterable[str]) -> list[str]:
    """Return the settings of an earlier command line that no flag of the present one replaces."""
    flags = {name for name, argument in FLAGS.items() if getattr(options, argument) is not None}
    return [item for item in settings if _setting(item)[0] not in flags]


def _setting(item: str) -> tuple[str, object]:
    name, equals, text = item.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or not name:
        raise SpecError(f"--set {item!r} is not OPTION=VALUE, such as --set top_p=0.9")
    refused = notes(BatchSpec, NotSettable).get(OLD_NAMES.get(name, name))
    if refused is not None:
        raise SpecError(f"--set {name}: {refused.reason}")
    return name, json_or_text(text)


def _directory(options: argparse.Namespace) -> Path:
    """Return the directory in which the command was started; for a resumed run, that of the first command."""
    return Path(options.directory or ".")


# Where the command line records a run, and the arguments that it stores to start the run again.

# Arguments that are stored. A command line cannot contain a key, and no other secret may be stored.
KEPT = (*FLAGS.values(), "set", "inputs", "format", "env_file", "output", "ordered", "limit", *CLUSTER)
NO_PATHS = {"gold", "cascade"}  # they may be something else
PATHS = {"inputs", "output", "env_file", *(FLAGS[name] for name in FLAGS if Path in kinds(BatchSpec, name))} - NO_PATHS
DIRECTORY = "directory"  # in which the command was started
LEFT_OUT = "left_out"  # names of arguments that were given but not stored


def recording_of(options: argparse.Namespace, file: SpecFile) -> dict[str, object]:
    """Return the options of BatchSpec about recording and resuming."""
    name = "checkpoint_dir" if "checkpoint_dir" in file.options else "run_dir"
    if options.no_run_dir or (options.dry_run and not options.resume):
        return {name: None, "resume": False, "on_change": None}
    recording: dict[str, object] = {name: _run_dir(options, file.options.get(name), file.path)}
    if options.resume:
        recording["resume"] = True
        for option in ("on_change", "retry_from"):
            if (chosen := getattr(options, option)) is not None:
                recording[option] = chosen
        if options.no_retry_failed:
            recording["retry_failed"] = False
        elif options.retry_type is not None or options.command == "retry-failed":
            recording["retry_failed"] = options.retry_type or True
    return recording


def _run_dir(options: argparse.Namespace, named: object, spec_path: Path) -> Path | str:
    for given in (options.run_dir, named):
        if isinstance(given, str) and not given.strip():
            raise SpecError("run_dir is empty: give a directory, or omit it")
    if options.run_dir is not None:
        place = place_of(options.run_dir)
        return place if isinstance(place, Path) else str(options.run_dir)
    if named is not None:
        place = place_of(str(named))
        return spec_path.parent / place if isinstance(place, Path) else str(named)
    if options.resume:
        raise SpecError("--resume needs --run-dir, the directory of the run to continue")
    stem = f"{spec_path.name.partition('.')[0] or 'run'}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
    taken = (Path(RUNS) / (stem if number == 1 else f"{stem}-{number}") for number in range(1, 1_000_000))
    return next(path for path in taken if not path.exists())


def command_of(options: argparse.Namespace) -> dict[str, JsonValue]:
    """Return the stored form of the command, which starts this run again from any directory."""
    kept: dict[str, JsonValue] = {
        "spec": None if options.spec is None else str(Path(options.spec).absolute()),
        DIRECTORY: options.directory or str(Path.cwd()),
    }
    for name in KEPT:
        value = getattr(options, name)
        if name in PATHS and isinstance(value, str) and value != STDIN:
            value = str(Path(value).absolute())
        if name == "gold" and (is_gold_file(value) or (is_run(value) and "://" not in value)):
            value = str(Path(value).absolute())
        if value is not None and _may_be_secret(name, value):
            value = None
            kept[LEFT_OUT] = [*cast("list[JsonValue]", kept.get(LEFT_OUT, [])), name]
        kept[name] = value
    return kept


def _may_be_secret(name: str, value: str | list[str]) -> bool:
    """Return whether an argument may contain a password or key: the URL of a backend or of an MCP server may."""
    if name == FLAGS["tools"]:
        return any(tool.startswith(f"{MCP}http") and ("@" in tool or "?" in tool) for tool in value)
    if name == "cascade":
        return any(mark in value for mark in ("@", "api_key", "headers"))
    return name == "backend" and "@" in value


def refuse_left_out(command: Mapping[str, JsonValue], options: argparse.Namespace) -> None:
    """Raise SpecError if an argument of the run was not stored and ``options`` does not give it again. Without it, the
    run would continue with another backend or without its tools."""
    left_out = command.get(LEFT_OUT)
    for name in left_out if isinstance(left_out, list) else ():
        if getattr(options, str(name)) is None:
            raise SpecError(
                f"{place_of(options.run_dir)} was started with a --{name} that was not stored, because it may "
                f"contain a password: give --{name} again"
            )


def files_read_by(facts: JsonObject) -> list[tuple[str, Path]]:
    """Return the files that the command of a recorded run read, as far as known: its spec and its inputs."""
    command = facts.get("command")
    if not isinstance(command, dict):
        return []
    spec, inputs = command.get("spec"), command.get("inputs")
    read = [("spec", Path(spec))] if isinstance(spec, str) else []
    if inputs is None and isinstance(spec, str):
        with suppress(SpecError):  # the file is deleted, or is no longer a spec
            inputs = read_specfile(Path(spec)).inputs_path()
    if isinstance(inputs, str) and inputs != STDIN:
        read.append(("inputs", Path(inputs)))
    return read


def recorded_command(facts: JsonObject, otherwise: str) -> JsonObject:
    """Return the command of a recorded run. Raises SpecError with the message ``otherwise`` if Python started it."""
    command = facts.get("command")
    if not isinstance(command, dict):
        raise SpecError(otherwise)
    return command


def command_again(command: Mapping[str, JsonValue]) -> argparse.Namespace:
    """Return the stored arguments of a recorded command."""
    kept = argparse.Namespace(**{name: command.get(name) for name in KEPT})
    kept.spec = command.get("spec")
    kept.spec_path = None
    kept.directory = command.get(DIRECTORY)
    return kept


def schema_of(text: str, directory: Path) -> JsonObject | str:
    """Return a JSON schema or its short form, or ``text`` itself if it is a reference."""
    if text.lstrip().startswith("{"):
        value = _parse(text, "")
    elif text.endswith(".json"):
        path = directory / text
        value = _parse(read_text(path), f"{path}: ")
    else:
        return text
    if not isinstance(value, dict):
        raise SpecError("must be an object")
    if not is_json_schema(value):
        written_out(value)  # it raises the error that says what a field may be
    return value


def _parse(text: str, where: str) -> JsonValue:
    try:
        value: JsonValue = json.loads(text)
    except ValueError as error:
        raise SpecError(f"{where}is not JSON: {error}") from None
    return value


KINDS = ("map", "flat_map", "filter", "join", "reduce")


def load_flow(options: argparse.Namespace, **more: Any) -> Flow:
    """Return the pipeline of the spec file, overridden by the command line. ``more`` are arguments of Flow.

    ``stages`` lists the stages; the other options apply to all of them.

        inputs: papers.jsonl
        stages:
          - map: {name: read, task: "Read {text}", output_schema: "papers:Paper"}
          - filter: "papers:is_relevant"
          - reduce: {prompt: "Write a survey of {n} papers", output_schema: "papers:Survey"}

    Functions are given as ``module:name``. ``join`` takes its own ``stages`` and ``inputs``, ``key`` and ``other_key``.
    """
    file, pipeline, whole = _loaded(options)
    with file.named():
        return Flow(pipeline.inputs, pipeline.stages, whole, **more)


def load_plan(options: argparse.Namespace) -> PipelinePlan:
    """Return the plan of the pipeline. Nothing is sent."""
    file, pipeline, whole = _loaded(options)
    with file.named():
        return pipeline.plan(**whole)


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
        with file.named(), about(f"stages: number {number}, {kind}: "):
            pipeline = _with(file, pipeline, kind, content, read_rows)
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
