"""Protocol for clusters whose processes work on a run, such as Ray (``batch_agent.ray``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pydantic import JsonValue

from batch_agent.engine.run.prepare import Prepared
from batch_agent.engine.run.run import Run
from batch_agent.events import Sink


class Cluster(Protocol):
    """A value of ``cluster=``."""

    def open_run(
        self, prepared: Prepared, command: Mapping[str, JsonValue] | None = None, sinks: Sequence[Sink] = ()
    ) -> Run[Any]:
        """Return the run for the process that reads the inputs and delivers the results."""
