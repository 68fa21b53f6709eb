"""Runs the engine over time: one step after another on the event loop's clock, as callbacks, without a task.

A step's results appear when its seconds have passed. The clock is ``loop.time()``, so under a virtual clock simulated
hours take only their computing time. This file does not know callers or wire formats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Many

from batch_agent.backends.simulated.core import Sequence, SimulatedEngine, SimulatedStep
from batch_agent.backends.simulated.model import EngineModel
from batch_agent.vllm_pin import Order

OnToken = Callable[[Sequence], None]


class EngineRunner:
    """Serves any number of callers of one event loop at a time."""

    def __init__(self, model: EngineModel) -> None:
        self.engine = SimulatedEngine(model)
        self._listeners: dict[Sequence, OnToken] = {}
        self._timer: asyncio.Handle | None = None

    def start(
        self, work: Many[tuple[bytes, bytes]], on_token: OnToken, priority: int = 0, order: Order | None = None
    ) -> list[Sequence]:
        """Queue (prompt, output) pairs, all or none, and report each of their tokens. Raises what a refusing server
        would answer. The caller must ``stop`` what it started."""
        self.engine.now = asyncio.get_running_loop().time()
        for prompt, output in work:
            self.engine.check(prompt, output, len(work))
        sequences = [self.engine.add(prompt, output, priority, order) for prompt, output in work]
        for sequence in sequences:
            self._listeners[sequence] = on_token
        if self._timer is None:
            # Not at once: requests that arrive in the same iteration of the loop share their first step.
            self._timer = asyncio.get_running_loop().call_soon(self._next_step)
        return sequences

    def stop(self, sequences: Many[Sequence]) -> None:
        """Abort unfinished sequences; the rest of the batch continues."""
        for sequence in sequences:
            self.engine.abort(sequence)
            self._listeners.pop(sequence, None)

    def close(self) -> None:
        """Drop the running step. The cache stays warm for the next user, possibly on another event loop."""
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

    def _complete(self, step: SimulatedStep) -> None:
        self.engine.now = asyncio.get_running_loop().time()
        for sequence in self.engine.complete(step):
            listener = self._listeners.get(sequence)
            if sequence.ended:
                self._listeners.pop(sequence, None)
            if listener is not None:
                listener(sequence)
        self._next_step()
