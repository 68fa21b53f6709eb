"""The seam to clusters whose processes work on a run: Ray has one (``batch_agent.ray``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pydantic import JsonValue

from batch_agent.engine.run.prepare import Prepared
from batch_agent.engine.run.run import Run
from batch_agent.events import Sink


class Cluster(Protocol):
    """What ``cluster=`` takes."""

    def open_run(
        self, prepared: Prepared, command: Mapping[str, JsonValue] | None = None, sinks: Sequence[Sink] = ()
    ) -> Run[Any]:
        """The run as the process has it that reads the inputs and delivers the results."""
        ...
