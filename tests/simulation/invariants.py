"""What must be true after each session and at the end, beside what the world complains of when it happens."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

from tests.simulation.process import Session, recorded
from tests.simulation.workload import Edition, Outcome, Workload
from tests.simulation.world import World

SOON = 0.1  # seconds in which an answer is on disk, where nothing holds it up


async def check_session(session: Session) -> None:
    """Nothing runs any more; what was paid for is on disk, but for what came in the moment of a kill."""
    world, directory = session.world, session.directory
    await asyncio.sleep(0)
    left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    if left:
        world.complain(f"tasks are left behind: {left}")
    session.end()
    after = recorded(directory)
    if gone := world.held - after:
        world.complain(f"recorded answers are gone: {dict(gone)}")
    world.held = after
    answered: Counter[str] = Counter()
    for process in session.processes:
        answered += process.answered
        end = process.lost_touch_at
        for mark, (sent, at) in process.answered_at.items():
            # A worker that is stopped during its request loses the lease of the row.
            lost = process is not session.feeder and world.disk.stalled_until > sent
            if not after[mark] and at + SOON < end and not lost and not world.disk.was_held_up(at):
                world.complain(f"the answer {mark} of {at:.3f} s is not on disk at {end:.3f} s")
    world.lost += answered - (after - session.before)
    for row, count in session.feeder.delivered.items():
        world.done[row] = max(world.done[row], count)


def check_end(
    workload: Workload, world: World, edition: Edition, outcome: Outcome, directory: Path, *, counts: bool
) -> None:
    """``counts``: it is known how many answers there should be."""
    if missing := world.missing_writes(edition.wanted()) if workload.writes else []:
        world.complain(f"never written: {missing}")
    for mark, count in world.answered.items() if counts else ():
        if count > world.wanted_of(mark) + world.lost[mark]:
            world.complain(f"{mark} was paid for {count} times, and {world.lost[mark]} answers were lost")
    if not workload.is_pipeline:
        lines = [json.loads(line) for line in (directory / "results.jsonl").read_bytes().splitlines()]
        if {str(line["index"]): line["output"] for line in lines} != outcome or len(lines) != len(outcome):
            world.complain("results.jsonl does not hold what was delivered")
