"""The journal on the event loop: nothing waits for the disk but whoever must, and a failure reaches everyone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import count

import pytest

from batch_agent.errors import StoreError
from batch_agent.job import AgentResult, Success
from batch_agent.messages import Reply, Usage
from batch_agent.record.commits import (
    AT_ONCE,
    BACKLOG,
    MANY,
    OVERDUE,
    Commits,
    Meter,
    Trail,
)
from batch_agent.record.steps import Ended, Past, Used
from batch_agent.record.store import (
    GATHERING,
    GATHERING_FAR,
    Commit,
    Identity,
    KeptStep,
    Lease,
    Row,
    RowChange,
    Spent,
    Store,
)
from batch_agent.share.table import BUDGET_TOKENS, Claim, Grant
from batch_agent.testing import virtual_clock


class Disk:
    """A store whose commits finish when they may. It remembers what came in which order."""

    wait, group, writes = 0.0, 1, True

    def __init__(self, gathering: float = GATHERING) -> None:
        self.gathering = gathering
        self.commits: list[list[KeptStep]] = []
        self.numbers: list[int] = []
        self.ended: list[RowChange] = []
        self.lost: set[str] = set()
        self.spent: list[Spent] = []
        self.lent: list[Mapping[str, Claim]] = []
        self.may_commit = threading.Semaphore(0)
        self.error: Exception | None = None

    def blocks(self, call: str) -> bool:
        return self.gathering > 0

    def agent_numbers(self, worker: int) -> Iterator[int]:
        return count(1)

    def lend(self, member: str, claims: Mapping[str, Claim]) -> Mapping[str, Grant]:
        self.lent.append(claims)
        return {name: Grant(claim.want, claim.want) for name, claim in claims.items()}

    def commit(self, worker: int, number: int, commit: Commit) -> set[str]:
        changes = commit.changes
        assert self.may_commit.acquire(timeout=10)
        if self.error is not None:
            raise self.error
        self.commits.append([step for change in changes for step in change.steps])
        self.numbers.append(number)
        self.ended += [change for change in changes if change.result is not None]
        self.spent.append(commit.spent)
        return self.lost


class Purse:
    """A budget of which each commit claims a part."""

    member = "feeder-1"

    def __init__(self) -> None:
        self.told: list[StoreError | Mapping[str, Grant]] = []

    def claims(self, *, last: bool) -> Mapping[str, Claim]:
        return {BUDGET_TOKENS: Claim(1000, 45, 45 if last else 100, spent=45)}

    def granted(self, grants: Mapping[str, Grant]) -> None:
        self.told.append(grants)

    def broken(self, error: StoreError) -> None:
        self.told.append(error)


@asynccontextmanager
async def journal(disk: Disk, **options: object) -> AsyncIterator[Commits]:
    store = Store(disk)  # type: ignore[arg-type]
    book = Commits(store, 1, **options)  # type: ignore[arg-type]
    try:
        yield book
    finally:
        disk.may_commit.release(100)
        book.close()
        store.end_threads()


def lease(row: int = 0) -> Lease:
    return Lease(Row(row, b"k", b"r", "x"), str(row), 1)


def entry(agent: int = 1, row: int = 0) -> tuple[Trail, Ended]:
    trail = Trail(None, lease(row), Identity(b"k", b"r"), Past(agent, ()))
    return trail, Ended(Used(cost=0.5), reply=Reply("x", usage=Usage(5, 0, 2)))


def result(row: int, *, resumed: bool = False) -> AgentResult[object]:
    return Success(row, str(row), "x", True, "y", resumed=resumed)


async def settled(book: Commits, commit: int) -> None:
    if not book.has(commit):
        await book.durable(commit)


async def until_committing() -> None:
    await asyncio.sleep(10 * GATHERING)


async def test_what_gathers_during_a_commit_goes_into_the_next_one() -> None:
    disk = Disk()
    async with journal(disk) as book:
        first = book.add(*entry(1))
        await until_committing()
        later = [book.add(*entry(agent)) for agent in range(2, 10)]
        assert set(later) == {first + 1}
        disk.may_commit.release(2)
        await asyncio.gather(*(settled(book, number) for number in (first, *later)))
    assert [len(commit) for commit in disk.commits] == [1, 8]


@pytest.mark.parametrize(
    ("gathering", "records", "waits"),
    [(GATHERING_FAR, MANY, GATHERING_FAR), (GATHERING_FAR, MANY - 1, GATHERING), (GATHERING, MANY, GATHERING)],
)
@virtual_clock
async def test_a_busy_worker_sends_larger_commits_to_another_process(
    gathering: float, records: int, waits: float
) -> None:
    disk, clock = Disk(gathering), asyncio.get_running_loop().time
    disk.may_commit.release(2)
    async with journal(disk) as book:
        await settled(book, [book.add(*entry(agent)) for agent in range(1, records + 1)][-1])
        begun = clock()
        await settled(book, book.add(*entry(records + 1)))
        assert clock() - begun == pytest.approx(waits)


async def test_a_commit_that_fails_is_reported_although_no_agent_waits_for_it() -> None:
    disk, failed = Disk(), list[StoreError]()
    disk.error = StoreError("the disk is full")
    disk.may_commit.release()
    async with journal(disk, on_failed=failed.append) as book:
        book.publish(lease(), result(0, resumed=True))  # its agent added no step, so it waits for none
        await until_committing()
    assert failed == [disk.error]


async def test_adding_never_waits_and_waiting_ends_only_with_the_commit() -> None:
    disk = Disk()
    async with journal(disk) as book:
        waiting = asyncio.ensure_future(settled(book, book.add(*entry())))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        disk.may_commit.release()
        await waiting


async def test_a_waiter_that_is_cancelled_disturbs_no_other() -> None:
    disk = Disk()
    async with journal(disk) as book:
        number = book.add(*entry())
        one, other = (asyncio.ensure_future(settled(book, number)) for _ in range(2))
        await until_committing()
        one.cancel()
        disk.may_commit.release()
        await other
        assert (await asyncio.gather(one, return_exceptions=True))[0].__class__ is asyncio.CancelledError


async def test_a_result_and_the_steps_before_it_are_one_change_of_one_commit() -> None:
    disk = Disk()
    ends: list[tuple[set[str], list[Lease]]] = []
    async with journal(disk, on_committed=lambda lost, ended: ends.append((lost, list(ended)))) as book:
        book.add(*entry(1, row=4))
        book.add(*entry(2, row=5))
        book.publish(lease(4), result(4, resumed=True))
        await until_committing()
        assert ends == []
        disk.may_commit.release()
        await book.flush()
    [change] = disk.ended
    assert (change.lease, change.error, change.resumed) == (lease(4), "", True)
    assert [step.agent for step in change.steps] == [1]
    assert [step.agent for step in disk.commits[0]] == [1, 2]
    assert ends == [(set(), [lease(4)])]


async def test_rows_that_other_workers_have_now_are_reported_with_the_commit() -> None:
    disk, lost = Disk(), list[set[str]]()
    disk.lost = {"4"}
    disk.may_commit.release()
    async with journal(disk, on_committed=lambda places, ended: lost.append(places)) as book:
        book.publish(lease(4), result(4))
        await book.flush()
    assert lost == [{"4"}]


async def test_a_store_in_memory_is_called_at_once() -> None:
    disk = Disk(0.0)
    disk.may_commit.release()
    async with journal(disk) as book:
        book.publish(lease(4), result(4))
        assert [change.lease for change in disk.ended] == [lease(4)]


async def test_a_failed_commit_reaches_everyone_who_waits_and_everyone_after() -> None:
    disk = Disk()
    disk.error = StoreError("the disk is full")
    async with journal(disk) as book:
        first = asyncio.ensure_future(settled(book, book.add(*entry())))
        await until_committing()
        second = asyncio.ensure_future(settled(book, book.add(*entry())))
        disk.may_commit.release()
        outcomes = await asyncio.gather(first, second, return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["the disk is full"] * 2
        with pytest.raises(StoreError, match="full"):
            book.add(*entry())
        with pytest.raises(StoreError, match="full"):
            await book.flush()
    assert disk.commits == []


async def test_an_unforeseen_error_of_the_store_stops_the_run_as_a_store_error() -> None:
    disk = Disk()
    disk.error = ZeroDivisionError("oops")
    async with journal(disk) as book:
        disk.may_commit.release()
        with pytest.raises(StoreError, match="oops"):
            await settled(book, book.add(*entry()))


async def test_a_disk_that_falls_behind_is_told_and_told_again_when_it_has_caught_up() -> None:
    disk, told = Disk(), list[bool]()
    async with journal(disk, on_backlog=told.append) as book:
        book.add(*entry())
        await until_committing()
        for _ in range(BACKLOG):
            book.add(*entry())
        assert told == [True]
        disk.may_commit.release(2)
        await book.flush()
        assert told == [True, False]


async def test_many_waiters_go_on_a_few_at_a_time() -> None:
    disk = Disk()
    async with journal(disk) as book:
        number = book.add(*entry())
        awake = 0

        async def wait() -> None:
            nonlocal awake
            await settled(book, number)
            awake += 1

        waiters = [asyncio.ensure_future(wait()) for _ in range(3 * AT_ONCE)]
        await until_committing()
        disk.may_commit.release()
        most, before = 0, 0
        while awake < len(waiters):
            await asyncio.sleep(0)
            most, before = max(most, awake - before), awake
        assert most == AT_ONCE


async def test_what_the_session_has_spent_is_recorded_with_what_it_did() -> None:
    disk = Disk()
    disk.may_commit.release(10)
    purse, totals = Purse(), iter([(45, 7.5e-7), (50, 7.5e-7), (50, 1e-6)])
    async with journal(disk, meter=Meter(lambda: next(totals)), budget=purse) as book:
        trail = Trail(book, lease(), Identity(b"k", b"r"))
        trail.add(entry()[1])
        await trail.settle()
        granted = {BUDGET_TOKENS: Grant(100, 100)}
        assert (disk.spent, purse.told) == ([Spent(45, 750)], [granted])
        book.touch()
        await book.flush()
        assert (disk.commits[1:], purse.told) == ([[]], [granted, granted])
        assert await book.end() is None
        assert disk.spent == [Spent(45, 750), Spent(5, 0), Spent(0, 250)]
        assert [claims[BUDGET_TOKENS].want for claims in disk.lent] == [100, 100, 45]  # the rest is returned
    assert disk.numbers == sorted(set(disk.numbers))


async def test_a_budget_is_told_that_its_claims_will_never_be_on_disk() -> None:
    disk, purse = Disk(), Purse()
    disk.error = StoreError("the disk is full")
    async with journal(disk, budget=purse) as book:
        book.touch()
        disk.may_commit.release()
        with pytest.raises(StoreError):
            await book.flush()
        book.touch()
        assert purse.told == [disk.error]


@virtual_clock
async def test_a_commit_that_takes_long_is_overdue_until_it_is_done() -> None:
    disk = Disk()
    told: list[bool] = []
    async with journal(disk, on_overdue=told.append) as book:
        number = book.add(*entry())
        await asyncio.sleep(0.9 * OVERDUE)
        assert told == []
        await asyncio.sleep(0.2 * OVERDUE)
        assert told == [True]
        disk.may_commit.release()
        await settled(book, number)
    assert told == [True, False]


async def test_after_a_failed_commit_nothing_counts_as_durable_any_more() -> None:
    disk = Disk()
    disk.error = StoreError("the disk is full")
    async with journal(disk) as book:
        number = book.add(*entry())
        book.publish(lease(0), result(0))
        disk.may_commit.release(10)
        with pytest.raises(StoreError, match="full"):
            await book.flush()
        disk.error = None
        with pytest.raises(StoreError, match="full"):
            book.publish(lease(1), result(1))
        with pytest.raises(StoreError, match="full"):
            await settled(book, number)
        failure = await book.end()
        assert isinstance(failure, StoreError)
    assert (disk.commits, disk.ended) == ([], [])
