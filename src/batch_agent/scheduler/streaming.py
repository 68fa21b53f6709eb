"""Decides whether to stream the answers of a run, so that tools can start before the answer is complete.

The gain of streaming belongs to the agent: the time that its tools had run when the answer was complete. The cost is a
little event-loop time for each token, and all agents share the loop: while it reads for one agent, the others in flight
may have to wait. So a turn is worth streaming if its agent gains more than all agents together can lose.

A trial decides: a few turns are streamed and ``TRIAL`` answers are measured. While streaming pays, each further answer
is added to the mean, in which older answers count less. Agents often move in waves, and a wave of last answers, which
call no tool, is no reason to stop. When streaming does not pay, answers are not streamed for ``REST`` turns, and then
there is another trial, because tools and answers may have changed. This module has no clock: the caller measures each
turn.
"""

from __future__ import annotations

TRIAL = 16  # answers that decide; twice as many turns are streamed for it, because some fail
MEMORY = 256  # number of answers after which all earlier ones count half
REST = 1024  # turns
TOKEN_SECONDS = 15e-6  # event-loop seconds for one token of a stream


class Streaming:
    def __init__(self) -> None:
        self._told: bool | None = None  # the last decision that was reported
        self._begin_trial()

    def _begin_trial(self) -> None:
        self._pays: bool | None = None  # None: on trial
        self._asked = 0  # turns streamed for the trial
        self._whole = 0  # turns since then that were not streamed
        self._answers = 0
        self._gained = self._cost = 0.0  # of those answers, in seconds

    def wants_next(self) -> bool:
        """Return whether to stream the next turn."""
        if self._pays:
            return True
        if self._whole >= REST:  # also after a trial whose answers never arrived
            self._begin_trial()
        if self._pays is None and self._asked < 2 * TRIAL:
            self._asked += 1
            return True
        self._whole += 1
        return False

    def learn(self, gained: float, tokens: int, inflight: int) -> tuple[bool, str] | None:
        """Learn from a complete streamed answer. ``gained``: seconds that its tools had run by then; ``inflight``:
        turns in flight. Returns a new decision with its reason, or None if nothing changed."""
        if self._pays is False:  # it was sent before streaming stopped
            return None
        self._answers += 1
        self._gained += gained
        self._cost += tokens * TOKEN_SECONDS * max(1, inflight)
        if self._answers < TRIAL:
            return None
        gain, cost = self._gained / self._answers, self._cost / self._answers
        self._pays = gain > cost
        if self._answers >= MEMORY:
            self._answers //= 2
            self._gained /= 2
            self._cost /= 2
        if self._pays is self._told:
            return None
        self._told = self._pays
        verdict = "more" if self._pays else "no more"
        reason = f"early tools gain {gain:.2g} s per turn, {verdict} than the {cost:.2g} s that reading tokens costs"
        return self._pays, reason
