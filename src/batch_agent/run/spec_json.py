"""JSON encoding of a spec, for workers. Functions and classes are encoded as ``module:name``, never as code.

A function or class without such a name is refused before anything is sent. API keys are not included: each worker has
its own in its environment.
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

from batch_agent.agent.cascade import label_of
from batch_agent.agent.fingerprint import fingerprint_of
from batch_agent.agent.prepare import Prepared, entries_with_models, stored_place
from batch_agent.errors import SpecError
from batch_agent.files.results import from_json, to_json
from batch_agent.foreign import describe, name_of
from batch_agent.messages import JsonObject
from batch_agent.record.keys import shape_fields
from batch_agent.runtimes.base import CommandLineRuntime
from batch_agent.runtimes.named import RUNTIMES
from batch_agent.spec import BatchSpec
from batch_agent.tools.base import BUILTIN_NAMES, Tool
from batch_agent.trust.escalate import is_reference

# Options that only the feeder uses: inputs, record, observers, API key.
FEEDERS = {
    *("inputs", "on_result", "sinks", "events", "metrics_port", "api_key", "no_hoist"),
    *("run_dir", "resume", "on_change", "predictive_prewarm", "prewarm_max_age"),
    *("gold", "gold_sample", "gold_sealed", "tolerance", "score", "by", "groups", "require"),
    *("lease", "keep", "feed_only", "cluster", "pilot", "pilot_key", "pilot_only"),
    *("promise", "max_people", "people_error", "truth", "beacon"),
}
REFERENCES = ("worker", "compaction", "vote", "escalate")
ENTRY = "the entry "  # of a cascade, before its name
HINT = "define it at the top of a module that every worker can import (batch-agent work --import-from DIR)"


def spec_json(prepared: Prepared) -> JsonObject:
    """Return the options that workers need, as JSON. Raises SpecError for a value that other processes cannot use."""
    spec, cascade = prepared.spec, prepared.cascade
    whole = spec if cascade is None else cascade.whole  # whose entries have options of their own
    options: dict[str, JsonValue] = {"no_hoist": True, "task": spec.task}
    for name in sorted(whole.model_fields_set - FEEDERS):
        value: Any = spec.examples if name == "examples" else getattr(whole, name)
        if name == "cascade":
            options[name] = _entries(prepared)
        elif name == "tools":
            options[name] = [_tool(tool) for tool in _flat(value)]
        elif name == "output_schema":
            options[name] = schema_json(value)
        elif isinstance(value, CommandLineRuntime):
            options["runtime"] = _runtime(value)
        elif name in REFERENCES and callable(value):
            options[name] = reference(value, name)
        elif name == "vote" and isinstance(value, Mapping):
            options[name] = {field: reference(how, name) if callable(how) else how for field, how in value.items()}
        elif name in ("backend", "compaction_backend", "runtime"):
            options[name] = _place(value, name)
        else:
            options[name] = cast(JsonValue, from_json(to_json(value)))
    if cascade is not None:
        return options
    if prepared.model is not None and spec.model is None:
        options["model"] = prepared.model
    if spec.backend is None and isinstance(prepared.where, str | list):  # from the record or the environment
        options["backend"] = stored_place(prepared.where, prepared.backend.name)
        if isinstance(options["backend"], dict):  # it has a password: each worker has its own environment
            del options["backend"]
    return options


def read_spec(options: JsonObject, inputs: object, import_from: Path | None) -> BatchSpec:
    """Return the spec of a worker. Modules are imported from ``import_from`` first. Raises SpecError; also if the
    record has options that only a feeder may have: files to write, ports to open, keys."""
    if feeders := sorted(options.keys() & FEEDERS - {"no_hoist"}):
        raise SpecError(f"the record sets {', '.join(feeders)}, and only a feeder has that option")
    directory = str((import_from or Path.cwd()).resolve())
    if directory not in sys.path[:1]:
        sys.path.insert(0, directory)
    read: dict[str, Any] = dict(options)
    if "cascade" in read:
        if not isinstance(read["cascade"], list):  # a file or a text could name what was not checked
            raise SpecError("the record has a cascade that is no list of entries")
        read["cascade"] = [dict(entry) if isinstance(entry, dict) else entry for entry in read["cascade"]]
    for each in (read, *(entry for entry in read.get("cascade") or () if isinstance(entry, dict))):
        if "tools" in each:
            each["tools"] = [
                imported(tool) if ":" in tool and not tool.startswith("mcp:") else tool for tool in each["tools"]
            ]
    for name in ("output_schema", *REFERENCES):
        if isinstance(given := read.get(name), str) and (is_reference(given) if name == "escalate" else ":" in given):
            read[name] = imported(given)
    return BatchSpec(**read, inputs=inputs)


def reference(value: object, option: str) -> str:
    """Return ``module:name`` of a function or a class. Raises SpecError if another process cannot import it."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    shown = name or repr(value)
    if not module or not name or "<" in name:
        raise SpecError(f"{option}: {shown} has no name that another process can import; {HINT}")
    if module == "__main__":
        raise SpecError(f"{option}: {shown} is defined in the main script, which workers cannot import; {HINT}")
    found = _resolved(module, name)
    if found is not value and not (isinstance(found, Tool) and found.function is value):
        raise SpecError(f"{option}: {module}:{name} is a different object; {HINT}")
    return f"{module}:{name}"


