"""What a run works with: slots, a budget, a tool pool, a record, a stream of events. Runs inside a run share its."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.spending import Spending
from batch_agent.engine.run.clock import Clock
from batch_agent.events import Event, Sink
from batch_agent.store.session import Session
from batch_agent.tools.pool import ToolPool

logger = logging.getLogger("batch_agent")


class Sinks:
    """A sink of all the others. One that raises gets no more events, and does not touch the run."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    def __call__(self, event: Event) -> None:
        for sink in self._sinks:
            try:
                sink(event)
            except Exception:
                logger.exception("a sink of events raised and gets no more of them")
                self._sinks = [other for other in self._sinks if other is not sink]


@dataclass(slots=True, eq=False)
class Shared:
    """``dispatchers`` are those of all backends, by name; ``dispatcher`` is this run's. ``pool`` and ``session`` are
    set while the outermost run is at work, the session only if it has a run directory."""

    clock: Clock
    emit: Sink
    dispatcher: Dispatcher
    spending: Spending
    dispatchers: dict[str, Dispatcher]
    pool: ToolPool | None = None
    session: Session | None = None
