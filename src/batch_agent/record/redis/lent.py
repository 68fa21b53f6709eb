"""What the workers of a run share, stored in Redis.

    K lent     hash: ``table`` (JSON, see ``share.table``) and its ``version``
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

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from batch_agent.errors import StoreError
from batch_agent.files.results import from_json, to_json
from batch_agent.messages import JsonObject
from batch_agent.record.address import StoreAddress
from batch_agent.record.redis.connection import Client, RedisConnection, Script, entries
from batch_agent.record.store import FOLLOWED_SECONDS, LARGEST_SHARED, UNKEPT_SECONDS, SharedCall
from batch_agent.share.table import Allotment, Claim, Learnt, Steering, Table, steered

T = TypeVar("T")

FEW, PAUSE = 3, 0.05  # attempts to change the table before a pause, and the longest pause in seconds
CALL_SECONDS = 24 * 3600.0  # after which a call that never ended is deleted

READ = """
local time = redis.call('TIME')
local found = redis.call('HMGET', KEYS[1], 'version', 'table')
return {found[1] or '0', found[2] or '{}', time[1], time[2]}
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


class RedisShares:
    """What the workers of one run share: the base of its ``RunStore``."""

    def __init__(self, address: StoreAddress, connection: RedisConnection) -> None:
        self._whole = address.at(address.name).prefix  # stages of a pipeline share the state of their run
        self.connection = connection
        self._share_scripts: dict[str, Script] = {}

    def _share_key(self, name: str) -> str:
        return self._whole + name

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
            args = [version, json.dumps(table.to_json()), worker, until]
            if self._share_script(WRITE, ["lent", "alive", "run"], args):
                return answer

    def _read_table(self) -> tuple[str, Table, float]:
        version, table, seconds, micros = self._share_script(READ, ["lent"], [])
        try:
            found = Table.from_json(cast(JsonObject, from_json(table)))
        except ValueError:
            raise StoreError(
                f"{self._share_key('lent')} in Redis is damaged or forged: it is no table of shares"
            ) from None
        return version.decode(), found, int(seconds) + int(micros) / 1e6

    # Calls

    def begin_call(self, member: str, key: str, token: str, seen: str) -> SharedCall:
        args = [member, token, seen, int(CALL_SECONDS * 1000)]
        found = self._share_script(BEGIN, [f"call:{key}", "alive", "ended"], args)
        state, held, position, ok, text = (each.decode() for each in found)
        return SharedCall(cast(Any, state), held, position, text, ok == "1")

    def end_call(self, key: str, token: str, text: str | None, ok: bool, keep: float) -> None:
        fits = text is not None and len(text) <= LARGEST_SHARED
        milliseconds = max(1, int((keep or UNKEPT_SECONDS) * 1000))
        args = [token, int(fits), text if fits else "", int(ok), milliseconds, int(keep > 0), key]
        self._share_script(END, [f"call:{key}", "ended"], args)

    def wait_calls(self, position: str, seconds: float) -> tuple[str, set[str]]:
        milliseconds = max(1, int(seconds * 1000))

        def read(client: Client) -> Any:
            return client.execute_command(
                "XREAD", "COUNT", 1000, "BLOCK", milliseconds, "STREAMS", self._share_key("ended"), position
            )

        ended: set[str] = set()
        for place, fields in entries(self.connection.call(read)):
            position = place
            ended.add(fields[b"key"].decode())
        return position, ended

    # Files

    def put_file(self, name: str, text: str) -> None:
        self.connection.call(lambda client: client.execute_command("HSET", self._share_key("files"), name, text))

    def get_file(self, name: str) -> str | None:
        found = self.connection.call(lambda client: client.execute_command("HGET", self._share_key("files"), name))
        return None if found is None else cast(bytes, found).decode()

    # Jobs at batch APIs

    def outlasts(self) -> bool:
        return True

    def job_lines(self) -> list[bytes]:
        key = self._share_key("jobs")
        return cast("list[bytes]", self.connection.call(lambda client: client.execute_command("LRANGE", key, 0, -1)))

    def add_job_lines(self, lines: Sequence[bytes]) -> None:
        key = self._share_key("jobs")
        self.connection.call(lambda client: client.execute_command("RPUSH", key, *lines))

    # Rows that viewers follow

    def follow_row(self, row: str) -> JsonObject | None:
        found = self._share_script(FOLLOW, ["watched", f"live:{row}"], [row, FOLLOWED_SECONDS])
        return None if found is None else cast(JsonObject, json.loads(found))

    def followed_rows(self) -> list[str]:
        return [cast(bytes, row).decode() for row in self._share_script(FOLLOWED, ["watched"], [])]

    def report_rows(self, rows: Mapping[str, JsonObject]) -> None:
        for row, told in rows.items():
            command = "SET", self._share_key(f"live:{row}"), to_json(told), "PX", int(FOLLOWED_SECONDS * 1000)
            self.connection.call(lambda client, command=command: client.execute_command(*command))  # type: ignore[misc]

    def _share_script(self, script: str, keys: list[str], args: list[Any]) -> Any:
        names = [self._share_key(key) for key in keys]

        def call(client: Client) -> Any:
            registered = self._share_scripts.get(script)
            if registered is None:
                registered = self._share_scripts[script] = client.register_script(script)
            return registered(keys=names, args=args)

        return self.connection.call(call)
