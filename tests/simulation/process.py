"""The simulated processes of one session of a run: its feeder and its workers. Each may be killed at any event.

kill -9 of the feeder leaves the files as they are at that moment. So the run directory is copied then; the coroutines
of the dead process are cancelled and do what they like with the original, which is thrown away. A worker has no files:
from its death on, its calls do not reach the feeder. The world does not notice what a dead process does.

A worker reaches the record of the feeder as it does in another process: each call is a message, and so is its answer.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from tests.simulation.faults import FEEDER, MACHINE, Event, Kill, Stop
from tests.simulation.loop import NotYet, SimulatedLoop
from tests.simulation.model import Answer, mark_of
from tests.simulation.world import Disk, ModelServer, Row, World

from batch_agent import Tool
from batch_agent.backends.address import Address
from batch_agent.backends.base import ModelRequest, OnToolCall, Probe
from batch_agent.backends.schemes import SCHEMES, Scheme
from batch_agent.dispatch.control import CONTROL_JOB
from batch_agent.errors import SpecError, StoreError, Unavailable
from batch_agent.job import AgentResult
from batch_agent.messages import Reply
from batch_agent.record.codec import decode
from batch_agent.record.directory import DirectoryStore
from batch_agent.record.memory import MemoryStore
from batch_agent.record.sqlite import SqliteJournal
from batch_agent.record.store import KeptStep, Lease
from batch_agent.record.store_server import Answer as Answered
from batch_agent.record.store_server import Call, ServedStore, StoreDesk, dump, load
from batch_agent.run.joined_worker import JoinedWorker
from batch_agent.run.run import Run
from batch_agent.run.trust import Trust
from batch_agent.run.worker_processes import REFUSED, ProcessCrew
from batch_agent.spec import BatchSpec
from batch_agent.testing import Request, ScriptedBackend
from batch_agent.testing.replies import ScriptedReply

T = TypeVar("T")

PAUSE_SECONDS = 30.0
TOMORROW = 4e9  # seconds: a time that no clock shows yet
EPOCH = 1e9  # seconds: the time of day when the simulation begins
GONE = "the process that feeds this run has ended, or is unreachable"
CURRENT: ContextVar[Process] = ContextVar("process")
"""The process in which the current task runs."""


class Steered(Protocol):
    """A run, or a pipeline at work."""

    def cancel(self) -> None: ...
    def drain(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Process:
    """``number`` is FEEDER, or that of a worker, from 1. ``interruptions`` are how it ends early, if it does."""

    def __init__(self, session: Session, number: int, interruptions: Sequence[Kill | Stop]) -> None:
        self.session, self.number = session, number
        self.world, self.directory = session.world, session.directory
        self.dead = False
        self.interrupted = False
        self.events: Counter[Event] = Counter()
        self.run: Steered | None = None
        self.task: asyncio.Task[Any] | None = None
        self.inflight: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.answered_at: dict[str, tuple[float, float]] = {}  # when the latest was sent and answered
        self.killed_at: float | None = None
        self.delivered: Counter[Row] = Counter()
        self._interruptions = list(interruptions)

    def event(self, kind: Event) -> None:
        """Something happened. The process may not survive it."""
        if self.dead:
            return
        self.events[kind] += 1
        self.world.moves += kind in ("tool", "note", "result")
        for wanted in [each for each in self._interruptions if (each.event, each.count) == (kind, self.events[kind])]:
            self._interruptions.remove(wanted)
            self._interrupt(wanted)

    def _interrupt(self, how: Kill | Stop) -> None:
        run, task = self.run, self.task
        assert task is not None
        if isinstance(how, Kill):
            self.interrupted = True
            self.die()
            for worker in self.session.workers if how.who == MACHINE else ():
                worker.die()
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

    def die(self) -> None:
        if self.dead or self.task is None or self.task.done():
            return
        self.world.note_kill(self.inflight)
        self.dead, self.killed_at = True, asyncio.get_running_loop().time()
        self.session.bury(self)
        self.task.cancel()

    @property
    def lost_touch_at(self) -> float:
        """When it could record nothing any more."""
        deaths = (self.killed_at, self.session.feeder.killed_at)
        return min((death for death in deaths if death is not None), default=asyncio.get_running_loop().time())

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

    def record(self, spec: BatchSpec) -> MemoryStore:
        """The record of a run, on the simulated disk."""
        if spec.run_dir is None:
            return MemoryStore()
        return SimulatedStore.at(Path(spec.run_dir), self.world)


class WorkerProcess(Process):
    """A process that joins the run of the feeder."""

    def __init__(self, session: Session, number: int, interruptions: Sequence[Kill | Stop]) -> None:
        super().__init__(session, number, interruptions)
        self.joined: list[tuple[str, int]] = []  # stage, and the number of a worker in it
        self.worker = JoinedWorker(ServedStore(self._exchange), Trust(everything=True), wait=30.0)

    async def work(self) -> tuple[int, str]:
        """Its exit status, and what it said."""
        try:
            await self.worker.work()
        except asyncio.CancelledError:
            if self.dead:
                return -signal.SIGKILL, ""
            raise
        except SpecError as error:
            return REFUSED, str(error)
        except Exception as error:  # noqa: BLE001
            return (-signal.SIGKILL if self.dead else 1), "".join(traceback.format_exception(error))
        return 0, ""

    def _exchange(self, call: Call) -> Answered:
        """What ``Connections`` and ``StoreServer`` do."""
        feeder, desk = self.session.feeder, self.session.desk
        commits = call[1] == "commit"
        if commits and not self.dead:
            feeder.event("before thread")
        if self.dead or feeder.dead or desk is None or feeder.task is None or feeder.task.done():
            raise StoreError(GONE)
        answer = desk.answer(cast(Call, load(dump(call))))
        if call[1] == "join" and isinstance(answer[1], int):
            self.joined.append((call[0], answer[1]))
        if commits:
            feeder.event("after thread")
        return cast(Answered, load(dump(answer)))


class Session:
    """The processes of a session. It is the ``Threads`` of the loop."""

    def __init__(self, world: World, directory: Path, interruptions: Sequence[Kill | Stop]) -> None:
        self.world, self.directory = world, directory
        self.desk: StoreDesk | None = None  # answers the calls of workers
        self.workers: list[WorkerProcess] = []
        self._interruptions = interruptions
        self.before = world.held
        self.feeder = Process(self, FEEDER, self._of(FEEDER, MACHINE))
        for mark in directory.rglob("rates"):  # the wall clock was set back, by much more than a minute
            os.utime(mark, (TOMORROW, TOMORROW))

    def _of(self, *who: int) -> list[Kill | Stop]:
        found = [(each, each.who if isinstance(each, Kill) else FEEDER) for each in self._interruptions]
        return [each for each, whose in found if whose in who]

    @property
    def processes(self) -> list[Process]:
        return [self.feeder, *self.workers]

    def start_worker(self) -> WorkerProcess:
        number = 1 + len(self.workers)
        process = WorkerProcess(self, number, self._of(number))
        self.workers.append(process)
        begin(process, process.work())
        return process

    @property
    def _kept(self) -> Path:
        return self.directory.with_name("kept")

    def bury(self, process: Process) -> None:
        """A process was killed."""
        if process is self.feeder:
            if self.directory.exists():
                shutil.copytree(self.directory, self._kept)
            else:
                self._kept.mkdir()
        elif not self.feeder.dead and self.desk is not None:
            self.world.held = recorded(self.directory)  # whoever has its rows next does not ask for these
            if self.world.chance(f"noticed {process.number}").random() < 0.7:  # else its leases end
                desk, joined = self.desk, cast(WorkerProcess, process).joined
                for stage, worker in joined:
                    desk.answer((stage, "leave", (worker,)))

    def state(self) -> str:
        """What each process has done, and what the record says."""
        lines = [
            f"process {each.number}{' (dead)' if each.dead else ''}: {dict(each.events)}" for each in self.processes
        ]
        if self.desk is not None:
            lines += [f"{what}: {self.desk.answer(('', what, ()))[1]}" for what in ("standing", "table")]
        return "\n  ".join(lines)

    def end(self) -> None:
        """The directory is as it was when the feeder was killed."""
        if self.feeder.dead:
            shutil.rmtree(self.directory, ignore_errors=True)
            self._kept.rename(self.directory)

    # Threads

    def seconds(self, now: float) -> float:
        return self.world.disk.seconds(now)

    def before_call(self) -> None:
        CURRENT.get().event("before thread")

    def after_call(self) -> None:
        CURRENT.get().event("after thread")


def begin(process: Process, work: object) -> None:
    """Start the main task of a process."""
    context = copy_context()
    context.run(CURRENT.set, process)
    loop = asyncio.get_running_loop()
    process.task = loop.create_task(work, name=f"process {process.number}", context=context)  # type: ignore[arg-type]


class SimulatedCrew(ProcessCrew):
    """The crew of a run with ``processes=N``, whose processes are simulated."""

    def __init__(self, session: Session, count: int) -> None:
        super().__init__(count)
        self._session = session
        self._started: dict[int, WorkerProcess] = {}

    def _serve(self, run: Run[object]) -> str:
        self._session.desk = _desk_of(run)
        return ""

    async def _run_one(self, number: int) -> tuple[int, str]:
        worker = self._started[number] = self._session.start_worker()
        assert worker.task is not None
        try:
            await asyncio.wait([worker.task])
        except asyncio.CancelledError:
            if not self._session.feeder.dead:  # nobody else ends it
                worker.die()
                await asyncio.wait([worker.task])
            raise
        status, said = worker.task.result()
        return status, said

    def _signal(self, number: int) -> None:
        for worker in self._started.values() if not self._session.feeder.dead else ():
            worker.worker.cancel() if number == signal.SIGTERM else worker.die()


def _desk_of(run: Run[object]) -> StoreDesk:
    assert run.record_server is not None
    return run.record_server.desk


async def join_later(session: Session, run: Run[object], count: int, seconds: float) -> None:
    """Let workers join a run that was alone, as ``batch-agent work DIR`` does."""
    await asyncio.sleep(seconds)
    if run.record_server is not None and not session.feeder.dead:
        session.desk = run.record_server.desk
        try:
            await run.record_server.begin_sharing()
        except SpecError as error:
            if "the run has ended" in str(error):  # at this moment
                return
            raise
        for _ in range(count):
            session.start_worker()


class SimulatedStore(DirectoryStore):
    """A run directory on the simulated disk and the virtual clock. No call waits in its thread."""

    @classmethod
    def at(cls, path: Path, world: World) -> SimulatedStore:
        def open_journal(path: Path, *, begun: bool) -> SimulatedJournal:
            journal = SimulatedJournal.open(path, begun=begun)
            journal.disk = world.disk
            return journal

        clock = asyncio.get_running_loop().time
        return cls(path, open_journal=open_journal, clock=clock, wall=lambda: EPOCH + clock())

    def _open_stage(self, name: str) -> MemoryStore:
        path = self.path / name
        return SimulatedStore(path, open_journal=self._open_journal, clock=self._clock, wall=self._wall)

    def take(self, worker: int, most: int, wait: float) -> list[Lease]:
        return _waited(wait, super().take(worker, most, 0.0), bool)

    def wait_calls(self, position: str, seconds: float) -> tuple[str, set[str]]:
        return _waited(seconds, super().wait_calls(position, 0.0), lambda found: bool(found[1]))


def _waited(seconds: float, found: T, is_there: Callable[[T], bool]) -> T:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    if not is_there(found) and loop.waited < seconds:
        raise NotYet
    return found


@Tool.define(cacheable=True)
async def look(key: str) -> str:
    """Look something up."""
    await _use_tool(f"look {key}")
    return f"seen {key}"


@Tool.define(effect="write")
async def note(key: str) -> str:
    """Write something down."""
    await _use_tool(f"note {key}")
    process = CURRENT.get()
    await process.alive()
    process.world.note_write(key)
    process.event("note")
    await asyncio.sleep(process.world.chance(f"after {key}").uniform(0, 1))
    return f"noted {key}"


async def _use_tool(what: str) -> None:
    process = CURRENT.get()
    await process.alive()
    process.event("tool")
    mode = process.world.tools
    usual = 10 ** process.world.chance(what).uniform(-2, 0.5)
    await asyncio.sleep({"slow": 30 * usual, "hangs": 1e6}.get(mode, usual))
    if mode == "fails":
        raise RuntimeError("the tool is broken")


class ServerBackend(ScriptedBackend):
    """One process's connection to one server."""

    def __init__(self, server: ModelServer, process: Process) -> None:
        super().__init__(self._reply)
        self._model, self._process = server, process

    @classmethod
    def from_address(cls, address: Address) -> ServerBackend:
        process = CURRENT.get()
        return cls(process.world.servers[int(address.url.netloc.removeprefix("s"))], process)

    @property
    def name(self) -> str:
        return f"{WORLD}://{self._model.name}"

    async def probe(self, endpoint: str = "") -> Probe:
        await asyncio.sleep(0.01)
        if self._model.mode in ("dead", "stuck", "502", "garbage", "reset"):
            return Probe("down", self._model.mode)
        return Probe("up", models=("scripted",))

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        process, world, sent = self._process, self._process.world, asyncio.get_running_loop().time()
        await process.alive()
        if self._model.mode == "dead":
            raise Unavailable("connection refused", unreached=True)
        reply = await super().infer(request, on_tool_call)
        await process.alive()
        if request.job_id == CONTROL_JOB:
            return reply
        world.note_answer(reply.reasoning, reply.usage)
        process.answered[reply.reasoning] += 1
        process.answered_at[reply.reasoning] = sent, asyncio.get_running_loop().time()
        process.event("answer")
        return reply

    async def _reply(self, request: Request) -> ScriptedReply:
        process, mark = self._process, "" if request.is_control else mark_of(request)
        if mark:
            process.world.note_request(mark)
        process.event("request")
        await process.alive()
        process.inflight[mark] += 1
        try:
            return await self._model.reply(request)
        finally:
            process.inflight[mark] -= 1


WORLD = "world"


@contextmanager
def world_urls() -> Iterator[None]:
    """Servers of the world have URLs, as workers get them."""
    schemes = cast("dict[str, Scheme]", SCHEMES)
    factory = "tests.simulation.process:ServerBackend.from_address"
    schemes[WORLD] = Scheme(WORLD, factory, "", "", listed=False, in_process=True)
    try:
        yield
    finally:
        del schemes[WORLD]


class SimulatedJournal(SqliteJournal):
    """A journal on a disk that may be full."""

    disk: Disk | None = None

    def commit(self, steps: Sequence[KeptStep], *written: Any) -> None:
        if self.disk is not None and self.disk.is_full:
            raise StoreError("the disk is full")
        super().commit(steps, *written)


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
