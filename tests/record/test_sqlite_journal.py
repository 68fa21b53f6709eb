"""The journal on disk: what is committed is there, what is damaged is refused, nothing is ever misread."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Literal
from zlib import crc32

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from batch_agent.errors import StoreError
from batch_agent.job import AgentError
from batch_agent.messages import Reply
from batch_agent.record.codec import FORMAT, encode
from batch_agent.record.sqlite import TABLE, SqliteJournal, glance
from batch_agent.record.steps import Asked, Ended, Failed, Past, Step, Used
from batch_agent.record.store import Identity, KeptStep, Spent, Totals

Opened = Callable[[], SqliteJournal]


def at(path: Path) -> Opened:
    return lambda: SqliteJournal.open(path)


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    return at(tmp_path / "journal.db")


def identity(name: str) -> Identity:
    return Identity(name.encode(), f"row of {name}".encode())


def kept(agent: int, who: Identity, step: Step) -> KeptStep:
    return KeptStep(agent, who.key, who.row, *encode(step))


def done(agent: int, name: str, text: str = "answer") -> KeptStep:
    return kept(agent, identity(name), Ended(Used(), reply=Reply(text)))


def under_way(agent: int, name: str, text: str = "so far") -> KeptStep:
    return kept(agent, identity(name), Asked("", 0, Reply(text), Used()))


def failed(agent: int, name: str) -> KeptStep:
    return kept(agent, identity(name), Failed(AgentError("infer", "Unavailable", "gone"), "", Used()))


def ended(agent: int, name: str) -> KeptStep:
    return kept(agent, identity(name), Ended(Used()))


def write(opened: Opened, *commits: list[KeptStep]) -> None:
    journal = opened()
    journal.begin(b"f", "now")
    for steps in commits:
        journal.commit(steps, Totals(ok=len(steps)))
    journal.close()


def read(opened: Opened, *names: str, by: Literal["key", "row"] = "key") -> list[Past | None]:
    journal = opened()
    try:
        journal.sort_by(by)
        return journal.claim([identity(name) for name in names])
    finally:
        journal.close()


def text_of(past: Past | None) -> str | None:
    return None if past is None else past.turns[-1].reply.text


def test_what_was_committed_is_claimed_by_key_and_each_agent_once(opened: Opened) -> None:
    write(opened, [done(1, "a", "first"), done(2, "a", "second")], [done(3, "b")])
    found = read(opened, "a", "b", "a", "a", "c")
    assert list(map(text_of, found)) == ["first", "answer", "second", None, None]


def test_an_agent_that_is_done_is_claimed_before_one_under_way_and_that_before_a_failed_one(
    opened: Opened,
) -> None:
    write(opened, [failed(1, "a"), under_way(2, "a"), done(3, "a"), ended(4, "a")])
    found = read(opened, "a", "a", "a", "a")
    assert [past.agent for past in found if past] == [3, 4, 2, 1]


def test_the_last_step_of_an_agent_says_how_it_stands(opened: Opened) -> None:
    write(opened, [under_way(1, "a"), failed(1, "a")], [under_way(1, "a"), done(1, "a"), done(2, "b"), failed(2, "b")])
    a, b = read(opened, "a", "b")
    assert a is not None and a.failed is None and len(a.turns) == 3
    assert b is not None and b.failed is not None and not b.done


def test_an_agent_that_ended_without_an_answer_is_done(opened: Opened) -> None:
    write(opened, [under_way(1, "a"), ended(1, "a"), ended(2, "b")])
    a, b = read(opened, "a", "b")
    assert a is not None and a.done and len(a.turns) == 1
    assert b is not None and b.done and b.turns == ()


def test_records_are_claimed_by_row_when_the_question_does_not_matter(opened: Opened) -> None:
    write(opened, [kept(1, Identity(b"old question", b"row of a"), Ended(Used(), reply=Reply("kept")))])
    assert text_of(read(opened, "a", by="row")[0]) == "kept"
    assert read(opened, "a")[0] is None


def test_by_row_an_agent_with_the_same_question_is_claimed_first_and_then_the_newest(opened: Opened) -> None:
    asked = [Identity(question, b"row of a") for question in (b"a", b"old", b"newer")]
    write(opened, [kept(n, who, Ended(Used(), reply=Reply(who.key.decode()))) for n, who in enumerate(asked, start=1)])
    assert list(map(text_of, read(opened, "a", "a", "a", "a", by="row"))) == ["a", "newer", "old", None]


def test_agents_are_numbered_on_and_sessions_counted(opened: Opened) -> None:
    fresh = opened()
    assert (fresh.sessions(), fresh.next_agent(), fresh.spent()) == (0, 1, (0, 0.0))
    fresh.close()
    write(opened, [done(7, "a")])
    write(opened, [done(8, "b"), done(9, "c")])
    store = opened()
    assert (store.sessions(), store.next_agent()) == (2, 10)
    store.close()


def test_what_sessions_spent_is_added_up(opened: Opened) -> None:
    for tokens, cost in ((10, 500_000_000), (5, None), (7, 250_000_000)):
        store = opened()
        store.begin(b"f", "now")
        store.commit([], Totals(spent=Spent(1)))
        store.commit([], Totals(spent=Spent(tokens, cost)))
        store.close()
    store = opened()
    assert store.spent() == (22, 0.75)
    store.close()


def leave_advance(path: Path, tokens: int, cost: float) -> None:
    """Let the latest session be one of an earlier version that was killed with this advance."""
    with closing(sqlite3.connect(path)) as db:
        *line, _ = db.execute("SELECT * FROM session ORDER BY id DESC").fetchone()
        line[8:10] = tokens, cost
        seal = crc32(repr(tuple(line)).encode())
        values = (tokens, cost, seal, line[0])
        db.execute('UPDATE session SET leased_tokens = ?, leased_cost = ?, "check" = ? WHERE id = ?', values)
        db.commit()


def test_an_advance_that_an_earlier_version_did_not_return_is_spent_and_what_was_learnt_is_there(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.db"
    for spent, learnt, advance in (
        (Spent(10, 500_000_000), None, (90, 0.25)),  # killed
        (Spent(20), (1, 2, 3), (5, 0.0)),
        (Spent(30, 1_000_000_000), None, None),  # at its end
    ):
        store = at(path)()
        store.begin(b"f", "now")
        store.commit([], Totals(spent=spent), learnt)
        store.close()
        if advance is not None:
            leave_advance(path, *advance)
    store = at(path)()
    assert (store.spent(), store.learnt()) == ((140, 1.5), (1, 2, 3))
    store.close()


def test_facts_are_written_with_the_steps_of_a_commit_or_not_at_all(opened: Opened) -> None:
    store = opened()
    store.begin(b"f", "now")
    store.commit([done(1, "a")], Totals(ok=1), None, {TABLE: '{"spent": {"budget tokens": 7}}'})
    with pytest.raises(StoreError):
        store.commit([done(10**30, "b")], Totals(ok=2), None, {TABLE: "{}"})
    assert store.fact(TABLE) == '{"spent": {"budget tokens": 7}}'
    store.close()


@pytest.mark.parametrize("count", [1, 3, 4, 5, 256, 257, 1000])
def test_a_commit_of_any_size_is_recorded_whole(tmp_path: Path, count: int) -> None:
    path = tmp_path / "journal.db"
    write(at(path), [done(agent, f"row {agent}") for agent in range(1, count + 1)])
    assert None not in read(at(path), *(f"row {agent}" for agent in range(1, count + 1)))


def test_a_glance_tells_of_the_last_session(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    write(at(path), [done(7, "a")])
    write(at(path), [done(8, "b"), done(9, "c")])
    assert (glance(path).sessions, glance(path).latest.ok) == (2, 2)


def test_another_process_may_look_while_the_journal_is_open(tmp_path: Path) -> None:
    journal = SqliteJournal.open(tmp_path / "journal.db")
    journal.begin(b"f", "now")
    journal.commit([done(1, "a")], Totals(ok=1, spent=Spent(12)))
    assert glance(tmp_path / "journal.db").latest == Totals(ok=1, spent=Spent(12))
    journal.close()


@pytest.mark.parametrize("version, age", [(FORMAT + 1, "a newer"), (0, "an older")])
def test_a_journal_of_another_format_is_refused(tmp_path: Path, version: int, age: str) -> None:
    path = tmp_path / "journal.db"
    write(at(path), [done(1, "a")])
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {version}")
    db.close()
    with pytest.raises(StoreError, match=f"{age} version.*format {version}"):
        SqliteJournal.open(path)


def test_a_database_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE mine (x)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another program"):
        SqliteJournal.open(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"this is no database, and it is long enough to be sure of that" * 50])
def test_a_journal_that_is_none_is_refused_with_a_way_out(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"damaged.*move journal\.db"):
        SqliteJournal.open(path)


def test_a_record_that_cannot_be_decoded_is_none_and_keeps_no_other_from_being_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal.db"
    write(at(path), [done(1, "a"), done(2, "b"), done(3, "b", "another")])
    db = sqlite3.connect(path)
    db.execute("UPDATE record SET body = x'ff' WHERE agent < 3")
    db.commit()
    db.close()
    assert list(map(text_of, read(at(path), "a", "b", "b"))) == [None, "another", None]
    assert caplog.text.count("is unreadable and is ignored") == 2


def test_a_number_that_sqlite_cannot_hold_is_a_store_error_or_cut(tmp_path: Path) -> None:
    journal = SqliteJournal.open(tmp_path / "journal.db")
    journal.begin(b"f", "now")
    journal.commit([done(1, "a")], Totals(ok=1, spent=Spent(10**30)))
    assert glance(tmp_path / "journal.db").latest.tokens == 2**63 - 1
    with pytest.raises(StoreError, match="cannot be recorded"):
        journal.commit([done(10**30, "b")], Totals(ok=2))
    journal.close()
    assert text_of(read(at(tmp_path / "journal.db"), "a")[0]) == "answer"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal as a kill leaves it: ten commits of three rows, in the write-ahead log."""
    here = tmp_path_factory.mktemp("killed")
    journal = SqliteJournal.open(here / "live.db")
    journal.begin(b"f", "now")
    for commit in range(10):
        journal.commit([done(3 * commit + n, f"{3 * commit + n}") for n in range(1, 4)], Totals())
    for suffix in ("", "-wal"):
        shutil.copy(here / f"live.db{suffix}", here / f"journal.db{suffix}")
    journal.close()
    return here / "journal.db"


