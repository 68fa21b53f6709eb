"""What a tick gets of an agent's thoughts, without a clock or a task."""

from __future__ import annotations

from math import inf

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batch_agent.ticks import Action, Agent, Decision
from batch_agent.ticks.mind import Mind, Patience, Thought


def mind(*, overlap: bool = False, skip_unchanged: bool = False, repeat_last: bool = True) -> Mind:
    return Mind(Agent("a"), 1, overlap=overlap, skip_unchanged=skip_unchanged, repeat_last=repeat_last)


def begun(mind: Mind, tick: int, now: float = 0.0, due: float = inf, seen: object = None) -> Thought:
    thought = mind.turn_to(tick, seen if seen is not None else {"tick": tick}, now, due)
    assert isinstance(thought, Thought)
    return thought


def at_once(mind: Mind, tick: int, now: float = 0.0, due: float = inf, seen: object = None) -> Decision[object]:
    given = mind.turn_to(tick, seen if seen is not None else {"tick": tick}, now, due)
    assert isinstance(given, tuple)
    return given[0]


def ends(thought: Thought, at: float, action: str = "go") -> None:
    thought.left = True
    thought.action = Action(action)
    thought.end(at)


def test_an_answer_in_time_is_an_answer_to_its_tick() -> None:
    m = mind()
    thought = begun(m, 1)
    ends(thought, 0.5)
    decision, of = m.conclude(thought, 1, "late")
    assert (decision.source, decision.seen_tick, decision.latency, of) == ("answer", 1, 0.5, thought)
    assert m.thoughts == []


def test_at_the_deadline_an_agent_falls_back_and_later_does_what_it_did_last() -> None:
    m = mind()
    decision, _ = m.conclude(begun(m, 1, due=1.0), 1, "too late")
    assert (decision.source, decision.reason) == ("fallback", "too late")
    m = mind()
    first = begun(m, 1, due=1.0)
    ends(first, 0.5, "dig")
    m.conclude(first, 1, "")
    decision, _ = m.conclude(begun(m, 2, 1.0, 2.0), 2, "too late")
    assert (decision.source, decision.seen_tick, decision.action) == ("last", 1, Action("dig"))


def test_who_does_not_repeat_falls_back_each_time() -> None:
    m = mind(repeat_last=False)
    first = begun(m, 1)
    ends(first, 0.5)
    m.conclude(first, 1, "")
    assert m.conclude(begun(m, 2, 1.0, 2.0), 2, "too late")[0].source == "fallback"


def test_a_failure_is_the_fallback_with_its_reason_even_where_something_was_done_before() -> None:
    m = mind()
    first = begun(m, 1)
    ends(first, 0.5)
    m.conclude(first, 1, "")
    second = begun(m, 2)
    second.end(0.7, "the server is on fire")
    decision, _ = m.conclude(second, 2, "")
    assert (decision.source, decision.reason) == ("fallback", "the server is on fire")


def test_an_answer_that_came_between_two_ticks_is_the_next_ones_at_once_and_thinking_goes_on() -> None:
    m = mind()
    thought = begun(m, 1, 0.0, 1.0)
    thought.left = True
    m.conclude(thought, 1, "")
    ends(thought, 1.5)
    decision = at_once(m, 2, 2.0, 3.0)
    assert (decision.source, decision.seen_tick) == ("late", 1)
    assert [(other.tick, other.awaited) for other in m.thoughts] == [(2, False)]


def test_a_thought_that_a_late_answer_displaced_is_second_choice() -> None:
    m = mind()
    thought = begun(m, 1, 0.0, 1.0)
    thought.left = True
    m.conclude(thought, 1, "")
    ends(thought, 1.5)
    at_once(m, 2, 2.0, 3.0)
    ends(m.thoughts[0], 2.1, "spare")
    third = begun(m, 3, 4.0, 5.0)
    decision, _ = m.conclude(third, 3, "")
    assert (decision.source, decision.seen_tick, decision.action) == ("late", 2, Action("spare"))


def test_a_fresh_answer_goes_before_a_spare_one_which_is_then_nobodys() -> None:
    m = mind()
    thought = begun(m, 1, 0.0, 1.0)
    thought.left = True
    m.conclude(thought, 1, "")
    ends(thought, 1.5)
    at_once(m, 2, 2.0, 3.0)
    ends(m.thoughts[0], 2.1, "spare")
    third = begun(m, 3, 4.0, 5.0)
    ends(third, 4.2, "fresh")
    assert m.conclude(third, 3, "")[0].action == Action("fresh")
    fourth = begun(m, 4, 6.0, 7.0)
    assert m.conclude(fourth, 4, "")[0].action == Action("fresh")  # as what was done last


def test_a_thought_that_was_not_asked_yet_turns_to_the_newest_tick_and_keeps_its_place() -> None:
    m = mind()
    thought = begun(m, 1, 0.0, 1.0)
    m.conclude(thought, 1, "")
    assert begun(m, 2, 1.0, 2.0) is thought
    assert (thought.tick, thought.due, thought.awaited) == (2, 2.0, True)


def test_a_thought_on_its_way_is_waited_for_by_the_next_tick_and_late_there() -> None:
    m = mind()
    thought = begun(m, 1, 0.0, 1.0)
    thought.left = True
    m.conclude(thought, 1, "")
    assert begun(m, 2, 1.0, 2.0) is thought
    ends(thought, 1.4)
    decision, _ = m.conclude(thought, 2, "")
    assert (decision.source, decision.seen_tick) == ("late", 1)


