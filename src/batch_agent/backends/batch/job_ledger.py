"""Records what was sent to a batch API in the record of the run: lines of JSON, each kept before the next step.

    {"wave": name, "requests": [id, …], "rows": [row, …], "at": seconds}    will be sent now
    {"wave": name, "job": id}                   the provider accepted it
    {"wave": name, "requests": [id, …]}         only these answers are not delivered yet
    {"wave": name, "over": true}                its answers were delivered and recorded

A line cut short by a crash is ignored. A wave without a job is searched at the provider before its requests are sent
again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from batch_agent.backends.base import JobLines
from batch_agent.blocking import in_thread


@dataclass(slots=True)
class JobEntry:
    wave: str
    requests: Sequence[str] = ()
    rows: Mapping[str, str] = field(default_factory=dict)  # request → the row that sent it
    job: str | None = None
    at: float | None = None  # when it was about to be sent, Unix time
    over: bool = False


class JobLedger:
    """``lines`` are in the record of the run. Other workers may use the same record."""

    def __init__(self, lines: JobLines) -> None:
        self._lines = lines
        self._known: set[str] = set()  # waves that this ledger returned or wrote

    async def read(self, *, new: bool = False) -> list[JobEntry]:
        """Return the waves with undelivered answers, oldest first; with ``new`` only those that this ledger did not
        return or write yet."""
        found = [entry for entry in await in_thread(self._read) if not (new and entry.wave in self._known)]
        self._known.update(entry.wave for entry in found)
        return found

    async def intend(self, wave: str, rows: Mapping[str, str]) -> None:
        """``rows`` are the requests, each with its row."""
        self._known.add(wave)
        await self._note({"wave": wave, "requests": [*rows], "rows": [*rows.values()], "at": time.time()})

    async def sent(self, wave: str, job: str) -> None:
        await self._note({"wave": wave, "job": job})

    async def job_of(self, wave: str) -> str | None:
        """Return the job of a wave; None if it is not recorded."""
        return next((entry.job for entry in await in_thread(self._read) if entry.wave == wave), None)

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
            if "rows" in note:
                entry.rows = dict(zip(entry.requests, note["rows"], strict=False))
            entry.job = note.get("job", entry.job)
            entry.at = note.get("at", entry.at)
            entry.over = note.get("over", entry.over)
        return [entry for entry in entries.values() if not entry.over]

    def _append(self, lines: Sequence[dict[str, object]]) -> None:
        if lines:
            self._lines.add_job_lines([orjson.dumps(line) for line in lines])
