"""A run in Redis: ``RunStore`` with streams, a consumer group and one script per operation (design/cluster.md)."""

from __future__ import annotations

import json
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, groupby, islice
from threading import Lock
from typing import Any, TypeVar, cast

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import InputError, SpecError, StoreError
from batch_agent.files.results import from_json, to_json
from batch_agent.job import BaseResult, Job, UnreadableRow
from batch_agent.messages import JsonObject
from batch_agent.record.address import StoreAddress
from batch_agent.record.directory import KEEPS
from batch_agent.record.redis import scripts
from batch_agent.record.redis.connection import DELETED, Client, RedisConnection, Script, entries
from batch_agent.record.row_json import ResultEncoder, decode_row, encode_row
from batch_agent.record.rundir import recorded_options
from batch_agent.record.store import (
    FOLLOWED_SECONDS,
    GATHERING_FAR,
    GROUP,
    LARGEST_SHARED,
    LEASE,
    NUMBERS,
    OBSERVED,
    UNKEPT_SECONDS,
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

T = TypeVar("T")
logger = logging.getLogger("batch_agent")

RUNS = "batch-agent:runs"  # set of the names of the runs in a database
KEPT_WORKER = 3600  # seconds that the description of a worker is kept after its latest renewal
STARTING, ANNOUNCED = "starting", 30  # key of a run whose feeder has not begun, and its seconds
ADOPTED_AT_ONCE = 100  # rows whose records are taken over by one command
BLOCKED = 1.0  # seconds that a command may wait in Redis
FEW, PAUSE = 3, 0.05  # attempts to change the table before a pause, and the longest pause in seconds
CALL_SECONDS = 24 * 3600.0  # after which a call that never ended is deleted

READ = """
local time = redis.call('TIME')
local found, spent = redis.call('HMGET', KEYS[1], 'version', 'table'), redis.call('HMGET', KEYS[2], 'tokens', 'cost')
return {found[1] or '0', found[2] or '{}', time[1], time[2], spent[1] or '0', spent[2] or '0'}
"""
# ARGV: version, table, the worker that changed it ("" for none), and the end of its membership ("" if it left).
# A worker that leaves a run which was deleted meanwhile leaves no key behind.
WRITE = """
if ARGV[3] ~= '' and ARGV[4] == '' and redis.call('EXISTS', KEYS[3]) == 0 then
  redis.call('DEL', KEYS[1], KEYS[2])
  return 1
end
if (redis.call('HGET', KEYS[1], 'version') or '0') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'version', tonumber(ARGV[1]) + 1, 'table', ARGV[2])
if ARGV[3] ~= '' then
  if ARGV[4] == '' then redis.call('ZREM', KEYS[2], ARGV[3])
  else redis.call('ZADD', KEYS[2], ARGV[4], ARGV[3]) end
end
return 1
"""
# ARGV: worker, token, seen token, milliseconds
BEGIN = """
local last = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)
local position = last[1] and last[1][1] or '0-0'
local call = redis.call('HMGET', KEYS[1], 'state', 'worker', 'token', 'ok', 'text', 'kept')
if call[1] == 'done' and (call[6] == '1' or call[3] == ARGV[3]) then
  return {'done', call[3], position, call[4], call[5]}
end
if call[1] == 'running' and call[2] ~= ARGV[1] then
  local time = redis.call('TIME')
  local until_ = redis.call('ZSCORE', KEYS[2], call[2])
  if until_ and tonumber(until_) > tonumber(time[1]) + tonumber(time[2]) / 1000000 then
    return {'theirs', call[3], position, '', ''}
  end
end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'state', 'running', 'worker', ARGV[1], 'token', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return {'mine', ARGV[2], position, '', ''}
"""
# ARGV: token, "1" if there is a text, text, ok, milliseconds to keep it, "1" if it is kept for others, key
END = """
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
if ARGV[2] == '1' then
  redis.call('HSET', KEYS[1], 'state', 'done', 'ok', ARGV[4], 'text', ARGV[3], 'kept', ARGV[6])
  redis.call('PEXPIRE', KEYS[1], ARGV[5])
else
  redis.call('DEL', KEYS[1])
end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 1000, '*', 'key', ARGV[7])
return 1
"""

# ARGV: row, seconds
FOLLOW = """
local now = tonumber(redis.call('TIME')[1])
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), ARGV[1])
redis.call('EXPIRE', KEYS[1], 60)
return redis.call('GET', KEYS[2])
"""
FOLLOWED = """
return redis.call('ZRANGEBYSCORE', KEYS[1], tonumber(redis.call('TIME')[1]), '+inf')
"""


class RedisRunStore:
    """One run. It is thread-safe. What its workers share is in these keys, behind the prefix K of the run.

        K lent     hash: `table` (JSON, see `share.table`) and its `version`
        K alive    sorted set: worker → end of its membership, in seconds of Redis' clock
        K call:…   hash: one tool call or model answer, while it runs and while its result is kept
        K ended    stream: keys of calls that ended, the latest thousand
        K files    hash: name → text
        K jobs     list: what was sent to batch APIs, as lines of JSON
        K watched  sorted set: row that a viewer follows → until when, in seconds of Redis' clock
        K live:…   string: the conversation of such a row, as its worker last reported it; expires

    The table is read, changed here, and written back if its version is still the same; else this is retried. So all
    decisions are in one place and in Python, and Redis only compares versions.
    """

    wait = WAIT
    group = GROUP
    window = WINDOW
    gathering = GATHERING_FAR
    writes = True
    lasts = True
    folder = None

    def __init__(self, connection: RedisConnection) -> None:
        self.connection, self.address = connection, connection.address
        self._whole = self.address.at(self.address.name).prefix  # of what the stages of a pipeline share
        self._keys = [self.key(name) for name in scripts.KEYS]
        self._steps = self.key("steps:")
        self._scripts: dict[str, Script] = {}
        self._nonce = secrets.token_hex(8)  # distinguishes this feeder from others
        self._calls = count(1)
        self._looked = 0.0  # when expired leases were last looked for
        self._lease = LEASE
        self._resuming = Resuming()
        self._announcing = Lock()
        self._feeds = False  # it feeds the run, or did
        self.unstarted = 0  # as the server said last
        self._row_schema: OutputSchema[object] | None = None
        self._encoded = ResultEncoder()
        self.polite = True  # give other workers time to renew after an outage; look for expired leases rarely

    @classmethod
    def at(cls, address: StoreAddress, *, on_away: Callable[[bool], None] = lambda _: None) -> RedisRunStore:
        """Open the run at that address, which need not exist yet. Raises SpecError if the server refuses, StoreError if
        it is unreachable."""
        connection = RedisConnection(address, on_away=on_away)
        try:
            connection.open()
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    def blocks(self, call: str) -> bool:
        return True

    def describe(
        self, schema: OutputSchema[object] | None, row_schema: OutputSchema[object] | None, *, messages: bool
    ) -> None:
        self._row_schema = row_schema
        self._encoded = ResultEncoder(schema, messages=messages)

    def key(self, name: str) -> str:
        """Return the name of a key of this run."""
        return self.address.prefix + name

    def open(self, resuming: Resuming) -> None:
        if not (resuming.resume or resuming.force) and self.facts() is not None:
            raise self._taken()

    def announce(self) -> bool:
        """Tell readers for a while that this process is about to feed the run. Returns False once it feeds it."""
        with self._announcing:
            if not self._feeds:
                self._command("SET", self.key(STARTING), self._nonce, "EX", ANNOUNCED)
            return not self._feeds

    def is_announced(self) -> bool:
        return bool(self._command("EXISTS", self.key(STARTING)))

    def stop_announcing(self) -> None:
        with self._announcing:
            if not self._feeds:
                self._feeds = True
                self._command("DEL", self.key(STARTING))

    def _taken(self) -> SpecError:
        return SpecError(
            f"{self.address} holds a run already: resume it (resume=True, or batch-agent resume URL), or use another "
            "name"
        )

    def listen(self, changed: Callable[[], None], *, results: bool = False) -> None:
        """Do nothing: changes in Redis are waited for by calls that block."""

    def stage(self, name: str) -> RedisRunStore:
        store = RedisRunStore(RedisConnection(self.address.at(self.address.name, name)))
        store.polite = self.polite
        return store

    def close(self) -> None:
        self.connection.close()

    def facts(self) -> JsonObject | None:
        found = self._command("HGET", self.key("run"), "facts")
        if found is None:
            return None
        try:
            facts = from_json(found)
        except ValueError:
            facts = None
        if not isinstance(facts, dict):
            raise StoreError(
                f"the record of the run {self.address.name!r} is damaged or forged: its facts are unreadable"
            )
        return cast(JsonObject, facts)

    # The feeder

    def open_feed(self, facts: JsonObject, resuming: Resuming, *, keep_results_only: bool = False) -> FeederSession:
        self._resuming = resuming
        self.stop_announcing()
        lease = float(cast(float, facts.get("lease", LEASE)))
        arguments = (
            to_json(facts),
            str(facts.get("fingerprint", "")),
            int(resuming.resume or resuming.force),
            max(1, int(lease * 1000)),
            "results" if keep_results_only else "all",
            self._nonce,
            int(resuming.drop),
            int(bool(facts.get(OBSERVED))),
            to_json(recorded_options(facts).get("vote")),
        )
        waits = 2  # the lease of a dead feeder ends meanwhile; a live feeder renews its lease
        while (answer := self._script(scripts.OPEN_FEED, *arguments))[0] == scripts.HELD:
            if not waits:
                raise StoreError(f"{self.address} is fed by another process; wait for it, or stop it")
            waits -= 1
            time.sleep(max(0, answer[1]) / 1000 + 0.05)
        if answer == scripts.TAKEN:
            raise self._taken()
        if not self.address.stage:
            self._command("SADD", RUNS, self.address.name)
        session, previous, position = answer
        adoptions = iter(()) if resuming.adopted is None else resuming.adopted()
        while some := list(islice(adoptions, ADOPTED_AT_ONCE)):
            adopted: list[object] = [int(session), self._steps]
            for each in some:
                adopted += (each.row, each.key.hex(), each.content.hex(), int(each.forced))
            self._fenced(scripts.ADOPT, *adopted)
        if resuming.force and previous:
            logger.warning(KEEPS, self.address)
        return FeederSession(
            int(session), cast(JsonObject, from_json(previous)) if previous else None, position.decode()
        )

    def keep_feed(self, session: int) -> RunStanding:
        standing = _standing(self._fenced(scripts.KEEP_FEED, session, self._nonce))
        self.unstarted = standing.counts.unstarted
        return standing

    def write_facts(self, session: int, facts: JsonObject) -> None:
        self._fenced(scripts.WRITE, session, "facts", to_json(facts))

    def carried(self, values: Sequence[object]) -> Sequence[object]:
        return [self._carried(value) for value in values]

    def _carried(self, value: object) -> object:
        if isinstance(value, UnreadableRow):
            return value
        try:
            return decode_row(encode_row(value), self._row_schema)[0]
        except InputError as error:
            return UnreadableRow(str(error))

    def feed(self, session: int, rows: Sequence[Row]) -> list[object]:
        # No worker has a use for a row that is a failure already.
        retry_of = self._resuming.retry_of
        sent = [row for row in rows if not isinstance(row.job, BaseResult)]
        answers = iter([each for retry, some in groupby(sent, retry_of) for each in self._feed(session, retry, some)])
        return [row.job if isinstance(row.job, BaseResult) else next(answers) for row in rows]

    def _feed(self, session: int, retry: bool | tuple[str, ...], rows: Iterable[Row]) -> list[object]:
        again = ("*" if retry else "") if isinstance(retry, bool) else f"|{'|'.join(retry)}|"
        how = int(self._resuming.force), int(self._resuming.cut), int(self._resuming.decides)
        arguments: list[object] = [session, next(self._calls), again, self._steps, *how]
        for row in rows:
            arguments += (row.index, row.key.hex(), row.content.hex(), _value_of(row))
        return cast("list[object]", self._fenced(scripts.FEED, *arguments))

    def end_inputs(self, session: int) -> None:
        self._fenced(scripts.END_INPUTS, session)

    def results(self, session: int, after: str, most: int, wait: float) -> list[SharedResult]:
        blocked = ("BLOCK", max(1, int(min(wait, BLOCKED) * 1000))) if wait > 0 else ()
        read = self._command("XREAD", "COUNT", most, *blocked, "STREAMS", self.key("results"), after)
        found = []
        for place, fields in entries(read):
            own = int(fields[b"sitting"]) == session
            found.append(SharedResult(place, int(fields[b"index"]), fields[b"result"], own))
        return found

    def set_phase(self, session: int, phase: Phase) -> None:
        self._fenced(scripts.WRITE, session, "phase", phase)

    def close_feed(self, session: int, facts: JsonObject, phase: Phase) -> None:
        self._fenced(scripts.CLOSE_FEED, session, to_json(facts), phase)

    def worked(self) -> Mapping[str, float]:
        found = self._command("HGET", self.key("run"), "counts")
        return cast("dict[str, float]", json.loads(found)) if found else {}

    def events(self, session: int, after: str, most: int) -> list[tuple[str, bytes]]:
        time, _, number = after.partition("-")
        found = self._fenced(scripts.EVENTS, session, f"{time}-{int(number or 0) + 1}", most)
        return [(cast(bytes, place).decode(), fields[1]) for place, fields in found]

    def spent_recorded(self) -> tuple[int, int]:
        """Return the tokens, and the cost in units of 1e-9 $, that workers have reported with their commits."""
        tokens, cost = self._command("HMGET", self.key("run"), "tokens", "cost")
        return int(tokens or 0), int(cost or 0)

    def spent(self) -> Spent:
        """Return what the run has spent, by the commits of its workers and by the table of shares."""
        table, _ = self.table()
        return Spent(table.spent_of(BUDGET_TOKENS), table.spent_of(BUDGET_COST))

    def learnt(self) -> tuple[int, ...] | None:
        return None

    def lend(self, member: str, claims: Mapping[str, Claim]) -> Mapping[str, Grant]:
        return self._change(lambda table, now: table.beat(member, now, FOREVER, claims).grants)

    # Workers

    def standing(self) -> RunStanding:
        with self._present():
            return _standing(self._script(scripts.STANDING))

    def join(self, description: JsonObject) -> int:
        worker = int(self._script(scripts.JOIN))
        if not worker:
            raise StoreError(f"{self.address} holds no run; it may have been deleted")
        lease = self._command("HGET", self.key("run"), "lease")
        self._lease = int(lease) / 1000 if lease else LEASE
        key = self.key(f"worker:{worker}")
        self._command("HSET", key, "description", to_json(description))
        self._command("EXPIRE", key, KEPT_WORKER)
        return worker

    def agent_numbers(self, worker: int) -> Iterator[int]:
        return count(worker << NUMBERS | 1)

    def claim(self, lease: Lease, wanted: Sequence[Identity]) -> list[tuple[KeptStep, ...]]:
        """Return nothing: a leased row has the steps of all its agents."""
        return [()] * len(wanted)

    def take(self, worker: int, most: int, wait: float) -> list[Lease]:
        with self._present():
            found = self._given(scripts.TAKE, worker, most, self._steps, int(self._may_look()), self._age)
            if found or wait <= 0:
                return found
            waits = max(1, int(min(wait, BLOCKED) * 1000))
            read = self._command(
                "XREADGROUP", "GROUP", scripts.GROUP, worker, "COUNT", most, "BLOCK", waits, "STREAMS",
                self.key("queue"), ">",
            )  # fmt: skip
            places = [place for place, _ in entries(read)]
            return self._given(scripts.GIVE, self._steps, *places) if places else []

    def _given(self, script: str, *arguments: object) -> list[Lease]:
        """Return the rows that a script has given to this worker."""
        taken, dropped = self._script(script, *arguments)
        if dropped:
            told = "dropped from the queue of %s, because no feeder put them there: %d. Other programs write to it"
            logger.warning(told, self.address, dropped)
        return [_leased(*each) for each in taken]

    def forged(self) -> int:
        """Return how many entries of the queue were dropped, because no feeder has put them there."""
        return int(self._command("HGET", self.key("run"), "forged") or 0)

    def renew(self, worker: int, leases: Sequence[Lease]) -> tuple[set[str], RunStanding]:
        with self._present():
            lost, standing = self._script(scripts.RENEW, worker, *_places(leases))
            self._command("EXPIRE", self.key(f"worker:{worker}"), KEPT_WORKER)
            return {place.decode() for place in lost}, _standing(standing)

    def commit(self, worker: int, number: int, commit: Commit) -> set[str]:
        spent = commit.spent
        counts = json.dumps(dict(spent.counts)) if spent.counts else ""
        arguments: list[object] = [worker, self.key(f"worker:{worker}"), number, self._steps]
        arguments += (spent.tokens, spent.nano or 0, counts, spent.events)
        for change in self._encoded.changes(commit.changes, worker):
            lease = change.lease
            steps = [_pack(step) for step in change.steps]
            arguments += (lease.place, lease.token, lease.name, change.result or b"", change.error, len(steps), *steps)
        with self._present():
            return {place.decode() for place in self._script(scripts.COMMIT, *arguments)}

    def hand_back(self, worker: int, leases: Sequence[Lease]) -> None:
        with self._present():
            self._script(scripts.HAND_BACK, worker, *_places(leases))

    def leave(self, worker: int) -> None:
        with self._present():
            self._script(scripts.LEAVE, worker, self.key(f"worker:{worker}"))

    # The table

    def beat(
        self,
        member: str,
        seconds: float,
        claims: Mapping[str, Claim],
        learnt: Mapping[str, Learnt],
        status: JsonObject,
    ) -> Allotment:
        # The table keeps the membership longer than the worker expects, so the worker stops using its shares first.
        until = 1.2 * seconds
        return self._change(
            lambda table, now: table.beat(member, now, until, claims, learnt, status), member, lasts=until
        )

    def resign(self, member: str) -> None:
        self._change(lambda table, now: table.leave(member, now), member)

    def table(self) -> tuple[Table, float]:
        _, table, now = self._read_table()
        return table, now

    def steer(self, request: JsonObject) -> Steering:
        def change(table: Table, _: float) -> Steering:
            table.steering = steered(table.steering, request)
            return table.steering

        return self._change(change)

    def _change(self, change: Callable[[Table, float], T], worker: str = "", *, lasts: float | None = None) -> T:
        attempt = 0
        while True:
            attempt += 1
            if attempt > FEW:
                time.sleep(random.uniform(0.0, PAUSE))  # many workers report at once
            version, table, now = self._read_table()
            answer = change(table, now)
            until = "" if lasts is None else repr(now + lasts)
            args = version, json.dumps(table.to_json()), worker, until
            if self._shared_script(WRITE, ["lent", "alive", "run"], *args):
                return answer

    def _read_table(self) -> tuple[str, Table, float]:
        version, table, seconds, micros, tokens, cost = self._shared_script(READ, ["lent", "run"])
        try:
            found = Table.from_json(cast(JsonObject, from_json(table)))
        except ValueError:
            raise StoreError(f"{self._whole}lent in Redis is damaged or forged: it is no table of shares") from None
        found.outside = {BUDGET_TOKENS: int(tokens), BUDGET_COST: int(cost)}
        return version.decode(), found, int(seconds) + int(micros) / 1e6

    # Calls

    def begin_call(self, member: str, key: str, token: str, seen: str) -> SharedCall:
        args = member, token, seen, int(CALL_SECONDS * 1000)
        found = self._shared_script(BEGIN, [f"call:{key}", "alive", "ended"], *args)
        state, held, position, ok, text = (each.decode() for each in found)
        return SharedCall(cast(Any, state), held, position, text, ok == "1")

    def end_call(self, key: str, token: str, text: str | None, ok: bool, keep: float) -> None:
        fits = text is not None and len(text) <= LARGEST_SHARED
        milliseconds = max(1, int((keep or UNKEPT_SECONDS) * 1000))
        args = token, int(fits), text if fits else "", int(ok), milliseconds, int(keep > 0), key
        self._shared_script(END, [f"call:{key}", "ended"], *args)

    def wait_calls(self, position: str, seconds: float) -> tuple[str, set[str]]:
        blocked = "BLOCK", max(1, int(seconds * 1000))
        read = self._command("XREAD", "COUNT", 1000, *blocked, "STREAMS", f"{self._whole}ended", position)
        ended: set[str] = set()
        for place, fields in entries(read):
            position = place
            ended.add(fields[b"key"].decode())
        return position, ended

    # Files

    def put_file(self, name: str, text: str) -> None:
        self._command("HSET", f"{self._whole}files", name, text)

    def get_file(self, name: str) -> str | None:
        found = self._command("HGET", f"{self._whole}files", name)
        return None if found is None else cast(bytes, found).decode()

    # Jobs at batch APIs

    def outlasts(self) -> bool:
        return True

    def job_lines(self) -> list[bytes]:
        return cast("list[bytes]", self._command("LRANGE", f"{self._whole}jobs", 0, -1))

    def add_job_lines(self, lines: Sequence[bytes]) -> None:
        self._command("RPUSH", f"{self._whole}jobs", *lines)

    # Rows that viewers follow

    def follow_row(self, row: str) -> JsonObject | None:
        found = self._shared_script(FOLLOW, ["watched", f"live:{row}"], row, FOLLOWED_SECONDS)
        return None if found is None else cast(JsonObject, json.loads(found))

    def followed_rows(self) -> list[str]:
        return [cast(bytes, row).decode() for row in self._shared_script(FOLLOWED, ["watched"])]

    def report_rows(self, rows: Mapping[str, JsonObject]) -> None:
        for row, told in rows.items():
            self._command("SET", f"{self._whole}live:{row}", to_json(told), "PX", int(FOLLOWED_SECONDS * 1000))

    # Redis

    def dangers(self) -> list[str]:
        """Return the settings of this server with which it could lose the run, each with its effect."""
        return [danger for danger in (self._persistence(), self._eviction()) if danger]

    def _eviction(self) -> str:
        facts = self.connection.call(lambda client: self._info(client, "memory"))
        policy = str(facts.get("maxmemory_policy", "noeviction"))
        if policy == "noeviction" or not int(cast(int, facts.get("maxmemory", 0))):
            return ""
        return f"maxmemory-policy is {policy}: when its memory is full, it deletes rows. Set it to noeviction"

    def _info(self, client: Client, section: str) -> dict[str, object]:
        target = {"target_nodes": "random"} if self.address.cluster else {}
        facts = client.execute_command("INFO", section, **target)
        if isinstance(facts, dict) and len(facts) == 1 and isinstance(next(iter(facts.values())), dict):
            facts = next(iter(facts.values()))
        return cast("dict[str, object]", facts)

    def _persistence(self) -> str:
        """Return the reason why a restart of this server would lose the run, or ""."""

        def ask(client: Client) -> str:
            if int(cast(int, self._info(client, "persistence").get("aof_enabled", 0))):
                return ""
            saves = _configured(client, "save", {"target_nodes": "random"} if self.address.cluster else {})
            if saves is None or saves:
                return "only snapshots are written (appendonly is off): a crash loses what came after the latest one"
            return "nothing is written to disk (appendonly and save are off): a restart loses the run"

        return self.connection.call(ask)

    @property
    def _age(self) -> int:
        """Minimum uptime of the server in milliseconds before leases expire: workers could not renew while it was
        down."""
        return int(self._lease * 1000) if self.polite else 0

    def _may_look(self) -> bool:
        """Return whether to look for expired leases. False just after an outage, in which other workers could not renew
        theirs."""
        now = time.monotonic()
        if not self.polite:
            return True
        if now - self._looked < min(1.0, self._lease / 5) or now - self.connection.since < self._lease / 3:
            return False
        self._looked = now
        return True

    def _command(self, *arguments: object) -> Any:
        return self.connection.call(lambda client: client.execute_command(*arguments))

    def _script(self, text: str, *arguments: object) -> Any:
        """Run a script of ``scripts``, which all have the same keys."""
        return self._with_keys(text, self._keys, arguments)

    def _shared_script(self, text: str, keys: Sequence[str], *arguments: object) -> Any:
        return self._with_keys(text, [self._whole + key for key in keys], arguments)

    def _with_keys(self, text: str, keys: Sequence[str], arguments: Sequence[object]) -> Any:
        def call(client: Client) -> Any:
            script = self._scripts.get(text)
            if script is None:
                script = self._scripts[text] = client.register_script(text)
            return script(keys=keys, args=arguments)

        return self.connection.call(call)

    def _fenced(self, text: str, *arguments: object) -> Any:
        with self._present():
            answer = self._script(text, *arguments)
        if answer == scripts.REPLACED:
            raise FeederReplaced(f"{self.address} is fed by another process now")
        return answer

    @contextmanager
    def _present(self) -> Iterator[None]:
        """Raise an error that says that the run was deleted meanwhile, if that is the cause of an error in the
        block."""
        try:
            yield
        except StoreError as error:
            if any(each in str(error) for each in ("NOGROUP", "no such key", DELETED)):
                raise StoreError(f"{self.address} holds no run; it may have been deleted") from None
            raise


def _configured(client: Client, name: str, target: dict[str, str]) -> str | None:
    """Return a setting of the server; None if the server does not allow reading it."""
    try:
        found = client.execute_command("CONFIG", "GET", name, **target)
    except Exception:  # managed servers forbid CONFIG  # noqa: BLE001
        return None
    while isinstance(found, dict) and found and isinstance(next(iter(found.values())), dict):
        found = next(iter(found.values()))
    value = found.get(name, "") if isinstance(found, dict) else ""
    return value.decode() if isinstance(value, bytes) else str(value)


def _standing(answer: Sequence[Any]) -> RunStanding:
    phase, generation, feeder, unstarted, leased, ok, failed, fed, observed = answer
    if phase is None:
        raise StoreError("there is no run")
    counts = Counts(int(unstarted), int(leased), int(ok), int(failed), fed == b"1")
    return RunStanding(cast(Phase, phase.decode()), int(generation), bool(feeder), counts, observed == b"1")


def _leased(
    place: bytes, token: int, row: bytes, index: bytes, value: bytes, steps: Sequence[bytes], past: bytes
) -> Lease:
    checks, retry = past not in (b"forced", b"ended"), past != b"ended"
    known = tuple(map(unpack_step, steps))
    return Lease(Row(int(index), b"", b"", value), place.decode(), int(token), known, retry, checks, name=row.decode())


def _value_of(row: Row) -> object:
    """Return the input of a row as JSON, with its id if that does not follow from its index."""
    if isinstance(row.value, bytes):
        return row.value
    name = row.job.job_id if isinstance(row.job, Job) else None
    return encode_row(row.value, None if name == str(row.index) else name)


def _places(leases: Sequence[Lease]) -> list[object]:
    return [part for lease in leases for part in (lease.place, lease.token)]


def _pack(step: KeptStep) -> bytes:
    return b"%d %b %b %d " % (step.agent, step.key.hex().encode(), step.content.hex().encode(), step.kind) + step.body


def unpack_step(packed: bytes) -> KeptStep:
    agent, key, content, kind, body = packed.split(b" ", 4)
    return KeptStep(int(agent), bytes.fromhex(key.decode()), bytes.fromhex(content.decode()), int(kind), body)
