"""A command-line agent as a tool: each call has its own process, home directory and working tree.

The agent sends its requests to the backend of its runtime, or to the run's through the gateway. The record has the
result of a call, not the agent's model calls.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from batch_agent.errors import AgentTimeout, SpecError, ToolError, ToolTimeout, WorkerFailed
from batch_agent.messages import Usage
from batch_agent.runtimes.base import LOGIN, CommandLineRuntime
from batch_agent.runtimes.named import ClaudeCodeRuntime
from batch_agent.tools.base import Tool
from batch_agent.tools.context import ModelKey, ToolContext

DESCRIPTION = {
    "read": "Give a task to {name}, a coding agent that can read the files here. Returns its answer.",
    "write": "Give a task to {name}, a coding agent that can change files. Returns its answer and what it changed.",
    "full": "Give a task to {name}, a coding agent that can run programs. Returns its answer and what it changed.",
}


class _Call:
    """The context of one call for a runtime."""

    def __init__(self, task: str, key: ModelKey, workdir: Path) -> None:
        self.prompt = task
        self.model = key.model
        self.workdir = workdir
        self.base_url = key.base_url
        self.api_key = key.api_key
        self.env = key.env
        self.patch = ""

    def save(self, name: str, content: str | bytes | Path) -> Path:
        if name == "diff.patch" and isinstance(content, bytes):
            self.patch = content.decode("utf-8", "replace")
        return self.workdir / name

    def add_usage(self, usage: Usage) -> None:
        pass


def agent_tool(
    runtime: CommandLineRuntime, name: str | None, description: str | None, max_concurrent: int | None
) -> Tool[..., Coroutine[Any, Any, str]]:
    """Return the tool; its default number of calls at once fits into memory. Raises SpecError."""
    if runtime.model is None and runtime.backend not in (None, LOGIN) and not isinstance(runtime, ClaudeCodeRuntime):
        raise SpecError(f"Tool.agent: give {runtime.name} a model")

    async def agent(task: str) -> str:
        return await _run(runtime, task, ModelKey("", "", {}, runtime.model or ""))

    async def agent_of_run(task: str, context: ToolContext) -> str:
        if context.models is None:
            raise ToolError(f"{runtime.name} has no backend: outside of a run, give its runtime one")
        async with context.models.opened(context) as key:
            return await _run(runtime, task, key)

    return Tool.define(
        agent if runtime.backend is not None else agent_of_run,
        name=name or runtime.name.lower().replace(" ", "_"),
        description=description or DESCRIPTION[runtime.permissions].format(name=runtime.name),
        effect="read" if runtime.permissions == "read" else "write",
        max_concurrent=max_concurrent or runtime.most_at_once(),
        timeout=runtime.timeout,
    )


async def _run(runtime: CommandLineRuntime, task: str, key: ModelKey) -> str:
    with tempfile.TemporaryDirectory(prefix="batch-agent-", ignore_cleanup_errors=True) as folder:
        call = _Call(task, key, Path(folder))
        try:
            text = await runtime(None, call)
        except AgentTimeout as error:
            raise ToolTimeout(str(error)) from None
        except (WorkerFailed, SpecError) as error:
            raise ToolError(str(error)) from None
    return f"{text}\n\nWhat it changed:\n{call.patch}" if call.patch else text


def claude_code() -> Tool[..., Coroutine[Any, Any, str]]:
    """Return a tool for Claude Code that reads the files of the working directory: with its own login, else with
    ANTHROPIC_API_KEY, else with the run's backend."""
    runtime = ClaudeCodeRuntime(LOGIN, working_dir=".", isolation="none")
    if runtime.login():
        return Tool.agent(runtime)
    return Tool.agent(replace(runtime, backend="anthropic://" if os.environ.get("ANTHROPIC_API_KEY") else None))
