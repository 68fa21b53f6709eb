"""Records what was sent to a batch API in the record of the run: lines of JSON, each kept before the next step.

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

from batch_agent.backends.base import JobLines
from batch_agent.blocking import in_thread

FILE = "jobs.jsonl"


@dataclass(slots=True)
class JobEntry:
    wave: str
    requests: Sequence[str] = ()
    job: str | None = None
    at: float | None = None  # when it was about to be sent, Unix time
    over: bool = field(default=False)


class JobLedger:
    """``place`` is the run directory, or a record outside this machine. Other workers may use the same record."""

    def __init__(self, place: Path | JobLines) -> None:
        self._lines: JobLines = JobFile(place / FILE) if isinstance(place, Path) else place
        self._known: set[str] = set()  # waves that this ledger returned or wrote

    async def read(self) -> list[JobEntry]:
        """Return the waves with undelivered answers, oldest first."""
        found = await in_thread(self._read)
        self._known.update(entry.wave for entry in found)
        return found

    async def intend(self, wave: str, requests: Iterable[str]) -> None:
        self._known.add(wave)
        await self._note({"wave": wave, "requests": [*requests], "at": time.time()})

    async def sent(self, wave: str, job: str) -> None:
        await self._note({"wave": wave, "job": job})

    async def close(self, left: Mapping[str, Sequence[str]]) -> None:
        """Mark every wave that this ledger knows as over, except these, with their remaining requests."""

        def close() -> None:
            lines: list[dict[str, object]] = []
            for entry in self._read():
                if entry.wave not in self._known:
                    continue  # of another worker
                if entry.wave not in left:
                    lines.append({"wave": entry.wave, "over": True})
                elif len(left[entry.wave]) < len(entry.requests):
                    lines.append({"wave": entry.wave, "requests": [*left[entry.wave]]})
            self._append(lines)

        await in_thread(close)

    async def _note(self, line: dict[str, object]) -> None:
        await in_thread(lambda: self._append([line]))

    def _read(self) -> list[JobEntry]:
        entries: dict[str, JobEntry] = {}
        for line in self._lines.job_lines():
            try:
                note = orjson.loads(line)
                entry = entries.setdefault(note["wave"], JobEntry(note["wave"]))
            except (orjson.JSONDecodeError, KeyError, TypeError):
                continue  # cut short by a crash
            entry.requests = note.get("requests", entry.requests)
            entry.job = note.get("job", entry.job)
            entry.at = note.get("at", entry.at)
            entry.over = note.get("over", entry.over)
        return [entry for entry in entries.values() if not entry.over]

    def _append(self, lines: Sequence[dict[str, object]]) -> None:
        if lines:
            self._lines.add_job_lines([orjson.dumps(line) for line in lines])


class JobFile:
    """The lines in a file of the run directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def job_lines(self) -> list[bytes]:
        try:
            return self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return []

    def add_job_lines(self, lines: Sequence[bytes]) -> None:
        data = b"".join(line + b"\n" for line in lines)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            # End a line that was cut short before the next one is appended.
            if os.fstat(descriptor).st_size and not self._path.read_bytes().endswith(b"\n"):
                data = b"\n" + data
            os.write(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