@given(st.floats(0, 1))
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_prefix_of_the_log_holds_a_prefix_of_the_commits(killed: Path, share: float) -> None:
    log = killed.with_name("journal.db-wal").read_bytes()
    copy = killed.parent / "prefix.db"
    for leftover in killed.parent.glob("prefix.db*"):
        leftover.unlink()
    shutil.copy(killed, copy)
    copy.with_name("prefix.db-wal").write_bytes(log[: int(share * len(log))])
    try:
        found = [past is not None for past in read(at(copy), *(str(n) for n in range(1, 31)))]
    except StoreError:  # the schema itself was cut off
        assert share < 0.5
        return
    assert found == sorted(found, reverse=True)
    assert sum(found) % 3 == 0
    assert share < 1 or sum(found) == 30


@given(st.floats(0, 0.999))
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_that_was_cut_off_is_refused_or_holds_true_answers(tmp_path: Path, share: float) -> None:
    path = tmp_path / "whole.db"
    if not path.exists():
        write(at(path), [done(n, str(n), f"answer {n}" + "." * 300) for n in range(1, 101)])
    cut = tmp_path / "cut.db"
    for leftover in tmp_path.glob("cut.db*"):
        leftover.unlink()
    content = path.read_bytes()
    cut.write_bytes(content[: int(share * len(content))])
    try:
        found = read(at(cut), *(str(n) for n in range(1, 101)))
    except StoreError:
        return
    for n, past in enumerate(found, start=1):
        assert past is None or text_of(past) == f"answer {n}" + "." * 300


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of two sessions with spending, a fact that has spending too, and a hundred rows."""
    path = tmp_path_factory.mktemp("recorded") / "journal.db"
    journal = SqliteJournal.open(path)
    for start, spent in ((1, Spent(70, 500_000_000)), (51, Spent(30))):
        journal.begin(b"f", "now")
        steps = [under_way(n, str(n), f"answer {n}") for n in range(start, start + 50)]
        journal.commit(steps + [done(n, str(n), f"answer {n}") for n in range(start, start + 50)], Totals(spent=spent))
    journal.set_fact(TABLE, '{"spent": {"budget tokens": 5}}')
    journal.close()
    return path


def flipped(path: Path, place: float, bit: int) -> Path:
    """A copy of a journal in which one bit is flipped."""
    copy = path.with_name("flipped.db")
    for leftover in path.parent.glob("flipped.db*"):
        leftover.unlink()
    shutil.copy(path, copy)
    content = bytearray(copy.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    copy.write_bytes(content)
    return copy


def changed(path: Path, statement: str, *values: object) -> Path:
    """A copy in which a statement has changed rows without their checksums."""
    copy = flipped(path, 0.0, 0)
    shutil.copy(path, copy)
    db = sqlite3.connect(copy)
    db.execute(statement, values)
    db.commit()
    db.close()
    return copy


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7))
@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_is_an_error_or_costs_one_row_that_is_named(
    recorded: Path, caplog: pytest.LogCaptureFixture, place: float, bit: int
) -> None:
    caplog.clear()
    names = [str(n) for n in range(1, 101)]
    try:
        journal = SqliteJournal.open(flipped(recorded, place, bit))
        try:
            spent, table, _ = journal.spent(), journal.fact(TABLE), journal.sort_by("key")
            found = journal.claim_steps([identity(name) for name in names], range(1, 101))
        finally:
            journal.close()
    except StoreError:
        return
    assert (spent, table) == ((100, 0.5), '{"spent": {"budget tokens": 5}}')
    lost = [name for name, steps in zip(names, found, strict=True) if not steps]
    assert len(lost) <= 1
    for name, steps in zip(names, found, strict=True):
        if steps:
            assert [step.body for step in steps] == [
                under_way(1, "", f"answer {name}").body,
                done(1, "", f"answer {name}").body,
            ]
        else:
            assert f"the record of row {name} is unreadable" in caplog.text


@pytest.mark.parametrize("column", ["kind", "body"])
def test_a_row_whose_last_record_is_damaged_is_named(
    recorded: Path, column: str, caplog: pytest.LogCaptureFixture
) -> None:
    value = {"kind": 5, "body": b"[]"}[column]
    last = "(SELECT max(id) FROM record WHERE agent = 7)"
    journal = SqliteJournal.open(changed(recorded, f"UPDATE record SET {column} = ? WHERE id = {last}", value))
    journal.sort_by("key")
    found = journal.claim_steps([identity(str(n)) for n in range(1, 101)], range(1, 101))
    journal.close()
    assert [n for n, steps in enumerate(found, start=1) if not steps] == [7]
    assert "the record of row 7 is unreadable" in caplog.text


@pytest.mark.parametrize("column", ["key", "row", "agent"])
def test_a_record_that_says_wrongly_whose_it_is_is_an_error_that_names_the_copy(recorded: Path, column: str) -> None:
    value = {"key": b"other", "row": b"other", "agent": 3}[column]
    last = "(SELECT max(id) FROM record WHERE agent = 7)"
    copy = changed(recorded, f"UPDATE record SET {column} = ? WHERE id = {last}", value)
    agent = 3 if column == "agent" else 7
    reads: list[Callable[[SqliteJournal], object]] = [
        lambda journal: journal.sort_by("key"),
        lambda journal: journal.sort_by("row"),
        lambda journal: [*journal.recorded(None)],
    ]
    for read in reads:
        journal = SqliteJournal.open(copy)
        with pytest.raises(StoreError, match=rf"the key of agent {agent} is not as it was written.*batch-agent copy"):
            read(journal)
        journal.close()


@pytest.mark.parametrize("column", ["tokens", "cost", "leased_tokens", "leased_cost", "learnt", "started", "ok"])
def test_a_damaged_session_is_an_error_that_names_it_and_a_copy_goes_on_without_it(recorded: Path, column: str) -> None:
    copy = changed(recorded, f"UPDATE session SET {column} = 1 WHERE id = 1")
    journal = SqliteJournal.open(copy)
    with pytest.raises(StoreError, match=r"session 1 is not as it was written.*batch-agent copy"):
        journal.spent()
    journal.close()
    assert (glance(copy).latest.tokens, glance(copy).latest.cost) == (35, None)


def test_a_key_whose_type_is_damaged_is_still_found(recorded: Path) -> None:
    copy = changed(recorded, "UPDATE record SET key = CAST(key AS TEXT) WHERE agent = 7")
    assert text_of(read(at(copy), "7")[0]) == "answer 7"


def test_a_schema_that_is_no_text_is_an_error_in_words(recorded: Path) -> None:
    copy = flipped(recorded, 0.0, 0)
    content = recorded.read_bytes()
    copy.write_bytes(content.replace(b"kind INTEGER NOT NULL, body", b"kind INTEGER NOT NUL\xcc, body"))
    with pytest.raises(StoreError, match="is damaged"):
        SqliteJournal.open(copy)


def test_a_damaged_table_of_shares_is_an_error(recorded: Path) -> None:
    copy = changed(recorded, "UPDATE fact SET value = replace(value, '5', '4')")
    journal = SqliteJournal.open(copy)
    with pytest.raises(StoreError, match="the fact 'table' is not as it was written"):
        journal.fact(TABLE)
    journal.close()


def test_a_damaged_index_is_an_error_that_names_the_copy(recorded: Path) -> None:
    copy = flipped(recorded, 0.0, 0)
    shutil.copy(recorded, copy)
    db = sqlite3.connect(copy)
    db.execute("DROP INDEX record_agent")
    db.execute("CREATE INDEX record_agent ON record (agent) WHERE agent != 20")
    db.execute("PRAGMA writable_schema = ON")
    db.execute("UPDATE sqlite_schema SET sql = 'CREATE INDEX record_agent ON record (agent)' WHERE type = 'index'")
    db.commit()
    db.close()
    with pytest.raises(StoreError, match=r"missing from index record_agent.*batch-agent copy"):
        SqliteJournal.open(copy)
