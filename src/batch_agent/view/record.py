"""The record of one run for the page, as values that can be sent as JSON.

Methods block. Use the object of a run in one thread only.
"""

from __future__ import annotations

import shlex
import time
from functools import cached_property
from typing import cast

from pydantic import JsonValue

from batch_agent.errors import BatchAgentError
from batch_agent.messages import JsonObject
from batch_agent.record.reader import RunReader, RunView
from batch_agent.record.timeline import Line, TimelineRecord
from batch_agent.view.conversation import conversation, failed_attempts
from batch_agent.view.index import RowIndex
from batch_agent.view.query import Query

SAMPLES_SHOWN = 600


class RunRecord:
    """The record of a run. ``key`` is its name in the URLs of the page. Closing it closes the reader."""

    def __init__(self, key: str, run: RunReader) -> None:
        self.key, self.run = key, run
        self._asked: JsonObject | None = None

    @cached_property
    def index(self) -> RowIndex:
        return RowIndex(self.run)

    def index_more(self) -> bool:
        """Take in the next rows; True while there is more to read. Makes the index in the thread that calls it."""
        return self.index.step()

    def close(self) -> None:
        if "index" in vars(self):
            self.index.close()
        self.run.close()

    # Pages

    def overview(self) -> JsonObject:
        """Return the numbers of the run: from the run itself, from its rows, and rows that need attention.

        ``progress`` has the rows, the tokens and the cost over all sessions; in a pipeline, of all stages.
        """
        view = self.run.view()
        now = view.progress
        timeline = self.run.timeline(spans=False)
        return {
            "run": self._identity(view),
            "progress": {
                "total": view.total,
                "ok": now.ok,
                "failed": now.failed,
                "resumed": now.resumed,
                "tokens": now.tokens,
                "cost": now.cost,
            },
            "unfinished": self.run.unfinished_count() if view.state == "interrupted" else 0,
            "status": self.run.status(),
            "summary": view.summary,
            "index": self.index.progress(),
            **self.index.numbers(),
            "samples": _thinned(timeline.samples),
            "changes": [*timeline.changes[-200:]],
        }

    def in_short(self) -> JsonObject:
        """Return one line of the list of runs."""
        view = self.run.view()
        latest = view.progress
        progress: JsonObject = {"ok": latest.ok, "failed": latest.failed, "tokens": latest.tokens, "cost": latest.cost}
        return {**self._identity(view), **progress}

    def rows(self, query: Query, sort: str, descending: bool, offset: int, limit: int) -> JsonObject:
        page = self.index.page(query, sort, descending, offset, limit)
        return {**page, "index": self.index.progress()}

    def row(self, row: str) -> JsonObject:
        """Return a finished row with its conversation, by its index or else by its id. ``record`` is None if there is
        no result, or not in the index yet."""
        found = (self.index.placed(int(row)) if row.isdecimal() else None) or self.index.placed(row)
        if found is None:
            return {"record": None, "index": self.index.progress()}
        place, record = found
        spans = [span for span in self.run.timeline().spans if span[3] == record["index"]]
        try:
            past = self.run.past(place, record)
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
            "command": self._named(),
        }

    def timeline(self, since: float | None, until: float | None, most: int) -> JsonObject:
        """Return samples, changes, and at most ``most`` spans of a period. A span of a pipeline names its row as
        STAGE/INDEX."""
        found = self.run.timeline()
        for stage in self.run.begun_stages():
            with self.run.stage(stage) as part:
                _add_stage(found, stage, part.timeline())
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

    def asked(self) -> JsonObject | None:
        """Return the recorded task and system prompt; None if the run did not record them."""
        if self._asked is None:
            headers = self.run.timeline(spans=False).headers
            self._asked = headers[-1] if headers else None
        return self._asked

    def _named(self) -> str:
        """Return the run as an argument of a command line."""
        return shlex.quote(self.run.whole)

    def _identity(self, view: RunView) -> JsonObject:
        facts = view.facts
        graph = (self.run.status() or {}).get("stages")
        return {
            "key": self.key,
            "path": self.run.name,
            "command": self._named(),
            "name": self.run.title,
            "state": view.state,
            "why": facts.get("why"),
            "model": facts.get("model"),
            "backend": facts.get("backend"),
            "total": view.total,
            "started": facts.get("started"),
            "session_started": facts.get("session_started"),
            "ended": facts.get("ended"),
            "trouble": facts.get("trouble") if view.state == "running" else None,
            "sessions": view.sessions,
            "stages": [*view.stages],
            "graph": graph if isinstance(graph, list) else None,
            "now": time.time(),
        }


def _thinned(samples: list[Line]) -> list[JsonValue]:
    """Return the samples, reduced to the number that a chart can show."""
    step = max(1, len(samples) // SAMPLES_SHOWN)
    return [*samples[:-1:step], *samples[-1:]]


def _add_stage(whole: TimelineRecord, stage: str, part: TimelineRecord) -> None:
    whole.spans.extend([*span[:3], f"{stage}/{span[3]}", *span[4:]] for span in part.spans)
