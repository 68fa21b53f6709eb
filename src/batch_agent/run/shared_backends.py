"""Backends of the runs of one process: runs with the same address share connections and local weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from batch_agent.agent.prepare import Prepared
from batch_agent.backends.base import Backend

Wrap = Callable[[Backend, str | None], Backend]


class SharedBackends:
    """``wrap`` is called with each backend and its API key, and returns the backend to use."""

    def __init__(self, wrap: Wrap = lambda backend, api_key: backend) -> None:
        self._wrap = wrap
        self._known: dict[tuple[object, ...], Backend] = {}

    def share(self, prepared: Prepared) -> Prepared:
        """Return the run with the backend of an earlier run that has the same address, or with its own."""
        spec = prepared.spec
        where = spec.runtime if spec.backend is None else spec.backend
        place = where if isinstance(where, str | None) else id(where)
        key = (prepared.backend.name, place, spec.api_key, spec.cache)
        if key not in self._known:
            self._known[key] = self._wrap(prepared.backend, spec.api_key)
        return replace(prepared, backend=self._known[key])
