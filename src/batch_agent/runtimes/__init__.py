"""Command-line agents as workers for rows."""

from __future__ import annotations

from batch_agent.runtimes.base import CommandLineRuntime
from batch_agent.runtimes.named import ClaudeCodeRuntime, CodexRuntime, OpenCodeRuntime

__all__ = ["ClaudeCodeRuntime", "CodexRuntime", "CommandLineRuntime", "OpenCodeRuntime"]