def test_while_another_tick_waits_the_next_thought_begins_after_that_one() -> None:
    m = mind()
    first = begun(m, 1)
    second = begun(m, 2)
    assert second is not first and second.after is first
    ends(first, 0.5)
    ends(second, 0.9)
    assert m.conclude(first, 1, "")[0].seen_tick == 1
    assert m.conclude(second, 2, "")[0].seen_tick == 2


def test_thoughts_overlap_only_where_that_is_asked_for() -> None:
    m = mind(overlap=True)
    first = begun(m, 1, 0.0, 1.0)
    first.left = True
    m.conclude(first, 1, "")
    second = begun(m, 2, 1.0, 2.0)
    assert second is not first and second.after is None


def test_an_answer_older_than_what_was_given_is_none() -> None:
    m = mind(overlap=True)
    first, second = begun(m, 1, 0.0, 1.0), begun(m, 2, 0.0, 1.0)
    ends(second, 0.5)
    m.conclude(second, 2, "")
    ends(first, 2.0)
    assert begun(m, 3, 3.0, 4.0).tick == 3


def test_what_has_not_changed_is_not_thought_about_where_that_is_asked_for() -> None:
    m = mind(skip_unchanged=True)
    first = begun(m, 1, seen={"x": 1})
    ends(first, 0.5)
    m.conclude(first, 1, "")
    decision = at_once(m, 2, seen={"x": 1})
    assert (decision.source, decision.seen_tick, decision.reason) == ("last", 1, "nothing has changed")
    assert begun(m, 3, seen={"x": 2}).tick == 3


def test_what_cannot_be_compared_has_changed() -> None:
    class Array:
        def __eq__(self, other: object) -> bool:
            raise ValueError("the truth value of an array is ambiguous")

    m = mind(skip_unchanged=True)
    first = begun(m, 1, seen=Array())
    ends(first, 0.5)
    m.conclude(first, 1, "")
    assert begun(m, 2, seen=Array()).tick == 2


def test_an_episode_begins_when_the_tick_goes_back_and_nothing_of_the_old_one_is_given() -> None:
    m = mind()
    assert not m.starts_episode(5) and not m.starts_episode(5)
    thought = begun(m, 5, 0.0, 1.0)
    assert m.starts_episode(0)
    assert m.forget() == [thought]
    assert m.thoughts == []


def test_a_request_that_is_lost_is_withdrawn_once_and_its_thought_is_about_the_newest_tick() -> None:
    m, patience = mind(), Patience(1.0)
    m.starts_episode(1)
    thought = begun(m, 1, 0.0, 1.0)
    thought.left, thought.sent_at, thought.patience = True, 0.0, patience
    m.starts_episode(2)
    m.conclude(thought, 1, "")
    patience.answered(0.5, 0.6)
    m.give_up_lost(2.9)
    assert thought.losses == 0 and thought.left
    m.give_up_lost(3.0)
    m.give_up_lost(9.0)
    assert thought.losses == 1 and not thought.left and thought.tick == 2


class AnyWorld(RuleBasedStateMachine):
    """Ticks begin and end, thoughts leave and end, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.mind = mind()
        self.now = 0.0
        self.tick = 0
        self.waiting: dict[int, Thought] = {}  # by tick
        self.given: list[Decision[object]] = []
        self.patience = Patience(1.0)

    def _take(self, tick: int, decision: Decision[object]) -> None:
        if decision.source in ("answer", "late"):
            assert decision.seen_tick is not None
            assert all(
                earlier.seen_tick < decision.seen_tick for earlier in self.given if earlier.seen_tick is not None
            )
            assert (decision.source == "answer") == (decision.seen_tick == tick)
            self.given.append(decision)
        elif decision.source == "last":
            assert decision.seen_tick == self.given[-1].seen_tick

    @rule()
    def a_tick_begins(self) -> None:
        self.tick += 1
        self.mind.give_up_lost(self.now)
        turned = self.mind.turn_to(self.tick, {"tick": self.tick}, self.now, self.now + 1.0)
        if isinstance(turned, Thought):
            self.waiting[self.tick] = turned
        else:
            self._take(self.tick, turned[0])

    @precondition(lambda self: self.waiting)
    @rule()
    def a_tick_ends(self) -> None:
        tick = min(self.waiting)  # deadlines pass in the order in which ticks began
        self._take(tick, self.mind.conclude(self.waiting.pop(tick), tick, "late")[0])

    @precondition(lambda self: any(not thought.ended for thought in self.mind.thoughts))
    @rule(fails=st.booleans())
    def the_oldest_thought_goes_on(self, fails: bool) -> None:
        thought = next(thought for thought in self.mind.thoughts if not thought.ended)
        if not thought.left:
            thought.left, thought.sent_at, thought.patience = True, self.now, self.patience
            return
        if thought.sent_at < inf:
            self.patience.answered(thought.sent_at, self.now)
        thought.sent_at = inf
        if fails:
            thought.end(self.now, "no")
        else:
            ends(thought, self.now)

    @rule(seconds=st.floats(0.1, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def one_thought_at_a_time_is_under_way(self) -> None:
        under_way = [t for t in self.mind.thoughts if not t.ended and (t.after is None or t.after.ended)]
        assert len(under_way) <= 1


TestAnyWorld = AnyWorld.TestCase
