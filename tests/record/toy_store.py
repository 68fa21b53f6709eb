"""A small record in a file of JSON lines, written for the contract suite: it is correct, and its subclasses are not.

Everything that a later process needs is a line: [name, content]. A commit is one line, so it is there as a whole or not
at all. A last line without its end was never acknowledged, and is cut off. The queue and the leases are in memory.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from threading import Condition, RLock
from typing import Any

from batch_agent.errors import SpecError, StoreError
from batch_agent.messages import JsonObject
from batch_agent.record.store import (
    GATHERING_FAR,
    NUMBERS,
    OBSERVED,
    WAIT,
    WINDOW,
    Commit,
    Counts,
    FeederReplaced,
    FeederSession,
    Identity,
    KeptStep,
    Lease,
    Phase,
    Resuming,
    Row,
    RowChange,
    RunStanding,
    SharedCall,
    SharedResult,
    Spent,
)
from batch_agent.share.table import (
    BUDGET_COST,
    BUDGET_TOKENS,
    FOREVER,
    Allotment,
    Claim,
    Grant,
    Learnt,
    Steering,
    Table,
    steered,
)

RECORD = "record.jsonl"


@dataclass
class Queued:
    """A row that was fed. ``lease``, ``worker`` and ``until`` are those of its lease, if it has one."""

    new: Row
    order: int
    lease: Lease | None = None
    worker: int = 0
    until: float = 0.0


@dataclass
class Call:
    member: str
    token: str
    text: str | None = None
    ok: bool = True
    kept: bool = False


@dataclass
class Kept:
    """What the file holds."""

    facts: JsonObject | None = None
    steps: dict[str, list[KeptStep]] = field(default_factory=dict)  # by row
    results: dict[str, tuple[bytes, str]] = field(default_factory=dict)  # by row: result, error
    sessions: int = 0
    spent: tuple[int, int] = 0, 0  # tokens and 1e-9 $ in the commits of workers
    learnt: list[int] | None = None
    table: JsonObject = field(default_factory=dict)
    jobs: list[str] = field(default_factory=list)
    workers: int = 0
    token: int = 0


class ToyStore:
    wait, group, window, gathering = WAIT, 16, WINDOW, GATHERING_FAR
    writes, lasts, unstarted, folder = True, True, 0, None

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        sync: Callable[[int], None] = os.fsync,
        whole: ToyStore | None = None,
    ) -> None:
        self.folder, self.clock, self.sync, self.whole = folder, clock, sync, whole or self
        self.file: int | None = None
        self.kept = Kept()
        self.changed = Condition(RLock())
        self.stages: dict[str, ToyStore] = {}
        self.begin_memory()

    def begin_memory(self) -> None:
        self.resuming, self.phase, self.fed = Resuming(), None, False
        self.session = self.generation = 0
        self.rows: dict[str, Queued] = {}
        self.ended: list[SharedResult] = []
        self.ok = self.failed = 0
        self.orders = count(1)
        self.commits: dict[int, tuple[int, set[str]]] = {}
        self.calls: dict[str, Call] = {}
        self.ended_calls: list[str] = []
        self.files: dict[str, str] = {}
        self.lease_seconds = 15.0
        self.done = Spent()  # by the workers of this session
        self.lent: JsonObject | None = None  # the table that the next commit writes
        self.sent: dict[int, bytes] = {}  # their events, by position
        self.positions = count(1)

    def describe(self, schema: Any, row_schema: Any, *, messages: bool) -> None: ...

    def announce(self) -> bool:
        return False

    def stop_announcing(self) -> None: ...

    def carried(self, values: Sequence[object]) -> Sequence[object]:
        return values

    # The file

    def open(self, resuming: Resuming) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = os.open(self.folder / RECORD, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise StoreError(f"{self.folder} cannot be used: {error}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.kept = self.read(file)
            if self.kept.facts is not None and not (resuming.resume or resuming.force):
                raise SpecError(f"{self.folder} holds a run: resume it")
        except BlockingIOError:
            os.close(file)
            raise StoreError(f"{self.folder} is in use") from None
        except BaseException:
            os.close(file)
            raise
        self.file = file
        self.begin_memory()

    def read(self, file: int) -> Kept:
        data = os.pread(file, os.fstat(file).st_size, 0)
        whole = data[: data.rfind(b"\n") + 1]
        kept = Kept()
        for line in whole.splitlines():
            try:
                name, content = json.loads(line)
                self.apply(kept, name, content)
            except (ValueError, TypeError, KeyError) as error:
                raise StoreError(f"{self.folder / RECORD} is damaged: {error!r}") from None
        os.ftruncate(file, len(whole))
        return kept

    def apply(self, kept: Kept, name: str, content: Any) -> None:
        match name:
            case "facts" | "table":
                setattr(kept, name, content)
            case "jobs":
                kept.jobs += content
            case "session":
                kept.facts = content
                kept.sessions += 1
                table = Table.from_json(kept.table)
                table.forget_members(0.0)
                kept.table = table.to_json()
            case "join":
                kept.workers += 1
            case "lease":
                kept.token = max(kept.token, content)
            case "commit":
                for change in content["changes"]:
                    kept.steps.setdefault(change["row"], []).extend(map(read_step, change["steps"]))
                    if change["result"] is not None:
                        kept.results[change["row"]] = base64.b64decode(change["result"]), change["error"]
                tokens, nano = content["spent"]
                kept.spent = kept.spent[0] + tokens, kept.spent[1] + nano
                kept.learnt = content["learnt"] or kept.learnt
                kept.table = content["table"] or kept.table
            case _:
                raise ValueError(f"unknown line {name!r}")

    def write(self, name: str, content: object) -> None:
        """Append a line. When it returns, the line survives a loss of power."""
        if self.file is None:
            raise StoreError(f"{self.folder} is closed")
        data = (json.dumps([name, content]) + "\n").encode()
        size = os.fstat(self.file).st_size
        try:
            while data:
                data = data[os.write(self.file, data) :]
            self.sync(self.file)
        except OSError as error:
            os.ftruncate(self.file, size)
            raise StoreError(f"{self.folder / RECORD} cannot be written: {error}") from None

    def keep(self, name: str, content: object) -> None:
        self.write(name, content)
        self.apply(self.kept, name, json.loads(json.dumps(content)))

    def close(self) -> None:
        with self.changed:
            if self.file is not None:
                os.close(self.file)
            self.file = None

    # The run

    def facts(self) -> JsonObject | None:
        with self.changed:
            return self.kept.facts

    def stage(self, name: str) -> ToyStore:
        with self.changed:
            if name not in self.stages:
                self.stages[name] = type(self)(self.folder / name, clock=self.clock, sync=self.sync, whole=self.whole)
            return self.stages[name]

    def listen(self, changed: Callable[[], None], *, results: bool = False) -> None: ...

    def open_feed(self, facts: JsonObject, resuming: Resuming, *, keep_results_only: bool = False) -> FeederSession:
        with self.changed:
            previous = self.kept.facts
            if previous is not None and not (resuming.resume or resuming.force):
                raise SpecError(f"{self.folder} holds a run: resume it")
            self.keep("session", facts)
            self.resuming, self.phase, self.fed = resuming, "running", False
            self.session = self.kept.sessions
            self.done = Spent()
            self.sent.clear()
            self.generation = self.session
            self.lease_seconds = float(str(facts.get("lease", 15.0)))
            return FeederSession(self.session, previous, "0")

    def check(self, session: int) -> None:
        if session != self.session:
            raise FeederReplaced("another feeder feeds this run now")

    def keep_feed(self, session: int) -> RunStanding:
        with self.changed:
            self.check(session)
            return self.standing()

    def write_facts(self, session: int, facts: JsonObject) -> None:
        with self.changed:
            self.check(session)
            self.keep("facts", facts)

    def feed(self, session: int, rows: Sequence[Row]) -> list[object]:
        with self.changed:
            self.check(session)
            answers = [self.feed_row(new) for new in rows]
            self.changed.notify_all()
            return answers

    def feed_row(self, new: Row) -> object:
        names = (f"{new.key.hex()}-{number}" for number in count())
        name = next(name for name in names if name not in self.rows)
        row = self.rows[name] = Queued(new, next(self.orders))
        known = self.kept.results.get(name)
        if known is None or self.retries(known[1]):
            return None
        row.order = 0  # it has ended
        self.ok += not known[1]
        self.failed += bool(known[1])
        return known[0]

    def retries(self, error: str) -> bool:
        retry = self.resuming.retry
        return bool(error) and (retry if isinstance(retry, bool) else error in retry)

    def end_inputs(self, session: int) -> None:
        with self.changed:
            self.check(session)
            self.fed = True
            self.changed.notify_all()

    def results(self, session: int, after: str, most: int, wait: float) -> list[SharedResult]:
        with self.changed:
            self.changed.wait_for(lambda: len(self.ended) > int(after), wait)
            return self.ended[int(after) : int(after) + most]

    def set_phase(self, session: int, phase: Phase) -> None:
        with self.changed:
            self.check(session)
            self.phase = phase

    def close_feed(self, session: int, facts: JsonObject, phase: Phase) -> None:
        with self.changed:
            self.check(session)
            self.keep("facts", facts)
            self.phase, self.session = phase, 0
            self.sent.clear()

    def worked(self) -> Mapping[str, float]:
        with self.changed:
            return self.done.counts

    def events(self, session: int, after: str, most: int) -> list[tuple[str, bytes]]:
        with self.changed:
            self.check(session)
            self.sent = {place: events for place, events in self.sent.items() if place > int(after)}
            return [(str(place), events) for place, events in self.sent.items()][:most]

    @property
    def observed(self) -> bool:
        return self.session > 0 and bool(self.kept.facts and self.kept.facts.get(OBSERVED))

    def spent(self) -> Spent:
        table = Table.from_json(self.kept.table)
        tokens, nano = self.kept.spent
        return Spent(tokens + table.spent_of(BUDGET_TOKENS), (nano + table.spent_of(BUDGET_COST)) or None)

    def learnt(self) -> tuple[int, ...] | None:
        return None if self.kept.learnt is None else tuple(self.kept.learnt)

    def lend(self, member: str, claims: Mapping[str, Claim]) -> Mapping[str, Grant]:
        with self.changed:
            table = Table.from_json(self.lent or self.kept.table)
            grants = table.beat(member, self.clock(), FOREVER, claims).grants
            self.lent = table.to_json()
            return grants

    # Workers

    def standing(self) -> RunStanding:
        with self.changed:
            if self.phase is None:
                raise StoreError("there is no run")
            leased = sum(row.lease is not None for row in self.rows.values())
            waiting = sum(row.order > 0 for row in self.rows.values()) - leased
            counts = Counts(waiting, leased, self.ok, self.failed, self.fed)
            return RunStanding(self.phase, self.generation, self.session > 0, counts, self.observed)

    def join(self, description: JsonObject) -> int:
        with self.changed:
            self.keep("join", dict(description))
            return self.kept.workers

    def agent_numbers(self, worker: int) -> Iterator[int]:
        return count(worker << NUMBERS | 1)

    def take(self, worker: int, most: int, wait: float) -> list[Lease]:
        with self.changed:
            self.changed.wait_for(self.free, wait)
            return [self.lease(name, worker) for name in self.free()[:most]]

    def free(self) -> list[str]:
        """Return the rows that can be leased."""
        self.end_leases()
        free = [(row.order, name) for name, row in self.rows.items() if row.order and row.lease is None]
        return [name for _, name in sorted(free)]

    def end_leases(self) -> None:
        now = self.clock()
        for row in self.rows.values():
            if row.lease is not None and row.until <= now:
                row.lease = None

    def next_token(self) -> int:
        self.keep("lease", self.kept.token + 1)
        return self.kept.token

    def lease(self, name: str, worker: int) -> Lease:
        row = self.rows[name]
        row.lease = lease = Lease(row.new, name, self.next_token(), tuple(self.kept.steps.get(name, ())))
        row.worker, row.until = worker, self.clock() + self.lease_seconds
        return lease

    def claim(self, lease: Lease, wanted: Sequence[Identity]) -> list[tuple[KeptStep, ...]]:
        return [()] * len(wanted)

    def holds(self, worker: int, lease: Lease) -> bool:
        row = self.rows.get(lease.place)
        return row is not None and row.worker == worker and row.lease is not None and row.lease.token == lease.token

    def renew(self, worker: int, leases: Sequence[Lease]) -> tuple[set[str], RunStanding]:
        with self.changed:
            for lease in leases:
                if self.holds(worker, lease):
                    self.rows[lease.place].until = self.clock() + self.lease_seconds
            return {each.place for each in leases if not self.holds(worker, each)}, self.standing()

    def commit(self, worker: int, number: int, commit: Commit) -> set[str]:
        with self.changed:
            latest = self.commits.get(worker)
            if latest is not None and latest[0] == number:
                return latest[1]
            changes, spent, table = commit.changes, commit.spent, self.lent
            held = [change for change in changes if self.holds(worker, change.lease)]
            kept = {"spent": [spent.tokens, spent.nano or 0], "learnt": commit.learnt, "table": table}
            self.keep("commit", {"changes": [written(each) for each in held], **kept})
            self.done, self.lent = self.done + spent, None
            if spent.events and self.observed:
                self.sent[next(self.positions)] = spent.events
            for change in held:
                if change.result is not None:
                    self.end(change)
            lost = {change.lease.place for change in changes if change not in held}
            self.commits[worker] = number, lost
            self.changed.notify_all()
            return lost

    def end(self, change: RowChange) -> None:
        row = self.rows[change.lease.place]
        row.lease, row.order = None, 0
        self.ok += not change.error
        self.failed += bool(change.error)
        position = str(len(self.ended) + 1)
        self.ended.append(SharedResult(position, row.new.index, change.result, True))

    def hand_back(self, worker: int, leases: Sequence[Lease]) -> None:
        with self.changed:
            for lease in leases:
                if self.holds(worker, lease):
                    self.rows[lease.place].lease = None
            self.changed.notify_all()

    def leave(self, worker: int) -> None: ...

    # Shares and calls, which stages have in common

    def beat(
        self,
        member: str,
        seconds: float,
        claims: Mapping[str, Claim],
        learnt: Mapping[str, Learnt],
        status: JsonObject,
    ) -> Allotment:
        with self.whole.changed:
            table = self.whole.table()[0]
            answer = table.beat(member, self.whole.clock(), 1.2 * seconds, claims, learnt, status)
            self.whole.keep("table", table.to_json())
            return answer

    def resign(self, member: str) -> None:
        with self.whole.changed:
            table = self.whole.table()[0]
            table.leave(member, self.whole.clock())
            self.whole.keep("table", table.to_json())

    def table(self) -> tuple[Table, float]:
        with self.whole.changed:
            return Table.from_json(self.whole.kept.table), self.whole.clock()

    def steer(self, request: JsonObject) -> Steering:
        with self.whole.changed:
            table = self.whole.table()[0]
            table.steering = steered(table.steering, request)
            self.whole.keep("table", table.to_json())
            return table.steering

    def outlasts(self) -> bool:
        return True

    def job_lines(self) -> list[bytes]:
        with self.whole.changed:
            return [line.encode() for line in self.whole.kept.jobs]

    def add_job_lines(self, lines: Sequence[bytes]) -> None:
        with self.whole.changed:
            self.whole.keep("jobs", [line.decode() for line in lines])

    def begin_call(self, member: str, key: str, token: str, seen: str) -> SharedCall:
        whole = self.whole
        with whole.changed:
            call, position = whole.calls.get(key), str(len(whole.ended_calls))
            if call is not None and call.text is not None and (call.kept or call.token == seen):
                return SharedCall("done", call.token, position, call.text, call.ok)
            if call is not None and call.text is None and call.member != member and whole.lives(call.member):
                return SharedCall("theirs", call.token, position)
            whole.calls[key] = Call(member, token)
            return SharedCall("mine", token, position)

    def lives(self, member: str) -> bool:
        table, now = self.table()
        return member in table.live(now)

    def end_call(self, key: str, token: str, text: str | None, ok: bool, keep: float) -> None:
        whole = self.whole
        with whole.changed:
            call = whole.calls.get(key)
            if call is None or call.token != token:
                return
            if text is None:
                del whole.calls[key]
            else:
                whole.calls[key] = replace(call, text=text, ok=ok, kept=keep > 0)
            whole.ended_calls.append(key)
            whole.changed.notify_all()

    def wait_calls(self, position: str, seconds: float) -> tuple[str, set[str]]:
        whole = self.whole
        with whole.changed:
            whole.changed.wait_for(lambda: len(whole.ended_calls) > int(position), seconds)
            return str(len(whole.ended_calls)), set(whole.ended_calls[int(position) :])

    def put_file(self, name: str, text: str) -> None:
        self.whole.files[name] = text

    def get_file(self, name: str) -> str | None:
        return self.whole.files.get(name)


def written(change: RowChange) -> dict[str, object]:
    steps = [write_step(step) for step in change.steps]
    result = change.result
    assert result is None or isinstance(result, bytes)
    encoded = None if result is None else base64.b64encode(result).decode()
    return {"row": change.lease.place, "steps": steps, "result": encoded, "error": change.error}


def write_step(step: KeptStep) -> dict[str, object]:
    body = base64.b64encode(step.body).decode()
    return {"agent": step.agent, "key": step.key.hex(), "content": step.content.hex(), "kind": step.kind, "body": body}


def read_step(step: Any) -> KeptStep:
    key, content = bytes.fromhex(step["key"]), bytes.fromhex(step["content"])
    return KeptStep(step["agent"], key, content, step["kind"], base64.b64decode(step["body"]))
