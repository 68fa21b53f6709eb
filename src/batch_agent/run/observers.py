"""Observers of a run: its file of events, its Prometheus page, its traces.

The outermost run opens them before anything else and closes them after its last event. A run that uses none of them
imports none of them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

from batch_agent.blocking import in_thread
from batch_agent.errors import SpecError
from batch_agent.events import Held, Sink
from batch_agent.observe.prometheus import LiveNumbers, RunNumbers
from batch_agent.observe.statistics import Statistics
from batch_agent.spec import BatchSpec

if TYPE_CHECKING:
    from batch_agent.observe.telemetry import Traces

logger = logging.getLogger("batch_agent")

INSTALL = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
ENDPOINTS = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
)
PATIENCE = 5.0  # seconds to wait for a disk or a collector at the end of a run


class Observers:
    def __init__(self) -> None:
        self.metrics_url: str | None = None  # while the page is served
        self.traces: Traces | None = None  # if the run is traced
        self._extent = AsyncExitStack()

    async def open(
        self,
        spec: BatchSpec,
        add: Callable[[Sink], None],
        statistics: Callable[[], Statistics],
        live: Callable[[], LiveNumbers],
    ) -> None:
        """Open the observers of the spec. ``add`` registers a sink of the run's events. Raises SpecError if a file or a
        port cannot be opened."""
        if spec.events is not None:
            from batch_agent.observe.event_lines import EventLines

            lines = EventLines(spec.events)
            self._extent.push_async_callback(_in_thread, lines.close)
            add(lines)
        exports = wants_telemetry(spec.telemetry, os.environ)
        exports_metrics = exports and os.environ.get("OTEL_METRICS_EXPORTER", "").lower() != "none"
        if spec.metrics_port is None and not exports:
            return
        held, numbers = Held(), RunNumbers(statistics, live, conventions=exports_metrics)
        if spec.metrics_port is not None:
            from batch_agent.observe.exposition import serve_metrics

            def page() -> str:
                held.flush()
                return numbers.page()

            served = serve_metrics(spec.metrics_port, page)
            self.metrics_url = await self._extent.enter_async_context(served)
            with suppress(OSError, ValueError):  # standard error may be closed
                sys.stderr.write(f"metrics: {self.metrics_url}\n")
        if exports:
            from batch_agent.observe.telemetry import Telemetry

            telemetry = Telemetry(numbers if exports_metrics else None, os.environ)
            self._extent.push_async_callback(_in_thread, telemetry.close)
            self.traces = telemetry.traces
            for sink in telemetry.sinks:
                held.add(sink)
        if spec.metrics_port is not None or exports_metrics:
            held.add(numbers)
        self._extent.callback(held.flush)
        add(held)

    async def close(self) -> None:
        """Close all observers. Takes a few seconds at most, even if one does not respond."""
        await self._extent.aclose()
        self.metrics_url = None


def is_observed(spec: BatchSpec) -> bool:
    """Return whether a run has observers that need events of workers in other processes. Workers export their own
    spans."""
    return bool(spec.sinks) or spec.events is not None or spec.metrics_port is not None


async def _in_thread(function: Callable[[], None]) -> None:
    """Call a function that may block in a thread. It is abandoned if it takes too long."""
    closing = in_thread(function)
    await asyncio.wait([closing], timeout=PATIENCE)
    if closing.done() and (error := closing.exception()) is not None:
        logger.warning("an observer of the run could not be closed: %s", error)


def wants_telemetry(given: bool | None, environ: Mapping[str, str]) -> bool:
    """Return whether a run exports to OpenTelemetry, without importing it. Raises SpecError if it should and the SDK is
    missing."""
    if given is False or environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if given is None and not any(environ.get(name) for name in ENDPOINTS):
        return False
    if _installed():
        return True
    if given:
        raise SpecError(f"telemetry: the OpenTelemetry SDK is not installed; {INSTALL}")
    return False


def _installed() -> bool:
    try:
        return find_spec("opentelemetry.sdk") is not None and find_spec("opentelemetry.exporter.otlp") is not None
    except ModuleNotFoundError:
        return False
