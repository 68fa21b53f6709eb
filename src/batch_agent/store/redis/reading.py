"""Reads runs in Redis: their names, progress, results and records of rows. Also deletes a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from batch_agent.store.address import StoreAddress
from batch_agent.store.redis.connection import Client, RedisConnection, entries
from batch_agent.store.redis.store import RUNS, RedisRunStore, unpack_step
from batch_agent.store.shared import KeptStep

PAGE = 500


@dataclass(frozen=True, slots=True)
class ReadRow:
    """A recorded row. ``index`` is its latest one. ``result`` is its result as JSON; None if it has none yet."""

    index: int
    result: bytes | None
    steps: tuple[KeptStep, ...]


class RedisReader:
    def __init__(self, store: RedisRunStore) -> None:
        self.store = store

    def sittings(self) -> int:
        """Return how many times the run was begun or resumed."""
        return int(self._command("HGET", self.store.key("run"), "sitting") or 0)

    def rows(self, *, steps: bool) -> Iterator[ReadRow]:
        """Yield the ended rows in the order of their ends, then the rows that have begun. Once all inputs are fed, rows
        that are no longer among them have no result."""
        fed, sitting = self._command("HMGET", self.store.key("run"), "fed", "sitting")
        for place, fields in self._stream("results"):
            row = fields[b"row"]
            known = (self._command("HGET", self.store.key("rows"), row) or b"").split(b" ")
            if len(known) < 4 or known[3].decode() != place:  # the row was retried
                continue
            result = fields[b"result"] if fed != b"1" or known[0] == sitting else None
            if steps or result is not None:
                yield ReadRow(int(known[1]), result, self._steps(row) if steps else ())
        for _, fields in self._stream("queue") if steps else ():
            if kept := self._steps(fields[b"row"]):
                yield ReadRow(int(fields[b"index"]), None, kept)

    def _steps(self, row: bytes) -> tuple[KeptStep, ...]:
        return tuple(map(unpack_step, self._command("LRANGE", self.store.key(f"steps:{row.decode()}"), 0, -1)))

    def _stream(self, name: str) -> Iterator[tuple[str, dict[bytes, bytes]]]:
        start = "-"
        while True:
            page = self._command("XRANGE", self.store.key(name), start, "+", "COUNT", PAGE)
            place = ""
            for place, fields in entries({name: page}):
                yield place, fields
            if not place:
                return
            start = f"({place}"

    def _command(self, *arguments: object) -> Any:
        return self.store.connection.call(lambda client: client.execute_command(*arguments))


def run_names(address: StoreAddress) -> list[str]:
    """Return the names of the runs on a server, sorted. Raises StoreError if it is unreachable."""
    connection = RedisConnection(address, patience=0.0)
    try:
        found = connection.call(lambda client: client.execute_command("SMEMBERS", RUNS))
        return sorted(cast(bytes, name).decode() for name in found)
    finally:
        connection.close()


def delete_run(address: StoreAddress) -> int:
    """Delete every key of a run and of its stages. Returns how many there were."""
    connection = RedisConnection(address, patience=0.0)
    pattern = address.at(address.name).prefix.replace("[", "\\[") + "*"

    def delete(client: Client) -> int:
        count = 0
        for key in cast(Any, client).scan_iter(match=pattern, count=1000):
            count += int(client.execute_command("UNLINK", key))
        return count

    try:
        removed = connection.call(delete)
        connection.call(lambda client: client.execute_command("SREM", RUNS, address.name))
        return removed
    finally:
        connection.close()
