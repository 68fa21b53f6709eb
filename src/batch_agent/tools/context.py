"""Information for a tool about its call. The model does not see it.

The pool sets each parameter that is annotated with ToolContext; its name does not matter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

traceparent_of_call: ContextVar[Callable[[], str]] = ContextVar("batch_agent_traceparent", default=str)
"""Returns the trace context (W3C) of the tool call of the current task; "" if the run is not traced. It is computed when
a tool needs it."""


def current_traceparent() -> str:
    return traceparent_of_call.get()()


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
    traceparent: str = field(default_factory=current_traceparent)  # for the tool's own requests; "": not traced
    cancelled: threading.Event = field(default_factory=threading.Event, repr=False)
