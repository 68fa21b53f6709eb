"""What goes wrong in a simulated run. Some faults happen at a time, some at an event in one session of the run, some
between two sessions. A schedule is a list of them, so a failing one is made smaller by leaving some out.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

Mode = Literal["good", "slow", "dead", "500", "502", "503", "429", "reset", "cut", "garbage", "stuck", "mute"]
OUTAGES: tuple[Mode, ...] = (
    "slow",
    "dead",  # connections are refused, and those that were open are reset
    "500",  # the probe answers
    "502",  # the probe fails
    "503",
    "429",
    "reset",  # connections are dropped before any answer
    "cut",  # and in the middle of one
    "garbage",
    "stuck",  # answers nothing, the probe fails
    "mute",  # the same, and the probe answers
)
ToolMode = Literal["good", "slow", "fails", "hangs"]
Event = Literal["request", "answer", "before thread", "after thread", "tool", "note", "result"]
EVENTS: tuple[Event, ...] = ("request", "answer", "before thread", "after thread", "tool", "note", "result")
EditKind = Literal["prompt", "add", "remove", "replace", "reorder"]


@dataclass(frozen=True, slots=True)
class Outage:
    at: float
    seconds: float
    server: int
    mode: Mode


@dataclass(frozen=True, slots=True)
class Stall:
    """The event loop does nothing, as in a process that is stopped, or on a machine that sleeps."""

    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class BusyDisk:
    """What is written waits."""

    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class FullDisk:
    """Nothing can be recorded."""

    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ToolTrouble:
    at: float
    seconds: float
    mode: ToolMode


FEEDER, MACHINE = 0, -1  # whose processes are killed; from 1: those of a worker


@dataclass(frozen=True, slots=True)
class Kill:
    """kill -9 of a process at the ``count``-th event of its kind in a session. ``who`` is the number of a worker,
    FEEDER, or MACHINE: at that event of the feeder all processes are killed."""

    session: int
    event: Event
    count: int
    who: int = FEEDER


@dataclass(frozen=True, slots=True)
class Stop:
    """The user does something to the run."""

    session: int
    event: Event
    count: int
    how: Literal["cancel", "leave", "drain", "pause"]


@dataclass(frozen=True, slots=True)
class Edit:
    """Before a session, the user changes the prompt or the rows."""

    session: int
    what: EditKind


Timed = Outage | Stall | BusyDisk | FullDisk | ToolTrouble
Fault = Timed | Kill | Stop | Edit


@dataclass(frozen=True, slots=True)
class Extent:
    """How long the undisturbed run took, in seconds, and how often each event happened in it."""

    seconds: float
    events: dict[Event, int]


def schedule(chance: Random, extent: Extent, servers: int, *, edits: bool, workers: int = 0) -> list[Fault]:
    faults: list[Fault] = []
    sessions = chance.choice((0, 1, 1, 2, 3, 5, 8))
    for session in range(sessions):
        event = chance.choice(EVENTS)
        count = chance.randint(1, 1 + extent.events.get(event, 0) // chance.choice((1, 2, sessions)))
        if chance.random() < 0.8:
            faults.append(Kill(session, event, count))
        else:
            faults.append(Stop(session, event, count, chance.choice(("cancel", "leave", "drain", "pause"))))
        if edits and chance.random() < 0.2:
            faults.append(Edit(session + 1, chance.choice(("prompt", "add", "remove", "replace", "reorder"))))
    latest = extent.seconds * (1 + sessions)
    for _ in range(chance.choice((0, 1, 2, 4))):
        length = 10 ** chance.uniform(-0.5, 3.2)
        faults.append(Outage(chance.uniform(0, latest), length, chance.randrange(servers), chance.choice(OUTAGES)))
    for _ in range(chance.choice((0, 0, 1, 2))):
        faults.append(Stall(chance.uniform(0, latest), 10 ** chance.uniform(-1, 3)))
    for _ in range(chance.choice((0, 0, 1, 2))):
        faults.append(BusyDisk(chance.uniform(0, latest), 10 ** chance.uniform(-2, 1.5)))
    if chance.random() < 0.15:
        faults.append(FullDisk(chance.uniform(0, latest), 10 ** chance.uniform(-1, 1.5)))
    for _ in range(chance.choice((0, 0, 1))):
        mode: ToolMode = chance.choice(("slow", "fails", "hangs"))
        faults.append(ToolTrouble(chance.uniform(0, latest), 10 ** chance.uniform(0, 2), mode))
    for session in range(1 + sessions) if workers else ():
        for _ in range(chance.choice((0, 1, 1, 2, 3))):
            event = chance.choice(EVENTS)
            who = MACHINE if chance.random() < 0.1 else chance.randint(1, 2 * workers)
            faults.append(Kill(session, event, chance.randint(1, 1 + extent.events.get(event, 0) // workers), who))
    return faults
