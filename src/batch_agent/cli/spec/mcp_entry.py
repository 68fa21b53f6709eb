"""MCP servers in spec files and on the command line: ``mcp:SERVER``, or a mapping with ``mcp`` and options."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path

from batch_agent.errors import SpecError
from batch_agent.tools.base import Tool, tools_at
from batch_agent.tools.mcp.address import expanded

SERVER = "mcp"
EXPANDED = ("headers", "env")  # their values are often secrets, so ${NAME} is replaced from the environment


def mcp_entry(entry: Mapping[str, object], beside: Path) -> list[Tool]:
    """Return the tools of an entry. Files and server commands are resolved in the directory ``beside``."""
    server = entry[SERVER]
    options = {name: value for name, value in entry.items() if name != SERVER}
    in_file = isinstance(server, str) and server.endswith(".json")
    known = inspect.signature(Tool.mcp_file if in_file else Tool.mcp).parameters
    for name in options:
        if name not in list(known)[1:]:
            raise SpecError(f"there is no option {name!r} of an MCP server; there are {', '.join(list(known)[1:])}")
    if in_file:
        return tools_at(str(beside / str(server)), **options)
    if not isinstance(server, str | list):
        raise SpecError(f"{server!r} is not an MCP server")
    for name in EXPANDED:
        values = options.get(name)
        if isinstance(values, Mapping):
            options[name] = {key: expanded(value, os.environ) for key, value in values.items()}
    is_url = isinstance(server, str) and not server.startswith("stdio:")
    if not is_url:
        options["cwd"] = beside / str(options.get("cwd", ""))
    return tools_at(server, **options) if isinstance(server, str) else Tool.mcp(server, **options)  # type: ignore[arg-type]
