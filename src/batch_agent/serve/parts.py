"""The parts of a server that work until it ends, each in a task of its own: an error in one does not end the others.

A part that raises is logged with its traceback, counted, and started again. If it raises several times in a row, the
server ends, and its supervisor starts a new process.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine

from batch_agent.errors import InternalError
from batch_agent.foreign import describe

logger = logging.getLogger("batch_agent")

MOST_FAILURES, WITHIN_SECONDS = 5, 60.0  # of one part, after which the server ends
PAUSE_SECONDS = 0.5  # before a part is started again

Part = Callable[[], Coroutine[object, object, None]]


class PartFailed(InternalError):
    """A part of the server failed several times in a row."""


class ServerParts:
    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.tasks = tasks
        self.failures: Counter[str] = Counter()  # by part, since the start of the server

    def start(self, name: str, part: Part) -> None:
        """Start a part, which is cancelled at the end of the server."""
        self.failures[name] = 0
        self.tasks.create_task(self._keep(name, part), name=f"batch-agent serve {name}")

    async def _keep(self, name: str, part: Part) -> None:
        """Run a part until it ends, and start it again after an error. Raises PartFailed if it fails several times in a
        row."""
        clock, failed = asyncio.get_running_loop().time, deque[float](maxlen=MOST_FAILURES)
        while True:
            try:
                await part()
                return
            except Exception as error:
                self.failures[name] += 1
                failed.append(clock())
                logger.exception("the part %r of the server failed, and is started again", name)
                if len(failed) == MOST_FAILURES and failed[-1] - failed[0] <= WITHIN_SECONDS:
                    often = f"{MOST_FAILURES} times within {WITHIN_SECONDS:g} s"
                    raise PartFailed(
                        f"the part {name!r} failed {often}, the last time with {describe(error)}"
                    ) from error
            await asyncio.sleep(PAUSE_SECONDS)
