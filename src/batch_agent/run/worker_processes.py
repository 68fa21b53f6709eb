"""Worker processes on this machine, for a run with ``processes=N``.

The run's own process feeds and has the files. Each worker process reaches the record through a Unix socket. A process
that was killed is started again, because its rows are not lost. If a process refuses to work, for example because it
cannot import a tool, it is not started again; when no process is left, the run ends with the reason.

The end of a worker is the exit of its process. Its messages come through a pipe that its own children may hold open:
nothing waits for the end of that pipe, and what a worker leaves running is ended by name.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from batch_agent.blocking import in_thread
from batch_agent.errors import RunRejected
from batch_agent.run.control import Crew
from batch_agent.spec import BatchSpec

if TYPE_CHECKING:
    from batch_agent.run.run import Run

logger = logging.getLogger("batch_agent")

LEAVE_SECONDS = 5.0  # for workers to leave when the run has ended
KNOWN_SECONDS = 2.0  # until each process knows that the budget is spent: twice the time between two reports
STARTS = 5  # times in a row that one process is started again
STEADY_SECONDS = 60.0  # a process that has worked for so long was no failed start: it is counted from the beginning
PAUSE = 0.5  # seconds before that
REFUSED = 2  # exit status of a worker that cannot work on the run
PIPE_BYTES = SAID_BYTES = 64 * 1024  # of a worker's latest messages that are kept
MARK = "BATCH_AGENT_WORKER"  # environment variable that marks a worker and everything that it starts
LEFT_SECONDS = 1.0  # for what a worker left behind to end by itself, and then after SIGTERM


def count_of(processes: int | str) -> int:
    """Return the number of processes for a value of ``processes=``."""
    if isinstance(processes, int):
        return processes
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every platform
        return os.cpu_count() or 1


def crew_of(spec: BatchSpec) -> Crew | None:
    """Return the object that starts the worker processes of a run; None if the run works in its own process."""
    if spec.cluster is not None:
        return cast(Crew, spec.cluster)
    return None if spec.processes is None else ProcessCrew(count_of(spec.processes))


class ProcessCrew:
    """``count`` worker processes on this machine."""

    def __init__(self, count: int) -> None:
        self._count, self._place = count, ""
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._ending = False

    @asynccontextmanager
    async def at_work(self, run: Run[object]) -> AsyncIterator[None]:
        """Let the processes work on the run. When this ends, they leave."""
        self._place = self._serve(run)
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch(run))
            try:
                yield
            except BaseException:
                self._ending = True
                self._signal(signal.SIGTERM)
                raise
            finally:
                self._ending = True
                await self._leave(watching)

    def _serve(self, run: Run[object]) -> str:
        """Return the place of the record, for the command line of workers."""
        return f"unix:{run.serve()}"

    async def _watch(self, run: Run[object]) -> None:
        reasons: list[str] = []
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._count):
                tasks.create_task(self._keep(number, run, reasons.append))
        if reasons and run.wants_workers and not self._ending:
            raise RunRejected(f"every worker process of the run has ended: {reasons[-1]}")

    async def _keep(self, number: int, run: Run[object], give_up: Callable[[str], None]) -> None:
        """Keep one process running while the run wants workers. ``give_up`` is called with the reason if it is not
        started again."""
        clock, failed = asyncio.get_running_loop().time, 0
        while True:
            began = clock()
            status, said = await self._run_one(number)
            if status == 0 and run.wants_workers and not self._ending:
                await asyncio.sleep(KNOWN_SECONDS)  # the worker may have seen that the budget is spent
            if self._ending or (status == 0 and not run.wants_workers):
                return
            why = said or (f"it was ended by signal {-status}" if status < 0 else f"its exit status was {status}")
            failed = 1 if clock() - began >= STEADY_SECONDS else failed + 1
            if status == REFUSED or failed > STARTS:
                logger.warning("worker process %d has ended: %s", number, why)
                give_up(why)
                return
            logger.warning("worker process %d is started again: %s", number, why)
            await asyncio.sleep(PAUSE)
            if not run.wants_workers:
                return

    async def _start(self, stderr: int, mark: str) -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", "batch_agent", "work", self._place, "--import-from", _modules())
        paths = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH", "")]))
        return await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, "PYTHONPATH": paths, MARK: mark},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,  # the feeder decides how a run ends, not Ctrl-C in the terminal
        )

    async def _run_one(self, number: int) -> tuple[int, str]:
        """Run one process. Returns its exit status, and the last line of its messages."""
        said, mark = _Messages(), secrets.token_hex(8)
        try:
            with said.writing() as stderr:
                process = self._processes[number] = await self._start(stderr, mark)
            try:
                status = await process.wait()
            except asyncio.CancelledError:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
                raise
            finally:
                self._processes.pop(number, None)
                await asyncio.shield(_end_left_behind(number, mark))
            return status, said.last_line()
        finally:
            said.close()

    async def _leave(self, watching: asyncio.Task[None]) -> None:
        """Wait for the processes to leave; then end them."""
        _, still = await asyncio.wait([watching], timeout=LEAVE_SECONDS)
        if still:
            self._signal(signal.SIGTERM)
            _, still = await asyncio.wait([watching], timeout=LEAVE_SECONDS)
        if still:
            self._signal(signal.SIGKILL)
            _, still = await asyncio.wait([watching], timeout=LEAVE_SECONDS)
        if still:  # in the kernel, for example at a file system that does not answer
            logger.warning("a worker process has not ended %g s after it was killed", LEAVE_SECONDS)
            watching.cancel()

    def _signal(self, number: int) -> None:
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)


class _Messages:
    """The latest messages of a worker, read from a pipe. Children of the worker may keep the other end open after its
    exit."""

    def __init__(self) -> None:
        self._reading, self._other_end = os.pipe()
        os.set_blocking(self._reading, False)
        self._latest = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reading, self._take)

    @contextmanager
    def writing(self) -> Iterator[int]:
        """Give the writing end to a process that is started in this block."""
        try:
            yield self._other_end
        finally:
            os.close(self._other_end)

    def _take(self) -> bool:
        """Read what has arrived. Returns whether there may be more."""
        try:
            data = os.read(self._reading, SAID_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._reading)
        self._latest = (self._latest + data)[-SAID_BYTES:]
        return bool(data)

    def last_line(self) -> str:
        """Return the last line of the messages so far."""
        reads = 2 * PIPE_BYTES // SAID_BYTES  # a child that writes without end does not hold this up
        while reads and self._take():
            reads -= 1
        lines = self._latest.decode(errors="replace").splitlines()
        return next((line.rstrip() for line in reversed(lines) if line.strip()), "")

    def close(self) -> None:
        self._loop.remove_reader(self._reading)
        os.close(self._reading)


async def _end_left_behind(number: int, mark: str) -> None:
    """Kill the processes that a worker has started and left running, and log their names. Only on Linux."""
    if not (await in_thread(partial(_marked, mark))):
        return
    await asyncio.sleep(LEFT_SECONDS)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        left = await in_thread(partial(_marked, mark))
        for pid, name in left.items():
            if sign is signal.SIGTERM:
                logger.warning("worker process %d left %s (process %d) running: it is ended", number, name, pid)
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, sign)
        if left:
            await asyncio.sleep(LEFT_SECONDS)


def _marked(mark: str) -> dict[int, str]:
    """Return the ids and names of the running processes that have the mark in their environment."""
    found, wanted = {}, f"{MARK}={mark}".encode()
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (place / "environ").read_bytes().split(b"\0"):
                found[int(place.name)] = (place / "comm").read_text().strip()
    return found


def _modules() -> str:
    """Return the directory of the user's modules, in Python's own order: that of the main script, else the working
    directory (also for ``python -m``)."""
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    if script is None or getattr(main, "__spec__", None) is not None:
        return str(Path.cwd())
    return str(Path(script).resolve().parent)
