"""One agent between ticks: its running thoughts, its last action, and which of these a tick gets. Pure code.

    state of the agent                     what the tick gets
    no running thought                     a new thought, which the tick waits for
    running thought, not sent yet          the same thought; it is about this tick's observation from now on
    running thought of an earlier tick     the same thought; its answer will be late
    thought that another tick waits for    a new thought, which starts when that one ends
    answer that arrived late               the answer, at once; and a thought about this tick starts
    answer that no tick waited for         a new thought; the answer is used if that gives nothing newer

An answer is used once. An answer older than the last one used is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field, replace
from math import inf

from batch_agent.messages import Usage
from batch_agent.ticks.agent import ActionSource, Agent, Decision
from batch_agent.ticks.plain import tried

DEADLINES = 3  # minimum wait, in tick deadlines
USUALLY = 2  # minimum wait, in usual request times
LONG = 5.0  # seconds, used instead of the deadlines if ticks have none or a long one
GUESS = 0.5  # assumed seconds of a request until more is known
KEPT = 64
UNSEEN = object()


class Patience:
    """Decides when a request to a backend counts as lost, so that its agent sends another.

    A server may never answer a request: it restarted, or a proxy dropped the connection. The agent would repeat its
    last action until the timeout. So a request that takes much longer than usual is abandoned: at once, if requests
    sent at the same time or later are answered. If nothing is answered, the server may just be slow for everyone: one
    request at a time is sent again, at growing intervals, and its answer is the signal for the others.
    """

    def __init__(self, deadline: float | None) -> None:
        self._least = min(LONG, DEADLINES * (deadline or inf))
        self._times = deque([GUESS], maxlen=KEPT)
        self._answered = -inf  # send time of the newest answered request
        self._tried = -inf  # when a request was last sent again while nothing was answered
        self._tries = 0

    def answered(self, sent_at: float, now: float) -> None:
        self._times.append(now - sent_at)
        self._answered = max(self._answered, sent_at)
        self._tries = 0

    def is_over(self, sent_at: float, now: float, *, own: float, losses: int) -> bool:
        """Return whether to abandon the request. ``own``: time of the agent's latest request. ``losses``: how often
        this question was abandoned before; each time doubles the wait, so that a slow answer is not missed forever."""
        if now - sent_at < self._least:
            return False
        usual = sorted(self._times)[-1 - len(self._times) // 20]  # the 95th percentile
        wait = max(self._least, USUALLY * max(usual, own))
        if now - sent_at < wait * 2**losses:
            return False
        if self._answered < sent_at:
            if now - self._tried < wait * 2**self._tries:
                return False
            self._tried = now
            self._tries += 1
        return True


@dataclass(slots=True, eq=False)
class Thought:
    """An agent's path from one tick's observation to an action or a failure. Times are on the event loop's clock."""

    tick: int
    began: float
    due: float  # the deadline of its tick
    after: Thought | None = None  # starts when this one has ended
    awaited: bool = True  # a tick waits for it
    left: bool = False  # its prompt was created, so it cannot use a newer observation
    sent_at: float = inf  # of the running request
    patience: Patience | None = None  # shared by the requests of its backend
    limit: asyncio.Timeout | None = None  # ends its wait
    losses: int = 0  # requests that were abandoned
    ended_at: float = inf
    action: object = None
    failure: str = ""  # why there is no action
    usage: Usage = field(default_factory=Usage)
    prompt: str = ""
    answer: str = ""  # the model's text
    task: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        return self.ended_at < inf

    @property
    def succeeded(self) -> bool:
        return self.ended and not self.failure

    def end(self, now: float, failure: str = "") -> None:
        self.ended_at, self.failure = now, failure


Given = tuple[Decision[object], Thought | None]  # what a tick gets, and the thought behind it


