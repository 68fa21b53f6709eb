"""The contract suite finds what is wrong with a store: a correct toy passes it, and each broken variant fails."""

from __future__ import annotations

import inspect
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
from tests.record.test_run_stores import NAMES, Clock
from tests.record.toy_store import RECORD, Kept, ToyStore

from batch_agent.messages import JsonObject
from batch_agent.record.store import (
    Commit,
    KeptStep,
    Lease,
    Resuming,
    Row,
    RowChange,
    RunStanding,
    RunStore,
    SharedCall,
    SharedResult,
    Spent,
)
from batch_agent.share.table import Allotment, Steering, Table
from batch_agent.testing.run_store_contract import RunStoreContract
from batch_agent.testing.store_place import LEASE_SECONDS, StorePlace, SyncedFiles, copied


class ToyPlace(StorePlace):
    ledger = True

    def __init__(self, folder: Path, kind: type[ToyStore]) -> None:
        super().__init__()
        self.folder, self.kind, self.clock, self.disk = folder, kind, Clock(), SyncedFiles()
        self.file = self.log = folder / "run" / RECORD

    def at(self, folder: Path) -> ToyStore:
        return self.opened(self.kind(folder, clock=self.clock, sync=self.disk.sync))

    def open(self) -> RunStore:
        return self.at(self.folder / "run")

    def reopen(self, killed: RunStore) -> RunStore:
        return self.at(copied(cast(ToyStore, killed).folder, self.folder / next(NAMES)))

    def lose_power(self) -> RunStore:
        after = self.folder / next(NAMES)
        self.disk.copy(self.folder / "run", after)
        return self.at(after)

    def unwritable(self) -> RunStore:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "file").touch()
        return self.at(self.folder / "file" / "run")

    def expire(self) -> None:
        self.clock.ahead += 2 * LEASE_SECONDS

    def wait_half(self) -> bool:
        self.clock.ahead += LEASE_SECONDS / 2
        return True

    def close(self) -> None:
        for store in self._opened:
            for stage in cast(ToyStore, store).stages.values():
                stage.close()
        super().close()


