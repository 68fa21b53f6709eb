"""Whose fault was it? The health of one endpoint, told of every answer and every failure.

    works ──── failure ───▶ in doubt ──── failures of several agents, no good answer between ───▶ down
      ▲                        │                                                                 │  ▲
      ├───── good answer ──────┘                                                      pause over │  │ failed
      │                                                                                          ▼  │
      └────────────────────────────────── answered ───────────────────────────────────────── on trial

What one row's own request can cause (a 500, a connection that breaks) counts by different agents; a request that never
reached the server counts by itself. All of it counts only against what is still on its way, which may yet be answered;
a server that refuses for load is down only when nothing is. A server that says nothing at all, with several requests in
flight and for much longer than it ever took, is down too.

While an endpoint is down it gets one real request at a time, its trial. The pause between two trials grows with the
outage, so that what is lost after the server's return stays a small share of the outage itself. A trial that is not
answered in the usual time may have been lost, or the server may have become slow: one such request is waited for
beside the next trials, each time for twice as long.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import inf
from random import random
from typing import Literal

from batch_agent.errors import BackendError, Timeout, Unavailable

State = Literal["works", "in doubt", "down", "on trial"]
Kind = Literal["unreached", "broken", "overload", "silent"]

SEVERAL = 3
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between two trials
PAUSE_SHARE = 1 / 300  # of the outage so far
JITTER = 0.3  # the share of a pause that is left to chance
LEARNT = 10  # good answers after which the slowest of them says something
SHORTEST_SILENCE, SILENCE_FACTOR = 5.0, 6  # seconds, and times the slowest answer
SHORTEST_GRACE = 1.0  # seconds
SHORTEST_TRIAL = 2.0  # seconds a trial may take
TRIAL_SHARE = 1 / 240  # of the outage so far: a server that starts cold takes longer than it ever did


class Health:
    """``chance`` gives numbers from 0 to 1."""

    def __init__(self, chance: Callable[[], float] = random) -> None:
        self._chance = chance
        self.state: State = "works"
        self.patient = False  # its answers take as long as they take: silence says nothing
        self.answered = False  # at least once
        self.down_since = 0.0
        self.next_trial = 0.0
        self.trials = 0  # of this outage
        self.trial_ends = 0.0  # when the latest one has taken too long
        self.reason = ""  # the latest failure, for people
        self.heard = 0.0  # when the last request left or was answered
        self._silent = False  # it is down because it said nothing
        self._patience = 0.0  # seconds that a trial was waited for
        self._troubled: set[Hashable] = set()  # agents that failed since the last good answer
        self._unreached = 0
        self._good = 0
        self._slowest = 0.0

    @property
    def is_down(self) -> bool:
        return self.state in ("down", "on trial")

    def answered_after(self, seconds: float, sent_at: float, now: float) -> bool:
        """A good answer, or a refusal that only a server which works can give, to a request that left at ``sent_at``.
        True when it ends an outage."""
        self.heard = now
        self.answered = True
        self._good += 1
        self._slowest = max(self._slowest, seconds)
        if self.state == "works":
            return False
        was_down = self.is_down
        if was_down and sent_at < self.down_since and not self._silent:
            return False  # it finishes what it had before, and may take nothing new
        self.state, self._unreached = "works", 0
        self._troubled.clear()
        return was_down

    def failed(self, kind: Kind, agent: Hashable, left_in_flight: int, reason: str, now: float) -> bool:
        """A failure that may be the server's. True when the endpoint is down from now on."""
        self.heard = now
        self.reason = reason
        if self.is_down:
            return False
        self.state = "in doubt"
        self._troubled.add(agent)
        self._unreached += kind == "unreached"
        failed = max(len(self._troubled), self._unreached)
        # Failures often come faster than answers: those still on their way may be good.
        allowed = 0 if kind == "overload" else 2 * failed
        down = failed >= SEVERAL and left_in_flight <= allowed
        if down:
            self.go_down(now)
        return down

    def go_down(self, now: float, *, silent: bool = False) -> None:
        self.state = "down"
        self._silent = silent
        self.down_since = now
        self.trials = 0
        self._patience = 0.0
        self.next_trial = now + self._pause(now)

    def is_silent(self, in_flight: int, now: float) -> bool:
        return not self.is_down and in_flight >= SEVERAL and now >= self.silent_at

    @property
    def silent_at(self) -> float:
        """When the endpoint has said nothing for too long; never, while too little is known of it."""
        if self._good < LEARNT or self.patient:
            return float("inf")
        return self.heard + max(SHORTEST_SILENCE, SILENCE_FACTOR * self._slowest)

    @property
    def grace(self) -> float:
        """Seconds that requests from before an outage still get when it is over. What has not come by then is lost."""
        return max(SHORTEST_GRACE, 2 * self._slowest)

    # Trials

    def try_now(self, now: float) -> None:
        """The trial leaves."""
        self.state = "on trial"
        self.trials += 1
        self.next_trial = now + self._pause(now)
        self.trial_ends = now + (self.trial_seconds(now) or inf)

    def _pause(self, now: float) -> float:
        """Spread, so that the trials of many runs do not fall together."""
        longest = min(LONGEST_PAUSE, FIRST_PAUSE + (now - self.down_since) * PAUSE_SHARE)
        return longest * (1 - JITTER * self._chance())

    def trial_seconds(self, now: float) -> float | None:
        """How long this trial may take; None while the server has never answered, and nobody knows what it takes."""
        if not self.answered or self.patient:
            return None
        return max(SHORTEST_TRIAL, 2 * self._slowest, (now - self.down_since) * TRIAL_SHARE)

    def patient_seconds(self, now: float) -> float:
        """How long a trial is waited for beside the next ones."""
        self._patience = 2 * max(self._patience, self.trial_seconds(now) or 0.0)
        return self._patience

    def trial_over(self) -> None:
        """It failed, or was withdrawn."""
        if self.state == "on trial":
            self.state = "down"


def trouble_of(error: BackendError) -> Kind | None:
    """What a failure says about the server; None when it says nothing against it."""
    if error.second_hand:
        return None
    if error.overload:
        return "overload"
    if error.unreached:
        return "unreached"
    if isinstance(error, Unavailable) or (isinstance(error, Timeout) and not error.text):
        return "broken"
    return None
