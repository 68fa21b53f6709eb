"""The numbers and words of a run that every command, page, report and API shows, so that all show the same.

``of_record`` makes them of a recorded run, ``of_statistics`` of a run in this process. One definition of each:

- tokens and cost are those of all sessions; what the latest session has spent is named as such.
- The rate is that of the latest session: its rows by its seconds.
- A cost is ``at least`` that much if the price of a part is not known.
- The state of a run that works may be ``paused`` or ``draining``. Its health says whether servers are down, and whether
  the run continues nevertheless.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, cast

from batch_agent.messages import JsonObject
from batch_agent.observe.statistics import Statistics
from batch_agent.observe.text import amount, clock, dollars, duration, harmless, rows
from batch_agent.observe.text import rate as rate_text
from batch_agent.record.reader import RunSnapshot
from batch_agent.record.rundir import stage_names

ALIVE = ("starting", "running", "paused", "draining")
WORKING = ("running", "paused", "draining")
UNPRICED: Final = "price unknown"
IDLE, STANDING_IN = "standby", "standing in"  # states of a standby, while other servers work and while none does


@dataclass(frozen=True, slots=True)
class ShownNumbers:
    """``models`` are those of all stages; ``answered_by`` counts the finished rows by the model that answered them, in
    a run with a standby. ``rate`` is in rows per second; 0 if the end of the latest session is not recorded.
    ``session`` has the tokens and $ of that session, if they are known. ``blocked_since`` is a wall-clock time."""

    state: str = ""
    total: int | None = None
    ok: int = 0
    failed: int = 0
    resumed: int = 0
    rate: float = 0.0
    tokens: int = 0
    cost: float | None = None
    at_least: bool = False
    session: tuple[int, float | None] | None = None
    sessions: int = 1
    models: tuple[str, ...] = ()
    answered_by: Mapping[str, int] = field(default_factory=dict)
    degraded: str = ""
    blocked: str = ""
    blocked_since: float = 0.0

    @property
    def done(self) -> int:
        return self.ok + self.failed

    @property
    def seconds_left(self) -> float | None:
        if self.state != "running" or not self.rate or self.total is None:
            return None
        return max(0, self.total - self.done) / self.rate

    @property
    def cost_per_row(self) -> float | None:
        return None if self.cost is None or not self.done else self.cost / self.done

    @property
    def model(self) -> str:
        return ", ".join(self.models)

    # Words

    @property
    def rate_words(self) -> str:
        left = self.seconds_left
        return rate_text(self.rate) + (f", {duration(left)} left" if left is not None else "")

    @property
    def cost_words(self) -> str:
        """Return the cost of all sessions; "" without a price."""
        return "" if self.cost is None else cost_words(self.cost, at_least=self.at_least)

    @property
    def total_words(self) -> str:
        """Return the tokens, the cost and the cost per row of all sessions."""
        words = f"{amount(self.tokens)} tokens, {self.cost_words or UNPRICED}"
        return words + ("" if self.cost_per_row is None else f", {dollars(self.cost_per_row)} a row")

    @property
    def spent_words(self) -> str:
        """Return the tokens, the cost and the cost per row of all sessions, and what the latest session has spent if
        there were others."""
        return self.total_words + (", in all sessions" if self.sessions > 1 else "") + self.session_words

    @property
    def session_words(self) -> str:
        """Return what this session has spent, if there were others."""
        if self.session is None or self.sessions <= 1:
            return ""
        tokens, cost = self.session
        return f"; this session {amount(tokens)} tokens" + ("" if cost is None else f", {dollars(cost)}")

    def health_words(self, now: float) -> tuple[str, str]:
        """Return a label and words about servers that are down; "" if none is."""
        if self.degraded:
            return "degraded", self.degraded
        if self.blocked:
            return "blocked", f"for {clock(max(0.0, now - self.blocked_since))}: {self.blocked}"
        return "", ""

    def to_json(self) -> JsonObject:
        """Return the numbers under the names that all JSON of a run uses."""
        return {
            "rows": {
                "total": self.total,
                "done": self.done,
                "ok": self.ok,
                "failed": self.failed,
                "resumed": self.resumed,
            },
            "tokens": self.tokens,
            "cost": None if self.cost is None else round(self.cost, 9),
            "cost_is_minimum": self.at_least,
            "cost_per_row": self.cost_per_row,
            "answered_by": dict(self.answered_by),
        }


def all_sessions_json(numbers: ShownNumbers) -> JsonObject:
    """Return the tokens and the cost of all sessions."""
    cost = None if numbers.cost is None else round(numbers.cost, 9)
    return {"tokens": numbers.tokens, "cost": cost, "cost_is_minimum": numbers.at_least}


def cost_words(cost: float, *, at_least: bool) -> str:
    return f"at least {dollars(cost)}" if at_least else dollars(cost)


def answered_words(counts: Mapping[str, int]) -> str:
    """Return text that says how many rows each model has answered; "" without a standby."""
    return ", ".join(f"{rows(count)} by {harmless(name)}" for name, count in counts.items())


def degraded_words(endpoints: Iterable[tuple[str, str, str]]) -> str:
    """Return text that says which servers are down while others work; "" if none is down, or if all are. ``endpoints``
    are names, states (``endpoint_state``) and reasons."""
    known = [each for each in endpoints if each[1] != IDLE]
    down = [(name, reason) for name, state, reason in known if state in ("down", "given up")]
    if not down or len(down) == len(known):
        return ""
    name, reason = down[0]
    words = f"{len(down)} of {len(known)} servers down: {harmless(name)}" + (f": {harmless(reason)}" if reason else "")
    standby = next((harmless(name) for name, state, _ in known if state == STANDING_IN), "")
    return words + (f"; the standby {standby} answers meanwhile" if standby else "")


def of_statistics(
    now: Statistics, *, paused: bool = False, endpoints: Sequence[tuple[str, str, str]] = ()
) -> ShownNumbers:
    """Return the numbers of a run in this process."""
    state = now.ended or ("paused" if paused else "draining" if now.draining else "running")
    used = now.usage.prompt_tokens + now.usage.completion_tokens
    cost = now.cost
    if now.earlier_cost:  # 0 without a price too
        cost = now.earlier_cost + (now.cost or 0.0)
    return ShownNumbers(
        state=state,
        total=now.total,
        ok=now.ok,
        failed=now.failed,
        resumed=now.resumed,
        rate=now.overall_rate,
        tokens=now.earlier_tokens + used,
        cost=cost,
        at_least=cost is not None and now.unpriced,
        session=(used, now.cost),
        sessions=2 if now.earlier_tokens else 1,
        models=(now.model,) if now.model else (),
        answered_by=now.answered_by,
        degraded=degraded_words(endpoints),
    )


def of_record(view: RunSnapshot) -> ShownNumbers:
    """Return the numbers of a recorded run, or of a stage of it."""
    facts = view.facts
    now = view.progress
    parts = view.parts
    state: str = view.state
    if state == "running":
        drains = any(part.facts.get("draining") for part in parts.values())
        state = "paused" if facts.get("paused") else "draining" if drains else state
    tokens, cost = now.tokens, now.cost
    priced = [part.latest.cost is not None for part in parts.values() if part.latest.tokens]
    unpriced = any(part.facts.get("unpriced") for part in parts.values())  # that of the model beside a standby
    at_least = cost is not None and (unpriced or not all(priced))
    session: tuple[int, float | None] | None = None
    summary = view.summary if facts.get("ended") and state not in ALIVE else None
    known = None if summary is None else summary.get("all_sessions")
    if summary is not None and isinstance(known, dict):
        tokens, cost = cast(int, known["tokens"]), cast("float | None", known["cost"])
        at_least = bool(known["cost_is_minimum"])
        used = cast("dict[str, int]", summary["tokens"])
        session = used["prompt"] + used["completion"], cast("float | None", summary["cost"])
    seconds = _seconds(view)
    rate = view.fresh_rows / seconds if seconds else 0.0
    if summary is not None and isinstance(known_rate := summary.get("rows_per_second"), int | float):
        rate = float(known_rate)
    trouble, since = facts.get("trouble"), facts.get("trouble_since")
    is_blocked = view.state == "running" and bool(trouble) and isinstance(since, int | float)
    degraded = str(facts.get("degraded") or "") if view.state == "running" else ""
    return ShownNumbers(
        state=state,
        total=view.total,
        ok=now.ok,
        failed=now.failed,
        resumed=now.resumed,
        rate=rate,
        tokens=tokens,
        cost=cost,
        at_least=at_least,
        session=session,
        sessions=max(1, view.sessions),
        models=_models(view),
        answered_by=_answered_by(view),
        degraded=degraded,
        blocked=str(trouble) if is_blocked and not degraded else "",
        blocked_since=float(cast(float, since)) if is_blocked else 0.0,
    )


def _models(view: RunSnapshot) -> tuple[str, ...]:
    """Return the models of a run, or those of the stages of a pipeline that have begun."""
    parts = view.stages.values() if stage_names(view.facts) else (view,)
    models = dict.fromkeys(str(part.facts["model"]) for part in parts if part.facts.get("model"))
    own = view.facts.get("model")
    return tuple(models) or ((str(own),) if own else ())


def _answered_by(view: RunSnapshot) -> Counter[str]:
    """Return the finished rows of all parts by the model that answered them."""
    counts = Counter[str]()
    for part in view.parts.values():
        if isinstance(known := part.facts.get("answered_by"), dict):
            counts.update(cast("dict[str, int]", known))
    return counts


def _seconds(view: RunSnapshot) -> float | None:
    """Return the seconds of the latest session so far; None if its end is not recorded, because it was killed."""
    facts = view.facts
    try:
        began = datetime.fromisoformat(str(facts.get("session_started")))
        ended = datetime.now(UTC) if view.state in ALIVE else datetime.fromisoformat(str(facts.get("ended")))
    except ValueError:
        return None
    return (ended - began).total_seconds()
