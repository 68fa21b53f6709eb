"""Makes a failing workload smaller: rows and faults are left out one by one as long as it still fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.simulation.faults import Fault, Outage
from tests.simulation.play import Played, play_against
from tests.simulation.workload import Workload


def shrink(workload: Workload, faults: Sequence[Fault], played: Played) -> tuple[Workload, list[Fault], Played]:
    """The smallest that was found, and what becomes of it."""
    found = workload, list(faults), played
    smaller = True
    while smaller:
        smaller = False
        for next_workload, next_faults in _smaller(*found[:2]):
            now = play_against(next_workload, next_faults)
            if now.problems:
                found, smaller = (next_workload, next_faults, now), True
                break
    return found


def _smaller(workload: Workload, faults: list[Fault]) -> list[tuple[Workload, list[Fault]]]:
    """One step smaller each; what leaves out most comes first."""
    rows = workload.first.rows
    fewer = [rows[: len(rows) // 2], rows[len(rows) // 2 :]] if len(rows) > 3 else []
    fewer += [rows[:place] + rows[place + 1 :] for place in range(len(rows)) if len(rows) > 1]
    simpler = [
        replace(workload, budget=None),
        replace(workload, hedge=None),
        replace(workload, rpm=None),
        replace(workload, capacity=None),
        replace(workload, servers=1),
        replace(workload, streaming=False),
    ]
    without = [[*faults[:place], *faults[place + 1 :]] for place in range(len(faults))]
    return [
        *((workload, left) for left in without),
        *((simple, faults) for simple in simpler if simple != workload and _fits(faults, simple)),
        *((replace(workload, first=replace(workload.first, rows=left)), faults) for left in fewer),
    ]


def _fits(faults: Sequence[Fault], workload: Workload) -> bool:
    return all(fault.server < workload.servers for fault in faults if isinstance(fault, Outage))
