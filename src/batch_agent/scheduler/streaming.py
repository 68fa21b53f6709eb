"""Whether it pays to stream the answers of a run, so that tools can start while the model is still talking.

What streaming brings is the agent's own: the time that its tools had been running when the answer was complete. What it
costs is the event loop's, a little for each token, and the loop is everybody's: while it reads for one agent the others
in flight may have to wait. So a turn is worth streaming while it brings its agent more than it can cost them all.

A trial decides: a few turns are streamed and ``TRIAL`` answers weighed. As long as it pays each further answer is
weighed with those before it, of which the older count less: agents move in waves, and a wave of last answers, which
call no tool, is no reason to stop. When it does not pay, answers come whole for ``REST`` turns, and then there is
another trial: tools and answers may have changed. No clock here: whoever takes a turn measures it.
"""

from __future__ import annotations

TRIAL = 16  # answers that decide; twice as many turns are streamed for it, since some fail
MEMORY = 256  # answers, after which those so far count half
REST = 1024  # turns
TOKEN_SECONDS = 15e-6  # of the loop's time, for one token of a stream


class Streaming:
    __slots__ = ("_answers", "_asked", "_cost", "_gained", "_pays", "_told", "_whole")

    def __init__(self) -> None:
        self._told: bool | None = None  # what was said last
        self._begin_trial()

    def _begin_trial(self) -> None:
        self._pays: bool | None = None  # None: on trial
        self._asked = 0  # turns streamed for the trial
        self._whole = 0  # turns since, that were not streamed
        self._answers = 0
        self._gained = self._cost = 0.0  # by and of those answers, in seconds

    def wants_next(self) -> bool:
        """Whether the turn that is about to be taken is to be streamed."""
        if self._pays:
            return True
        if self._whole >= REST:  # also after a trial whose answers never came
            self._begin_trial()
        if self._pays is None and self._asked < 2 * TRIAL:
            self._asked += 1
            return True
        self._whole += 1
        return False

    def learn(self, gained: float, tokens: int, inflight: int) -> tuple[bool, str] | None:
        """A streamed answer of so many tokens is complete, whose tools had run for ``gained`` seconds by then, with
        ``inflight`` turns under way. What was decided and why, in words, when that is new."""
        if self._pays is False:  # it left before streaming was given up
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
        reason = f"early tools gain {gain:.2g} s a turn, {verdict} than the {cost:.2g} s that reading tokens costs all"
        return self._pays, reason
