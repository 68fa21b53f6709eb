"""One agent between ticks: its thoughts under way, what it last did, and which of these a tick gets. Pure code.

    nothing under way                 a thought begins, and the tick waits for it
    under way, not asked yet          it is about this tick's observation from now on, and keeps its place
    under way since an earlier tick   the tick waits for it: its answer is late
    under way for a tick that waits   another thought, about this tick, begins when that one ends
    an answer that came late          is this tick's, at once; and a thought about this tick begins
    an answer that was not needed     (its tick had a late one) is second choice: used if nothing newer comes

An answer is given once. One that is older than what was already given is none.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from math import inf

from batch_agent.messages import Usage
from batch_agent.scheduler.forecast import Progress
from batch_agent.scheduler.ordering import LAST
from batch_agent.ticks.action import Decision
from batch_agent.ticks.agent import Agent

UNSEEN = object()


@dataclass(slots=True, eq=False)
class Thought:
    """About one tick's observation, from its beginning to its action or failure. Times are the event loop's."""

    tick: int
    began: float
    due: float  # when its tick is over
    after: Thought | None = None  # what must end before it begins
    awaited: bool = True  # a tick waits for it
    left: bool = False  # what it asks is on its way, and cannot change any more
    ended_at: float = inf
    action: object = None
    failure: str = ""  # why there is no action
    usage: Usage = field(default_factory=Usage)
    prompt: str = ""
    answer: str = ""  # the model's words
    task: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        return self.ended_at < inf

    @property
    def succeeded(self) -> bool:
        return self.ended and not self.failure

    def end(self, now: float, failure: str = "") -> None:
        self.ended_at, self.failure = now, failure


Given = tuple[Decision[object], Thought | None]  # what a tick gets, and the thought that it comes of


class Mind:
    """``number`` tells agents apart, and stays. ``overlap``: a thought may begin while another is under way."""

    def __init__(self, agent: Agent, number: int, *, overlap: bool, skip_unchanged: bool, repeat_last: bool) -> None:
        self.agent, self.number = agent, number
        self.progress = Progress(LAST)
        self.thoughts: list[Thought] = []  # under way, or ended and not given yet
        self.last: Decision[object] | None = None  # that came of a thought
        self.gone = ""  # why it decides nothing any more
        self._overlap, self._skips, self._repeats = overlap, skip_unchanged, repeat_last
        self._newest: int | None = None
        self._observed: object = UNSEEN  # by the latest thought
        self._spare: Thought | None = None

    def begins_again(self, tick: int) -> bool:
        """Whether this tick is the first of another episode. Asked once for each tick."""
        again = self._newest is not None and tick < self._newest
        self._newest = tick
        return again

    def forget(self) -> list[Thought]:
        """An episode begins: what was thought in the one before is nobody's any more. The thoughts to be ended."""
        under_way = [thought for thought in self.thoughts if not thought.ended]
        self.thoughts, self.last, self._spare, self._observed = [], None, None, UNSEEN
        return under_way

    def turn_to(self, tick: int, observation: object, now: float, due: float) -> Given | Thought:
        """What the tick gets at once, or the thought that it waits for; which is new where it has no task yet."""
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
                latest.tick, latest.due, self._observed = tick, due, observation
            return latest
        if self._skips and self.last is not None and _same(observation, self._observed):
            return _again(self.last, "nothing has changed"), None
        return self._begin(tick, observation, now, due)

    def conclude(self, thought: Thought, tick: int, why: str) -> Given:
        """The tick is over. ``why`` is what to say where the thought is not."""
        if thought.succeeded and self._is_news(thought):
            self.thoughts = [other for other in self.thoughts if other is not thought]
            return self._give(thought, tick)
        thought.awaited = False
        if self._spare is not None:
            return self._give(self._spare, tick)
        if self.last is not None and self._repeats and not thought.ended and not self.gone:
            return _again(self.last, why), None
        return self.fall_back(self.gone or thought.failure or why), thought if thought.ended else None

    def fall_back(self, why: str) -> Decision[object]:
        return Decision(self.agent.fallback_for(why), "fallback", reason=why)

    def _begin(self, tick: int, observation: object, now: float, due: float, after: Thought | None = None) -> Thought:
        self._observed = observation
        thought = Thought(tick, now, due, after)
        self.thoughts.append(thought)
        return thought

    def _is_news(self, thought: Thought) -> bool:
        return self.last is None or self.last.seen_tick is None or thought.tick > self.last.seen_tick

    def _give(self, thought: Thought, tick: int) -> Given:
        self._spare = None
        late = thought.tick != tick
        decision = Decision(
            thought.action,
            "late" if late else "answer",
            thought.tick,
            thought.usage,
            thought.ended_at - thought.began,
            f"it answers tick {thought.tick}" if late else "",
        )
        self.last = decision
        return decision, thought


def _again(last: Decision[object], why: str) -> Decision[object]:
    """What was done last, which costs nothing to do again."""
    return replace(last, source="last", usage=Usage(), latency=None, reason=why)


def _same(one: object, other: object) -> bool:
    """Whether nothing has changed; what cannot be compared (an array) has."""
    try:
        return bool(one == other)
    except Exception:
        return False
