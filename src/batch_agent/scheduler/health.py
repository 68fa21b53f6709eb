"""The health of one server over time: healthy, suspect, down, on trial.

    healthy ──── failure ───▶ suspect ──── several rows failed, or unreachable ───▶ down
       ▲                         │                                                │  ▲
       ├────── good answer ──────┘                                     pause over │  │ failed
       │                                                                          ▼  │
       └──────────────────────────────── answered ───────────────────────────── on trial

A suspect server is in doubt while a control request finds out whether it or its rows are bad. It gets nothing else
meanwhile.

``blame`` says whose fault a failure is, and ``server_state`` decides the transitions; this module owns their timing. A
server that is down gets one real request at a time, its trial. The pause between two trials grows with the outage, so
that the time lost after the server's return stays a small share of the outage. A trial that is not answered in the
usual time may be lost, or the server may have become slow. One such request continues beside the next trials, each time
with twice the time limit.

A server is silent if it sends nothing at all for much longer than its slowest answer took.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import random
from typing import Literal

from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.rates import MINUTE

State = Literal["healthy", "suspect", "down", "on trial"]


class Health:
    """The health of one server. ``chance`` returns random numbers from 0 to 1."""

    def __init__(self, chance: Callable[[], float] = random) -> None:
        self.chance = chance
        self._become("healthy")
        self.is_denied = False  # it is down because it denies every row
        self.is_limited = False  # it is down because it refuses every request for its rate limit
        self.in_doubt = False  # nothing but a control request is sent
        self.patient = False  # answers may take hours: silence is no evidence
        self.answered = False  # at least once
        self.reached = False  # a probe or a request has shown that it is there
        self.replies = False  # it has replied to a request, even if only with an error: one that loads is silent
        self.down_since = 0.0
        self.next_trial = 0.0
        self.probing = False  # a probe replaces the trial, or precedes it
        self.ready = False  # the probe is done, and a row may be the trial before the next probe
        self.trials = 0  # number in this outage
        self.trial_ends = 0.0  # when the latest trial times out
        self.reason = ""  # text of the latest failure
        self.heard = 0.0  # when the last request was sent or answered
        self.up_at = -inf  # when an answer or a probe last showed that it is up; -inf after evidence that it is down
        self._silent = False  # it is down because it was silent
        self._patience = 0.0  # seconds that a trial was waited for
        self._good = 0
        self.slowest = 0.0  # seconds of the slowest answer
        self._unanswered = 0  # control requests before the first answer that were followed by another one
        self.sounded = False  # a request was recalled to find out how long a row takes
        self._looks = 0  # times that its silence was looked into since its last answer
        self._looked_at = 0.0
        self._generated: int | None = None  # tokens that its engine had counted at the last reading
        self._counts = False  # that count has grown since the first request
        self.cold_until = 0.0  # until then a count that does not grow may be that of a cold start

    def _become(self, state: State) -> None:
        self.state = state
        self.is_down = state in ("down", "on trial")

    def answer(self, seconds: float, sent_at: float, now: float) -> bool:
        """Record an answer, or a refusal that only a working server can send. Returns True if it ends an outage. If
        ``seconds`` is 0, the answer says nothing about the time of others."""
        self.heard = self.up_at = now
        self.answered = self.reached = self.replies = True
        if seconds:
            self._looks = 0
            self._good += 1
        if seconds > self.slowest:
            self.slowest = seconds
        if self.state == "healthy":
            return False
        was_down = self.is_down
        if was_down and sent_at < self.down_since and not self._silent:
            return False  # it finishes old requests, and may accept no new ones
        self._become("healthy")
        self.in_doubt = self.is_denied = self.is_limited = False
        return was_down

    def counted(self, generated: int, began_at: float, now: float) -> None:
        """Learn from the engine's count of generated tokens. An engine with long prompts may complete no answer for a
        long time although it works."""
        before, self._generated = self._generated, generated
        if before is not None and generated > before:
            self.heard, self._counts, self.cold_until = now, True, 0.0
        elif not self._counts and began_at < inf:
            self.cold_until = began_at + N.longest_lag

    def recover(self) -> None:
        """End the outage because a probe found the server up."""
        self._become("healthy")

    def fail(self, reason: str, now: float) -> None:
        self.heard, self.up_at = now, -inf
        self.reason = reason
        if self.state == "healthy":
            self._become("suspect")

    def doubt(self, reason: str, now: float) -> None:
        self.fail(reason, now)
        self.in_doubt = True

    def go_down(self, now: float, *, silent: bool = False) -> None:
        self._become("down")
        self.in_doubt = self.is_denied = self.is_limited = False
        self.up_at, self.ready = -inf, False
        self._silent = silent
        self.down_since = now
        self.trials = 0
        self._patience = 0.0
        self.next_trial = now + self.pause(now)

    @property
    def is_learnt(self) -> bool:
        """Whether enough answers are known to tell how long an answer takes."""
        return self._good >= N.learnt

    def is_silent(self, in_flight: int, now: float) -> bool:
        """Return whether the server is certainly silent: enough answers have shown how long one takes."""
        return not self.is_down and in_flight >= N.several and self.is_learnt and now >= self.silent_at

    @property
    def silent_at(self) -> float:
        """When the silence of the server is examined next. Each time the wait is twice as long."""
        if self.patient:
            return inf
        wait = max(N.shortest_silence, N.silence_factor * self.slowest)
        looked_into = max(self.heard, self._looked_at) + wait * 2.0 ** min(self._looks, N.most_doubled)
        return max(looked_into, self.cold_until)

    def look(self, now: float) -> int:
        """Record that the silence of the server is examined. Returns how often that was done before."""
        self._looks += 1
        self._looked_at = now
        return self._looks - 1

    def is_sound(self, now: float) -> bool:
        """Return whether it has recently proved to be up."""
        return now - self.up_at <= N.longest_pause

    @property
    def grace(self) -> float:
        """Seconds that requests sent before an outage still get after its end."""
        return max(N.slack, 2 * self.slowest)

    # Trials

    def try_now(self, now: float, *, probing: bool = False) -> None:
        """Record that a trial is sent, or a probe instead of it."""
        self._become("on trial")
        self.probing, self.ready = probing, False
        self.trials += not probing
        self.next_trial = now + self.pause(now)
        self.trial_ends = now + (self.trial_seconds(now) or inf)

    def pause(self, now: float, since: float | None = None) -> float:
        """Return the seconds until the next trial, partly random so that many runs do not coincide."""
        lasted = now - (self.down_since if since is None else since)
        is_limited = self.is_limited and lasted < MINUTE  # a limit per minute lets requests through again by then
        share = N.limited_share if is_limited else N.denied_share if self.is_denied else N.pause_share
        longest = min(N.longest_pause, N.first_pause + lasted * share)
        if is_limited:
            longest = min(longest, N.first_pause + MINUTE - lasted)
        return longest * (1 - N.jitter * self.chance())

    def trial_seconds(self, now: float) -> float | None:
        """Return the time limit of a trial; None if the server has never replied."""
        if self.patient or not self.replies:
            return None
        if not self._good:  # it has only refused, which says nothing about the time of an answer
            return max(N.minute, (now - self.down_since) * N.pause_share)
        return max(N.short_wait, 2 * self.slowest, (now - self.down_since) * N.pause_share)

    def control_seconds(self, now: float, max_outage: float = inf) -> float:
        """Return the time limit of a control request. Before the server's first answer, it is a part of ``max_outage``
        if there is one."""
        if not self._good:
            seconds = N.minute if self.is_down else N.busy * (1 + self._unanswered)
            return min(seconds, max(N.busy, max_outage))
        shortest = N.busy
        if self.is_learnt and (self._looks or self.is_down):
            # It is silent, or was. One that hangs is asked again soon; one that is slow gets more time at each trial.
            tried = min(self.trials, N.most_doubled) if self.is_down else 0
            shortest = min(shortest, N.short_wait * 2.0**tried)
        return max(shortest, 2 * self.slowest, self.trial_seconds(now) or 0.0)

    def asks_again(self, max_outage: float = inf) -> bool:
        """Return whether a control request without an answer in time proves nothing, so that another one is sent."""
        sent = self._unanswered + 1
        waited = N.busy * sent * (sent + 1) / 2
        if self._good or sent == N.several or waited >= max_outage:
            return False
        self._unanswered += 1
        return True

    def patient_seconds(self, now: float) -> float:
        """Return the time limit of the trial that continues beside the next trials."""
        self._patience = 2 * max(self._patience, self.trial_seconds(now) or 0.0)
        return self._patience

    def trial_over(self) -> None:
        """Record that the trial failed or was withdrawn. Has no effect if the trial was answered."""
        if self.state == "on trial":
            self._become("down")
            self.up_at = -inf

    def what_was_tried(self, now: float, max_outage: float) -> str:
        """Return the reason why the endpoint is given up: what was tried, as a message."""
        outage = f"{now - self.down_since:.0f} s and {self.trials} trials"
        if self.reached:
            return f"the server was down for longer than max_outage, {max_outage:g} s: {outage}; {self.reason}"
        return f"the server never answered, in {outage}: {self.reason}"
