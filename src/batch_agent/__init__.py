"""Batch Agent: input list in, structured result list out.

Each name is imported when it is first used. A program that only needs the version or the help text does not load the
engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from batch_agent.version import __version__

if TYPE_CHECKING:
    from batch_agent.agent.context import AgentContext, AgentReply, BlockingContext
    from batch_agent.api import BatchAgent
    from batch_agent.backends.local.engine import release_models
    from batch_agent.errors import (
        BatchAgentError,
        JobError,
        RunRejected,
        RunUnreachable,
        SpecError,
        StoreError,
        ToolError,
    )
    from batch_agent.fleet.backend import Fleet
    from batch_agent.job import AgentError, AgentResult, Failure, Success, Timings
    from batch_agent.messages import Image, Message, ToolCall, Usage
    from batch_agent.record.compare import compare
    from batch_agent.results import Results
    from batch_agent.spec import BatchSpec
    from batch_agent.tools.base import Tool
    from batch_agent.tools.context import ToolContext
    from batch_agent.topology.pipeline import Pipeline

__all__ = [
    "AgentContext",
    "AgentError",
    "AgentReply",
    "AgentResult",
    "BatchAgent",
    "BatchAgentError",
    "BatchSpec",
    "BlockingContext",
    "Failure",
    "Fleet",
    "Image",
    "JobError",
    "Message",
    "Pipeline",
    "Results",
    "RunRejected",
    "RunUnreachable",
    "SpecError",
    "StoreError",
    "Success",
    "Timings",
    "Tool",
    "ToolCall",
    "ToolContext",
    "ToolError",
    "Usage",
    "__version__",
    "compare",
    "release_models",
]

_HOMES = {
    "agent.context": ("AgentContext", "AgentReply", "BlockingContext"),
    "api": ("BatchAgent",),
    "backends.local.engine": ("release_models",),
    "errors": ("BatchAgentError", "JobError", "RunRejected", "RunUnreachable", "SpecError", "StoreError", "ToolError"),
    "fleet.backend": ("Fleet",),
    "job": ("AgentError", "AgentResult", "Failure", "Success", "Timings"),
    "record.compare": ("compare",),
    "messages": ("Image", "Message", "ToolCall", "Usage"),
    "results": ("Results",),
    "spec": ("BatchSpec",),
    "tools.base": ("Tool",),
    "tools.context": ("ToolContext",),
    "topology.pipeline": ("Pipeline",),
}

if not TYPE_CHECKING:  # with it, a type checker would accept any name

    def __getattr__(name: str) -> object:
        for home, names in _HOMES.items():
            if name in names:
                return getattr(import_module(f"batch_agent.{home}"), name)
        raise AttributeError(f"module 'batch_agent' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
