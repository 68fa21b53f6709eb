"""One simulated process: one sitting of a run, which may be killed at any event.

kill -9 leaves the files as they are at that moment. So the run directory is copied then; the coroutines of the dead
process are cancelled and do what they like with the original, which is thrown away. From its death on the world does
not notice what the process does.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tests.simulation.faults import Event, Kill, Stop
from tests.simulation.model import Answer, mark_of
from tests.simulation.world import Disk, ModelServer, Row, World

from batch_agent import Tool
from batch_agent.backends.base import ModelRequest, OnToolCall, Probe
from batch_agent.dispatch.control import CONTROL_JOB
from batch_agent.errors import StoreError, Unavailable
from batch_agent.job import AgentResult
from batch_agent.messages import Reply
from batch_agent.record.base import RunProgress
from batch_agent.record.codec import decode
from batch_agent.record.directory import DirectoryStore
from batch_agent.record.memory import MemoryStore
from batch_agent.record.sqlite import SqliteJournal
from batch_agent.record.store import KeptStep
from batch_agent.spec import BatchSpec
from batch_agent.testing import Request, ScriptedBackend
from batch_agent.testing.replies import ScriptedReply

PAUSE_SECONDS = 30.0
TOMORROW = 4e9  # seconds: a time that no clock shows yet


class Steered(Protocol):
    """A run, or a pipeline at work."""

    def cancel(self) -> None: ...
    def drain(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Process:
    """``interruption`` is how this sitting ends early, if it does. It is the ``Threads`` of its loop."""

    def __init__(self, world: World, directory: Path, interruption: Kill | Stop | None) -> None:
        self.world, self.directory = world, directory
        self.dead = False
        self.interrupted = False
        self.events: Counter[Event] = Counter()
        self.run: Steered | None = None
        self.task: asyncio.Task[object] | None = None
        self.answered: Counter[str] = Counter()
        self.answered_at: dict[str, float] = {}  # the latest
        self.killed_at: float | None = None
        self.delivered: Counter[Row] = Counter()
        self._interruption = interruption
        for mark in directory.rglob("rates"):  # the wall clock was set back, by much more than a minute
            os.utime(mark, (TOMORROW, TOMORROW))

    def event(self, kind: Event) -> None:
        """Something happened. The process may not survive it."""
        if self.dead:
            return
        self.events[kind] += 1
        this, wanted = self.events[kind], self._interruption
        if wanted is not None and not self.interrupted and (kind, this) == (wanted.event, wanted.count):
            self._interrupt(wanted)

    def _interrupt(self, how: Kill | Stop) -> None:
        run, task = self.run, self.task
        assert task is not None
        if isinstance(how, Kill):
            self.interrupted = True
            self._die()
        elif run is not None:
            self.interrupted = True
            match how.how:
                case "leave":
                    task.cancel()
                case "cancel":
                    run.cancel()
                case "drain":
                    run.drain()
                case "pause":
                    run.pause()
                    asyncio.get_running_loop().call_later(PAUSE_SECONDS, run.resume)

    def _die(self) -> None:
        self.world.note_kill()
        self.dead, self.killed_at = True, asyncio.get_running_loop().time()
        if self.directory.exists():
            shutil.copytree(self.directory, self._kept)
        else:
            self._kept.mkdir()
        assert self.task is not None
        self.task.cancel()

    @property
    def _kept(self) -> Path:
        return self.directory.with_name("kept")

    def bury(self) -> None:
        """The sitting is over: the directory is as it was at the kill, and the world knows what is on disk."""
        if self.dead:
            shutil.rmtree(self.directory, ignore_errors=True)
            self._kept.rename(self.directory)

    @property
    def ended_at(self) -> float:
        return asyncio.get_running_loop().time() if self.killed_at is None else self.killed_at

    async def alive(self) -> None:
        """Never returns in a process that is dead."""
        if self.dead:
            await asyncio.get_running_loop().create_future()

    def deliver(self, result: AgentResult[object]) -> None:
        if self.dead:
            return
        if result.ok and isinstance(result.output, Answer) and result.output.row:
            self.delivered[result.output.version, result.output.row] += 1
        self.event("result")

    # Threads

    def seconds(self, now: float) -> float:
        return self.world.disk.seconds(now)

    def before(self) -> None:
        self.event("before thread")

    def after(self) -> None:
        self.event("after thread")

    def record(self, spec: BatchSpec) -> MemoryStore:
        """The record of a run, on the simulated disk."""
        if spec.run_dir is None:
            return MemoryStore()
        return DirectoryStore(Path(spec.run_dir), open_journal=self._open_journal)

    def _open_journal(self, path: Path, *, begun: bool) -> SimulatedJournal:
        journal = SimulatedJournal.open(path, begun=begun)
        journal.disk = self.world.disk
        return journal

    # Tools

    def tools(self) -> list[Tool]:
        @Tool.define(cacheable=True)
        async def look(key: str) -> str:
            """Look something up."""
            await self._use_tool(f"look {key}")
            return f"seen {key}"

        @Tool.define(effect="write")
        async def note(key: str) -> str:
            """Write something down."""
            await self._use_tool(f"note {key}")
            await self.alive()
            self.world.note_write(key)
            self.event("note")
            await asyncio.sleep(self.world.chance(f"after {key}").uniform(0, 1))
            return f"noted {key}"

        return [look, note]

    async def _use_tool(self, what: str) -> None:
        await self.alive()
        self.event("tool")
        mode = self.world.tools
        usual = 10 ** self.world.chance(what).uniform(-2, 0.5)
        await asyncio.sleep({"slow": 30 * usual, "hangs": 1e6}.get(mode, usual))
        if mode == "fails":
            raise RuntimeError("the tool is broken")


class ServerBackend(ScriptedBackend):
    """One process's connection to one server."""

    def __init__(self, server: ModelServer, process: Process) -> None:
        super().__init__(self._reply)
        self._model, self._process = server, process

    @property
    def name(self) -> str:
        return f"simulated://{self._model.name}"

    async def probe(self, endpoint: str = "") -> Probe:
        await asyncio.sleep(0.01)
        if self._model.mode in ("dead", "stuck", "502", "garbage", "reset"):
            return Probe("down", self._model.mode)
        return Probe("up", models=("scripted",))

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        process, world = self._process, self._process.world
        await process.alive()
        if self._model.mode == "dead":
            raise Unavailable("connection refused", unreached=True)
        reply = await super().infer(request, on_tool_call)
        await process.alive()
        if request.job_id == CONTROL_JOB:
            return reply
        world.note_answer(reply.reasoning, reply.usage)
        process.answered[reply.reasoning] += 1
        process.answered_at[reply.reasoning] = asyncio.get_running_loop().time()
        process.event("answer")
        return reply

    async def _reply(self, request: Request) -> ScriptedReply:
        if not request.is_control:
            self._process.world.note_request(mark_of(request))
        self._process.event("request")
        await self._process.alive()
        return await self._model.reply(request)


class SimulatedJournal(SqliteJournal):
    """A journal on a disk that may be full."""

    disk: Disk | None = None

    def commit(self, steps: Sequence[KeptStep], progress: RunProgress) -> None:
        if self.disk is not None and self.disk.is_full:
            raise StoreError("the disk is full")
        super().commit(steps, progress)


def recorded(directory: Path) -> Counter[str]:
    """The marks of all answers in the journals below a directory."""
    marks: Counter[str] = Counter()
    for path in directory.rglob("journal.db"):
        db = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
        try:
            rows = db.execute("SELECT kind, body FROM record").fetchall()
        except sqlite3.OperationalError:  # killed before there was a table
            rows = []
        finally:
            db.close()
        for step in (decode(*row) for row in rows):
            reply = getattr(step, "reply", None)  # of steps of any kind that hold an answer
            if isinstance(reply, Reply):
                marks[reply.reasoning] += 1
    return marks
