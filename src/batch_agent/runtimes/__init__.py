"""Command-line agents as workers for rows."""

from __future__ import annotations

from batch_agent.runtimes.base import CommandLineRuntime
from batch_agent.runtimes.claude_code import ClaudeCodeRuntime
from batch_agent.runtimes.codex import CodexRuntime
from batch_agent.runtimes.opencode import OpenCodeRuntime

__all__ = ["ClaudeCodeRuntime", "CodexRuntime", "CommandLineRuntime", "OpenCodeRuntime"]
