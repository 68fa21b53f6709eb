"""Batch Agent: input list in, structured result list out."""

from importlib.metadata import version

from batch_agent.api import BatchAgent
from batch_agent.errors import BatchAgentError, JobError, RunRejected, SpecError, StoreError, ToolError
from batch_agent.job import AgentError, AgentResult, Timings
from batch_agent.messages import Message, ToolCall, Usage
from batch_agent.spec import BatchSpec
from batch_agent.tools.base import Tool

__all__ = [
    "AgentError",
    "AgentResult",
    "BatchAgent",
    "BatchAgentError",
    "BatchSpec",
    "JobError",
    "Message",
    "RunRejected",
    "SpecError",
    "StoreError",
    "Timings",
    "Tool",
    "ToolCall",
    "ToolError",
    "Usage",
    "__version__",
]

__version__ = version("batch-agent")
