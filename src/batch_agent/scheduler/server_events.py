"""The events that change a server's state, and the effects that it answers with (``ServerState``)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Literal, NamedTuple

from batch_agent.errors import BackendError
from batch_agent.messages import Usage
from batch_agent.scheduler.blame import Attempt, Scope, Verdict
from batch_agent.scheduler.engine_load import Load

if TYPE_CHECKING:
    from batch_agent.events import Ended
    from batch_agent.scheduler.core import Slot


@dataclass(frozen=True, slots=True)
class Around:
    """What a dispatcher knows, apart from the server, when an event happens."""

    others_work: bool = False  # another server works that could take its rows
    few_rows: bool = False  # too few are left to tell a bad row from a bad server
    has_untested: bool = False  # a row is left that has not failed yet
    can_ask: bool = False  # a control request can be sent
    wants_slot: bool = False  # a turn is ready
    is_full: bool = False  # as many requests are in flight as the dispatcher may have
    patience: float = inf  # seconds of an outage that it waits out
    first_patience: float = inf  # the same before anything was heard of the server; infinite for a service
    silence: float = inf  # seconds that a server may be silent, by the answers of the others


class Sent(NamedTuple):
    slot: Slot


class Answered(NamedTuple):
    slot: Slot
    seconds: float
    usage: Usage


class Failed(NamedTuple):
    """A request failed. ``beside``: a request of another row is in flight at the server, and may fail next."""

    slot: Slot
    error: BackendError
    around: Around
    beside: bool = False


class Reading(NamedTuple):
    load: Load


class ReadingLost(NamedTuple):
    """The server no longer reports its load."""


class ProbeEnded(NamedTuple):
    """A probe ended. ``reason``: why the server is down or its state unknown. ``trusted``: a probe alone ends an
    outage."""

    state: Literal["up", "down", "unknown"]
    reason: str
    around: Around
    trusted: bool = False


class Unasked(NamedTuple):
    """A control request or a trial could not be sent, or gave no evidence."""

    around: Around


class Tick(NamedTuple):
    """Time has passed, and something may be due. ``heard``: when a piece of an answer last arrived. ``patient``: the
    trial that may continue beside later ones. ``second``: a request was sent beside another one, and may be
    recalled."""

    around: Around
    inflight: int
    heard: float = 0.0
    patient: Slot | None = None
    second: bool = False
    probes: bool = True  # an outage is looked into by probes


ServerEvent = Sent | Answered | Failed | Reading | ReadingLost | ProbeEnded | Unasked | Tick


class Judged(NamedTuple):
    """The verdict on a failed attempt: who is at fault. ``scope``: which rows a denial concerns."""

    attempt: Attempt
    verdict: Verdict
    scope: Scope


class Limit(NamedTuple):
    """The number of requests at once has changed."""

    reason: str


class SendProbe(NamedTuple): ...


class Control(NamedTuple):
    """Send a control request. ``again``: in place of the one that fails now."""

    again: bool = False


class WentDown(NamedTuple): ...


class CameUp(NamedTuple):
    """The server is up again. ``was_slow``: it still has the requests that were sent before it seemed down."""

    was_slow: bool = False


class TrialEnded(NamedTuple):
    """A trial failed. The next one follows after a pause."""


class Ready(NamedTuple):
    """The next row may be the trial of the server."""


class Recall(NamedTuple):
    """Cancel requests in flight: all, the oldest from before the outage, or one to make room. ``once``: none that was
    cancelled before."""

    which: Literal["all", "oldest", "room"]
    once: bool = False


class GiveUp(NamedTuple):
    ended: Ended
    why: str


class Wake(NamedTuple):
    """Check again the requests that wait for the server."""


Effect = Judged | Limit | SendProbe | Control | WentDown | CameUp | TrialEnded | Ready | Recall | GiveUp | Wake
Effects = list[Effect]


About = Literal["health", "hold", "limit", "cache"]


class Reason(NamedTuple):
    """A conclusion: which rule made it, from which evidence, and since when (loop time)."""

    about: About
    rule: str
    evidence: str
    since: float
