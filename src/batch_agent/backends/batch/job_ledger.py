"""What was sent to a batch API, noted in the run directory: lines of JSON, each on disk before anything is built on it.

    {"wave": name, "requests": [id, …], "at": seconds}    about to be sent
    {"wave": name, "job": id}                             the provider has it
    {"wave": name, "requests": [id, …]}                   only these answers are not handed out yet
    {"wave": name, "over": true}                          its answers were handed out and recorded

A line that a crash cut short is left out. A wave with no job is looked for at the provider before its requests are sent
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
        """Waves whose answers may still be wanted, oldest first."""
        return await in_thread(self._read)

    async def intend(self, wave: str, requests: Iterable[str]) -> None:
        await self._note({"wave": wave, "requests": [*requests], "at": time.time()})

    async def sent(self, wave: str, job: str) -> None:
        await self._note({"wave": wave, "job": job})

    async def close(self, left: Mapping[str, Sequence[str]]) -> None:
        """Every wave is over but these, of which these requests are left."""

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
                continue  # a crash cut it short
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
            # What was cut short must not run into what comes.
            if os.fstat(descriptor).st_size and not self._path.read_bytes().endswith(b"\n"):
                data = b"\n" + data
            os.write(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
