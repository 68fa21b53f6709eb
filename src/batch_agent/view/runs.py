"""The runs that the page shows, each with a thread that reads its record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TypeVar, cast

from batch_agent.errors import BatchAgentError, SpecError, StoreError
from batch_agent.files.tables import Record
from batch_agent.messages import JsonObject
from batch_agent.record.address import RunPlace
from batch_agent.record.control import NotAlive, Refused
from batch_agent.record.reader import RunReader, open_run, runs_in
from batch_agent.view.conversation import conversation, live_conversation
from batch_agent.view.record import RunRecord

T = TypeVar("T")

EVERY = 1.0  # seconds between two reads of a record: changes of another process's files cannot be awaited


class ShownRun:
    """A run, read in its own thread."""

    def __init__(self, key: str, run: RunReader) -> None:
        self.record = RunRecord(key, run)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-agent-view")
        self._indexing: asyncio.Task[None] | None = None
        self._known: JsonObject = {"index": {"rows": 0, "complete": True, "share": 1.0}, "state": "not begun"}

    async def do(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def index(self) -> None:
        """Start to index new rows. Pages are served meanwhile."""
        if self._indexing is None or self._indexing.done():
            self._indexing = asyncio.get_running_loop().create_task(self._index())

    async def indexed(self, most: float) -> None:
        """Wait until all rows are indexed, for at most ``most`` seconds."""
        self.index()
        assert self._indexing is not None
        await asyncio.wait([self._indexing], timeout=most)

    async def _index(self) -> None:
        with suppress(BatchAgentError):  # Redis is unreachable, or the run was deleted: the page shows what it has
            while await self.do(self.record.index_more):
                pass

    async def close(self) -> None:
        if self._indexing is not None:
            self._indexing.cancel()
            await asyncio.wait([self._indexing])
        await self.do(self.record.close)
        self._thread.shutdown(wait=False)

    # Live

    async def news(self) -> AsyncGenerator[JsonObject, None]:
        """Yield changes of the run, about once per second: from its process while it is alive, else from its record."""
        before: JsonObject = {}
        while True:
            try:
                async for answer in self._watch():
                    yield {"alive": True, **answer, **await self._indexed()}
            except (NotAlive, Refused, SpecError):
                pass
            now = {"alive": False, **await self._indexed()}
            if now != before:
                yield now
                before = now
            await asyncio.sleep(EVERY)

    async def _watch(self) -> AsyncGenerator[JsonObject, None]:
        """Yield the status and the running rows, about once per second. Raises NotAlive."""
        async with aclosing(self.record.run.watch()) as answers:
            async for answer in answers:
                status = cast(JsonObject, answer["status"])
                if "turns" not in status:  # workers do not report the sums over finished rows
                    counts = await self.do(lambda: cast(JsonObject, self.record.numbers()["counts"]))
                    status = {**status, **{name: counts[name] for name in ("tokens", "turns", "retries")}}
                yield {**answer, "status": status}

    async def conversations(self, row: str) -> AsyncGenerator[JsonObject, None]:
        """Yield a running row after each new message, until it ends."""
        try:
            async with aclosing(self.record.run.follow(row)) as changes:
                async for live, past in changes:
                    facts: JsonObject = {name: value for name, value in live.items() if name != "messages"}
                    if "messages" in live:
                        said = live_conversation(live)
                    else:
                        said = conversation(cast(Record, live), past, await self.do(self.record.asked), ())
                    yield {**facts, "conversation": [*said]}
        except (NotAlive, Refused):
            return

    async def steer(self, request: JsonObject) -> JsonObject:
        """Send a control request to the run. Raises NotAlive or Refused."""
        return await self.record.run.steer(request)

    async def _indexed(self) -> JsonObject:
        self.index()
        with suppress(BatchAgentError):  # there is no run yet, or it cannot be read now
            self._known = await self.do(
                lambda: {"index": self.record.progress(), "state": self.record.run.view().state}
            )
        return self._known


class ShownRuns:
    """The given runs, or all runs of a directory or a Redis server, and their stages."""

    def __init__(self, places: Sequence[RunPlace], directory: RunPlace | None = None) -> None:
        self._directory = directory
        self._places: dict[str, RunPlace] = {}
        self._open: dict[str, ShownRun] = {}
        for place in places:
            self._add(place)

    @property
    def first(self) -> list[str]:
        """The keys of the given runs."""
        return [] if self._directory is not None else list(self._places)

    def of(self, key: str) -> ShownRun:
        """Return the run of a key. Raises SpecError if there is none. May block."""
        if key not in self._open:
            whole, _, stage = key.partition("/")
            run = open_run(self.place(whole))
            if stage:
                with run as pipeline:
                    if stage not in pipeline.begun_stages():
                        raise SpecError(f"there is no run {key!r} here")
                    run = pipeline.stage(stage)
            self._open[key] = ShownRun(key, run)
        return self._open[key]

    def place(self, key: str) -> RunPlace:
        """Return the place where the run of a key is recorded. Raises SpecError if there is none. May block."""
        if key not in self._places:
            self.look()
        if key not in self._places:
            raise SpecError(f"there is no run {key!r} here")
        return self._places[key]

    def look(self) -> None:
        """Find new runs. Blocks."""
        if self._directory is not None:
            for place in runs_in(self._directory):
                if place not in self._places.values():
                    self._add(place)

    def in_short(self) -> list[JsonObject]:
        """Return the list of runs, the latest first. Blocks."""
        found: list[JsonObject] = []
        with suppress(StoreError):  # the server is unreachable: the page lists what it knows
            self.look()
        for key, place in self._places.items():
            with open_run(place) as run:
                try:
                    found.append(RunRecord(key, run).in_short())
                except BatchAgentError as error:
                    unreadable: JsonObject = {"path": run.name, "name": run.title, "state": "unreadable"}
                    found.append({"key": key, **unreadable, "why": str(error)})
        return sorted(found, key=lambda run: str(run.get("session_started")), reverse=True)

    async def close(self) -> None:
        for run in self._open.values():
            await run.close()

    def _add(self, place: RunPlace) -> None:
        name = (place.resolve().name if isinstance(place, Path) else place.stage or place.name) or "run"
        key, number = name, 1
        while key in self._places:
            number += 1
            key = f"{name}-{number}"
        self._places[key] = place
