"""A spec as the JSON that workers take it from. Functions and classes travel as ``module:name``, never as code.

What cannot be named is refused before anything is sent. Keys do not travel: each worker has its own in its environment.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

from pydantic import JsonValue

from batch_agent.engine.run.prepare import Prepared
from batch_agent.errors import SpecError
from batch_agent.files.results import from_json, to_json
from batch_agent.foreign import describe, name_of
from batch_agent.messages import JsonObject
from batch_agent.runtimes.base import CommandLineRuntime
from batch_agent.runtimes.named import RUNTIMES
from batch_agent.spec import BatchSpec
from batch_agent.store.keys import shape_fields
from batch_agent.tools.base import BUILTIN_NAMES, Tool

# Of the feeder alone: its inputs, its record, who watches it, its key.
FEEDERS = {
    *("inputs", "on_result", "sinks", "events", "metrics_port", "telemetry", "api_key", "no_hoist"),
    *("run_dir", "resume", "retry_failed", "force_resume", "predictive_prewarm", "prewarm_max_age"),
    *("lease", "keep", "feed_only", "cluster"),
}
REFERENCES = ("worker", "compaction")
HINT = "define it at the top of a module that every worker can import (batch-agent work --import-from DIR)"


def spec_json(prepared: Prepared) -> JsonObject:
    """The options that workers need, as JSON. Raises SpecError for what cannot travel."""
    spec = prepared.spec
    options: dict[str, JsonValue] = {"no_hoist": True, "task": spec.task}
    for name in sorted(spec.model_fields_set - FEEDERS):
        value = getattr(spec, name)
        if name == "tools":
            options[name] = [_tool(tool) for tool in _flat(value)]
        elif name == "output_schema":
            options[name] = _schema(value)
        elif isinstance(value, CommandLineRuntime):
            options["runtime"] = _runtime(value)
        elif name in REFERENCES and callable(value):
            options[name] = reference(value, name)
        elif name in ("backend", "compaction_backend", "runtime"):
            options[name] = _place(value, name)
        else:
            options[name] = cast(JsonValue, from_json(to_json(value)))
    if prepared.model is not None and spec.model is None:
        options["model"] = prepared.model
    return options


def read_spec(options: JsonObject, inputs: object, import_from: Path | None) -> BatchSpec:
    """The spec of a worker. Modules are looked up in ``import_from`` first. Raises SpecError."""
    directory = str((import_from or Path.cwd()).resolve())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    read: dict[str, Any] = dict(options)
    if "tools" in read:
        read["tools"] = [
            imported(tool) if ":" in tool and not tool.startswith("mcp:") else tool for tool in read["tools"]
        ]
    for name in ("output_schema", *REFERENCES):
        if isinstance(read.get(name), str) and ":" in read[name]:
            read[name] = imported(read[name])
    return BatchSpec(**read, inputs=inputs)


def reference(value: object, option: str) -> str:
    """``module:name`` of a function or a class. Raises SpecError when another process could not import it."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    shown = name or repr(value)
    if not module or not name or "<" in name:
        raise SpecError(f"{option}: {shown} has no name that another process can import; {HINT}")
    if module == "__main__":
        raise SpecError(f"{option}: {shown} is defined in the script that is run, which workers cannot import; {HINT}")
    found = _resolved(module, name)
    if found is not value and not (isinstance(found, Tool) and found.function is value):
        raise SpecError(f"{option}: {module}:{name} is something else than what was given; {HINT}")
    return f"{module}:{name}"


def imported(name: str) -> object:
    """What ``module:name`` names. Raises SpecError."""
    module = name.partition(":")[0]
    try:
        importlib.import_module(module)
        return resolve_name(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's module may raise anything
        raise SpecError(f"{name} cannot be imported here: {describe(error)}; see --import-from") from None


def _resolved(module: str, name: str) -> object:
    try:
        return resolve_name(f"{module}:{name}")
    except (ImportError, AttributeError, ValueError):
        return None


def _flat(tools: Sequence[object]) -> list[object]:
    flat: list[object] = []
    for tool in tools:
        flat += tool if isinstance(tool, list | tuple) else [tool]
    return flat


def _tool(tool: object) -> str:
    if isinstance(tool, str):
        if tool.startswith("mcp:") and ("@" in tool or "?" in tool):
            raise SpecError("tools: the address of an MCP server with a key in it would be stored with the run")
        return tool
    if not isinstance(tool, Tool):
        return reference(tool, "tools")
    builtin = next((name for name in BUILTIN_NAMES if getattr(Tool, name) is tool), None)
    if builtin is not None:
        return builtin
    function: Callable[..., object] = tool.function
    module = sys.modules.get(getattr(function, "__module__", ""))
    named = next((name for name, value in vars(module).items() if value is tool), None) if module is not None else None
    if module is None or named is None or module.__name__ == "__main__":
        raise SpecError(f"tools: no module has the tool {tool.name!r} under a name of its own; {HINT}")
    return f"{module.__name__}:{named}"


def _schema(value: object) -> JsonValue:
    if value is None or isinstance(value, Mapping):
        return cast(JsonValue, value)
    return reference(value, "output_schema")


def _runtime(runtime: CommandLineRuntime) -> JsonValue:
    """A command-line agent as a spec file names it."""
    name = next((name for name, kind in RUNTIMES.items() if type(runtime) is kind), None)
    if name is None:
        raise SpecError(f"runtime: a {type(runtime).__name__} is none of {', '.join(RUNTIMES)}, so it does not travel")
    plain = type(runtime)()
    given = {each.name: getattr(runtime, each.name) for each in fields(runtime) if each.init}
    changed = {option: value for option, value in given.items() if value != getattr(plain, option)}
    return cast(JsonValue, from_json(to_json({"name": name, **changed})))


def _place(value: object, option: str) -> JsonValue:
    """A backend or a runtime by its URL, its name or its mapping."""
    if value is None:
        return None
    if isinstance(value, str):
        if "@" in value:
            raise SpecError(f"{option}: a password in the URL would be stored with the run; give it in the environment")
        return value
    if isinstance(value, Mapping):
        secret = next((name for name in value if str(name).lower() in ("api_key", "headers")), None)
        if secret is not None:
            raise SpecError(
                f"{option}: {secret} would be stored with the run; give keys in the environment of each worker"
            )
        return {str(name): cast(JsonValue, from_json(to_json(item))) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_place(item, option) for item in value]
    raise SpecError(
        f"{option}: a {type(value).__name__} object does not travel to other processes; give its URL or name"
    )


def pieces(prepared: Prepared) -> dict[str, str]:
    """A digest of each part of what all rows are asked, to say which of them differs."""
    spec = prepared.spec
    asked: dict[str, object] = {
        "task": [spec.task, spec.template],
        "system prompt": prepared.plan.own_system,
        "versions of tools": {tool.name: tool.version for tool in prepared.tools},
        "worker": None if spec.worker is None else name_of(spec.worker),
    }
    for shape in prepared.shapes.asked:
        for name, value in shape_fields(shape).items():
            asked[name] = [asked.get(name), value]
    return {name: blake2b(to_json(value), digest_size=8).hexdigest() for name, value in asked.items()}
