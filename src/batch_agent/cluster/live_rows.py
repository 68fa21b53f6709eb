"""Reports the running rows that viewers of a run in Redis follow, with the text that is being streamed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject
from batch_agent.record.lent import LentStore
from batch_agent.run.steering import Controls

T = TypeVar("T")


class InThread(Protocol):
    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]:
        """Run a blocking call in a thread."""
        ...


async def report_followed_rows(store: LentStore, controls: Controls, in_thread: InThread) -> None:
    """Report the rows of this worker that a viewer follows. Call it with each beat: it costs one request to the store
    without viewers."""
    rows: dict[str, JsonObject] = {}
    for row in await in_thread(store.followed_rows):
        with suppress(SpecError):  # another worker has the row
            rows[row] = controls.live_row(row)
    if rows:
        await in_thread(partial(store.report_rows, rows))
