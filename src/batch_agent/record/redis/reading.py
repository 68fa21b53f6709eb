"""Reads runs in Redis: their names, progress, results and records of rows. Also deletes a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

from batch_agent.record.address import StoreAddress
from batch_agent.record.redis.connection import Client, RedisConnection, entries
from batch_agent.record.redis.scripts import GROUP
from batch_agent.record.redis.store import RUNS, RedisRunStore, unpack_step
from batch_agent.record.store import KeptStep

PAGE = 500


@dataclass(frozen=True, slots=True)
class ReadRow:
    """A recorded row. ``row`` is its key, ``index`` its latest index, ``place`` its id in the stream of results or in
    the queue. ``result`` is its result as JSON; None if it has none, or one that is no longer valid. A row without a
    result has its input as JSON in ``value``."""

    row: str
    place: str
    index: int
    result: bytes | None = None
    value: bytes | None = None
    started: bool = True


class RedisReader:
    def __init__(self, store: RedisRunStore) -> None:
        self.store = store

    def sittings(self) -> int:
        """Return how many times the run was begun or resumed."""
        return int(self._command("HGET", self.store.key("run"), "sitting") or 0)

    def results(self, after: str, count: int) -> list[ReadRow]:
        """Return the next rows that ended after a place in the stream of results; "" is its beginning. Once all inputs
        are fed, rows that are no longer among them have no result."""
        found = self._page("results", after, count)
        if not found:
            return []
        known = self._command("HMGET", self.store.key("rows"), *(fields[b"row"] for _, fields in found))
        fed, latest = self._command("HMGET", self.store.key("run"), "fed", "sitting")
        rows = []
        for (place, fields), now in zip(found, known, strict=True):
            sitting, index, _, at, *_ = (now or b"0 0 f 0").split(b" ")
            is_valid = at.decode() == place and (fed != b"1" or sitting == latest)  # else it was retried, or left out
            rows.append(ReadRow(fields[b"row"].decode(), place, int(index), fields[b"result"] if is_valid else None))
        return rows

    def unfinished(self) -> Iterator[ReadRow]:
        """Yield the rows in the queue: those that a worker holds or held, then those that have not started."""
        held: list[ReadRow] = []
        unstarted: list[ReadRow] = []
        leased, after = set(self._pending()), ""
        while page := self._page("queue", after, PAGE):
            for place, fields in page:
                started = place in leased or b"past" in fields
                (held if started else unstarted).append(_queued(place, fields, started=started))
            after = page[-1][0]
        yield from held
        yield from unstarted

    def leased(self, limit: int) -> list[ReadRow]:
        """Return the oldest rows that a worker holds, or whose lease has expired."""
        found = (self.queued(place) for place in islice(self._pending(), limit))
        return [row for row in found if row is not None]

    def queued(self, place: str) -> ReadRow | None:
        """Return the row at a place in the queue, or None if it is done."""
        page = entries({"queue": self._command("XRANGE", self.store.key("queue"), place, place)})
        return next((_queued(place, fields, started=True) for place, fields in page), None)

    def steps(self, row: str) -> tuple[KeptStep, ...]:
        return tuple(map(unpack_step, self._command("LRANGE", self.store.key(f"steps:{row}"), 0, -1)))

    def _pending(self) -> Iterator[str]:
        """Yield the places of rows that a worker holds, or whose lease has expired."""
        command, start = ("XPENDING", self.store.key("queue"), GROUP), "-"
        while page := self._command(*command, start, "+", PAGE, parse_detail=True):
            places = [cast(bytes, entry["message_id"]).decode() for entry in page]
            yield from places
            start = f"({places[-1]}"

    def _page(self, name: str, after: str, count: int) -> list[tuple[str, dict[bytes, bytes]]]:
        start = f"({after}" if after else "-"
        return list(entries({name: self._command("XRANGE", self.store.key(name), start, "+", "COUNT", count)}))

    def _command(self, *arguments: object, **options: bool) -> Any:
        return self.store.connection.call(lambda client: client.execute_command(*arguments, **options))


def _queued(place: str, fields: dict[bytes, bytes], *, started: bool) -> ReadRow:
    return ReadRow(fields[b"row"].decode(), place, int(fields[b"index"]), None, fields[b"value"], started=started)


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
