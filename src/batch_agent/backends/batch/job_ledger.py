"""What was sent to a batch API, noted in the run directory: lines of JSON, each on disk before anything is built on it.

    {"wave": name, "requests": [id, …]}    about to be sent
    {"wave": name, "job": id}              the provider has it
    {"wave": name, "over": true}           its answers were handed out and recorded

A line that a crash cut short is left out; the wave is then looked for at the provider, or sent again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
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
    over: bool = field(default=False)


class JobLedger:
    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE

    async def read(self) -> list[Entry]:
        """Waves whose answers may still be wanted, oldest first."""
        return await in_thread(self._read)

    async def intend(self, wave: str, requests: Iterable[str]) -> None:
        await self._note({"wave": wave, "requests": [*requests]})

    async def sent(self, wave: str, job: str) -> None:
        await self._note({"wave": wave, "job": job})

    async def close(self, unfinished: Sequence[str]) -> None:
        """Every wave is over but these."""

        def close() -> None:
            lines = [{"wave": entry.wave, "over": True} for entry in self._read() if entry.wave not in unfinished]
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
