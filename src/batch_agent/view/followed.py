"""A run in Redis for the page: a temporary directory that follows the run, its live state, and control."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, cast

from pydantic import JsonValue

from batch_agent.errors import BatchAgentError, SpecError
from batch_agent.files.results import from_json
from batch_agent.messages import JsonObject
from batch_agent.record.address import StoreAddress
from batch_agent.record.codec import decode
from batch_agent.record.control import NotAlive
from batch_agent.record.mirror import RunMirror, reader_of, shared_view, workers_of
from batch_agent.record.recorded import shared_status, steer_shared
from batch_agent.record.redis.reading import ReadRow, RedisReader
from batch_agent.record.steps import Past, read_past

T = TypeVar("T")

PAUSE = 0.5  # minimum seconds between two looks at a run that has nothing new
ROWS = 200  # running rows in an answer


class FollowedRun:
    """A run in Redis. ``path`` is the directory that follows it."""

    def __init__(self, address: StoreAddress) -> None:
        self.address = address
        self._folder = tempfile.TemporaryDirectory(prefix="batch-agent-", ignore_cleanup_errors=True)
        self.path = Path(self._folder.name) / address.name
        self._mirror = RunMirror(address, self.path)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-agent-mirror")
        self._places: dict[tuple[str, str], str] = {}  # stage and row → its place in the queue
        self._refreshed = 0.0
        self._refreshing: asyncio.Future[bool] | None = None

    async def refresh(self) -> bool:
        """Copy what is new in the run. Returns whether there is more."""
        if self._refreshing is None or self._refreshing.done():
            if time.monotonic() < self._refreshed + PAUSE:
                return False
            self._refreshing = asyncio.get_running_loop().run_in_executor(self._thread, self._refresh)
        return await asyncio.shield(self._refreshing)

    def first(self) -> None:
        """Copy the first rows, so that the directory holds a run. Blocks. Raises SpecError if there is none."""
        self._thread.submit(self._mirror.refresh).result()

    def _refresh(self) -> bool:
        try:
            more = self._mirror.refresh()
        except BatchAgentError:  # Redis is unreachable, or the run was deleted: the page shows what it has
            more = False
        self._refreshed = 0.0 if more else time.monotonic()
        return more

    async def close(self) -> None:
        await self._do(self._mirror.close)
        self._thread.shutdown(wait=False)
        await asyncio.get_running_loop().run_in_executor(None, self._folder.cleanup)

    # Live

    async def now(self, stage: str) -> JsonObject:
        """Return the status and the running rows of the run, or of one of its stages. Raises NotAlive."""
        return await self._do(lambda: self._now(stage))

    async def row(self, stage: str, row: str) -> tuple[JsonObject, Past | None] | None:
        """Return a row that is not done, with its input, and its conversation so far; None if there is none."""
        return await self._do(lambda: self._row(stage, row))

    async def steer(self, request: JsonObject) -> JsonObject:
        """Send a request to all workers. Raises NotAlive or Refused."""
        return await self._do(lambda: steer_shared(self.address, request))

    async def _do(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def _now(self, stage: str) -> JsonObject:
        address = self.address.at(self.address.name, stage)
        try:
            with reader_of(address) as reader:
                workers = workers_of(reader)
                if not workers:
                    raise NotAlive(f"{self.address} has no worker")
                table, _ = reader.store.lent().table()
                view = shared_view(reader, address)
                status = shared_status(view, workers, paused=table.steering.paused)
                rows = _running(reader)
                for name in reversed(list(view.stages)):  # as in a directory, later stages first
                    with reader_of(address.at(address.name, name)) as inner:
                        rows += [{**row, "stage": name} for row in _running(inner)]
                return {"status": status, "rows": [*rows[:ROWS]]}
        except NotAlive:
            raise
        except BatchAgentError as error:
            raise NotAlive(str(error)) from None

    def _row(self, stage: str, row: str) -> tuple[JsonObject, Past | None] | None:
        with reader_of(self.address.at(self.address.name, stage)) as reader:
            place = self._places.get((stage, row))
            found = None if place is None else reader.queued(place)
            if found is None:
                found = next((each for each in reader.unfinished() if str(each.index) == row), None)
            if found is None:
                return None
            self._places[stage, row] = found.place
            value = cast(JsonValue, from_json(found.value or b"null"))
            return {"index": found.index, "job_id": row, "input": value}, _past(reader, found)


def _running(reader: RedisReader) -> list[JsonObject]:
    rows: list[JsonObject] = []
    for row in reader.leased(ROWS):
        fed = int(row.place.partition("-")[0]) / 1000
        past = _past(reader, row)
        turn = 1 if past is None else 1 + len(past.turns)
        rows.append({"index": row.index, "job_id": str(row.index), "state": "running", "began": fed, "turn": turn})
    return rows


def _past(reader: RedisReader, row: ReadRow) -> Past | None:
    """Return the latest agent that worked on the row, as far as it is recorded."""
    steps = reader.steps(row.row)
    if not steps:
        return None
    agent = steps[-1].agent
    try:
        return read_past(agent, [decode(step.kind, step.body) for step in steps if step.agent == agent])
    except ValueError:
        return None


def follow(address: StoreAddress, *, waits: bool) -> FollowedRun:
    """Return a run in Redis that the page follows. With ``waits``, it may not have started yet. Blocks."""
    run = FollowedRun(address)
    try:
        run.first()
    except SpecError:
        if not waits:
            raise
    return run
