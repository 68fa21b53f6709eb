"""What the pilot of a run says about all rows: cost and time with intervals, and what so few rows cannot show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from batch_agent.job import AgentResult, Failure, cut
from batch_agent.messages import JsonObject
from batch_agent.observe.text import clock, dollars, harmless, rows
from batch_agent.trust.intervals import Share, share
from batch_agent.trust.totals import Total, total

EXAMPLES = 3  # rows that are shown
SHOWN_CHARACTERS = 70  # of an input and of an answer


class RowWork(NamedTuple):
    """The work of a row: $, seconds of work, and seconds of work in this session. ``ok``: the row did not fail."""

    ok: bool
    cost: float | None
    seconds: float
    fresh: float


NO_WORK = RowWork(True, None, 0.0, 0.0)


def work_of(result: AgentResult[Any]) -> RowWork:
    seconds = result.timings.inference + result.timings.tool_wait
    return RowWork(result.ok, result.cost, seconds, 0.0 if result.resumed else seconds)


def together(one: RowWork, other: RowWork) -> RowWork:
    """Return the work of a row in two stages."""
    known = [each.cost for each in (one, other) if each.cost is not None]
    cost = sum(known) if known else None
    return RowWork(one.ok and other.ok, cost, one.seconds + other.seconds, one.fresh + other.fresh)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a pilot says about all rows. ``rows`` of ``of`` rows were in the pilot, and ``done`` of them have a result.
    ``cost`` ($) and ``seconds`` are those of all rows; None if they are unknown. ``at_once``: rows that were in
    progress at once, on average. ``most``: the cost of all rows that cannot be exceeded. ``failed``: the share of rows
    that fail. ``unseen``: the largest share of rows that may have a property that no row of the pilot has."""

    rows: int
    of: int
    done: int
    ok: int
    cost: Total | None
    seconds: Total | None
    at_once: float
    most: float | None
    failed: Share
    unseen: float

    @classmethod
    def made_of(cls, work: Sequence[RowWork], *, rows: int, of: int, elapsed: float, most: float | None) -> Outlook:
        """Return the outlook. ``work`` is that of the rows of the pilot, which has ``rows`` of the ``of`` rows of the
        table. ``elapsed``: seconds from its first row to its last."""
        paid = any(each.cost is not None for each in work)
        cost = total([each.cost or 0.0 for each in work], of) if paid else None
        fresh = math.fsum(each.fresh for each in work)
        at_once = max(1.0, fresh / elapsed) if fresh and elapsed > 0 else 0.0
        seconds = total([each.seconds / at_once for each in work], of) if at_once else None
        done = len(work)
        ok = sum(each.ok for each in work)
        failed = share(done - ok, done, of)
        return cls(rows, of, done, ok, cost, seconds, at_once, most, failed, share(0, done, of).at_most)

    def to_json(self) -> JsonObject:
        return {
            "rows": self.rows,
            "of": self.of,
            "done": self.done,
            "ok": self.ok,
            "failed": {
                "share": (self.done - self.ok) / self.done if self.done else None,
                "interval": [*self.failed.interval],
                "bound": self.failed.at_most,
            },
            "cost": _total_json(self.cost),
            "most_cost": self.most,
            "seconds": _total_json(self.seconds),
            "at_once": round(self.at_once, 3),
            "unseen": self.unseen,
        }

    def lines(self) -> list[str]:
        """Return lines that describe the outlook."""
        found = [f"all {rows(self.of)}, from the {self.done:,} of the pilot (two-sided 95 % intervals, bootstrap-t):"]
        if self.cost is not None:
            found.append(f"  cost     about {dollars(self.cost.value)}{_between(self.cost, dollars)}")
        else:
            found.append("  cost     unknown: no price is known")
        if self.seconds is not None:
            known = _between(self.seconds, clock)
            if_same = f", if as many rows are in progress at once as in the pilot: {self.at_once:.1f} on average"
            found.append(f"  time     about {clock(self.seconds.value)}{known}{if_same}")
        if self.cost is not None or self.seconds is not None:
            found.append("  A row that is dearer or slower than those seen here is not in these numbers.")
        if self.most is not None:
            found.append(
                f"  at most  {dollars(self.most)}, if each row uses all of its turns, repairs and max_tokens (requests "
                "that fail at the server are not in it)"
            )
        elif self.cost is not None:
            found.append("  at most  no upper bound: max_tokens and max_turns do not bound what a row costs here")
        if self.done:
            bound = f"at most {self.failed.at_most:.1%} of all rows fail (95 % bound)"
            found.append(f"  failed   {self.done - self.ok:,} of {self.done:,}: {bound}")
            one_in = f", 1 row in {round(1 / self.unseen):,}," if self.unseen < 0.5 else ","
            found.append(
                f"  not seen: {rows(self.done)} cannot show what fewer than {self.unseen:.1%} of the rows have{one_in} "
                "such as a rare kind of row or a rare wrong answer"
            )
        return found


def examples(results: Sequence[AgentResult[Any]]) -> list[str]:
    """Return lines that show some rows with their answers, and one failed row of each kind."""
    lines = [
        f"  row {harmless(result.job_id, 30)}: {_short(result.input)} → {_short(result.output)}"
        for result in [each for each in results if each.ok][:EXAMPLES]
    ]
    failed = [result for result in results if isinstance(result, Failure)]
    kinds = Counter(result.error.type for result in failed)
    for kind, count in kinds.most_common():
        one = next(each for each in failed if each.error.type == kind)
        message = harmless(cut(one.error.message, 200))
        lines.append(f"  failed, {count:,} {kind}: for example row {harmless(one.job_id, 30)}: {message}")
    return lines


def _short(value: object) -> str:
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception:  # the value's class is user code  # noqa: BLE001
        text = type(value).__name__
    return harmless(cut(text, SHOWN_CHARACTERS))


def _between(found: Total, words: Callable[[float], str]) -> str:
    low, high = found.interval
    if math.isinf(high):
        return f" (at least {words(low)}; too few rows differ in it for an upper end)"
    return f" ({words(low)} to {words(high)})" if low != high else ""


def _total_json(found: Total | None) -> JsonObject | None:
    if found is None:
        return None
    low, high = found.interval
    return {
        "estimate": found.value,
        "interval": [low, None if math.isinf(high) else high],
        "bound": None if math.isinf(found.at_most) else found.at_most,
    }
