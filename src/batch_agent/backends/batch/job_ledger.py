"""Records what was sent to a batch API in the run directory: lines of JSON, each on disk before the next step.

    {"wave": name, "requests": [id, …], "at": seconds}    will be sent now
    {"wave": name, "job": id}                             the provider accepted it
    {"wave": name, "requests": [id, …]}                   only these answers are not delivered yet
    {"wave": name, "over": true}                          its answers were delivered and recorded

A line cut short by a crash is ignored. A wave without a job is searched at the provider before its requests are sent
again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from batch_agent.blocking import in_thread

FILE = "jobs.jsonl"


@dataclass(slots=True)
class Entry:
    wave: str
    requests: Sequence[str] = ()
    job: str | None = None
    at: float | None = None  # when it was about to be sent, Unix time
    over: bool = field(default=False)


class JobLedger:
    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE

    async def read(self) -> list[Entry]:
        """Return the waves with undelivered answers, oldest first."""
        return await in_thread(self._read)

    async def intend(self, wave: str, requests: Iterable[str]) -> None:
        await self._note({"wave": wave, "requests": [*requests], "at": time.time()})

    async def sent(self, wave: str, job: str) -> None:
        await self._note({"wave": wave, "job": job})

    async def close(self, left: Mapping[str, Sequence[str]]) -> None:
        """Mark every wave as over except these, with their remaining requests."""

        def close() -> None:
            lines: list[dict[str, object]] = []
            for entry in self._read():
                if entry.wave not in left:
                    lines.append({"wave": entry.wave, "over": True})
                elif len(left[entry.wave]) < len(entry.requests):
                    lines.append({"wave": entry.wave, "requests": [*left[entry.wave]]})
            self._append(lines)

        await in_thread(close)

    async def _note(self, line: dict[str, object]) -> None:
        await in_thread(lambda: self._append([line]))

    def _read(self) -> list[Entry]:
        entries: dict[str, Entry] = {}
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        for line in lines:
            try:
                note = orjson.loads(line)
                entry = entries.setdefault(note["wave"], Entry(note["wave"]))
            except (orjson.JSONDecodeError, KeyError, TypeError):
                continue  # cut short by a crash
            entry.requests = note.get("requests", entry.requests)
            entry.job = note.get("job", entry.job)
            entry.at = note.get("at", entry.at)
            entry.over = note.get("over", entry.over)
        return [entry for entry in entries.values() if not entry.over]

    def _append(self, lines: Sequence[dict[str, object]]) -> None:
        if not lines:
            return
        data = b"".join(orjson.dumps(line) + b"\n" for line in lines)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            # End a line that was cut short before the next one is appended.
            if os.fstat(descriptor).st_size and not self._path.read_bytes().endswith(b"\n"):
                data = b"\n" + data
            os.write(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
