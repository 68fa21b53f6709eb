"""The record of one run for the page, as values that can be sent as JSON.

Methods block. Use the object of a run in one thread only.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable
from functools import cached_property
from typing import cast

from pydantic import JsonValue

from batch_agent.errors import BatchAgentError
from batch_agent.messages import JsonObject
from batch_agent.record.reader import RunReader, RunSnapshot
from batch_agent.record.rundir import stage_names
from batch_agent.record.timeline import Line
from batch_agent.view.conversation import conversation, failed_attempts
from batch_agent.view.index import RowIndex
from batch_agent.view.query import Query

SAMPLES_SHOWN = 600


class RunRecord:
    """The record of a run. ``key`` is its name in the URLs of the page. Closing it closes the reader."""

    def __init__(self, key: str, run: RunReader) -> None:
        self.key, self.run = key, run
        self._asked: JsonObject | None = None
        self._stages: dict[str, RunRecord] = {}  # the stages of a pipeline that have begun

    @cached_property
    def index(self) -> RowIndex:
        return RowIndex(self.run)

    def index_more(self) -> bool:
        """Take in the next rows; True while there is more to read. Makes the index in the thread that calls it."""
        if self.index.step() or any(stage.index.step() for stage in self._stages.values()):
            return True
        return self._take_stages(self.run.begun_stages())

    def _take_stages(self, begun: Iterable[str]) -> bool:
        """Open the stages that have begun; returns whether there are new ones."""
        new = [name for name in begun if name not in self._stages]
        self._stages |= {name: RunRecord(f"{self.key}/{name}", self.run.stage(name)) for name in new}
        return bool(new)

    def progress(self) -> JsonObject:
        """Return how far the rows are indexed; for a pipeline, those of its stages."""
        each = [stage.index.progress() for stage in self._stages.values()] or [self.index.progress()]
        return {
            "rows": sum(cast(int, one["rows"]) for one in each),
            "complete": all(one["complete"] for one in each),
            "share": min(cast(float, one["share"]) for one in each),
        }

    def numbers(self) -> JsonObject:
        """Return counts, failures and unusual rows; for a pipeline, those of its stages with ``stage``."""
        if not self._stages:
            return self.index.numbers()
        each = {name: stage.index.numbers() for name, stage in self._stages.items()}
        lists: JsonObject = {
            kind: [{**row, "stage": name} for name, one in each.items() for row in cast("list[JsonObject]", one[kind])]
            for kind in ("failures", "unusual")
        }
        return {**lists, "counts": _sum([cast(JsonObject, one["counts"]) for one in each.values()])}

    def close(self) -> None:
        for stage in self._stages.values():
            stage.close()
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
        step = max(1, len(timeline.samples) // SAMPLES_SHOWN)
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
            "index": self.progress(),
            **self.numbers(),
            "samples": [*timeline.samples[:-1:step], *timeline.samples[-1:]],
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
        found, view = self.run.timeline(), self.run.view()
        found.spans[:] = [_labelled(span, span[3], view.facts.get("backend")) for span in found.spans]
        self._take_stages(view.stages)
        for stage, part in view.stages.items():
            server = f"{part.facts.get('backend')}, {part.facts.get('model')}"
            spans = self._stages[stage].run.timeline().spans
            found.spans.extend(_labelled(span, f"{stage}/{span[3]}", server) for span in spans)
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

    def _graph(self, view: RunSnapshot) -> list[JsonObject]:
        """Return the stages of a pipeline with the rows of each. A run in Redis does not record what follows what: its
        stages are shown in order."""
        known = (self.run.status() or {}).get("stages")
        nodes = [cast(JsonObject, node) for node in known] if isinstance(known, list) else []
        names = stage_names(view.facts)
        if not nodes:
            befores = [None, *names[:-1]]
            nodes = [
                {"name": name, "kind": "", "after": [] if before is None else [before]}
                for name, before in zip(names, befores, strict=False)
            ]
        return [{**node, "status": _standing(view.stages.get(str(node["name"])))} for node in nodes]

    def _named(self) -> str:
        """Return the run as an argument of a command line."""
        return shlex.quote(self.run.whole)

    def _identity(self, view: RunSnapshot) -> JsonObject:
        facts = view.facts
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
            "graph": [*self._graph(view)] or None,
            "now": time.time(),
        }


def _standing(stage: RunSnapshot | None) -> JsonObject | None:
    if stage is None:
        return None
    now = stage.progress
    rows: JsonObject = {"total": stage.total, "done": now.ok + now.failed, "ok": now.ok, "failed": now.failed}
    return {"state": stage.state, "rows": rows}


def _sum(counts: list[JsonObject]) -> JsonObject:
    """Return the counts of several stages together. Times per row of different stages have no common mean."""
    whole: JsonObject = {"seconds": None}
    for name, value in counts[0].items():
        if isinstance(value, dict):
            whole[name] = _sum([cast(JsonObject, each[name]) for each in counts])
        elif name != "seconds":
            known = [each[name] for each in counts if each[name] is not None]
            whole[name] = sum(cast("list[float]", known)) if known else None
    return whole


def _labelled(span: Line, row: JsonValue, server: JsonValue) -> Line:
    """Return a span with the name of its row, and of its endpoint if the backend has only one."""
    label = span[5] or server if span[0] == "turn" else span[5]
    return [*span[:3], row, span[4], label, *span[6:]]
