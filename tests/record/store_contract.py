"""What every store behind a run directory does; a class that inherits this says how it is ``opened`` again."""

from __future__ import annotations

from collections.abc import Callable

from batch_agent.job import AgentError
from batch_agent.messages import Reply
from batch_agent.record.base import Entry, Identity, Progress, Store
from batch_agent.record.steps import Done, Ended, Failed, Past, Spent, Turn

Opened = Callable[[], Store]


def identity(name: str) -> Identity:
    return Identity(name.encode(), f"row of {name}".encode())


def done(agent: int, name: str, text: str = "answer") -> Entry:
    return Entry(agent, identity(name), Done(Reply(text), Spent()))


def under_way(agent: int, name: str, text: str = "so far") -> Entry:
    return Entry(agent, identity(name), Turn(Reply(text), Spent()))


def failed(agent: int, name: str) -> Entry:
    return Entry(agent, identity(name), Failed(AgentError("infer", "Unavailable", "gone"), "", Spent()))


def ended(agent: int, name: str) -> Entry:
    return Entry(agent, identity(name), Ended(Spent()))


def write(opened: Opened, *commits: list[Entry]) -> None:
    store = opened()
    store.begin(b"f", "now")
    for entries in commits:
        store.commit(entries, Progress(ok=len(entries)))
    store.close()


def read(opened: Opened, *names: str, by: str = "key") -> list[Past | None]:
    store = opened()
    try:
        store.sort_by(by)  # type: ignore[arg-type]
        return store.claim([identity(name) for name in names])
    finally:
        store.close()


def text_of(past: Past | None) -> str | None:
    return None if past is None else past.turns[-1].reply.text


class StoreContract:
    def test_what_was_committed_is_claimed_by_key_and_each_agent_once(self, opened: Opened) -> None:
        write(opened, [done(1, "a", "first"), done(2, "a", "second")], [done(3, "b")])
        found = read(opened, "a", "b", "a", "a", "c")
        assert list(map(text_of, found)) == ["first", "answer", "second", None, None]

    def test_an_agent_that_is_done_is_claimed_before_one_under_way_and_that_before_a_failed_one(
        self, opened: Opened
    ) -> None:
        write(opened, [failed(1, "a"), under_way(2, "a"), done(3, "a"), ended(4, "a")])
        found = read(opened, "a", "a", "a", "a")
        assert [past.agent for past in found if past] == [3, 4, 2, 1]

    def test_the_last_step_of_an_agent_says_how_it_stands(self, opened: Opened) -> None:
        write(
            opened, [under_way(1, "a"), failed(1, "a")], [under_way(1, "a"), done(1, "a"), done(2, "b"), failed(2, "b")]
        )
        a, b = read(opened, "a", "b")
        assert a is not None and a.failed is None and len(a.turns) == 3
        assert b is not None and b.failed is not None and not b.done

    def test_an_agent_that_ended_without_an_answer_is_done(self, opened: Opened) -> None:
        write(opened, [under_way(1, "a"), ended(1, "a"), ended(2, "b")])
        a, b = read(opened, "a", "b")
        assert a is not None and a.done and len(a.turns) == 1
        assert b is not None and b.done and b.turns == ()

    def test_records_are_claimed_by_row_when_the_question_does_not_matter(self, opened: Opened) -> None:
        write(opened, [Entry(1, Identity(b"old question", b"row of a"), Done(Reply("kept"), Spent()))])
        assert text_of(read(opened, "a", by="row")[0]) == "kept"
        assert read(opened, "a")[0] is None

    def test_by_row_an_agent_with_the_same_question_is_claimed_first_and_then_the_newest(self, opened: Opened) -> None:
        asked = [Identity(question, b"row of a") for question in (b"a", b"old", b"newer")]
        write(opened, [Entry(n, who, Done(Reply(who.key.decode()), Spent())) for n, who in enumerate(asked, start=1)])
        assert list(map(text_of, read(opened, "a", "a", "a", "a", by="row"))) == ["a", "newer", "old", None]

    def test_agents_are_numbered_on_and_sessions_counted(self, opened: Opened) -> None:
        fresh = opened()
        assert (fresh.sessions(), fresh.next_agent(), fresh.spent()) == (0, 1, (0, 0.0))
        fresh.close()
        write(opened, [done(7, "a")])
        write(opened, [done(8, "b"), done(9, "c")])
        store = opened()
        assert (store.sessions(), store.next_agent()) == (2, 10)
        store.close()

    def test_what_sessions_spent_is_added_up(self, opened: Opened) -> None:
        for tokens, cost in ((10, 0.5), (5, None), (7, 0.25)):
            store = opened()
            store.begin(b"f", "now")
            store.commit([], Progress(tokens=1))
            store.commit([], Progress(tokens=tokens, cost=cost))
            store.close()
        store = opened()
        assert store.spent() == (22, 0.75)
        store.close()

    def test_a_lease_that_was_not_returned_is_spent_and_what_was_learnt_is_there_for_the_next_session(
        self, opened: Opened
    ) -> None:
        for progress in (
            Progress(tokens=10, cost=0.5, lease=(90, 0.25)),  # killed
            Progress(tokens=20, cost=None, lease=(5, 0.0), learnt=(1, 2, 3)),
            Progress(tokens=30, cost=1.0),  # at its end
        ):
            store = opened()
            store.begin(b"f", "now")
            store.commit([], Progress(lease=(1000, 9.0)))
            store.commit([], progress)
            store.close()
        store = opened()
        assert (store.spent(), store.learnt()) == ((140, 1.5), (1, 2, 3))
        store.close()
