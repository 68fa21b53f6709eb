"""The rows and the cost of each entry of a cascade, counted from results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from pydantic import JsonValue

from batch_agent.job import AgentResult
from batch_agent.messages import JsonObject, Usage
from batch_agent.money import dollars
from batch_agent.observe.text import counted, rows

PEOPLE = "people"


@dataclass(frozen=True, slots=True)
class EntryCount:
    """The numbers of one entry, over all sessions. ``asked``: rows that went to the entry. ``answered``: rows whose
    answer from it stays. ``cost`` is None if no price is known."""

    name: str
    asked: int = 0
    answered: int = 0
    tokens: int = 0
    cost: float | None = None

    def more(self, usage: Usage, cost: float | None, *, stays: bool) -> EntryCount:
        return replace(
            self,
            asked=self.asked + 1,
            answered=self.answered + stays,
            tokens=self.tokens + usage.prompt_tokens + usage.completion_tokens,
            cost=self.cost if cost is None else cost + (self.cost or 0.0),
        )

    def to_json(self) -> JsonObject:
        return {
            "name": self.name,
            "asked": self.asked,
            "answered": self.answered,
            "tokens": self.tokens,
            "cost": None if self.cost is None else round(self.cost, 9),
        }


@dataclass(frozen=True, slots=True)
class CascadeCount:
    """The numbers of a cascade. ``done``: rows with a result. ``waiting``: rows that wait for people or for an entry
    that did not answer, by its name."""

    entries: tuple[EntryCount, ...]
    done: int
    waiting: tuple[tuple[str, int], ...] = ()

    @property
    def for_people(self) -> int:
        return dict(self.waiting).get(PEOPLE, 0)

    @property
    def away(self) -> tuple[str, int] | None:
        """A model that did not answer, and the number of rows that wait for it; None if there is none."""
        return next(((name, count) for name, count in self.waiting if name != PEOPLE), None)

    @property
    def last_alone(self) -> float | None:
        """What the last model alone would have cost in $: the mean cost of the rows that it was asked about, times all
        rows. None if unknown."""
        last = self.entries[-1]
        return self.done * last.cost / last.asked if last.cost is not None and last.asked else None

    def lines(self) -> list[str]:
        """Return the lines of a summary."""
        lines = []
        for entry in self.entries:
            cost = "" if entry.cost is None else f", {dollars(entry.cost)}"
            lines.append(f"{entry.name}: asked {rows(entry.asked)}, answered {entry.answered:,}{cost}")
        if (alone := self.last_alone) is not None and len(self.entries) > 1:
            last = self.entries[-1]
            lines.append(f"{last.name} alone: about {dollars(alone)}, by the {counted(last.asked, 'row')} it was asked")
        for name, count in self.waiting:
            waits = "waits" if count == 1 else "wait"
            people = f"people: {rows(count)} came to them"
            lines.append(people if name == PEOPLE else f"{rows(count)} {waits} for {name}")
        return lines

    def to_json(self) -> JsonObject:
        alone = self.last_alone
        entries: list[JsonValue] = [entry.to_json() for entry in self.entries]
        waiting: JsonObject = dict(self.waiting)
        return {
            "entries": entries,
            "waiting": waiting,
            "last_alone": None if alone is None else round(alone, 9),
        }


def recorded_lines(summary: JsonObject) -> list[str]:
    """Return the lines about a cascade in the summary of an ended session; [] without a cascade."""
    found: Any = summary.get("cascade")
    if not isinstance(found, dict):
        return []
    try:
        entries = tuple(EntryCount(**entry) for entry in found["entries"])
        return CascadeCount(entries, cast(Any, summary["rows"])["done"], tuple(found["waiting"].items())).lines()
    except (AttributeError, LookupError, TypeError):  # of another version, or damaged
        return []


class EntryCounts:
    """Counts the results of a run with a cascade. ``names`` are those of its models."""

    def __init__(self, names: Sequence[str]) -> None:
        self._entries = {name: EntryCount(name) for name in names}
        self._waiting: Counter[str] = Counter()
        self._done = 0

    def took(self, result: AgentResult[object]) -> None:
        """Count one result."""
        self._done += 1
        usage, cost = result.usage, result.cost
        for each in result.earlier:
            self._add(each.name, each.usage, each.cost, stays=False)
            usage = _less(usage, each.usage)
            cost = None if cost is None else cost - (each.cost or 0.0)
        # A row that failed has the failure of its last entry, which is no answer.
        last = result.answered_by or self._last_of(result)
        if last is not None:
            self._add(last, usage, cost, stays=result.answered_by is not None)
        if result.waits_for is not None:
            self._waiting[result.waits_for] += 1

    def _last_of(self, result: AgentResult[object]) -> str | None:
        """Return the name of the entry whose failure is the result of the row; None if no entry was asked."""
        names = [*self._entries]
        place = len(result.earlier)
        return names[place] if result.attempts and place < len(names) else None

    def _add(self, name: str, usage: Usage, cost: float | None, *, stays: bool) -> None:
        known = self._entries.get(name, EntryCount(name))  # of an entry that an earlier session had
        self._entries[name] = known.more(usage, cost, stays=stays)

    def count(self) -> CascadeCount:
        return CascadeCount(tuple(self._entries.values()), self._done, tuple(self._waiting.items()))


def _less(whole: Usage, part: Usage) -> Usage:
    return replace(
        whole,
        prompt_tokens=whole.prompt_tokens - part.prompt_tokens,
        completion_tokens=whole.completion_tokens - part.completion_tokens,
    )


def first_count(counts: Iterable[EntryCounts | None]) -> CascadeCount | None:
    """Return the numbers of the first cascade among these runs, which are one run or the stages of a pipeline."""
    return next((each.count() for each in counts if each is not None), None)
