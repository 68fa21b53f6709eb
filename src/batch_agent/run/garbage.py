"""Lets Python's garbage collector run less often while a run works.

A run makes no reference cycles, but its live agents and its results are objects that the collector counts, and at
Python's threshold of 700 it looks at them again and again: a tenth of the CPU of a recorded run, and more with more
live agents. The threshold belongs to the process. So it is only raised, and set back at the end of the run.
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
# Objects that are made before the collector looks at them: more than the live agents of a usual run have, so that most
# of them are gone by then. Cycles of a user's tools wait as long.
THRESHOLD = 10_000


async def collecting_rarely(work: Callable[[], Awaitable[T]]) -> T:
    """Return the result of ``work``. A higher threshold, or a collector that is off, stays as it is. A threshold that
    is changed meanwhile is kept; so of several runs at once, the end of the first one sets it back."""
    before = gc.get_threshold()
    raised = (THRESHOLD, *before[1:]) if 0 < before[0] < THRESHOLD else before
    gc.set_threshold(*raised)
    try:
        return await work()
    finally:
        if gc.get_threshold() == raised:
            gc.set_threshold(*before)
