"""Information for a tool about its call. The model does not see it.

The pool sets each parameter that is annotated with ToolContext; its name does not matter.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

current_traceparent: ContextVar[str] = ContextVar("batch_agent_traceparent", default="")
"""The trace context (W3C) of the tool call of the current task; "" if the run is not traced."""


class CallTrace(Protocol):
    """The trace context of one tool call."""

    traceparent: str

    def entered(self) -> AbstractContextManager[None]:
        """Enter this to start the call: tasks started inside belong to the call's span."""


@dataclass(frozen=True, slots=True)
class ModelKey:
    """Where a program that a tool starts finds the run's model: an address (with ``/v1``), a key, and variables with
    both."""

    base_url: str
    api_key: str = field(repr=False)
    env: Mapping[str, str] = field(repr=False)
    model: str


class ModelAccess(Protocol):
    """The run's backend for the programs of its tools, through the gateway: with its slots, rate limits and budget."""

    def opened(self, context: ToolContext) -> AbstractAsyncContextManager[ModelKey]:
        """Yield a key for one call, which ends with it."""


@dataclass(frozen=True, slots=True, eq=False)
class ToolContext:
    """The row and turn of a tool call.

    ``state`` is one dict for all tool calls of a run. It is not recorded: a resumed run starts with an empty dict.
    ``cancelled`` is set when no agent needs the call any more. A function in a thread cannot be stopped, so it may
    check the event, or wait for it instead of sleeping. An async function is cancelled like any coroutine."""

    row: object = None  # the input, unchanged
    job_id: str = ""
    index: int = 0  # position of the row in the inputs
    turn: int = 0  # number of the model's answer that makes the call, from 1
    state: dict[str, Any] = field(default_factory=dict)
    traceparent: str = ""  # for the tool's own requests; "": not traced
    cancelled: threading.Event = field(default_factory=threading.Event, repr=False)
    models: ModelAccess | None = field(default=None, repr=False)  # for tools that ask models; None outside of a run
