"""Tools: what agents can call, and the pool that runs their calls once for all who ask."""

from __future__ import annotations

from batch_agent.tools.base import Tool, resolve_tools
from batch_agent.tools.builtin.files import read_file
from batch_agent.tools.builtin.http import http_get
from batch_agent.tools.builtin.python import python_eval
from batch_agent.tools.builtin.search import web_search
from batch_agent.tools.latency import ToolStatistics
from batch_agent.tools.pool import PendingCall, ToolOutcome, ToolPool

# Here and not in base: the built-in tools are made with Tool.define. Importing any module of this package runs this.
Tool.read_file = read_file()
Tool.http_get = http_get()
Tool.web_search = web_search()
Tool.python_eval = python_eval()

__all__ = [
    "PendingCall",
    "Tool",
    "ToolOutcome",
    "ToolPool",
    "ToolStatistics",
    "http_get",
    "python_eval",
    "read_file",
    "resolve_tools",
    "web_search",
]
