"""Runtimes by name, for spec files and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from batch_agent.backends.address import check_known
from batch_agent.errors import SpecError
from batch_agent.runtimes.base import CommandLineRuntime
from batch_agent.runtimes.claude_code import ClaudeCodeRuntime
from batch_agent.runtimes.codex import CodexRuntime
from batch_agent.runtimes.opencode import OpenCodeRuntime

RUNTIMES: Mapping[str, type[CommandLineRuntime]] = {
    "opencode": OpenCodeRuntime,
    "claude-code": ClaudeCodeRuntime,
    "codex": CodexRuntime,
}


def runtime_of(given: object) -> CommandLineRuntime | None:
    """Return the runtime given as an object, by name, or by a mapping with its name and options. None for anything
    else. Raises SpecError for an unknown name or option."""
    if isinstance(given, CommandLineRuntime):
        return given
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, Mapping):
        return None
    options = dict(given)
    name = options.pop("name", None)
    kind = RUNTIMES.get(str(name).replace("_", "-"))
    if kind is None:
        raise SpecError(f"runtime: {name!r} is none of {', '.join(RUNTIMES)}")
    known = [field.name for field in fields(kind) if field.init]
    check_known(map(str, options), known, f"runtime: {name} has no option")
    return kind(**options)
