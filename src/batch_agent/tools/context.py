"""What a tool can know of the call it works for. The model neither sees it nor gives it.

A parameter that is annotated with ToolContext, whatever its name, is filled by the pool.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

current_traceparent: ContextVar[str] = ContextVar("batch_agent_traceparent", default="")
"""The trace context (W3C) of the tool call that the running task works for; "" where the run is not traced."""


@dataclass(frozen=True, slots=True, eq=False)
class ToolContext:
    """``state`` is one dict for all calls of all tools of a run; it is not recorded, and a resumed run begins with an
    empty one. ``cancelled`` is set when nobody waits for the call any more: a function in a thread, which cannot be
    stopped, may look at it, or wait for it instead of sleeping. An async one is cancelled as any coroutine is."""

    row: object = None  # the input, as the caller of the run gave it
    job_id: str = ""
    index: int = 0  # of the row among the inputs
    turn: int = 0  # of the model's answers, counted from 1, the one that asks for the call
    state: dict[str, Any] = field(default_factory=dict)
    traceparent: str = field(default_factory=current_traceparent.get)  # for requests of its own; "": not traced
    cancelled: threading.Event = field(default_factory=threading.Event, repr=False)
