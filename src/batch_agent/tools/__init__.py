"""Tools that agents can call, and the pool that runs their calls and shares results between agents.

A built-in tool is made when it is first used, as ``Tool.http_get`` or as ``http_get(...)`` with other settings. A
program that uses none of them does not import an HTTP client.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from batch_agent.tools.base import Tool, resolve_tools
from batch_agent.tools.execution import ToolStatistics
from batch_agent.tools.pool import PendingCall, ToolOutcome, ToolPool

if TYPE_CHECKING:
    from batch_agent.tools.builtin.agent import claude_code
    from batch_agent.tools.builtin.files import read_file
    from batch_agent.tools.builtin.http import http_get
    from batch_agent.tools.builtin.python import python_eval
    from batch_agent.tools.builtin.search import web_search

__all__ = [
    "PendingCall",
    "Tool",
    "ToolOutcome",
    "ToolPool",
    "ToolStatistics",
    "claude_code",
    "http_get",
    "python_eval",
    "read_file",
    "resolve_tools",
    "web_search",
]

# Not in base, because the built-in tools use Tool.define. Importing any module of this package runs this code.
_MAKERS = {
    "claude_code": "batch_agent.tools.builtin.agent:claude_code",
    "http_get": "batch_agent.tools.builtin.http:http_get",
    "python_eval": "batch_agent.tools.builtin.python:python_eval",
    "read_file": "batch_agent.tools.builtin.files:read_file",
    "web_search": "batch_agent.tools.builtin.search:web_search",
}


class _Builtin:
    """Descriptor on Tool that makes the built-in tool at its first use and replaces itself by it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> object:
        tool: object = resolve_name(_MAKERS[self._name])()
        setattr(owner, self._name, tool)
        return tool


for _name in _MAKERS:
    setattr(Tool, _name, _Builtin(_name))

if not TYPE_CHECKING:  # with it, a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name in _MAKERS:
            return resolve_name(_MAKERS[name])
        raise AttributeError(f"module 'batch_agent.tools' has no attribute {name!r}")
