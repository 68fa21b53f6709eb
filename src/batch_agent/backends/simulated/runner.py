"""The engine in time: one step after the other on the event loop's clock, as callbacks, without a task of its own.

A step's results appear when its seconds have passed. The clock is ``loop.time()``, so a virtual clock makes hours of
simulated serving take as long as computing them. Who asked, and in which wire format, is no business of this file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Many

from batch_agent.backends.simulated.core import Engine, Sequence, Step
from batch_agent.backends.simulated.model import EngineModel
from batch_agent.vllm_pin import Order

OnToken = Callable[[Sequence], None]


class EngineRunner:
    """Serves any number of callers of one event loop at a time."""

    def __init__(self, model: EngineModel) -> None:
        self.engine = Engine(model)
        self._listeners: dict[Sequence, OnToken] = {}
        self._timer: asyncio.Handle | None = None

    def start(
        self, work: Many[tuple[bytes, bytes]], on_token: OnToken, priority: int = 0, order: Order | None = None
    ) -> list[Sequence]:
        """Queues (prompt, output) pairs, all or none, and reports each of their tokens. Raises what a server would
        answer when it refuses. The caller must ``stop`` what it started."""
        self.engine.now = asyncio.get_running_loop().time()
        for prompt, output in work:
            self.engine.check(prompt, output, len(work))
        sequences = [self.engine.add(prompt, output, priority, order) for prompt, output in work]
        for sequence in sequences:
            self._listeners[sequence] = on_token
        if self._timer is None:
            # Not at once: requests that arrive in the same turn of the loop share their first step.
            self._timer = asyncio.get_running_loop().call_soon(self._next_step)
        return sequences

    def stop(self, sequences: Many[Sequence]) -> None:
        """Drops what has not ended; the rest of the batch goes on."""
        for sequence in sequences:
            self.engine.abort(sequence)
            self._listeners.pop(sequence, None)

    def close(self) -> None:
        """Forgets the step under way; the cache stays warm for whoever comes next, maybe on another event loop."""
        self.stop(list(self._listeners))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _next_step(self) -> None:
        self.engine.now = asyncio.get_running_loop().time()
        step = self.engine.schedule()
        if step is None:
            self._timer = None
            return
        loop = asyncio.get_running_loop()
        if step.seconds > 0:
            self._timer = loop.call_later(step.seconds, self._complete, step)
        else:
            self._timer = loop.call_soon(self._complete, step)

    def _complete(self, step: Step) -> None:
        self.engine.now = asyncio.get_running_loop().time()
        for sequence in self.engine.complete(step):
            listener = self._listeners.get(sequence)
            if sequence.ended:
                self._listeners.pop(sequence, None)
            if listener is not None:
                listener(sequence)
        self._next_step()
