"""Answers on disk: bounded, shared, and never the reason for a failed run."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_agent.backends.cache_store import FILE, ResponseStore, cache_file, decode_reply, encode_reply
from batch_agent.errors import SpecError
from batch_agent.messages import Reply, Sealed, ToolCall, Usage

COUNTS = st.integers(0, 2**40)
REPLIES = st.builds(
    Reply,
    text=st.text(),
    tool_calls=st.lists(st.builds(ToolCall, st.text(), st.text(), st.text())).map(tuple),
    usage=st.builds(Usage, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS),
    reasoning=st.text(),
    finish_reason=st.text(),
    sealed=st.none() | st.builds(Sealed, st.text(), st.lists(st.text())),
)


@given(REPLIES)
def test_an_answer_comes_back_as_it_was_with_its_usage_as_what_it_saved(reply: Reply) -> None:
    back = decode_reply(encode_reply(reply))
    assert (back.text, back.tool_calls, back.reasoning, back.finish_reason) == (
        reply.text,
        reply.tool_calls,
        reply.reasoning,
        reply.finish_reason,
    )
    assert (back.usage, back.saved, back.sealed) == (Usage(), reply.usage, reply.sealed)


def test_an_answer_that_an_earlier_version_kept_is_read() -> None:
    kept = '{"text": "hi", "tool_calls": [], "usage": [9, 4, 2, 1], "reasoning": "", "finish_reason": "stop"}'
    assert decode_reply(kept) == Reply("hi", saved=Usage(9, 4, 2, 1))


def put(store: ResponseStore, number: int, size: int = 1000, model: str = "m") -> None:
    store.put(number.to_bytes(32), "b", model, Reply("x" * size))


def held(store: ResponseStore, count: int) -> list[int]:
    return [number for number in range(count) if store.get(number.to_bytes(32)) is not None]


def test_it_stays_within_its_bound_and_the_least_recently_used_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    with ResponseStore(tmp_path / FILE, max_bytes=12_000) as store:
        for number in range(10):
            now[0] += 10_000
            put(store, number)
            store.get((0).to_bytes(32))  # used all the time
        for number in range(10, 13):
            now[0] += 10_000
            put(store, number)
        assert sum(model.size_bytes for model in store.models()) <= 12_000
        left = held(store, 13)
    assert 0 in left and 12 in left
    assert 1 not in left


def test_an_answer_larger_than_the_bound_is_not_kept(tmp_path: Path) -> None:
    with ResponseStore(tmp_path / FILE, max_bytes=500) as store:
        put(store, 1)
        assert store.models() == []


def test_models_are_listed_and_pruned_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000_000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    with ResponseStore(tmp_path / FILE) as store:
        put(store, 1, model="old")
        now[0] += 500_000
        put(store, 2, model="new")
        put(store, 3, 5000, model="new")
        assert [(model.model, model.answers, model.used) for model in store.models()] == [
            ("new", 2, now[0]),
            ("old", 1, 1_000_000.0),
        ]
        assert store.prune(unused_seconds=400_000) == 1
        assert store.prune(unused_seconds=400_000) == 0
        assert store.clear() == 2
        assert store.models() == []


@pytest.mark.parametrize("damage", ["not a database", "cut"])
def test_a_file_that_cannot_be_read_is_set_aside_with_a_warning(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / FILE
    with ResponseStore(path) as store:
        put(store, 1)
    if damage == "not a database":
        path.write_bytes(b"garbage " * 1000)
    else:
        path.write_bytes(path.read_bytes()[:5000])
    with caplog.at_level(logging.WARNING, "batch_agent"), ResponseStore(path) as store:
        assert held(store, 3) == []
        put(store, 2)
        assert held(store, 3) == [2]
    assert "renamed to" in caplog.text
    assert len(list(tmp_path.glob(f"{FILE}.damaged-*"))) == 1


def test_the_file_of_another_release_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / FILE
    with ResponseStore(path) as store:
        put(store, 1)
    _execute(path, "PRAGMA user_version = 77")
    with pytest.raises(SpecError, match=r"its version is 77, and this release reads 1\); name another directory"):
        ResponseStore(path).open()
    assert [found.name for found in tmp_path.glob("*damaged*")] == []
    _execute(path, "PRAGMA user_version = 1")
    with ResponseStore(path) as store:
        assert held(store, 3) == [1]


@pytest.mark.parametrize("reply", ['{"text": ', "[]", "{}", '{"text": "", "tool_calls": [1]}', "caf\\xe9"])
def test_an_answer_that_cannot_be_read_is_a_miss_and_dropped(reply: str, tmp_path: Path) -> None:
    path = tmp_path / FILE
    with ResponseStore(path) as store:
        put(store, 1)
        put(store, 2)
    _execute(path, "UPDATE responses SET reply = ? WHERE key = ?", reply, (1).to_bytes(32))
    with ResponseStore(path) as store:
        assert held(store, 3) == [2]
        assert [model.answers for model in store.models()] == [1]
        put(store, 1)
        assert held(store, 3) == [1, 2]


def _execute(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement, values)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_rights_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(Exception, match="cannot be used"):
        ResponseStore(tmp_path / "sub" / FILE).open()


def test_a_disk_that_fails_in_the_middle_is_said_once_and_answers_are_misses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ResponseStore(tmp_path / FILE)
    with store:
        put(store, 1)
        assert store._connection is not None
        store._connection.execute("PRAGMA query_only = ON")  # as a disk turned read-only would be
        with caplog.at_level(logging.WARNING, "batch_agent"):
            put(store, 2)
            put(store, 3)
        assert held(store, 4) == [1]
    assert caplog.text.count("sent again") == 1


def test_the_file_is_where_one_says_else_in_the_variable_else_in_the_users_cache() -> None:
    home = Path("~").expanduser()
    assert cache_file("/some/where") == Path("/some/where") / FILE
    assert cache_file(True, {"BATCH_AGENT_CACHE": "/var/answers"}) == Path("/var/answers") / FILE
    assert cache_file(True, {"XDG_CACHE_HOME": "/xdg"}) == Path("/xdg/batch-agent") / FILE
    assert cache_file(True, {}) == home / ".cache/batch-agent" / FILE


def test_only_its_owner_reads_it_also_where_an_earlier_release_made_it(tmp_path: Path) -> None:
    path = tmp_path / FILE
    for _ in range(2):
        with ResponseStore(path) as store:
            put(store, 1)
            assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
        path.chmod(0o644)


@pytest.mark.parametrize("where", ["", "  "])
def test_an_empty_name_is_no_directory(where: str) -> None:
    with pytest.raises(SpecError, match="cache is empty"):
        cache_file(where)
