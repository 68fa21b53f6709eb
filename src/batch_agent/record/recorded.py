"""Reads a recorded run for commands, from a run directory or from the URL of a run in Redis.

``look`` reads a run in Redis in place. ``brought`` copies it into a directory and reads it there. So no command needs
to know where a run is stored.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, cast

from batch_agent.errors import SpecError
from batch_agent.files.tables import InOrderOfInput
from batch_agent.messages import JsonObject
from batch_agent.record.address import StoreAddress, is_store_url
from batch_agent.record.control import NotAlive, Refused
from batch_agent.record.mirror import RunMirror, reader_of, shared_view
from batch_agent.record.run_history import endpoints_of
from batch_agent.record.rundir import FAILURES, RunView

RunPlace: TypeAlias = Path | StoreAddress


def place_of(run: str, *, named: bool = True) -> RunPlace:
    """Return the place that a command line names. With ``named``, a URL must name a run. Raises SpecError for an
    invalid URL."""
    return StoreAddress.parse(run, named=named) if is_store_url(run) else Path(run)


def look(place: RunPlace) -> RunView:
    """Return the state and progress of the run. Raises SpecError if there is none, StoreError if it cannot be read."""
    if isinstance(place, Path):
        return RunView.of(place)
    with reader_of(place) as reader:
        return shared_view(reader, place)


@contextmanager
def brought(place: RunPlace, *, steps: bool = True) -> Iterator[Path]:
    """Yield a directory with the run: its own, or a temporary copy. With ``steps``, the copy has the record of its
    rows."""
    if isinstance(place, Path):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="batch-agent-") as folder:
        directory = Path(folder) / place.name
        copy_out(place, directory, steps=steps, inputs=True)
        yield directory


def failures(place: RunPlace) -> Counter[str]:
    """Return the number of failed rows by type of error."""
    with brought(place, steps=False) as directory:
        return Counter(str(failure.get("type")) for failure in InOrderOfInput(directory / FAILURES))


def copy_out(address: StoreAddress, directory: Path, *, steps: bool = True, inputs: bool = False) -> int:
    """Copy a run from Redis into a new directory, with its stages. Returns the number of its rows. With ``inputs`` the
    copy has the inputs of unfinished rows."""
    mirror = RunMirror(address, directory, steps=steps)
    try:
        while mirror.refresh():
            pass
        return mirror.finish(inputs=inputs)
    finally:
        mirror.close()


def steer_shared(address: StoreAddress, request: JsonObject) -> JsonObject:
    """Send a request to all workers of a run in Redis, and return the status of the run. The workers act within a
    second or two. Raises NotAlive if there is no worker, Refused if the request is invalid."""
    with reader_of(address) as reader:
        view, lent = shared_view(reader, address), reader.store.lent()
        table, now = lent.table()
        workers = [member.status for member in table.live(now).values()]
        if not workers:
            raise NotAlive(f"{address} has no worker: there is nothing to steer")
        steering = table.steering
        if request.get("do") != "status":
            try:
                steering = lent.steer(request)
            except SpecError as error:
                raise Refused(str(error)) from None
        return {"ok": True, "status": shared_status(view, workers, paused=steering.paused)}


def shared_status(view: RunView, workers: list[JsonObject], *, paused: bool) -> JsonObject:
    """Return the status of a run from what its workers report."""
    latest, agents = view.progress, Counter[str]()
    for worker in workers:
        agents.update(cast("dict[str, int]", worker.get("agents") or {}))
    rate = sum(cast(float, worker.get("rows_per_second") or 0.0) for worker in workers)
    left = None if view.total is None else view.total - latest.ok - latest.failed
    rows: JsonObject = {
        "total": view.total, "done": latest.ok + latest.failed, "ok": latest.ok, "failed": latest.failed
    }  # fmt: skip
    return {
        "at": time.time(),
        "state": "paused" if paused else view.state,
        "rows": rows,
        "agents": {**agents},
        "rows_per_second": rate,
        "seconds_left": left / rate if left is not None and rate else None,
        "cost": latest.cost,
        "max_inflight": None,
        "backend": view.facts.get("backend"),
        "endpoints": [*endpoints_of(workers)],
        "workers": [{"host": worker.get("host"), "pid": worker.get("pid")} for worker in workers],
    }


def members_of(address: StoreAddress) -> int:
    """Return the number of processes that work on a run in Redis."""
    with reader_of(address) as reader:
        table, now = reader.store.lent().table()
        return len(table.live(now))