class TestToyStore(RunStoreContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[StorePlace]:
        with closing(ToyPlace(tmp_path, ToyStore)) as place:
            yield place


# What a kill, a loss of power or a full disk shows


class NotFlushed(ToyStore):
    """Lines stay in memory until there are several."""

    pending = b""

    def write(self, name: str, content: object) -> None:
        self.pending += (json.dumps([name, content]) + "\n").encode()
        if len(self.pending) > 2000:
            self.close_pending()

    def close_pending(self) -> None:
        if self.file is not None:
            os.write(self.file, self.pending)
            self.sync(self.file)
            self.pending = b""

    def close(self) -> None:
        self.close_pending()
        super().close()


class NotSynced(ToyStore):
    def write(self, name: str, content: object) -> None:
        sync, self.sync = self.sync, lambda _: None
        try:
            super().write(name, content)
        finally:
            self.sync = sync


class SyncedTooEarly(ToyStore):
    def write(self, name: str, content: object) -> None:
        assert self.file is not None
        sync, self.sync = self.sync, lambda _: None
        try:
            sync(self.file)
            super().write(name, content)
        finally:
            self.sync = sync


class SyncsOnlyResults(ToyStore):
    def write(self, name: str, content: object) -> None:
        sync = self.sync
        if name == "commit" and not any(each["result"] for each in cast(Any, content)["changes"]):
            self.sync = lambda _: None
        try:
            super().write(name, content)
        finally:
            self.sync = sync


class HalfACommit(ToyStore):
    """Each row of a commit is a line of its own."""

    def write(self, name: str, content: object) -> None:
        if name != "commit":
            return super().write(name, content)
        changes = cast(Any, content)["changes"]
        for change in changes[:-1]:
            super().write("commit", {**cast(Any, content), "changes": [change], "spent": [0, 0]})
        super().write("commit", {**cast(Any, content), "changes": changes[-1:]})


class TornLineIsFatal(ToyStore):
    def read(self, file: int) -> Kept:
        data = os.pread(file, os.fstat(file).st_size, 0)
        for line in data.splitlines():
            json.loads(line)
        return super().read(file)


class TornLineIsKept(ToyStore):
    """The next line is appended to the torn one."""

    def read(self, file: int) -> Kept:
        data = os.pread(file, os.fstat(file).st_size, 0)
        kept = super().read(file)
        os.ftruncate(file, 0)
        os.write(file, data)
        return kept


class GarbageIsEmpty(ToyStore):
    def read(self, file: int) -> Kept:
        try:
            return super().read(file)
        except Exception:  # noqa: BLE001
            return Kept()


class SkipsDamagedLines(ToyStore):
    def read(self, file: int) -> Kept:
        kept = Kept()
        for line in os.pread(file, os.fstat(file).st_size, 0).splitlines():
            try:
                self.apply(kept, *json.loads(line))
            except (ValueError, TypeError):
                continue
        return kept


class RaisesOSError(ToyStore):
    def open(self, resuming: Resuming) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        super().open(resuming)


class FullDiskIsAnOSError(ToyStore):
    def write(self, name: str, content: object) -> None:
        assert self.file is not None
        os.write(self.file, (json.dumps([name, content]) + "\n").encode())
        self.sync(self.file)


class FullDiskIsIgnored(ToyStore):
    def write(self, name: str, content: object) -> None:
        assert self.file is not None
        data = (json.dumps([name, content]) + "\n").encode()
        try:
            os.write(self.file, data)
        except OSError:
            return
        self.sync(self.file)


class ForgetsStartedWrites(ToyStore):
    """Steps are written when their row ends."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.waiting: dict[str, list[KeptStep]] = {}

    def write(self, name: str, content: object) -> None:
        if name == "commit":
            kept = [change for change in cast(Any, content)["changes"] if change["result"] is not None]
            content = {**cast(Any, content), "changes": kept}
        super().write(name, content)


class TwoProcesses(ToyStore):
    """Without a lock."""

    def open(self, resuming: Resuming) -> None:
        folder, self.folder = self.folder, self.folder.with_name(f"{self.folder.name}.{id(self)}")
        if (folder / RECORD).exists():
            self.folder.mkdir(exist_ok=True)
            (self.folder / RECORD).write_bytes((folder / RECORD).read_bytes())
        else:
            self.folder = folder
        super().open(resuming)
        self.folder = folder


# What a later session shows


class LosesFacts(ToyStore):
    def read(self, file: int) -> Kept:
        kept = super().read(file)
        if kept.facts is not None:
            kept.facts = {"spec": {}}
        return kept


class ResumesUnasked(ToyStore):
    def open(self, resuming: Resuming) -> None:
        super().open(Resuming(resume=True))


class OrderOfStepsChanges(ToyStore):
    def apply(self, kept: Kept, name: str, content: Any) -> None:
        super().apply(kept, name, content)
        for steps in kept.steps.values():
            steps.sort(key=lambda step: step.body)


class IgnoresTheQuestion(ToyStore):
    """A row keeps its answer under another fingerprint."""

    def feed(self, session: int, rows: Sequence[Row]) -> list[object]:
        by_content = [Row(row.index, row.content, row.content, row.value) for row in rows]
        return super().feed(session, by_content)


class SameGeneration(ToyStore):
    def standing(self) -> RunStanding:
        found = super().standing()
        return RunStanding(found.phase, 1, found.feeder, found.counts)


class RetriesEverything(ToyStore):
    def retries(self, error: str) -> bool:
        return bool(error)


class RetriesNothing(ToyStore):
    def retries(self, error: str) -> bool:
        return False


class ReusesWorkerNumbers(ToyStore):
    def read(self, file: int) -> Kept:
        kept = super().read(file)
        kept.workers = 0
        return kept


class TokensBeginAgain(ToyStore):
    def read(self, file: int) -> Kept:
        kept = super().read(file)
        kept.token = 0
        return kept


class ForgetsWhatWasHeld(ToyStore):
    def apply(self, kept: Kept, name: str, content: Any) -> None:
        if name == "session":
            table = Table.from_json(kept.table)
            for member in list(table.members):
                table.leave(member, 0.0)
            kept.table = table.to_json()
        super().apply(kept, name, content)


class KeepsBudgetOnlyWithSteps(ToyStore):
    def write(self, name: str, content: object) -> None:
        if name != "commit" or cast(Any, content)["changes"]:
            super().write(name, content)


class SharesInMemory(ToyStore):
    def write(self, name: str, content: object) -> None:
        if name != "table":
            super().write(name, content)


# What workers show


class TokenDoesNotGrow(ToyStore):
    def next_token(self) -> int:
        return 1


class ExpiredLeaseCommits(ToyStore):
    def holds(self, worker: int, lease: Lease) -> bool:
        row = self.rows.get(lease.place)
        return row is not None and row.order > 0


class LeasesNeverEnd(ToyStore):
    def end_leases(self) -> None: ...


class RenewsNothing(ToyStore):
    def renew(self, worker: int, leases: Sequence[Lease]) -> tuple[set[str], RunStanding]:
        with self.changed:
            return {each.place for each in leases if not self.holds(worker, each)}, self.standing()


class RepeatedCommitCountsTwice(ToyStore):
    def commit(self, worker: int, number: int, commit: Commit) -> set[str]:
        self.commits.clear()
        return super().commit(worker, number, commit)


class LostRowsCostNothing(ToyStore):
    def commit(self, worker: int, number: int, commit: Commit) -> set[str]:
        held = all(self.holds(worker, change.lease) for change in commit.changes)
        return super().commit(worker, number, commit if held else replace(commit, spent=Spent()))


class CountsWorkTwice(ToyStore):
    def commit(self, worker: int, number: int, commit: Commit) -> set[str]:
        self.done += commit.spent
        return super().commit(worker, number, commit)


class KeepsEveryEvent(ToyStore):
    """Events are kept after they were read."""

    def events(self, session: int, after: str, most: int) -> list[tuple[str, bytes]]:
        self.check(session)
        return [(str(place), events) for place, events in self.sent.items() if place > int(after)][:most]


class DropsEventsThatWereReturned(ToyStore):
    """Events of an answer that is lost are lost too."""

    def events(self, session: int, after: str, most: int) -> list[tuple[str, bytes]]:
        found = super().events(session, after, most)
        self.sent.clear()
        return found


class AlwaysObserved(ToyStore):
    """Events are kept also if the feeder has no observers."""

    observed = True  # type: ignore[assignment]


class CommitIsAllOrNothing(ToyStore):
    """One lost row refuses the whole commit."""

    def commit(self, worker: int, number: int, commit: Commit) -> set[str]:
        if any(not self.holds(worker, change.lease) for change in commit.changes):
            return {change.lease.place for change in commit.changes}
        return super().commit(worker, number, commit)


class LosesHandedBackRows(ToyStore):
    def hand_back(self, worker: int, leases: Sequence[Lease]) -> None:
        for lease in leases:
            if self.holds(worker, lease):
                self.rows[lease.place].until = float("inf")


class HandsBackForOthers(ToyStore):
    def hand_back(self, worker: int, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self.rows[lease.place].lease = None


class LosesResults(ToyStore):
    """Only the latest result can be read."""

    def results(self, session: int, after: str, most: int, wait: float) -> list[SharedResult]:
        return super().results(session, after, 1000, wait)[-1:]


class DeliversTwice(ToyStore):
    def end(self, change: RowChange) -> None:
        super().end(change)
        if len(self.ended) == 3:
            last = self.ended[-1]
            self.ended.append(SharedResult("4", last.index, last.result, True))


class PagesOverlap(ToyStore):
    def results(self, session: int, after: str, most: int, wait: float) -> list[SharedResult]:
        return super().results(session, str(max(0, int(after) - 1)) if int(after) % 2 else after, most, wait)


class ResultsInOrderOfRows(ToyStore):
    def results(self, session: int, after: str, most: int, wait: float) -> list[SharedResult]:
        return sorted(super().results(session, after, most, wait), key=lambda result: result.index)


class SameQuestionIsOneRow(ToyStore):
    def feed_row(self, new: Row) -> object:
        name = f"{new.key.hex()}-0"
        if name in self.rows:
            return None
        return super().feed_row(new)


class TakesLastFirst(ToyStore):
    def free(self) -> list[str]:
        return super().free()[::-1]


class TakesWithoutALock(ToyStore):
    """Two threads see one row as free."""

    both = threading.Barrier(2)

    def take(self, worker: int, most: int, wait: float) -> list[Lease]:
        free = self.free()[:most]
        with suppress(threading.BrokenBarrierError):
            self.both.wait(1)
        return [self.lease(name, worker) for name in free]


class LosesSteps(ToyStore):
    """A row that is taken over begins again."""

    def lease(self, name: str, worker: int) -> Lease:
        taken = super().lease(name, worker)
        return replace(taken, steps=())


class ReplacedFeederWrites(ToyStore):
    def check(self, session: int) -> None: ...


class NeverDone(ToyStore):
    def end_inputs(self, session: int) -> None: ...


class FailuresCountAsOk(ToyStore):
    def end(self, change: RowChange) -> None:
        super().end(RowChange(change.lease, change.steps, change.result, ""))


class AgentsShareNumbers(ToyStore):
    def agent_numbers(self, worker: int) -> Iterator[int]:
        return count(1)


# What workers share


class CallRunsTwice(ToyStore):
    def begin_call(self, member: str, key: str, token: str, seen: str) -> SharedCall:
        found = super().begin_call(member, key, token, seen)
        return SharedCall("mine", token, found.position) if found.state == "theirs" else found


class CallOfTheDeadBlocks(ToyStore):
    def lives(self, member: str) -> bool:
        return True


class DeadWorkerEndsACall(ToyStore):
    def end_call(self, key: str, token: str, text: str | None, ok: bool, keep: float) -> None:
        call = self.whole.calls.get(key)
        super().end_call(key, token if call is None else call.token, text, ok, keep)


class KeepsEveryResult(ToyStore):
    def end_call(self, key: str, token: str, text: str | None, ok: bool, keep: float) -> None:
        super().end_call(key, token, text, ok, keep or 60.0)


class SharesTooMuch(ToyStore):
    def beat(self, member: str, seconds: float, claims: Any, learnt: Any, status: JsonObject) -> Allotment:
        table, now = self.table()
        answer = table.beat(member, now, seconds, claims, learnt, status)
        self.whole.keep("table", table.to_json() if member.endswith(("0", "1", "a", "left", "killed")) else {})
        return answer


class StagesShareNothing(ToyStore):
    def stage(self, name: str) -> ToyStore:
        stage = super().stage(name)
        stage.whole = stage
        return stage


class SaysThatItEnds(ToyStore):
    def outlasts(self) -> bool:
        return False


class JobsInMemory(ToyStore):
    def add_job_lines(self, lines: Sequence[bytes]) -> None:
        self.whole.kept.jobs += [line.decode() for line in lines]


class LatestJobsOnly(ToyStore):
    def add_job_lines(self, lines: Sequence[bytes]) -> None:
        self.whole.kept.jobs.clear()
        super().add_job_lines(lines)


class JobsOfOneStage(ToyStore):
    def job_lines(self) -> list[bytes]:
        return [line.encode() for line in self.kept.jobs]


# Rows, stages and calls that are mixed up, cut or forgotten


class ResultsMixedUp(ToyStore):
    def commit(self, worker: int, number: int, commit: Commit) -> set[str]:
        changes = commit.changes
        results = [change.result for change in changes][::-1]
        if all(result is not None for result in results):
            changes = [replace(change, result=result) for change, result in zip(changes, results, strict=True)]
        return super().commit(worker, number, replace(commit, changes=changes))


class StepsMixedUp(ToyStore):
    def commit(self, worker: int, number: int, commit: Commit) -> set[str]:
        steps = [change.steps for change in commit.changes][::-1]
        changes = [replace(change, steps=each) for change, each in zip(commit.changes, steps, strict=True)]
        return super().commit(worker, number, replace(commit, changes=changes))


class CutsLongSteps(ToyStore):
    def commit(self, worker: int, number: int, commit: Commit) -> set[str]:
        cut = [tuple(replace(step, body=step.body[:65536]) for step in change.steps) for change in commit.changes]
        changes = [replace(change, steps=steps) for change, steps in zip(commit.changes, cut, strict=True)]
        return super().commit(worker, number, replace(commit, changes=changes))


class CutsLongResults(ToyStore):
    def end(self, change: RowChange) -> None:
        super().end(replace(change, result=cast(bytes, change.result)[:65536]))


class LosesTheInputOfATakenRow(ToyStore):
    def lease(self, name: str, worker: int) -> Lease:
        value = b"null" if self.rows[name].worker else self.rows[name].new.value
        taken = super().lease(name, worker)
        return replace(taken, row=replace(taken.row, value=value))


class HandsBackEverything(ToyStore):
    def hand_back(self, worker: int, leases: Sequence[Lease]) -> None:
        super().hand_back(worker, [row.lease for row in self.rows.values() if row.lease and row.worker == worker])


class RowsOfAWorkerThatLeftAreLost(ToyStore):
    def leave(self, worker: int) -> None:
        for row in self.rows.values():
            if row.worker == worker:
                row.until = float("inf")


class NewRowsFirst(ToyStore):
    def free(self) -> list[str]:
        return sorted(super().free(), key=lambda name: self.rows[name].worker)


class LeasesEndEarly(ToyStore):
    def lease(self, name: str, worker: int) -> Lease:
        leased = super().lease(name, worker)
        self.rows[name].until = self.clock() + 15.0
        return leased


class AnEndedRowEndsAgain(ToyStore):
    def holds(self, worker: int, lease: Lease) -> bool:
        row = self.rows.get(lease.place)
        return super().holds(worker, lease) or (row is not None and row.order == 0 and row.worker == worker)


class DeliversEarlierResults(ToyStore):
    def feed_row(self, new: Row) -> object:
        known = super().feed_row(new)
        if known is not None:
            self.ended.append(SharedResult(str(len(self.ended) + 1), new.index, known, True))
        return known


class KeepsTheFirstResult(ToyStore):
    def apply(self, kept: Kept, name: str, content: Any) -> None:
        known = dict(kept.results)
        super().apply(kept, name, content)
        kept.results |= known


class RetriesThoughForbidden(ToyStore):
    def retries(self, error: str) -> bool:
        retry = self.resuming.retry
        return bool(error) and (isinstance(retry, bool) or error in retry)


class NotSyncedLine(ToyStore):
    """One kind of line is not synced."""

    line = ""

    def write(self, name: str, content: object) -> None:
        sync = self.sync
        if name == self.line or (name == "commit" and self.line == "lent" and not cast(Any, content)["changes"]):
            self.sync = lambda _: None
        try:
            super().write(name, content)
        finally:
            self.sync = sync


class JobsNotSynced(NotSyncedLine):
    line = "jobs"


class FactsNotSynced(NotSyncedLine):
    line = "facts"


class SharesNotSynced(NotSyncedLine):
    line = "table"


class BudgetNotSynced(NotSyncedLine):
    line = "lent"


class JobsOneByOne(ToyStore):
    def add_job_lines(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            super().add_job_lines([line])


class WritesNothingOnceClosed(ToyStore):
    def write(self, name: str, content: object) -> None:
        if self.file is not None:
            super().write(name, content)


class OneFolderForAllStages(ToyStore):
    def stage(self, name: str) -> ToyStore:
        return super().stage("stage")


class StagesInMemory(ToyStore):
    def write(self, name: str, content: object) -> None:
        if self.whole is self:
            super().write(name, content)


class ForgetsRequests(ToyStore):
    def resign(self, member: str) -> None:
        super().resign(member)
        table = self.whole.table()[0]
        table.steering = Steering()
        self.whole.keep("table", table.to_json())


class FindsTheLatestCallOnly(ToyStore):
    def wait_calls(self, position: str, seconds: float) -> tuple[str, set[str]]:
        position, keys = super().wait_calls(position, seconds)
        return position, keys & set(self.whole.ended_calls[-1:])


class CallsMixedUp(ToyStore):
    def end_call(self, key: str, token: str, text: str | None, ok: bool, keep: float) -> None:
        super().end_call(key, token, text, ok, keep)
        for each, call in self.whole.calls.items():
            if call.text is not None:
                self.whole.calls[each] = replace(call, text=text)


class AWorkerThatResignedKeepsItsCalls(ToyStore):
    gone = frozenset[str]()

    def resign(self, member: str) -> None:
        super().resign(member)
        self.gone |= {member}

    def lives(self, member: str) -> bool:
        return member in self.gone or super().lives(member)


class FilesMixedUp(ToyStore):
    def get_file(self, name: str) -> str | None:
        return list(self.files.values())[-1] if name in self.files else None


# The test that must find it, by a part of its name.
FOUND_BY: dict[type[ToyStore], str] = {
    NotFlushed: "after_a_kill_everything",
    NotSynced: "loss_of_power",
    SyncedTooEarly: "loss_of_power",
    SyncsOnlyResults: "loss_of_power",
    HalfACommit: "cut_off_is_absent_as_a_whole",
    TornLineIsFatal: "cut_off_is_absent_as_a_whole",
    TornLineIsKept: "cut_off_is_continued",
    GarbageIsEmpty: "garbage",
    SkipsDamagedLines: "garbage",
    RaisesOSError: "cannot_be_written",
    FullDiskIsAnOSError: "full_disk",
    FullDiskIsIgnored: "full_disk",
    ForgetsStartedWrites: "a_write_that_was_begun",
    TwoProcesses: "only_one_process",
    LosesFacts: "resumed_only_on_request",
    ResumesUnasked: "resumed_only_on_request",
    OrderOfStepsChanges: "steps_keep_their_order",
    IgnoresTheQuestion: "another_fingerprint",
    SameGeneration: "another_fingerprint",
    RetriesEverything: "only_the_failures_that_are_named",
    RetriesNothing: "only_the_failures_that_are_named",
    ReusesWorkerNumbers: "not_used_again_after_a_kill",
    TokensBeginAgain: "a_lease_from_before_a_kill",
    ForgetsWhatWasHeld: "what_they_held",
    KeepsBudgetOnlyWithSteps: "a_part_of_the_budget",
    SharesInMemory: "the_share_of_a_killed_worker",
    TokenDoesNotGrow: "under_the_old_token",
    ExpiredLeaseCommits: "the_old_holder_is_refused",
    LeasesNeverEnd: "the_old_holder_is_refused",
    RenewsNothing: "a_renewed_lease",
    RepeatedCommitCountsTwice: "a_commit_that_is_repeated",
    LostRowsCostNothing: "what_workers_have_done",
    CountsWorkTwice: "what_workers_have_done",
    KeepsEveryEvent: "until_it_has_read_on",
    DropsEventsThatWereReturned: "until_it_has_read_on",
    AlwaysObserved: "only_for_the_session",
    CommitIsAllOrNothing: "refuses_the_rows_that_are_lost",
    LosesHandedBackRows: "handed_back",
    HandsBackForOthers: "the_old_holder_is_refused",
    LosesResults: "read_once_in_pages",
    DeliversTwice: "read_once_in_pages",
    PagesOverlap: "read_once_in_pages",
    ResultsInOrderOfRows: "in_the_order_of_their_ends",
    SameQuestionIsOneRow: "rows_of_their_own",
    TakesLastFirst: "leased_once_in_their_order",
    TakesWithoutALock: "never_get_one_row_twice",
    LosesSteps: "taken_over_with_its_steps",
    ReplacedFeederWrites: "replaced",
    NeverDone: "in_the_order_of_their_ends",
    FailuresCountAsOk: "in_the_order_of_their_ends",
    AgentsShareNumbers: "no_two_agents",
    CallRunsTwice: "a_call_runs_at_one_worker",
    CallOfTheDeadBlocks: "the_call_of_a_dead_worker",
    DeadWorkerEndsACall: "the_call_of_a_dead_worker",
    KeepsEveryResult: "for_the_workers_that_waited",
    SaysThatItEnds: "jobs_of_all_workers",
    JobsInMemory: "jobs_of_all_workers",
    LatestJobsOnly: "jobs_of_all_workers",
    JobsOfOneStage: "share_everything_else",
    SharesTooMuch: "never_hold_more_than_the_limit",
    StagesShareNothing: "share_everything_else",
    ResultsMixedUp: "in_the_order_of_their_ends",
    StepsMixedUp: "handed_back",
    CutsLongSteps: "after_a_kill_everything",
    CutsLongResults: "a_long_result",
    LosesTheInputOfATakenRow: "taken_over_with_its_steps",
    HandsBackEverything: "handed_back",
    RowsOfAWorkerThatLeftAreLost: "handed_back",
    NewRowsFirst: "comes_before_new_rows",
    LeasesEndEarly: "holds_for_its_whole_time",
    AnEndedRowEndsAgain: "taken_over_with_its_steps",
    DeliversEarlierResults: "after_a_kill_everything",
    KeepsTheFirstResult: "only_the_failures_that_are_named",
    RetriesThoughForbidden: "only_the_failures_that_are_named",
    JobsNotSynced: "loss_of_power",
    FactsNotSynced: "loss_of_power",
    SharesNotSynced: "loss_of_power",
    BudgetNotSynced: "loss_of_power",
    JobsOneByOne: "lines_about_jobs",
    WritesNothingOnceClosed: "a_closed_store",
    OneFolderForAllStages: "share_everything_else",
    StagesInMemory: "share_everything_else",
    ForgetsRequests: "requests_reach_every_worker",
    FindsTheLatestCallOnly: "a_call_runs_at_one_worker",
    CallsMixedUp: "a_call_runs_at_one_worker",
    AWorkerThatResignedKeepsItsCalls: "the_call_of_a_dead_worker",
    FilesMixedUp: "a_file_is_found",
}

Test = Callable[[RunStoreContract, StorePlace], None]
TESTS: dict[str, Test] = dict(inspect.getmembers(RunStoreContract, lambda member: inspect.isfunction(member)))


def failures(kind: type[ToyStore], folder: Path, tests: Sequence[str]) -> set[str]:
    """Return the names of the tests that a store does not pass."""
    failed = set()
    for number, name in enumerate(tests):
        with closing(ToyPlace(folder / str(number), kind)) as place:
            try:
                TESTS[name](RunStoreContract(), place)
            except pytest.skip.Exception:
                continue
            except (Exception, pytest.fail.Exception):  # noqa: BLE001
                failed.add(name)
    return failed


@pytest.mark.parametrize("kind", FOUND_BY, ids=lambda kind: kind.__name__)
def test_a_broken_store_fails_the_test_of_what_is_broken(kind: type[ToyStore], tmp_path: Path) -> None:
    wanted = [name for name in TESTS if FOUND_BY[kind] in name]
    assert wanted, "no test has such a name"
    assert failures(kind, tmp_path, wanted)
