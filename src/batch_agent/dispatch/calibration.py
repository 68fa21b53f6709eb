"""The concurrency limits that ``calibrate_backend`` found, remembered by endpoint and model.

One small JSON file in the cache directory. Losing it only costs a new ramp, so nothing here raises: an unreadable
file is ignored with a warning and rewritten by the next calibration. Entries expire after a month.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from batch_agent.backends.base import Backend
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.scheduler.capacity import LimitSearch
from batch_agent.scheduler.numbers import N

FILE = "capacity.json"
MONTH = 30 * 86_400.0  # seconds
MOST_ENTRIES = 1000  # the newest are kept

logger = logging.getLogger("batch_agent")


class CalibrationFile:
    """Reads and writes the file. All methods block."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = calibration_file() if path is None else path

    def get(self, endpoints: Iterable[str], model: str) -> dict[str, int]:
        """Return the remembered limit of each endpoint that has one."""
        known, since = self._read(), time.time() - MONTH
        entries = {endpoint: known.get(_key(endpoint, model)) for endpoint in endpoints}
        return {endpoint: entry[0] for endpoint, entry in entries.items() if entry is not None and entry[1] > since}

    def put(self, found: Mapping[str, int], model: str) -> None:
        """Store the limits in ``found``, by endpoint."""
        now = time.time()
        known = self._read() | {_key(endpoint, model): (knee, now) for endpoint, knee in found.items()}
        latest = dict(sorted(known.items(), key=lambda item: -item[1][1])[:MOST_ENTRIES])
        document = {key: {"inflight": knee, "at": at} for key, (knee, at) in latest.items()}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # An atomic rename: the file is always complete, even with several writers.
            handle, draft = tempfile.mkstemp(dir=self._path.parent, prefix=FILE)
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(document, file, indent=1)
                Path(draft).replace(self._path)
            finally:
                Path(draft).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("cannot save what calibrate_backend found: %s", error)

    def _read(self) -> dict[str, tuple[int, float]]:
        try:
            document = json.loads(self._path.read_bytes())
            return {str(key): (_count(entry["inflight"]), float(entry["at"])) for key, entry in document.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            logger.warning("cannot read %s: calibrate_backend measures again", self._path)
            return {}


def calibration_file() -> Path:
    from batch_agent.backends.cache_store import cache_dir

    return cache_dir() / FILE


@asynccontextmanager
async def calibration(backend: Backend, dispatcher: Dispatcher, model: str, *, wanted: bool) -> AsyncIterator[None]:
    """Start each endpoint at its remembered limit, or with a ramp that finds it. Save what was found at the end."""
    if not wanted:
        yield
        return
    endpoints = {_where(backend, endpoint.name): endpoint for endpoint in dispatcher.scheduler.endpoints}
    known = await asyncio.to_thread(CalibrationFile().get, endpoints, model)
    for where, endpoint in endpoints.items():
        if (knee := known.get(where)) is not None:
            dispatcher.endpoints.search(endpoint, LimitSearch(knee, knee, settled=True), "found before")
        else:
            dispatcher.endpoints.search(endpoint, LimitSearch(N.few, N.few), "calibrate_backend")
    yield
    found = {where: knee for where, endpoint in endpoints.items() if (knee := endpoint.capacity.knee) is not None}
    if found:
        await asyncio.to_thread(CalibrationFile().put, found, model)


def _where(backend: Backend, endpoint: str) -> str:
    return f"{backend.name} {endpoint}" if endpoint else backend.name


def _key(endpoint: str, model: str) -> str:
    return f"{endpoint} {model}"


def _count(value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(value)
    return value
