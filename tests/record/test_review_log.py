"""The log of what people answer: only complete lines count, nothing is lost, and nobody decides on old news."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.record.redis_servers import needs_redis

from batch_agent.errors import StoreError
from batch_agent.record.review import REVIEW, DirectoryLog, ReviewLog, event_of, line_of
from batch_agent.trust.review import AUDIT, Event, Review, ReviewRow

PLACES = [ReviewRow(row, f"T-{row}", AUDIT, "same") for row in range(40)]


def answer(n: int, row: int, who: str = "ada", output: object = None) -> Event:
    return Event(n, "answer", who, 1.5, row, f"T-{row}", AUDIT, "same", output)  # type: ignore[arg-type]


@pytest.fixture(params=["directory", pytest.param("redis", marks=needs_redis)])
def open_log(request: Any, tmp_path: Path) -> Callable[[], ReviewLog]:
    if request.param == "directory":
        return lambda: DirectoryLog(tmp_path)
    from batch_agent.record.address import StoreAddress
    from batch_agent.record.redis.connection import connect
    from batch_agent.record.redis.review import RedisLog

    address = StoreAddress.parse(request.getfixturevalue("url"))
    with closing(connect(address)) as client:
        client.execute_command("HSET", f"{address.prefix}run", "facts", "{}")
    return lambda: RedisLog(address)


@pytest.mark.parametrize(
    "event",
    [
        answer(1, 3, output={"label": "ü\ud800", "big": 2**70, "none": None}),
        Event(1, "none", "Bob", 2.0, 0, "0", AUDIT, "d"),
        Event(1, "undo", "bob", 3.0, 0, "0", undoes=1),
        Event(1, "lease", "bob", 3.0, 0, "0", until=9.5),
        Event(1, "lease", "bob", 3.0, 0, "0"),
        Event(1, "audit", "bob", 3.0, rows=100),
    ],
)
def test_a_line_says_what_the_event_says(event: Event) -> None:
    assert event_of(line_of(event), 1) == event


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"{", b"[]", b'{"n":1}', b'{"n":1,"kind":"eat"}', b"\xff\xfe", b'{"kind":"skip","row":"x"}'),
        *(b'{"kind":"lease","until":[]}', b'{"kind":"answer","who":7}', b'{"kind":"answer","queue":"both"}'),
    ],
)
def test_a_line_that_says_no_event_is_passed_over(line: bytes) -> None:
    assert event_of(line, 1) is None


def test_what_one_appends_another_reads(open_log: Callable[[], ReviewLog]) -> None:
    one, other = open_log(), open_log()
    assert not one.exists()
    assert one.append([answer(1, 0, output="a"), answer(2, 1, output="b")])
    assert other.exists()
    assert [each.row for each in other.read()[0]] == [0, 1]
    assert other.append([answer(3, 2)])
    assert one.read() == ([answer(3, 2)], False)
    one.close()
    other.close()


def test_who_does_not_know_all_events_appends_nothing(open_log: Callable[[], ReviewLog]) -> None:
    one, other = open_log(), open_log()
    assert one.append([answer(1, 0)])
    assert not other.append([answer(1, 0, "bob")])
    assert len(other.read()[0]) == 1
    assert other.append([answer(2, 1, "bob")])
    one.close()
    other.close()


def test_the_clock_does_not_stand_still(open_log: Callable[[], ReviewLog]) -> None:
    log = open_log()
    assert log.now() > 1.7e9
    log.close()


def test_half_a_line_of_a_killed_process_is_ignored_and_removed(tmp_path: Path) -> None:
    log = DirectoryLog(tmp_path)
    log.append([answer(1, 0)])
    with (tmp_path / REVIEW).open("ab") as file:
        file.write(line_of(answer(2, 1))[:-9])
    again = DirectoryLog(tmp_path)
    assert again.read() == ([answer(1, 0)], False)
    assert again.append([answer(2, 2)])
    assert DirectoryLog(tmp_path).read()[0] == [answer(1, 0), answer(2, 2)]
    assert len((tmp_path / REVIEW).read_bytes().splitlines()) == 2


def test_a_log_that_another_file_took_the_place_of_is_read_again(tmp_path: Path) -> None:
    log, review = DirectoryLog(tmp_path), Review(lambda *_: True, overlap=0.0)
    log.append([answer(1, 0), answer(2, 1)])
    review.add([answer(1, 0), answer(2, 1)])
    (tmp_path / "other").write_bytes(line_of(answer(1, 5)) + b"\n")
    (tmp_path / "other").replace(tmp_path / REVIEW)
    log.catch_up(review)
    assert [row for row, _ in review.judged_rows()] == [5]
    (tmp_path / REVIEW).unlink()
    log.catch_up(review)
    assert not [*review.judged_rows()]


def test_on_a_full_disk_the_error_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    log = DirectoryLog(tmp_path)
    log.append([answer(1, 0)])
    before = (tmp_path / REVIEW).read_bytes()
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 7, limits[1]))  # a part of the line fits
    try:
        with pytest.raises(StoreError, match=f"{os.strerror(errno.EFBIG)}. This answer is not recorded"):
            log.append([answer(2, 1, output="x" * 5000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / REVIEW).read_bytes() == before
    assert log.append([answer(2, 1)])


def _reviewer(directory: Path, who: str) -> None:
    log, review = DirectoryLog(directory), Review(lambda one, other: one == other, overlap=0.0)

    def take(now: float) -> tuple[list[Event], ReviewRow | None]:
        place = review.next_of(PLACES, who, now)
        if place is None:
            return [], None
        given = {"row": place.row, "id": place.id, "queue": AUDIT, "input": place.input}
        return [Event(0, "lease", who, until=now + 600, **given), Event(0, "answer", who, **given)], place

    while log.change(review, take) is not None:
        pass


def test_processes_that_answer_at_once_never_judge_the_same_row(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    people = [context.Process(target=_reviewer, args=(tmp_path, f"person {number}")) for number in range(3)]
    for each in people:
        each.start()
    for each in people:
        each.join(60)
        assert each.exitcode == 0
    events, _ = DirectoryLog(tmp_path).read()
    assert sorted(each.row for each in events if each.kind == "answer") == [place.row for place in PLACES]
    assert [each.n for each in events] == [*range(1, len(events) + 1)]
