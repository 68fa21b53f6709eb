"""The timeline of a run on disk: samples of its metrics, changes, and the times of turns and tool calls.

    timeline.jsonl     headers of sessions, samples, changes of limits and health
    turns-first.jsonl  the first turns and tool calls
    turns-old.jsonl    the block of turns and tool calls before the latest
    turns-new.jsonl    the latest block
    status.json        the latest metrics of the run

Its size is bounded: long runs keep fewer samples per hour, and only the first and the latest turns. No other part
depends on it, so it is not synced. ``TimelineFiles`` blocks and raises OSError. ``read_timeline`` works while a
run writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

import orjson
from pydantic import JsonValue

from batch_agent.files.results import from_json, to_json
from batch_agent.messages import JsonObject
from batch_agent.record.private import private

Line: TypeAlias = list[JsonValue]  # the kind, then the fields of that kind
Span: TypeAlias = tuple[JsonValue, ...]  # a line that waits: thousands of tuples cost the garbage collector nothing

SAMPLES, STATUS = "timeline.jsonl", "status.json"
FIRST = "turns-first.jsonl"
OLD = "turns-old.jsonl"
NEW = "turns-new.jsonl"
SAMPLE = "sample"
MOST_SAMPLES = 4096
MOST_SPANS = 10_000  # in each of the three files


class TimelineFiles:
    """Writes the timeline. ``interval`` is the time between two samples in seconds; it doubles each time samples are
    dropped."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir
        self.interval = 1.0
        self._lines = self._first = self._new = 0

    def begin(self, header: JsonObject, at: float) -> None:
        """Begin a session. The lines of earlier sessions are kept."""
        self._lines = _count(self._folder / SAMPLES)
        self._first = _count(self._folder / FIRST)
        self._new = _count(self._folder / NEW)
        self.write([["run", at, header]], (), None)

    def write(self, samples: Sequence[Line], spans: Sequence[Line | Span], status: JsonObject | None) -> None:
        self._append(SAMPLES, samples)
        self._lines += len(samples)
        if self._lines > MOST_SAMPLES:
            self._thin_out()
        first = spans[: max(0, MOST_SPANS - self._first)]
        self._append(FIRST, first)
        self._first += len(first)
        rest = spans[len(first) :]
        while rest:
            if self._new >= MOST_SPANS:
                (self._folder / NEW).replace(self._folder / OLD)
                self._new = 0
            block = rest[: MOST_SPANS - self._new]
            self._append(NEW, block)
            self._new += len(block)
            rest = rest[len(block) :]
        if status is not None:
            self._replace(STATUS, to_json(status))

    def _append(self, name: str, lines: Sequence[Line | Span]) -> None:
        if lines:
            data = bytearray()  # orjson returns each line in a block of a kilobyte: thousands of them are not kept
            for line in lines:
                try:
                    data += orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
                except TypeError:  # text that orjson cannot write
                    data += to_json(line) + b"\n"
            with open(self._folder / name, "ab", opener=private) as file:
                file.write(data)

    def _thin_out(self) -> None:
        """Drop every other sample, and the oldest changes if there are too many."""
        lines = list(_lines(self._folder / SAMPLES))
        samples = [line for line in lines if line[0] == SAMPLE]
        dropped = {id(line) for line in samples[1:-1:2]}
        changes = [line for line in lines if line[0] != SAMPLE and line[0] != "run"]
        dropped |= {id(line) for line in changes[: -MOST_SAMPLES // 4]}
        kept = [line for line in lines if id(line) not in dropped]
        self._replace(SAMPLES, b"".join(to_json(line) + b"\n" for line in kept))
        self._lines = len(kept)
        self.interval *= 2

    def _replace(self, name: str, data: bytes) -> None:
        draft = self._folder / f"{name}.new"
        with open(draft, "wb", opener=private) as file:
            file.write(data)
        draft.replace(self._folder / name)


@dataclass(frozen=True, slots=True)
class TimelineRecord:
    """A timeline read from disk. ``headers`` are those of the sessions. ``cut``: turns in the middle are missing,
    because the size is bounded."""

    headers: list[JsonObject] = field(default_factory=list)
    samples: list[Line] = field(default_factory=list)
    changes: list[Line] = field(default_factory=list)
    spans: list[Line] = field(default_factory=list)
    cut: bool = False


def read_timeline(run_dir: Path, *, spans: bool = True) -> TimelineRecord:
    """Return the timeline of a run; empty if it has none."""
    folder, found = run_dir, TimelineRecord(cut=(run_dir / OLD).exists())
    for line in _lines(folder / SAMPLES):
        if line[0] == SAMPLE:
            found.samples.append(line)
        elif line[0] == "run" and isinstance(line[2], dict):
            found.headers.append({"at": line[1], **line[2]})
        else:
            found.changes.append(line)
    for name in (FIRST, OLD, NEW) if spans else ():
        found.spans.extend(_lines(folder / name))
    return found


def read_status(run_dir: Path) -> JsonObject | None:
    """Return the metrics that were last written, or None."""
    try:
        status = from_json((run_dir / STATUS).read_bytes())
    except (OSError, ValueError):
        return None
    return cast(JsonObject, status) if isinstance(status, dict) else None


def _lines(path: Path) -> Iterator[Line]:
    """Yield the complete lines of a file."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        for data in file:
            try:
                line = orjson.loads(data)
            except ValueError:  # incomplete, or with text that orjson cannot read
                line = _slowly(data)
            if isinstance(line, list) and len(line) > 2 and isinstance(line[0], str):
                yield line


def _slowly(data: bytes) -> object:
    try:
        return from_json(data)
    except ValueError:
        return None


def _count(path: Path) -> int:
    return sum(1 for _ in _lines(path))
