"""The runs that the page shows, each with a thread that reads its record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, cast

from batch_agent.errors import BatchAgentError, SpecError
from batch_agent.files.columns import Record
from batch_agent.messages import JsonObject
from batch_agent.record.control import NotAlive, Refused, ask, stream
from batch_agent.record.rundir import RUN, RunView
from batch_agent.view.conversation import conversation, live_conversation
from batch_agent.view.followed import FollowedRun
from batch_agent.view.record import RunRecord

T = TypeVar("T")

EVERY = 1.0  # seconds between two reads of a record: changes of another process's files cannot be awaited


class ShownRun:
    """A run, read in its own thread. ``followed`` is the run in Redis that its directory follows."""

    def __init__(self, key: str, path: Path, followed: FollowedRun | None = None) -> None:
        self.record = RunRecord(key, path)
        self._followed = followed
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-agent-view")
        self._indexing: asyncio.Task[None] | None = None

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
        more = True
        while more:
            more = self._followed is not None and await self._followed.refresh()
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
        if self._followed is None:
            async for answer in stream(self.record.control_dir, {"do": "watch"}):
                yield self._own(answer)
        while self._followed is not None:
            answer = await self._followed.now(self._stage or "")
            counts = await self.do(lambda: cast(JsonObject, self.record.index.numbers()["counts"]))
            finished: JsonObject = {name: counts[name] for name in ("tokens", "turns", "retries")}
            yield {**answer, "status": {**cast(JsonObject, answer["status"]), **finished}}
            await asyncio.sleep(EVERY)

    async def conversations(self, row: str) -> AsyncGenerator[JsonObject, None]:
        """Yield a running row after each new message, until it ends."""
        if self._followed is not None:
            async for live in self._recorded_so_far(self._followed, row):
                yield live
            return
        name = self._named(row)
        try:
            async for answer in stream(self.record.control_dir, {"do": "follow", "row": name}):
                live = cast(JsonObject, answer["row"])
                facts: JsonObject = {name: value for name, value in live.items() if name != "messages"}
                yield {**facts, "conversation": [*live_conversation(live)]}
        except (NotAlive, Refused):
            return

    async def _recorded_so_far(self, followed: FollowedRun, row: str) -> AsyncGenerator[JsonObject, None]:
        """Yield a row that is not done after each recorded turn. Text that is being streamed is not in Redis."""
        before: JsonObject | None = None
        while (found := await followed.row(self._stage or "", row)) is not None:
            record, past = found
            asked = await self.do(self.record.asked)
            now: JsonObject = {
                "index": record["index"],
                "job_id": record["job_id"],
                "state": "running",
                "conversation": [*conversation(cast(Record, record), past, asked, ())],
            }
            if now != before:
                yield now
                before = now
            await asyncio.sleep(EVERY)

    async def steer(self, request: JsonObject) -> JsonObject:
        """Send a control request to the run. Raises NotAlive or Refused."""
        if "row" in request:
            request = {**request, "row": self._named(str(request["row"]))}
        if self._followed is not None:
            return await self._followed.steer(request)
        return self._own(await ask(self.record.control_dir, request))

    async def _indexed(self) -> JsonObject:
        self.index()
        return await self.do(lambda: {"index": self.record.index.progress(), "state": _state(self.record.path)})

    @property
    def _stage(self) -> str | None:
        """Its name as a stage if it is controlled through its pipeline, else None."""
        if self._followed is not None:
            return None if self.record.path == self._followed.path else self.record.path.name
        return None if self.record.control_dir == self.record.path else self.record.path.name

    def _named(self, row: str) -> str:
        return row if self._stage is None else f"{self._stage}/{row}"

    def _own(self, answer: JsonObject) -> JsonObject:
        """Return the part of a pipeline's answer that is about this stage."""
        stage, status, rows = self._stage, answer.get("status"), answer.get("rows")
        if stage is None or not isinstance(status, dict):
            return answer
        stages = status.get("stages")
        own = [each for each in stages if isinstance(each, dict)] if isinstance(stages, list) else []
        found = next((each.get("status") for each in own if each.get("name") == stage), None)
        live = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
        return {**answer, "status": found, "rows": [row for row in live if row.get("stage") == stage]}


def _state(path: Path) -> str:
    try:
        return RunView.of(path).state
    except BatchAgentError:
        return "not begun"


class ShownRuns:
    """The given runs, or all runs of a directory, and their stages. ``followed`` are the given runs that are in
    Redis. If they are ``listed``, the page begins with the list of runs."""

    def __init__(
        self,
        paths: Sequence[Path],
        directory: Path | None = None,
        followed: Sequence[FollowedRun] = (),
        *,
        listed: bool = False,
    ) -> None:
        self._directory, self._listed = directory, listed
        self._followed = {run.path: run for run in followed}
        self._paths: dict[str, Path] = {}
        self._open: dict[str, ShownRun] = {}
        for path in paths:
            self._add(path)

    @property
    def first(self) -> list[str]:
        """The keys of the given runs."""
        return [] if self._listed or self._directory is not None else list(self._paths)

    def of(self, key: str) -> ShownRun:
        """Return the run of a key. Raises SpecError if there is none."""
        if key not in self._open:
            if key not in self._paths:
                self.look()
            path = self._paths.get(key) or self._stage_path(key)
            if path is None:
                raise SpecError(f"there is no run {key!r} here")
            followed = self._followed.get(path) or self._followed.get(path.parent)
            self._open[key] = ShownRun(key, path, followed)
        return self._open[key]

    def look(self) -> None:
        """Find new runs."""
        if self._directory is not None:
            for path in sorted(self._directory.glob(f"*/{RUN}")):
                if path.parent not in self._paths.values():
                    self._add(path.parent)

    def in_short(self) -> list[JsonObject]:
        """Return the list of runs, the latest first. Blocks."""
        self.look()
        found: list[JsonObject] = []
        for key, path in self._paths.items():
            try:
                found.append(RunRecord(key, path).in_short())
            except BatchAgentError as error:
                found.append(
                    {"key": key, "path": str(path), "name": path.name, "state": "unreadable", "why": str(error)}
                )
        return sorted(found, key=lambda run: str(run.get("session_started")), reverse=True)

    async def close(self) -> None:
        for run in self._open.values():
            await run.close()
        for followed in self._followed.values():
            await followed.close()

    def _add(self, path: Path) -> None:
        name = path.resolve().name or "run"
        key, number = name, 1
        while key in self._paths:
            number += 1
            key = f"{name}-{number}"
        self._paths[key] = path

    def _stage_path(self, key: str) -> Path | None:
        run, _, stage = key.rpartition("/")
        path = self._paths.get(run)
        if path is None or stage not in RunRecord(run, path).stages():
            return None
        return path / stage
