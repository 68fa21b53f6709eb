"""``batch-agent tools``: lists the tools that agents can call, with descriptions and schemas."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import cast

from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.output.streams import put, put_json, say
from batch_agent.cli.spec.arguments import add_mcp_argument
from batch_agent.cli.spec.specfile import STAGES, SpecFile, load_env_file, read_specfile
from batch_agent.errors import SpecError
from batch_agent.files.results import to_json
from batch_agent.messages import JsonObject
from batch_agent.observe.text import harmless, terminal_width, wrapped
from batch_agent.tools.base import Tool, resolve_tools


def add_tools_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", nargs="?", metavar="SPEC", help="the spec file; its tools are listed")
    parser.add_argument("--tool", action="append", metavar="NAME", help="a tool, like --tool of run; repeatable")
    add_mcp_argument(parser)
    parser.add_argument("--env-file", metavar="FILE", help="file with lines of NAME=VALUE, for MCP servers")
    parser.add_argument("--json", action="store_true", help="print one JSON list, with the schemas")


def tools_command(options: argparse.Namespace) -> int:
    if options.spec is None and not options.tool:
        raise SpecError("give a spec file, --tool or --mcp")
    with redirect_stdout(sys.stderr):  # a user's module may print when it is imported
        if options.env_file is not None:
            load_env_file(Path(options.env_file))
        tools = list(_tools(options))
    if options.json:
        put_json([_json(tool) for tool in tools])
    elif tools:
        put(wrapped("\n\n".join(map(_text, tools)), terminal_width(sys.stdout)))
    else:
        say("there are no tools")
    return ALL_OK


def _tools(options: argparse.Namespace) -> Iterator[Tool]:
    """Yield the tools of the spec, of each of its stages, and of the command line."""
    if options.spec is not None:
        file = read_specfile(Path(options.spec))
        stages = file.options.get(STAGES)
        for part in (file.options, *(stages if isinstance(stages, list) else ())):
            if isinstance(part, dict) and "tools" in part:
                yield from _resolved(file, part["tools"])
    if options.tool:
        yield from _resolved(SpecFile(Path("run"), "", {}), options.tool)


def _resolved(file: SpecFile, tools: object) -> tuple[Tool, ...]:
    with file.named():
        return resolve_tools(cast("list[object]", file.follow({"tools": tools})["tools"]))


def _json(tool: Tool) -> JsonObject:
    return {
        "name": tool.name,
        "description": tool.description,
        "effect": tool.effect,
        "cacheable": tool.cacheable,
        "parameters": tool.spec.parameters,
    }


def _text(tool: Tool) -> str:
    kind = "reads, cached" if tool.cacheable else "reads" if tool.effect == "read" else "writes"
    lines = [f"{tool.name} ({kind})", *(f"  {line}" for line in tool.description.strip().splitlines())]
    parameters = tool.spec.parameters
    required = parameters.get("required")
    properties = parameters.get("properties")
    for name, schema in properties.items() if isinstance(properties, dict) else ():
        must = isinstance(required, list) and name in required
        lines.append(f"  - {name}{'' if must else ' (optional)'}: {to_json(schema).decode()}")
    return "\n".join(map(harmless, lines))
