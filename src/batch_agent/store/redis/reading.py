"""Runs in Redis as readers see them: their names, how far one is, its results, the record of its rows; and its end."""

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
    """A row as it is recorded. ``result`` is its result as JSON; None while it has none."""

    index: int
    result: bytes | None
    steps: tuple[KeptStep, ...]


class RedisReader:
    def __init__(self, store: RedisRunStore) -> None:
        self.store = store

    def sittings(self) -> int:
        """How many times the run was begun or resumed."""
        return int(self._command("HGET", self.store.key("run"), "sitting") or 0)

    def rows(self, *, steps: bool) -> Iterator[ReadRow]:
        """Rows that have ended, in the order of their ends, then those that have begun."""
        for place, fields in self._stream("results"):
            row = fields[b"row"]
            if _place(self._command("HGET", self.store.key("rows"), row)) == place:  # else it was tried again
                yield ReadRow(int(fields[b"index"]), fields[b"result"], self._steps(row) if steps else ())
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


def _place(known: bytes | None) -> str:
    """Where the result of a row is, as the hash of rows says."""
    fields = b"" if known is None else known
    parts = fields.decode().split(" ")
    return parts[3] if len(parts) > 3 else ""


def run_names(address: StoreAddress) -> list[str]:
    """Names of the runs on a server, sorted. Raises StoreError when it cannot be reached."""
    connection = RedisConnection(address, patience=0.0)
    try:
        found = connection.call(lambda client: client.execute_command("SMEMBERS", RUNS))
        return sorted(cast(bytes, name).decode() for name in found)
    finally:
        connection.close()


def delete_run(address: StoreAddress) -> int:
    """Remove every key of a run, with those of its stages. Returns how many there were."""
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