class Mind:
    """One agent. ``number`` identifies it in the scheduler. ``overlap``: several thoughts may run at once."""

    def __init__(self, agent: Agent, number: int, *, overlap: bool, skip_unchanged: bool, repeat_last: bool) -> None:
        self.agent, self.number = agent, number
        self.thoughts: list[Thought] = []  # running, or ended and not used yet
        self.took = 0.0  # seconds that its last answered request took
        self.gone = ""  # why the agent no longer decides
        self._last: Decision[object] | None = None  # the last one that came from a thought
        self._overlap = overlap
        self._skips = skip_unchanged
        self._repeats = repeat_last
        self._newest: int | None = None
        self._observed: object = UNSEEN  # by the latest thought
        self._spare: Thought | None = None

    def starts_episode(self, tick: int) -> bool:
        """Return whether this tick starts a new episode. Call it once per tick."""
        starts = self._newest is not None and tick < self._newest
        self._newest = tick
        return starts

    def forget(self) -> list[Thought]:
        """Drop all thoughts and the last action. Return the thoughts to cancel."""
        under_way = [thought for thought in self.thoughts if not thought.ended]
        self.thoughts = []
        self._last = None
        self._spare = None
        self._observed = UNSEEN
        return under_way

    def give_up_lost(self, now: float) -> None:
        """Cancel requests that take far too long. Their thoughts send new ones, about the newest observation."""
        for thought in self.thoughts:
            patience = thought.patience
            if patience is not None and patience.is_over(thought.sent_at, now, own=self.took, losses=thought.losses):
                thought.sent_at = inf
                thought.left = False
                thought.losses += 1
                thought.tick = thought.tick if self._newest is None else self._newest
                if thought.limit is not None and not thought.limit.expired():
                    thought.limit.reschedule(now)

    def turn_to(self, tick: int, observation: object, now: float, due: float) -> Given | Thought:
        """Return the result that the tick gets at once, or the thought to wait for. A thought that has no task yet is
        new."""
        ended = [thought for thought in self.thoughts if thought.ended]
        self.thoughts = [thought for thought in self.thoughts if not thought.ended]
        at_hand = max((t for t in ended if t.succeeded and self._is_news(t)), key=lambda t: t.tick, default=None)
        if at_hand is not None and at_hand.ended_at > at_hand.due:
            if not self.thoughts or self._overlap:
                self._begin(tick, observation, now, due).awaited = False
            return self._give(at_hand, tick)
        self._spare = at_hand
        if self.thoughts and not self._overlap:
            latest = self.thoughts[-1]
            if latest.awaited:
                return self._begin(tick, observation, now, due, latest)
            latest.awaited = True
            if not latest.left:
                latest.tick = tick
                latest.due = due
                self._observed = observation
            return latest
        # Observations that cannot be compared, such as arrays, count as changed.
        if self._skips and self._last is not None and tried(lambda: bool(observation == self._observed), False):
            return _again(self._last, "nothing has changed"), None
        return self._begin(tick, observation, now, due)

    def conclude(self, thought: Thought, tick: int, why: str) -> Given:
        """Return the result that the tick gets at its end. ``why`` is the reason if the thought has not ended."""
        if thought.succeeded and self._is_news(thought):
            self.thoughts = [other for other in self.thoughts if other is not thought]
            return self._give(thought, tick)
        thought.awaited = False
        if self._spare is not None:
            return self._give(self._spare, tick)
        if self._last is not None and self._repeats and not thought.ended and not self.gone:
            return _again(self._last, why), None
        return self.fall_back(self.gone or thought.failure or why), thought if thought.ended else None

    def fall_back(self, why: str) -> Decision[object]:
        return Decision(self.agent.fallback_for(why), "fallback", reason=why)

    def _begin(self, tick: int, observation: object, now: float, due: float, after: Thought | None = None) -> Thought:
        self._observed = observation
        thought = Thought(tick, now, due, after)
        self.thoughts.append(thought)
        return thought

    def _is_news(self, thought: Thought) -> bool:
        return self._last is None or self._last.seen_tick is None or thought.tick > self._last.seen_tick

    def _give(self, thought: Thought, tick: int) -> Given:
        self._spare = None
        source: ActionSource = "answer" if thought.tick == tick else "late"
        why = "" if source == "answer" else f"it answers tick {thought.tick}"
        latency = thought.ended_at - thought.began
        self._last = Decision(thought.action, source, thought.tick, thought.usage, latency, why)
        return self._last, thought


def _again(last: Decision[object], why: str) -> Decision[object]:
    return replace(last, source="last", usage=Usage(), latency=None, reason=why)
