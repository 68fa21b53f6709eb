"""A command-line agent as a tool: each call has its own process, home directory and working tree.

The agent sends requests to the backend of its runtime itself. The run sees the result of a call, not the agent's model
calls.
"""

from __future__ import annotations

import tempfile
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from batch_agent.errors import AgentTimeout, SpecError, ToolError, ToolTimeout, WorkerFailed
from batch_agent.messages import Usage
from batch_agent.runtimes.base import LOGIN, CommandLineRuntime
from batch_agent.runtimes.claude_code import ClaudeCodeRuntime
from batch_agent.tools.base import Tool

DESCRIPTION = {
    "read": "Give a task to {name}, a coding agent that can read the files here. Returns its answer.",
    "write": "Give a task to {name}, a coding agent that can change files. Returns its answer and what it changed.",
    "full": "Give a task to {name}, a coding agent that can run programs. Returns its answer and what it changed.",
}


class _Call:
    """The context of one call for a runtime."""

    base_url = api_key = ""
    env: Mapping[str, str] = {}

    def __init__(self, task: str, model: str, workdir: Path) -> None:
        self.prompt, self.model, self.workdir = task, model, workdir
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
    if runtime.backend is None:
        raise SpecError(
            f"Tool.agent: give {runtime.name} its own backend, such as backend='vllm://host:8000', or backend='login' "
            "for the login of the command"
        )
    if runtime.model is None and runtime.backend != LOGIN and not isinstance(runtime, ClaudeCodeRuntime):
        raise SpecError(f"Tool.agent: give {runtime.name} a model")

    async def agent(task: str) -> str:
        with tempfile.TemporaryDirectory(prefix="batch-agent-", ignore_cleanup_errors=True) as folder:
            call = _Call(task, runtime.model or "", Path(folder))
            try:
                text = await runtime(None, call)
            except AgentTimeout as error:
                raise ToolTimeout(str(error)) from None
            except (WorkerFailed, SpecError) as error:
                raise ToolError(str(error)) from None
        return f"{text}\n\nWhat it changed:\n{call.patch}" if call.patch else text

    return Tool.define(
        agent,
        name=name or runtime.name.lower().replace(" ", "_"),
        description=description or DESCRIPTION[runtime.permissions].format(name=runtime.name),
        effect="read" if runtime.permissions == "read" else "write",
        max_concurrent=max_concurrent or runtime.most_at_once(),
        timeout=runtime.timeout,
    )


def claude_code() -> Tool[..., Coroutine[Any, Any, str]]:
    """Return a tool for Claude Code that reads the files of the working directory, with its own login or, without one,
    ANTHROPIC_API_KEY."""
    runtime = ClaudeCodeRuntime(LOGIN, working_dir=".", isolation="none")
    return Tool.agent(runtime if runtime.login() else replace(runtime, backend="anthropic://"))
