"""Plays a workload with a schedule of faults in virtual time, session after session, until every row is done."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from random import Random
from unittest.mock import patch

from tests.simulation.faults import Edit, Event, Extent, Fault, FullDisk, Kill, Outage, Stop, Timed, schedule
from tests.simulation.invariants import check_end, check_session
from tests.simulation.jobs import JobProvider
from tests.simulation.loop import SimulatedLoop
from tests.simulation.process import GONE, Process, Session, WorkerProcess, begin, world_urls
from tests.simulation.workload import SHAPES, Edition, Outcome, Shape, Workload
from tests.simulation.world import World

from batch_agent.errors import RunRejected, RunUnreachable, StoreError
from batch_agent.testing import VirtualClockDeadlock
from batch_agent.topology import flow

MOST_SESSIONS = 60
LONGEST_SESSION = 3 * 86_400.0  # virtual seconds
LONGEST_IDLE = 1_800.0  # virtual seconds without an answer, a tool call or a result, while nothing is disturbed
LONGEST_JOB = 12 * 3_600.0  # the same for batch APIs, whose jobs take hours
MEMORY = Path("/dev/shm")  # a disk on which fsync costs nothing


@dataclass(slots=True)
class Played:
    """What became of a workload. ``edition`` is that of the last session."""

    edition: Edition
    outcome: Outcome = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    sessions: int = 0
    kills: int = 0
    answered: Counter[str] = field(default_factory=Counter)  # answers by mark
    tokens_of: dict[str, int] = field(default_factory=dict)  # what each took
    tokens: int = 0
    requests: int = 0
    events: dict[Event, int] = field(default_factory=dict)  # of the first session


def play(seed: int, shapes: Sequence[Shape] = SHAPES) -> tuple[Workload, list[Fault], Played]:
    """One seed: its workload, of one of these shapes, what went wrong in it, and what became of it."""
    workload = Workload.of(seed, shapes)
    calm = play_with(workload, [])
    if calm.problems:
        return workload, [], calm
    chance = Random(f"faults {seed}")
    extent = Extent(calm.seconds, calm.events)
    # How often an edited pipeline needs an answer of its later stages is not known here.
    faults = schedule(chance, extent, workload.servers, edits=not workload.is_pipeline, workers=workload.workers)
    return workload, faults, play_against(workload, faults, calm)


def play_against(workload: Workload, faults: Sequence[Fault], calm: Played | None = None) -> Played:
    """With faults. The outcome must be that of the undisturbed run."""
    if calm is None:
        calm = play_with(workload, [])
    played = play_with(workload, faults, calm=calm)
    if played.edition != workload.first:
        calm = play_with(workload, [], played.edition)
    if not played.problems and played.outcome != calm.outcome:
        different = [key for key in calm.outcome if played.outcome.get(key) != calm.outcome[key]]
        played.problems.append(f"results differ from those of the undisturbed run: {different}")
    return played


def play_with(
    workload: Workload, faults: Sequence[Fault], edition: Edition | None = None, calm: Played | None = None
) -> Played:
    """Until every row is done, on a loop of its own. ``calm`` is the undisturbed run."""
    played = Played(workload.first if edition is None else edition)
    logger, open_files = logging.getLogger("batch_agent"), _open_files()
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    random.seed(workload.seed)
    place = MEMORY if MEMORY.is_dir() else None
    try:
        runner = asyncio.Runner(loop_factory=SimulatedLoop)
        by_count = patch.object(flow, "SLICE", inf)  # and not by the time that a thread took
        with by_count, world_urls(), tempfile.TemporaryDirectory(dir=place) as folder, runner:
            loop = runner.get_loop()
            loop.set_exception_handler(lambda _, context: played.problems.append(f"unhandled: {context}"))
            runner.run(_play_sessions(workload, faults, Path(folder) / "run", played, calm))
    except VirtualClockDeadlock as deadlock:
        played.problems.append(f"deadlock: {deadlock}")
    finally:
        logger.setLevel(level)
    gc.collect()
    if left := _open_files() - open_files:
        played.problems.append(f"files are left open: {sorted(left)}")
    return played


async def _play_sessions(
    workload: Workload, faults: Sequence[Fault], directory: Path, played: Played, calm: Played | None
) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    world = World(workload.seed, workload.servers, workload.capacity, workload.rpm)
    world.provider = JobProvider(world)
    played.problems, played.answered = world.problems, world.answered
    if calm is not None:
        world.usual, world.tokens_of = calm.answered, dict(calm.tokens_of)
        world.max_tokens = None if workload.budget is None else int(workload.budget * calm.tokens)
    world.plan([fault for fault in faults if isinstance(fault, Timed)], loop)
    while played.sessions < MOST_SESSIONS:
        session = played.sessions
        for edit in faults:
            if isinstance(edit, Edit) and edit.session == session:
                played.edition = played.edition.edited(edit.what, world.chance(f"edit {edit}"))
        interruptions = [each for each in faults if isinstance(each, Kill | Stop) and each.session == session]
        processes = Session(world, directory, interruptions)
        outcome = await _play_session(workload, processes, played, faults)
        if outcome is not None and not processes.feeder.dead and workload.is_complete(outcome, played.edition):
            played.outcome = outcome
            break
        if played.problems:
            break
        if outcome is not None and not processes.feeder.interrupted and world.is_quiet:
            world.max_tokens = None  # it was spent: the user allows more
        await asyncio.sleep(world.chance(f"pause {session}").choice((0.0, 1.0, 60.0, 3600.0)))
    else:
        world.complain(f"not done after {MOST_SESSIONS} sessions")
    if not played.problems:
        await asyncio.sleep(max(0.0, world.quiet_from - loop.time()))
        await _look_again(workload, world, directory, played)
    played.seconds, played.requests, played.tokens = loop.time(), world.asked.total(), world.tokens
    played.tokens_of = world.tokens_of


async def _play_session(
    workload: Workload, session: Session, played: Played, faults: Sequence[Fault]
) -> Outcome | None:
    """One session to its end. What came of it, where that is not an error."""
    loop, world, process = asyncio.get_running_loop(), session.world, session.feeder
    assert isinstance(loop, SimulatedLoop)
    loop.threads = session
    world.want(played.edition.wanted())
    was_quiet = world.is_quiet
    begin(process, workload.play(process, played.edition))
    patience = LONGEST_JOB if workload.is_batch else LONGEST_IDLE
    if not await _ended(process, patience):
        return None
    for worker in session.workers:
        if not await _ended(worker, patience):
            return None
        _check_worker(worker, faults)
    task, outcome = process.task, None
    assert task is not None
    error = None if task.cancelled() else task.exception()
    if error is not None and not process.dead and not _is_expected(error, faults):
        world.complain("".join(traceback.format_exception(error)))
    elif task.cancelled() and not process.interrupted:
        world.complain("the session was cancelled by nobody")
    elif error is None and not task.cancelled():
        outcome = task.result()
    await check_session(session)
    if (
        was_quiet
        and not any(each.interrupted for each in session.processes)
        and world.max_tokens is None
        and not (outcome and workload.is_complete(outcome, played.edition))
    ):
        world.complain(f"the session was not disturbed and did not do everything: {error or outcome}")
    played.sessions += 1
    played.kills += sum(each.dead for each in session.processes)
    played.events = played.events or dict(sum((each.events for each in session.processes), Counter()))
    return outcome


async def _ended(process: Process, patience: float) -> bool:
    """Wait for the end of a process; False if it does not come, or if nothing moves for ``patience`` seconds."""
    loop, task, world = asyncio.get_running_loop(), process.task, process.world
    assert isinstance(loop, SimulatedLoop) and task is not None
    latest, what = loop.time() + LONGEST_SESSION, "does not end"
    while not task.done() and loop.time() < latest:
        moves, was_quiet = world.moves, world.is_quiet
        await asyncio.wait([task], timeout=patience)
        if was_quiet and world.moves == moves:
            what = f"makes no progress for {patience:g} s"
            break
    if task.done():
        return True
    world.complain(f"process {process.number} {what}:\n  {process.session.state()}\n{loop.who_waits()}")
    task.cancel()
    return False


def _check_worker(worker: WorkerProcess, faults: Sequence[Fault]) -> None:
    """A worker that was not killed leaves without an error, while the feeder lives and the servers can be reached."""
    assert worker.task is not None
    status, said = (0, "") if worker.task.cancelled() else worker.task.result()
    if status and not worker.dead and GONE not in said and not any(isinstance(f, Outage | FullDisk) for f in faults):
        worker.world.complain(f"worker {worker.number} ended with {status}: {said}")


async def _look_again(workload: Workload, world: World, directory: Path, played: Played) -> None:
    """A run that is done comes back as it is, and nothing is asked."""
    asked, writes = world.asked.total(), world.writes.total()
    check_end(workload, world, played.edition, played.outcome, directory, counts=world.usual.total() > 0)
    again = await _play_session(workload, Session(world, directory, []), played, [])
    if (world.asked.total(), world.writes.total()) != (asked, writes):
        world.complain("a run that was done asked or wrote again")
    again = again or {}
    for key in sorted({*again, *played.outcome}):
        if again.get(key) != played.outcome.get(key):
            world.complain(f"{key} of a run that was done: {again.get(key)}, not {played.outcome.get(key)}")


def _is_expected(error: BaseException, faults: Sequence[Fault]) -> bool:
    if isinstance(error, RunRejected) and "the disk is full" in str(error):  # so every worker process has ended
        return any(isinstance(fault, FullDisk) for fault in faults)
    kinds = {RunUnreachable: Outage, RunRejected: Outage, StoreError: FullDisk}
    return any(isinstance(error, kind) and any(isinstance(f, cause) for f in faults) for kind, cause in kinds.items())


def _open_files() -> set[str]:
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing's own
            found.add(f"{descriptor.name} {descriptor.readlink()}")
    return found