def imported(name: str) -> object:
    """Return the object that ``module:name`` names. Raises SpecError."""
    module = name.partition(":")[0]
    try:
        importlib.import_module(module)
        return resolve_name(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's module can raise anything  # noqa: BLE001
        raise SpecError(
            f"{name} cannot be imported: {describe(error)}; name its directory with --import-from"
        ) from None


def _resolved(module: str, name: str) -> object:
    try:
        return resolve_name(f"{module}:{name}")
    except (ImportError, AttributeError, ValueError):
        return None


def _entries(prepared: Prepared) -> list[JsonValue]:
    """Return the entries of a cascade, with the models that are known."""
    found: list[JsonValue] = []
    for given in entries_with_models(prepared):
        if isinstance(given, str):
            found.append(given)
            continue
        entry, each = given
        if entry.get("api_key") is not None:
            raise SpecError("cascade: api_key would be stored with the run; set keys in the environment of each worker")
        options: dict[str, JsonValue] = {"label": label_of(entry), "doubt": each.spec.doubt}
        for name, value in entry.items():
            if name == "tools":
                options[name] = [_tool(tool) for tool in _flat(value)]
            elif name == "backend":
                options[name] = _place(value, name)
            else:
                options[name] = cast(JsonValue, from_json(to_json(value)))
        if each.model is not None and entry.get("model") is None:
            options["model"] = each.model
        found.append(options)
    return found


def _flat(tools: Sequence[object]) -> list[object]:
    flat: list[object] = []
    for tool in tools:
        flat += tool if isinstance(tool, list | tuple) else [tool]
    return flat


def _tool(tool: object) -> str:
    if isinstance(tool, str):
        if tool.startswith("mcp:") and ("@" in tool or "?" in tool):
            raise SpecError("tools: the address of this MCP server contains a key, which would be stored with the run")
        return tool
    if not isinstance(tool, Tool):
        return reference(tool, "tools")
    builtin = next((name for name in BUILTIN_NAMES if getattr(Tool, name) is tool), None)
    if builtin is not None:
        return builtin
    function: Callable[..., object] = tool.function
    module = sys.modules.get(getattr(function, "__module__", ""))
    named = next((name for name, value in vars(module).items() if value is tool), None) if module is not None else None
    if module is not None and module.__name__ == "__main__":
        raise SpecError(f"tools: {tool.name!r} is defined in the main script, which workers cannot import; {HINT}")
    if module is None or named is None:
        raise SpecError(f"tools: no module has a variable with the tool {tool.name!r}; {HINT}")
    return f"{module.__name__}:{named}"


def schema_json(value: object) -> JsonValue:
    """Return a JSON schema, or the ``module:name`` of a class. Raises SpecError."""
    if value is None or isinstance(value, Mapping):
        return cast(JsonValue, value)
    return reference(value, "output_schema")


def _runtime(runtime: CommandLineRuntime) -> JsonValue:
    """Return a command-line agent in the format of spec files."""
    name = next((name for name, kind in RUNTIMES.items() if type(runtime) is kind), None)
    if name is None:
        raise SpecError(f"runtime: workers know only {', '.join(RUNTIMES)}, not {type(runtime).__name__}")
    plain = type(runtime)()
    given = {each.name: getattr(runtime, each.name) for each in fields(runtime) if each.init}
    changed = {option: value for option, value in given.items() if value != getattr(plain, option)}
    return cast(JsonValue, from_json(to_json({"name": name, **changed})))


def _place(value: object, option: str) -> JsonValue:
    """Return the URL, name or mapping of a backend or a runtime."""
    if value is None:
        return None
    if isinstance(value, str):
        if "@" in value:
            raise SpecError(f"{option}: a password in the URL would be stored with the run; set it in the environment")
        return value
    if isinstance(value, Mapping):
        secret = next((name for name in value if str(name).lower() in ("api_key", "headers")), None)
        if secret is not None:
            raise SpecError(
                f"{option}: {secret} would be stored with the run; set keys in the environment of each worker"
            )
        return {str(name): cast(JsonValue, from_json(to_json(item))) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_place(item, option) for item in value]
    raise SpecError(
        f"{option}: a {type(value).__name__} object cannot be sent to other processes; give its URL or name"
    )


def pieces(prepared: Prepared) -> dict[str, str]:
    """Return a digest of each part of the requests that all rows share. A worker compares these digests to name what
    differs."""
    spec = prepared.spec
    asked: dict[str, object] = {
        "task": [spec.task, spec.template],
        "system prompt": prepared.plan.own_system,
        "worker": None if spec.worker is None else name_of(spec.worker),
        "samples": None if spec.samples == 1 else [spec.samples, spec.seed],
    }
    for entry in () if prepared.cascade is None else prepared.cascade.later:
        known = None if entry.prepared.model is None else fingerprint_of(entry.prepared).hex()
        asked[f"{ENTRY}{entry.label}"] = known
    for tool in prepared.tools:
        asked[f"the tool {tool.name}"] = [tool.version, tool.spec]
    for shape in prepared.shapes.asked:
        for name, value in shape_fields(shape).items():
            if name != "tools":
                asked[name] = [asked.get(name), value]
    return {name: blake2b(to_json(value), digest_size=8).hexdigest() for name, value in asked.items()}
