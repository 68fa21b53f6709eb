"""The answers of people to a run in Redis: a list of lines, and the clock of Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from batch_agent.errors import StoreError
from batch_agent.record.address import StoreAddress
from batch_agent.record.redis.connection import RedisConnection
from batch_agent.record.review import ReviewLog, event_of
from batch_agent.trust.review import Event

PAGE = 5000  # lines read at once
# ARGV: the number of lines before, then the lines. A call that is repeated after an outage finds its own lines there.
APPEND = """
if redis.call('EXISTS', KEYS[2]) == 0 then return -1 end
local before = tonumber(ARGV[1])
local there = redis.call('LRANGE', KEYS[1], before, -1)
if #there == 0 and redis.call('LLEN', KEYS[1]) == before then
  for place = 2, #ARGV do redis.call('RPUSH', KEYS[1], ARGV[place]) end
  return 1
end
if #there ~= #ARGV - 1 then return 0 end
for place, line in ipairs(there) do
  if line ~= ARGV[place + 1] then return 0 end
end
return 1
"""


class RedisLog(ReviewLog):
    """The log of a run in Redis, or of a stage."""

    def __init__(self, address: StoreAddress) -> None:
        super().__init__()
        self._address = address
        self._connection = RedisConnection(address, patience=0.0)
        self._key = f"{address.prefix}review"

    def _command(self, *arguments: object) -> Any:
        return self._connection.call(lambda client: client.execute_command(*arguments))

    def exists(self) -> bool:
        return bool(self._command("EXISTS", self._key))

    def now(self) -> float:
        target = {"target_nodes": "random"} if self._address.cluster else {}
        found = self._connection.call(lambda client: client.execute_command("TIME", **target))
        found = next(iter(found.values())) if isinstance(found, dict) else found
        seconds, micros = cast("tuple[int, int]", found)
        return int(seconds) + int(micros) / 1e6

    def read(self) -> tuple[list[Event], bool]:
        replaced = self.count > int(self._command("LLEN", self._key))
        if replaced:
            self.count = 0
        found: list[Event] = []
        while lines := self._command("LRANGE", self._key, self.count, self.count + PAGE - 1):
            for line in lines:
                self.count += 1
                if (event := event_of(line, self.count)) is not None:
                    found.append(event)
        return found, replaced

    def lines(self) -> list[bytes]:
        return cast("list[bytes]", self._command("LRANGE", self._key, 0, -1))

    def append_lines(self, lines: Sequence[bytes]) -> bool:
        keys = [self._key, f"{self._address.prefix}run"]
        done = self._connection.call(
            lambda client: client.register_script(APPEND)(keys=keys, args=[self.count, *lines])
        )
        if int(done) < 0:
            raise StoreError(f"{self._address} holds no run; it may have been deleted")
        if not int(done):
            return False
        self.count += len(lines)
        return True

    def close(self) -> None:
        self._connection.close()
