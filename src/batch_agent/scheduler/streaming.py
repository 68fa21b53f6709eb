"""Whether it pays to stream the answers of a run, so that tools can start while the model is still talking.

What streaming brings is the agent's own: the time that its tools had been running when the answer was complete. What it
costs is the event loop's, a little for each token, and the loop is everybody's: while it reads for one agent the others
in flight may have to wait. So a turn is worth streaming while it brings its agent more than it can cost them all.

The first ``TRIAL`` answers are streamed and decide, and as long as it pays each further ``TRIAL`` of them decide again.
When it does not, answers come whole for ``REST`` turns, and then there is another trial: tools and answers may have
changed. No clock here: whoever takes a turn measures it.
"""

from __future__ import annotations

TRIAL = 16  # answers
REST = 1024  # turns
TOKEN_SECONDS = 15e-6  # of the loop's time, for one token of a stream


class Streaming:
    __slots__ = ("_answers", "_cost", "_decided", "_gained", "_streams", "_whole")

    def __init__(self) -> None:
        self._streams = True
        self._decided: bool | None = None  # what was said last
        self._whole = 0  # turns since streaming was given up
        self._answers = 0
        self._gained = self._cost = 0.0  # by and of those answers, in seconds

    def wants_next(self) -> bool:
        """Whether the turn that is about to be taken is to be streamed."""
        if not self._streams:
            self._whole += 1
            self._streams = self._whole > REST
        return self._streams

    def learn(self, gained: float, tokens: int, inflight: int) -> tuple[bool, str] | None:
        """A streamed answer of so many tokens is complete, whose tools had run for ``gained`` seconds by then, with
        ``inflight`` turns under way. What was decided and why, in words, when that is new."""
        if not self._streams:  # it left before streaming was given up
            return None
        self._answers += 1
        self._gained += gained
        self._cost += tokens * TOKEN_SECONDS * max(1, inflight)
        if self._answers < TRIAL:
            return None
        gain, cost = self._gained / TRIAL, self._cost / TRIAL
        self._streams = gain > cost
        self._answers = self._whole = 0
        self._gained = self._cost = 0.0
        if self._streams is self._decided:
            return None
        self._decided = self._streams
        verdict = "more" if self._streams else "no more"
        reason = f"early tools gain {gain:.2g} s a turn, {verdict} than the {cost:.2g} s that reading tokens costs all"
        return self._streams, reason
