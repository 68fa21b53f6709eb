"""The record of one run for the page.

Only this module of the page knows the layout of a run directory. It returns values that can be sent as JSON. Methods
block. Use the object of a run in one thread only.
"""

from __future__ import annotations

import time
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from batch_agent.errors import BatchAgentError
from batch_agent.files.results import from_json
from batch_agent.messages import JsonObject
from batch_agent.record.control import CONTROL
from batch_agent.record.rundir import RUN, SUMMARY, RunView
from batch_agent.record.timeline import Line, read_status, read_timeline
from batch_agent.view.agents import RecordedAgents
from batch_agent.view.conversation import conversation, failed_attempts
from batch_agent.view.index import RowIndex
from batch_agent.view.query import Query

SAMPLES_SHOWN = 600


class RunRecord:
    """The record of a run. ``key`` is its name in the URLs of the page."""

    def __init__(self, key: str, path: Path) -> None:
        self.key, self.path = key, path
        self._agents = RecordedAgents(path)
        self._asked: JsonObject | None = None

    @cached_property
    def index(self) -> RowIndex:
        return RowIndex(self.path)

    def index_more(self) -> bool:
        """Take in the next rows; True while there is more to read. Makes the index in the thread that calls it."""
        return self.index.step()

    def close(self) -> None:
        if "index" in vars(self):
            self.index.close()

    # Pages

    def overview(self) -> JsonObject:
        """Return the numbers of the run: from the run itself, from its rows, and rows that need attention."""
        view = RunView.of(self.path)
        glance = view.glance.latest
        return {
            "run": self._identity(view),
            "progress": {
                "total": view.facts.get("total"),
                "ok": glance.ok,
                "failed": glance.failed,
                "resumed": glance.resumed,
                "tokens": glance.tokens,
                "cost": glance.cost,
            },
            "unfinished": len(self._agents.unfinished()) if view.state == "interrupted" else 0,
            "status": read_status(self.path),
            "summary": self._summary(),
            "index": self.index.progress(),
            **self.index.numbers(),
            "samples": self._samples(),
            "changes": [*read_timeline(self.path, spans=False).changes[-200:]],
        }

    def in_short(self) -> JsonObject:
        """Return one line of the list of runs."""
        view = RunView.of(self.path)
        latest = view.progress
        progress: JsonObject = {"ok": latest.ok, "failed": latest.failed, "tokens": latest.tokens, "cost": latest.cost}
        return {**self._identity(view), **progress}

    def rows(self, query: Query, sort: str, descending: bool, offset: int, limit: int) -> JsonObject:
        page = self.index.page(query, sort, descending, offset, limit)
        return {**page, "index": self.index.progress()}

    def row(self, row: str) -> JsonObject:
        """Return a finished row with its conversation. ``record`` is None if there is no result, or not in the index
        yet."""
        record = self.index.record(row)
        if record is None:
            return {"record": None, "index": self.index.progress()}
        spans = self._spans_of(cast(int, record["index"]))
        try:
            past = self._agents.of(record)
        except BatchAgentError:
            past = None
        before, after = self.index.neighbours(cast(int, record["index"]))
        return {
            "record": cast(JsonValue, record),
            "recorded": past is not None,
            "conversation": [*conversation(record, past, self.asked(), spans)],
            "failed_attempts": [*failed_attempts(spans)],
            "before": before,
            "after": after,
        }

    def timeline(self, since: float | None, until: float | None, most: int) -> JsonObject:
        """Return samples, changes, and at most ``most`` spans of a period."""
        found = read_timeline(self.path)
        lines = (*found.samples, *found.changes, *found.spans)
        first = min((cast(float, line[1]) for line in lines), default=None)
        ends = (*(line[1] for line in (*found.samples, *found.changes)), *(span[2] for span in found.spans))
        last = max((cast(float, end) for end in ends), default=None)
        low, high = since if since is not None else first or 0.0, until if until is not None else last or 0.0
        spans = [span for span in found.spans if cast(float, span[2]) >= low and cast(float, span[1]) <= high]
        return {
            "from": first,
            "to": last,
            "samples": [*found.samples],
            "changes": [*found.changes],
            "spans": [*spans[:most]],
            "left_out": max(0, len(spans) - most),
            "cut": found.cut,
        }

    # What a run directory holds

    def asked(self) -> JsonObject | None:
        """Return the recorded task and system prompt; None if the run did not record them."""
        if self._asked is None:
            headers = read_timeline(self.path, spans=False).headers
            self._asked = headers[-1] if headers else None
        return self._asked

    def stages(self) -> list[str]:
        """Return the names of the stages that have a record, in the order in which they started."""
        found = [path.parent for path in self.path.glob(f"*/{RUN}")]
        return [path.name for path in sorted(found, key=_started)]

    @property
    def control_dir(self) -> Path:
        """The directory with the address of the control socket: a stage is controlled through its pipeline."""
        return self.path if (self.path / CONTROL).exists() else self.path.parent

    def _identity(self, view: RunView) -> JsonObject:
        facts = view.facts
        status = read_status(self.path) or {}
        graph = status.get("stages")
        return {
            "key": self.key,
            "path": str(self.path),
            "name": self.path.name,
            "state": view.state,
            "why": facts.get("why"),
            "model": facts.get("model"),
            "backend": facts.get("backend"),
            "total": view.total,
            "started": facts.get("started"),
            "session_started": facts.get("session_started"),
            "ended": facts.get("ended"),
            "trouble": facts.get("trouble") if view.state == "running" else None,
            "sessions": view.glance.sessions,
            "stages": [*self.stages()],
            "graph": graph if isinstance(graph, list) else None,
            "now": time.time(),
        }

    def _summary(self) -> JsonObject | None:
        try:
            summary = from_json((self.path / SUMMARY).read_bytes())
        except (OSError, ValueError):
            return None
        return cast(JsonObject, summary) if isinstance(summary, dict) else None

    def _samples(self) -> list[JsonValue]:
        """Return the samples, reduced to the number that a chart can show."""
        samples = read_timeline(self.path, spans=False).samples
        step = max(1, len(samples) // SAMPLES_SHOWN)
        return [*samples[:-1:step], *samples[-1:]]

    def _spans_of(self, index: int) -> list[Line]:
        return [span for span in read_timeline(self.path).spans if span[3] == index]


def _started(path: Path) -> float:
    try:
        facts = RunView.of(path).facts
        return datetime.fromisoformat(str(facts.get("started"))).timestamp()
    except (BatchAgentError, ValueError):
        return 0.0
