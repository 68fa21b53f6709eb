"""The history of a run in Redis as samples of a timeline: made of the rows that finished and of what workers report."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import cast

from batch_agent.messages import JsonObject
from batch_agent.record.steps import Spent, Step, read_past
from batch_agent.record.timeline import SAMPLE, Line

MOST_SAMPLES = 1000  # of the time before the copy began


class History:
    """Counts rows by the second in which they began and ended."""

    def __init__(self) -> None:
        self._began: Counter[int] = Counter()
        self._ended: defaultdict[int, list[float]] = defaultdict(lambda: [0.0] * 6)
        self._totals = [0.0] * 6  # done, failed, prompt, cached and completion tokens, cost

    def add(self, place: str, record: JsonObject) -> None:
        """Count a result. ``place`` is its id in the stream of results, which has the time."""
        at = int(place.partition("-")[0]) / 1000
        usage, timings = cast(JsonObject, record.get("usage") or {}), cast(JsonObject, record.get("timings") or {})
        values = [
            1.0,
            float(not record.get("ok")),
            *(float(cast(int, usage.get(f"{kind}_tokens") or 0)) for kind in ("prompt", "cached", "completion")),
            float(cast(float, record.get("cost") or 0.0)),
        ]
        second = self._ended[int(at)]
        for number, value in enumerate(values):
            second[number] += value
            self._totals[number] += value
        self._began[int(at - cast(float, timings.get("total") or 0.0))] += 1

    def samples(self) -> list[Line]:
        """Return samples of the time in which the counted rows ran."""
        lines: list[Line] = []
        totals, running = [0.0] * 6, 0
        seconds = sorted({*self._began, *self._ended})
        step = max(1, len(seconds) // MOST_SAMPLES)
        for number, second in enumerate(seconds):
            ended = self._ended.get(second, [0.0] * 6)
            totals = [total + value for total, value in zip(totals, ended, strict=True)]
            running += self._began[second] - int(ended[0])
            if number % step == 0 or second == seconds[-1]:
                lines.append(_line(float(second), totals, [running, 0, 0, 0], {}))
        return lines

    def sample(self, at: float, workers: Sequence[JsonObject]) -> Line:
        """Return a sample of the present."""
        names, agents = ("running", "queued", "tools", "backing_off"), Counter[str]()
        for worker in workers:
            agents.update(cast("dict[str, int]", worker.get("agents") or {}))
        endpoints: JsonObject = {
            str(each.get("name")): [each.get("inflight"), each.get("limit"), each.get("state")]
            for each in endpoints_of(workers)
        }
        return _line(at, self._totals, [agents[name] for name in names], endpoints)


def spans_of(place: str, record: JsonObject, steps: Iterable[Step]) -> list[Line]:
    """Return the turns and tool calls of a finished row. Their times are computed back from its end."""
    spans: list[Line] = []
    timings = cast(JsonObject, record.get("timings") or {})
    began = int(place.partition("-")[0]) / 1000 - cast(float, timings.get("total") or 0.0)
    try:
        turns, before = read_past(1, list(steps)).turns, Spent()
    except ValueError:
        return spans
    waits = [*(turn.spent.tool_wait for turn in turns[1:]), cast(float, timings.get("tool_wait") or 0.0)]
    for number, (turn, wait) in enumerate(zip(turns, waits, strict=False), start=1):
        spent, usage = turn.spent, turn.reply.usage
        end = began + spent.total
        start, waited = end - max(0.0, spent.inference - before.inference), max(0.0, spent.queued - before.queued)
        tokens = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        index = record["index"]
        spans.append(["turn", start, end, index, number, "", round(waited, 3), 0.0, "", "", *tokens, None])
        for call in turn.reply.tool_calls:
            spans.append(["tool", end, end + max(0.0, wait - spent.tool_wait), index, number, call.name, True, ""])
        before = spent
    return spans


def endpoints_of(workers: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the endpoints of all workers: requests in flight are added, and the worst state counts."""
    found: dict[str, JsonObject] = {}
    inflight: Counter[str] = Counter()
    for worker in workers:
        for each in cast("list[JsonObject]", worker.get("endpoints") or []):
            name = str(each.get("name"))
            inflight[name] += cast(int, each.get("inflight") or 0)
            known = found.get(name)
            if known is None or (known.get("state") == "healthy" and each.get("state") != "healthy"):
                found[name] = each
    return [{**each, "inflight": inflight[name]} for name, each in found.items()]


def _line(at: float, totals: Sequence[float], agents: Sequence[int], endpoints: JsonObject) -> Line:
    done, failed, prompt, cached, completion, cost = totals
    counts = (int(done), int(failed), *agents, int(prompt), int(cached), int(completion))
    return [SAMPLE, round(at, 3), *counts, cost or None, endpoints, None]
