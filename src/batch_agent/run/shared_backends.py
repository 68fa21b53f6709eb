"""Backends of the runs of one process: runs with the same address share connections and local weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from batch_agent.agent.prepare import Prepared, place_of_backend
from batch_agent.backends.base import Backend

Wrap = Callable[[Backend, str | None], Backend]


class SharedBackends:
    """Finds backends that runs can share. ``wrap`` is called with each backend and its API key, and returns the backend
    to use."""

    def __init__(self, wrap: Wrap = lambda backend, api_key: backend) -> None:
        self._wrap = wrap
        self._known: dict[tuple[object, ...], Backend] = {}

    def share(self, prepared: Prepared) -> Prepared:
        """Return the run with the backend of an earlier run with the same address; if there is none, with its own. The
        same is done for the entries of a cascade."""
        if prepared.cascade is not None:
            prepared = replace(prepared, cascade=prepared.cascade.with_each(self.share))
        key = place_of_backend(prepared)
        if key not in self._known:
            self._known[key] = self._wrap(prepared.backend, prepared.spec.api_key)
        return replace(prepared, backend=self._known[key])
