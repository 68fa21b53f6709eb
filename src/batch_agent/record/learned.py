"""A promise whose truth is the last model of a cascade: the threshold between the models is learned in the run.

The rows of the audit, whose number is fixed at the start, go to both models. When all have ended, the thresholds and
both answers of each of these rows are appended to the log of the review, at once. The threshold in force follows from
these events alone, so every process and every later session has the same. No person is asked. Methods block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Self, cast

from pydantic import JsonValue

from batch_agent.messages import JsonObject
from batch_agent.record.promise import PromiseFacts, PromiseStanding, PromiseState, RunPromise, head_rows
from batch_agent.record.reader import RunReader
from batch_agent.record.review import ReviewLog
from batch_agent.trust.promise import FIXED_GRID, Tables, Walk, band, grid
from batch_agent.trust.review import Event, Review, ReviewRow

LAST = "last"
UNKNOWN = "?"  # in place of the fingerprint of an entry whose server did not say its model


class LearnedPromise(RunPromise):
    """The promise of a run whose truth is the last model."""

    @classmethod
    def of(cls, run: RunReader, review: Review, log: ReviewLog, *, overlap: float) -> Self | None:
        known = PromiseFacts.of(run.facts())
        return None if known is None else cls(run, known, review, log)

    # The audit

    @property
    def asked(self) -> str:
        """Fingerprints of what both models are asked."""
        cascade = cast(JsonObject, self._run.facts().get("cascade") or {})
        entries = cast("list[JsonObject]", cascade.get("entries") or [])
        return " ".join([self._asked, *(str(each.get("fingerprint") or UNKNOWN) for each in entries[1:])])

    @property
    def begun(self) -> Event | None:
        found = self.review.thresholds
        if found is None or found.id != self.known.key:
            return None
        pairs = zip(found.input.split(), self.asked.split(), strict=False)
        same = all(one == other for one, other in pairs if UNKNOWN not in (one, other))
        return found if same else None

    @property
    def before(self) -> int:
        """Number of rows of the order that come before those of the audit, because another prompt was tried on them."""
        found = self.review.thresholds
        if found is None or found.id != self.known.key:
            return 0
        return found.rows if self.begun is not None else max(found.rows, len(self.review.frozen))

    @property
    def head(self) -> list[int]:
        """The rows that go to both models: those before the audit, on which another prompt was tried, then those of the
        audit, in their order."""
        wanted = min(self.before + self.known.audit, self.known.rows)
        return self._head[:wanted]

    def head_names(self) -> list[tuple[int, str]]:
        """Return positions and ids of the first rows of the order."""
        return head_rows(self._run)

    @property
    def is_complete(self) -> bool:
        """Whether the log has both answers of all rows of the audit."""
        return self.begun is not None and all(row in self.review.frozen for row in self.head)

    @property
    def threshold(self) -> float | None:
        """The largest doubt with which an answer stays; None if no threshold keeps the promise. Call it when the audit
        is complete."""
        place = self._fixed_walk().passed
        return None if place is None else self.thresholds[place]

    def record(self, answers: Mapping[int, Event], *, unanswered: bool) -> None:
        """Append the thresholds and then both answers of the rows of the audit. What an interrupted session has
        appended stays.

        ``unanswered``: a model could not be asked about some rows. They count as wrong. If no threshold passes then,
        nothing is appended: a resume asks about these rows again, and they may be right.
        """
        self.log.catch_up(self.review)
        head = self.head

        def decide(now: float) -> tuple[list[Event], None]:
            begun, frozen = self.begun, self.review.frozen
            events: list[Event] = []
            if begun is None:
                known = [doubt for row in head if (doubt := _doubt(answers[row])) is not None]
                output: list[JsonValue] = [*grid(known, FIXED_GRID)]
                begun = Event(0, "thresholds", id=self.known.key, input=self.asked, rows=self.before, output=output)
                events, frozen = [begun], {}
            events += [answers[row] for row in head if row not in frozen]
            if unanswered:
                thresholds = cast("list[float]", begun.output)
                if self._fixed_walk(thresholds, {**answers, **frozen}).passed is None:
                    return [], None
            return events, None

        self.log.change(self.review, decide)

    def freeze(self) -> None:
        """Do nothing: the run records the audit when it is complete."""

    def audit(self) -> list[ReviewRow]:
        """Return []: people do not audit."""
        return []

    def repair(self) -> Sequence[tuple[float, ReviewRow]]:
        """Return []: people do not repair."""
        return ()

    def unjudged(self) -> tuple[int, int, int]:
        """Return zeros: people do not judge."""
        return 0, 0, 0

    def audit_events(self) -> list[Event]:
        before = {*self.order_before()}
        return [event for event in super().audit_events() if event.row not in before]

    # What is proved

    def outcomes(self) -> Iterator[tuple[int, bool] | None]:
        for event, wrong, _ in self._audited(self.review.frozen):
            yield band(self.thresholds, _doubt(event)), wrong

    def _audited(self, frozen: Mapping[int, Event]) -> Iterator[tuple[Event, bool, bool]]:
        """Yield the rows of the audit in their order: the event, whether the first model is wrong, and whether the row
        is wrong if it is sent to the last model."""
        for place, index in enumerate(self.head[self.before :], start=self.before):
            event = frozen[index]
            yield event, bool(self._wrong(event, place)), self._right(event, place) is False

    def _right(self, event: Event, place: int) -> JsonObject | Literal[False] | None:
        """Return the answer of the last model; False if there is none."""
        answer = cast(JsonObject, event.output)
        if not answer.get("answered"):
            return False
        return {name: field.take(answer.get("right")) for name, field in self.fields.items()}

    def _fixed_walk(self, thresholds: Sequence[float] | None = None, frozen: Mapping[int, Event] | None = None) -> Walk:
        """Return the tests, from both answers in the log or from the given ones. A row that the last model could not
        answer is wrong at each threshold."""
        thresholds = self.thresholds if thresholds is None else thresholds
        bands = self._scan.bands(thresholds)
        bands[-1] += self.known.rows - self._scan.done
        tables = Tables.of_bands(self.promise, bands, 0.0, by_people=False)
        if frozen is None:
            if not self.is_complete:
                return Walk(tables, fixed=max(1, self.known.audit))
            frozen = self.review.frozen
        failed = sum(self._right(frozen[row], 0) is False for row in self.head[: self.before])
        walk = Walk(replace(tables, before=self.before, before_wrong=failed), fixed=len(self.head) - self.before)
        for event, wrong, sent_wrong in self._audited(frozen):
            walk.add(band(thresholds, _doubt(event)), wrong=wrong, sent_wrong=sent_wrong)
        return walk

    def standing(self, *, spent: float | None = None) -> PromiseStanding:
        self._scan.catch_up()
        known, scan = self.known, self._scan
        walk, complete = self._fixed_walk(), self.is_complete
        place = walk.passed if complete else None
        waits = 0 if place is None else walk.tables.sent[place]  # sent on, and not settled by the last model
        bound = None
        if place is not None:
            bound = walk.bound(place, replace(walk.tables, lost=[waits] * len(walk.most)))
        state, why = self._state(walk, place, waits, spent)
        return PromiseStanding(
            state=state,
            text=known.promise.text,
            why=why,
            truth=self.truth,
            rows=known.rows,
            coverage=scan.ok / known.rows if known.rows else 0.0,
            audited=walk.drawn,
            wrong=walk.wrong[place or 0] if walk.drawn else 0,
            bound=bound,
            measured=walk.measured(place or 0) if walk.drawn else None,
            threshold=None if place is None else self.thresholds[place],
            error=0.0,
            twice=0,
            judgements=0,
            audit=0 if complete else known.audit,
            repair=0,
            left=None,
            cost=None,
            next="models" if state == "not yet" else None,
            last=self.last,
        )

    def _state(self, walk: Walk, place: int | None, waits: int, spent: float | None) -> tuple[PromiseState, str]:
        known = self.known
        if place is not None:
            most = math.floor(known.promise.most_wrong(known.rows))
            proved = walk.bound(place, replace(walk.tables, lost=[waits] * len(walk.most))) * known.rows
            if self._scan.done == known.rows and round(proved) <= most:
                return "kept", f"it is proved on {walk.drawn:,} random rows, which went to both models"
        elif self.is_complete:
            wrong = f"{walk.wrong[0]:,} of {walk.drawn:,} random rows have no answer of {self.last}"
            return "impossible", f"{wrong}, so it would not be kept if all rows went there"
        if known.max_cost is not None and (spent or 0.0) >= known.max_cost:
            return "impossible", "max_cost is reached before"
        if self.review.thresholds is not None and self.begun is None:
            return "not yet", self.voided
        if place is None:
            return "not yet", f"the audit of {known.audit:,} random rows is not complete: rows wait for the models"
        return "not yet", f"{waits:,} rows wait for the models"

    @property
    def truth(self) -> str:
        return f"the answers of {self.last}, which are taken to be right"


def promise_of(run: RunReader, review: Review, log: ReviewLog, *, overlap: float) -> RunPromise | None:
    """Return the promise of a run; None if it has none."""
    known = PromiseFacts.of(run.facts())
    kind = LearnedPromise if known is not None and known.truth == LAST else RunPromise
    return kind.of(run, review, log, overlap=overlap)


def _doubt(event: Event) -> float | None:
    known = cast(JsonObject, event.output).get("doubt")
    return float(known) if isinstance(known, int | float) else None
