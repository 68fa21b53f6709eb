"""Decides whether a run exports to OpenTelemetry, without importing it: a run without it pays nothing."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from batch_agent.errors import SpecError

INSTALL = 'pip install "batch-agent[otel]"'
ENDPOINTS = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
)


def is_wanted(given: bool | None, environ: Mapping[str, str]) -> bool:
    """Return whether a run exports. Raises SpecError if it should and the SDK is missing."""
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
