"""Where the command line records a run, and the arguments that it stores to start the run again."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from batch_agent.cli.spec.arguments import CLUSTER, FLAGS, RUNS
from batch_agent.cli.spec.rows import STDIN
from batch_agent.cli.spec.specfile import SpecFile, read_specfile
from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject
from batch_agent.option import kinds
from batch_agent.record.address import directory_of, place_of
from batch_agent.spec import MCP, BatchSpec

# Arguments that are stored. A command line cannot contain a key, and no other secret may be stored.
KEPT = (*FLAGS.values(), "set", "inputs", "format", "env_file", "output", "ordered", "limit", *CLUSTER)
PATHS = {"inputs", "output", "env_file", *(FLAGS[name] for name in FLAGS if Path in kinds(BatchSpec, name))}
DIRECTORY = "directory"  # in which the command was started
LEFT_OUT = "left_out"  # names of arguments that were given but not stored


def recording_of(options: argparse.Namespace, file: SpecFile) -> dict[str, object]:
    """Return the options of BatchSpec about recording and resuming."""
    name = "checkpoint_dir" if "checkpoint_dir" in file.options else "run_dir"
    if options.no_run_dir or options.dry_run:
        return {name: None, "resume": False, "on_change": None}
    recording: dict[str, object] = {name: _run_dir(options, file.options.get(name), file.path)}
    if options.resume:
        recording["resume"] = True
        for option in ("on_change", "retry_from"):
            if (chosen := getattr(options, option)) is not None:
                recording[option] = chosen
        if options.no_retry_failed:
            recording["retry_failed"] = False
        elif options.retry_type is not None:
            recording["retry_failed"] = options.retry_type
    return recording


def _run_dir(options: argparse.Namespace, named: object, spec_path: Path) -> Path | str:
    for given in (options.run_dir, named):
        if isinstance(given, str) and not given.strip():
            raise SpecError("run_dir is empty: give a directory, or omit it")
    if options.run_dir is not None:
        return directory_of(options.run_dir) or str(options.run_dir)
    if named is not None:
        directory = directory_of(str(named))
        return str(named) if directory is None else spec_path.parent / directory
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
        if value is not None and _may_be_secret(name, value):
            value = None
            kept[LEFT_OUT] = [*cast("list[JsonValue]", kept.get(LEFT_OUT, [])), name]
        kept[name] = value
    return kept


def _may_be_secret(name: str, value: str | list[str]) -> bool:
    """Return whether an argument may contain a password or key: the URL of a backend or of an MCP server may."""
    if name == FLAGS["tools"]:
        return any(tool.startswith(f"{MCP}http") and ("@" in tool or "?" in tool) for tool in value)
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
    kept.spec, kept.spec_path, kept.directory = command.get("spec"), None, command.get(DIRECTORY)
    return kept
