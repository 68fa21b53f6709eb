"""A promise about a run's table, as its record knows it: the rows of its audit, what is proved, what is left to do.

``RunPromise`` reads the facts of the run, its finished rows and the log of its review, and appends to that log alone:
the thresholds once, when the first answer of the audit is opened, and each answer before a person sees its row. So
all that is decided can be decided again from the record, with the same outcome. Methods block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from typing import Literal, NamedTuple, Self, cast

from pydantic import JsonValue

from batch_agent.files.gold import GOLD_FACT
from batch_agent.files.results import from_json, to_json
from batch_agent.messages import JsonObject
from batch_agent.money import dollars
from batch_agent.record.doubts import NEVER, FinishedDoubts, doubt_of, input_digest
from batch_agent.record.reader import RunReader
from batch_agent.record.review import ReviewLog
from batch_agent.record.rundir import GOLD, SCHEMA
from batch_agent.trust.forecast import WIDEST, Workload, interval, plan, possible
from batch_agent.trust.gold import GoldField
from batch_agent.trust.order import KeyedOrder
from batch_agent.trust.promise import (
    PEOPLE_ERROR,
    TWICE,
    Promise,
    Tables,
    Walk,
    band,
    first_step,
    grid,
    outcomes_in_order,
    people_error,
    promised_fields,
)
from batch_agent.trust.review import AUDIT, REPAIR, Event, Review, ReviewRow
from batch_agent.trust.table import GoldTable

PROMISE = "promise"  # the fact of a run that has one
HEAD = "audit.jsonl"  # the first rows of the audit's order
HEAD_ROWS = 10_000
ROWS_AT_ONCE = 500  # records read together
SUMS = 2**128

PromiseState = Literal["kept", "not yet", "impossible"]
NextStep = Literal["models", "audit", "repair"]


def row_digest(name: str, content: bytes) -> int:
    """Return the digest of a row, from its id and the digest of its input (``keys.row_of``). The sum over all rows
    identifies the table, in any order."""
    return int.from_bytes(blake2b(content + name.encode("utf-8", "surrogatepass"), digest_size=16).digest())


def audit_key(promise: Promise, rows: int, digest: str, beacon: str | None) -> str:
    """Return the key that draws the rows of the audit. It follows from the rows and the promise, so that people cannot
    choose it."""
    made = [promise.field, str(promise.share), rows, digest, beacon or ""]
    return blake2b(to_json(made), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class PromiseFacts:
    """What a run records about its promise when it starts."""

    promise: Promise
    rows: int
    digest: str  # of all rows
    key: str
    pilot: int = 0
    people_error: float = PEOPLE_ERROR
    max_people: int | None = None
    max_cost: float | None = None
    price: float | None = None
    truth: str | None = None
    beacon: str | None = None
    doubt: bool = True  # answers have one
    tolerance: Mapping[str, float] | None = None
    audit: int = 0  # rows of an audit whose size is fixed, by the last model of a cascade

    def to_json(self) -> JsonObject:
        promise = self.promise
        named = {"text": promise.text, "field": promise.field, "share": str(promise.share)}
        names = [name for name in self.__dataclass_fields__ if name != "promise"]
        return {**named, **{name: getattr(self, name) for name in names}}

    @classmethod
    def of(cls, facts: JsonObject) -> PromiseFacts | None:
        """Return the promise in the facts of a record; None if the run has none."""
        known = facts.get(PROMISE)
        if not isinstance(known, dict) or not known.get("key"):
            return None
        promise = Promise(str(known["text"]), str(known["field"]), Fraction(str(known["share"])))
        names = [name for name in cls.__dataclass_fields__ if name != "promise"]
        return cls(promise, **{name: known[name] for name in names if name in known})  # type: ignore[arg-type]

    @property
    def first(self) -> int:
        return first_step(self.promise, self.pilot)


class PromiseStanding(NamedTuple):
    """How a promise stands. ``bound`` and ``measured`` are shares of wrong rows in the table at ``threshold``; None if
    nothing is proved, or no row was seen. ``left``: the 80 % interval of the judgements that are left; ``cost``: their
    price. ``error``: the error of people; ``twice``: number of rows that two people judged. ``next``: what must be done
    next. ``voided``: the reason why an audit in which people had judged rows began again, or ""."""

    state: PromiseState
    text: str
    why: str
    truth: str
    rows: int
    coverage: float
    audited: int
    wrong: int
    bound: float | None
    measured: float | None
    threshold: float | None
    error: float
    twice: int
    judgements: int
    audit: int
    repair: int
    left: tuple[int, int] | None
    cost: tuple[float, float] | None
    next: NextStep | None
    last: str | None = None  # the model whose answers are the truth
    voided: str = ""

    @property
    def kept(self) -> bool:
        return self.state == "kept"

    @property
    def left_words(self) -> str:
        """The judgements that are left, as text. If the interval is wider than a factor of ten, only its lower end is
        given."""
        if self.left is None:
            return ""
        low, high = self.left
        if high > WIDEST * max(1, low):
            return f"at least {max(1, low):,} judgements are left, nobody can say yet how many"  # words: ok
        words = f"{low:,} to {high:,} judgements are left (80 %)" if low < high else f"{low:,} judgements are left"
        if self.cost is not None:
            words += f", {dollars(self.cost[0])} to {dollars(self.cost[1])}"
        return words

    def lines(self, run: str = "") -> list[str]:
        """Return lines that say how the promise stands. ``run`` is the run's name in commands."""
        state = "not yet kept" if self.state == "not yet" else self.state
        found = [f"{self.text} is {state}: {self.why}"]
        if self.bound is not None:
            measured = (
                "" if self.measured is None else f", {self.measured:.2%} measured ({self.audited:,} rows audited)"
            )
            words = f"at most {self.bound:.2%} of {self.rows:,} rows are wrong (95 %){measured}"
            found.append(f"{words}; coverage {self.coverage:.3f}")
        found.append(f"by {self.truth}" + (f"; {self._people_words()}" if self.last is None else ""))
        if self.voided:
            found.append(self.voided)
        if not self.kept and self.left_words:
            found.append(self.left_words)
        if not self.kept and self.next in ("audit", "repair") and run:
            found.append(f"next: batch-agent review {run}")
        return found

    def _people_words(self) -> str:
        how = f"measured on {self.twice} rows that two people judged" if self.twice >= TWICE else "assumed"
        return f"repaired rows count as wrong with {self.error:.3g} ({how}; outside the 95 %)"

    def to_json(self) -> JsonObject:
        found = {name: value for name, value in self._asdict().items() if name not in ("text", "left", "cost")}
        left = None if self.left is None else [*self.left]
        cost = None if self.cost is None else [*self.cost]
        wide = self.left is not None and self.left[1] > WIDEST * max(1, self.left[0])
        words = {"words": self.left_words or None, "interval": left, "cost": cost, "wide": wide}
        return {"promise": self.text, **found, "left": None if left is None else cast(JsonValue, words)}


class RunPromise:
    """The promise of a run. ``review`` has the events of ``log``; the owner of both keeps them up to date."""

    def __init__(
        self,
        run: RunReader,
        known: PromiseFacts,
        review: Review,
        log: ReviewLog,
        *,
        gold: GoldTable | None = None,
        looks: int = 0,
        overlap: float = 0.0,
    ) -> None:
        """``looks``: how many other prompts were scored on this gold before. If there are any, gold of a pilot is no
        truth for this prompt."""
        self._run = run
        self.known = known
        self.review = review
        self.log = log
        self._gold = gold
        self._sent: tuple[object, list[tuple[float, ReviewRow]]] | None = None  # the rows to repair
        self._known_walk: tuple[object, tuple[Walk, Workload, list[int]]] | None = None
        self._overlap = overlap
        self.looked = bool(gold is not None and known.pilot and looks)
        facts = run.facts()
        self._asked = str(facts.get("fingerprint"))
        schema = facts.get(SCHEMA)
        self.promise, self.fields = promised_fields(
            known.promise, schema if isinstance(schema, dict) else None, known.tolerance
        )
        self.last = _last_model(facts) if known.truth == "last" else ""
        self._scan: FinishedDoubts = FinishedDoubts(run, doubt=known.doubt, last=self.last)
        self._full: list[int] | None = None

    @classmethod
    def of(cls, run: RunReader, review: Review, log: ReviewLog, *, overlap: float) -> Self | None:
        """Return the promise of a run; None if it has none."""
        facts = run.facts()
        known = PromiseFacts.of(facts)
        if known is None:
            return None
        if not isinstance(facts.get(GOLD_FACT), dict):
            return cls(run, known, review, log, overlap=overlap)
        pilot = frozenset(index for index, _ in head_rows(run)[: known.pilot])
        gold = GoldTable.of_lines((line for line in run.kept_lines(GOLD) if _index_of(line) in pilot), by_name=False)
        score = (run.view().summary or {}).get("score")
        looks = score.get("looks") if isinstance(score, dict) else 0
        looks = looks if isinstance(looks, int) else 1  # unknown: the ledger could not be read
        return cls(run, known, review, log, gold=gold, looks=looks, overlap=overlap)

    def close(self) -> None:
        self._scan.close()

    def catch_up(self) -> None:
        """Read the rows that are new."""
        self._scan.catch_up()

    def priced(self, promise: Promise) -> Self:
        """Return another promise about the same table, measured by the audit of this one. It proves nothing, because
        the rows were not drawn for it."""
        known, looks = replace(self.known, promise=promise), int(self.looked)
        return type(self)(self._run, known, self.review, self.log, gold=self._gold, looks=looks, overlap=self._overlap)

    def recounted(self, counts: FinishedDoubts, order: Sequence[int]) -> None:
        """Use these counts of the rows and this order of the audit, which another reader has made."""
        self._scan.close()
        self._scan = counts
        self._head = [*order]
        self._full = []

    # The order of the audit

    @cached_property
    def _head(self) -> list[int]:
        return [index for index, _ in head_rows(self._run)]

    def _order(self, place: int) -> int | None:
        """Return the row at a place of the order; None if it is not known yet, or if the place is behind the last
        row."""
        if place < len(self._head):
            return self._head[place]
        if self._scan.done < self.known.rows or place >= self.known.rows:
            return None
        if self._full is None:
            order = KeyedOrder(self.known.key)
            ranked = ((order.rank(str(row.get("job_id"))), cast(int, row["index"])) for row in self._run.rows)
            self._full = [index for _, index in sorted(ranked)]
        return self._full[place] if place < len(self._full) else None

    @property
    def begun(self) -> Event | None:
        """The event that began the audit; None if there is no audit of this prompt and these rows."""
        found = self.review.thresholds
        if found is None or (found.id, found.input) != (self.known.key, self._asked):
            return None
        return found

    @property
    def voided(self) -> str:
        """The reason why an audit in which people had judged rows began again, or must begin again; "" if there is
        none."""
        found = self.review.thresholds if self.begun is None else self.review.replaced
        if found is None:
            return ""
        what = "rows or the promise" if found.id != self.known.key else "prompt, the model or the schema"
        how = "begins" if self.begun is None else "began"
        count = self._next_offset() if self.begun is None else self.before
        old = f": its first {count:,} rows prove nothing about what is there now" if count else ""
        return f"the {what} changed after the audit began, so it {how} again{old}"

    def order_before(self) -> list[int]:
        """Return the rows of the order that come before those of the audit."""
        return [index for place in range(self.before) if (index := self._order(place)) is not None]

    @property
    def thresholds(self) -> tuple[float, ...]:
        found = self.begun
        return grid(()) if found is None else tuple(cast("list[float]", found.output))

    @property
    def before(self) -> int:
        """Number of rows of the order that come before those of the audit."""
        found = self.begun
        return 0 if found is None else found.rows

    def freeze(self) -> None:
        """Record the thresholds, and the answers of the rows that people may see next. Call it before a row is given to
        a person, and before a result of the audit is used."""
        self._scan.catch_up()

        def decide(now: float) -> tuple[list[Event], None]:
            events: list[Event] = []
            begun, frozen = self.begun, self.review.frozen
            if begun is None:
                first = self._order(self._next_offset())
                if first is None or not self._scan.is_done(first):
                    return [], None
                begun, frozen = self._first_event(), {}
                events.append(begun)
            for index in self._ready(begun.rows, self._wanted(begun), frozen):
                events.append(self._frozen(index))
            return events, None

        self.log.change(self.review, decide)

    def _next_offset(self) -> int:
        """Return how many rows of the order come before an audit that begins now. If a prompt was changed after rows
        were audited, it is proved on the rows after these."""
        found = self.review.thresholds
        least = self.known.pilot if self.looked else 0
        if found is None or found.id != self.known.key:
            return least
        last = place = found.rows
        while (index := self._order(place)) is not None and index in self.review.frozen:
            place += 1
            if self.review.verdict(index, AUDIT).kind != "open":
                last = place
        return max(last, least)

    def _first_event(self) -> Event:
        known = [doubt for doubt in self._scan.doubts if doubt < NEVER]
        return Event(
            0,
            "thresholds",
            id=self.known.key,
            input=self._asked,
            rows=self._next_offset(),
            output=[*grid(known)],
        )

    def _wanted(self, begun: Event) -> int:
        """Return how many rows the audit must have."""
        if begun is not self.review.thresholds:
            return self.known.first
        walk, work, _ = self._walked()
        return walk.drawn + work.audit

    def _ready(self, before: int, wanted: int, frozen: Mapping[int, Event]) -> Iterator[int]:
        """Yield the rows at the beginning of the audit that can be frozen now."""
        for place in range(before, before + wanted):
            index = self._order(place)
            if index is None or not self._scan.is_done(index):
                return
            if index not in frozen:
                yield index

    def _frozen(self, index: int) -> Event:
        [record] = self._scan.records([index])
        assert record is not None, "a finished row has a record"
        doubt = doubt_of(record, doubt=self.known.doubt)
        answer: JsonObject = {"ok": bool(record.get("ok")), "output": cast(JsonValue, record.get("output"))}
        answer["doubt"] = None if doubt == NEVER else doubt
        return Event(
            0,
            "frozen",
            row=index,
            id=str(record.get("job_id")),
            queue=AUDIT,
            input=input_digest(record.get("input")),
            output=answer,
        )

    # What people see

    def audit(self) -> list[ReviewRow]:
        """Return the rows of the audit that people may see, in its order."""
        found = []
        wanted = self._wanted(self.begun) if self.begun is not None else 0
        for place in range(self.before, self.before + wanted):
            index = self._order(place)
            event = None if index is None else self.review.frozen.get(index)
            if event is None:
                break
            found.append(ReviewRow(event.row, event.id, AUDIT, event.input))
        return found

    def unjudged(self) -> tuple[int, int, int]:
        """Return three numbers: how many more random rows people must judge, as far as is known; how many of these the
        models have finished; and how many of those ``audit`` returns, whose answers are recorded when a person asks for
        a row."""
        walk, work, _ = self._walked()
        wanted = walk.drawn + work.audit
        before = self._next_offset() if self.begun is None else self.before
        judged = sum(each is not None for each in islice(self.outcomes() if self.begun else (), wanted))
        ready = [*self._ready(before, wanted, {})] if self.known.truth != "gold" else []
        return wanted - judged, max(0, len(ready) - judged), sum(row not in self.review.frozen for row in ready)

    def repair(self) -> Sequence[tuple[float, ReviewRow]]:
        """Return the rows that people should repair, each with its doubt: those above the threshold that the audit has
        reached. Empty before that."""
        if self.begun is None:
            return ()
        _, work, _ = self._walked()
        if work.audit or work.threshold is None:
            return ()
        known = self._scan.version, self.thresholds, work.threshold
        if self._sent is None or self._sent[0] != known:
            self._sent = known, [*self._above(work.threshold)]
        return self._sent[1]

    def _above(self, threshold: int) -> Iterator[tuple[float, ReviewRow]]:
        thresholds, doubts = self.thresholds, self._scan.doubts
        above = [index for index, doubt in enumerate(doubts) if doubt == doubt and band(thresholds, doubt) > threshold]
        for start in range(0, len(above), ROWS_AT_ONCE):
            some = above[start : start + ROWS_AT_ONCE]
            for index, record in zip(some, self._scan.records(some), strict=True):
                if record is not None:
                    digest = input_digest(record.get("input"))
                    yield doubts[index], ReviewRow(index, str(record.get("job_id")), REPAIR, digest)

    def audit_events(self) -> list[Event]:
        """Return the frozen answers of the audit, in any order."""
        return [] if self.begun is None else [*self.review.frozen.values()]

    # What is proved

    def audited(self) -> Iterator[tuple[Event, bool, JsonValue]]:
        """Yield the rows of the audit that count, in its order: the event with the frozen answer, whether the answer is
        wrong, and the right values (None if there are none)."""
        place = self.before
        for _ in outcomes_in_order(self.outcomes()):
            index = self._order(place)
            assert index is not None, "the row was counted"
            event = self.review.frozen[index]
            right = self._right(event, place)
            yield event, bool(self._wrong(event, place)), right or None
            place += 1

    def outcomes(self) -> Iterator[tuple[int, bool] | None]:
        """Yield, for each row of the audit in its order, its band and whether its frozen answer is wrong; None if that
        is not decided."""
        thresholds = self.thresholds
        place = self.before
        while (index := self._order(place)) is not None and (event := self.review.frozen.get(index)) is not None:
            wrong = self._wrong(event, place)
            yield None if wrong is None else (band(thresholds, _doubt(event)), wrong)
            place += 1

    def _wrong(self, event: Event, place: int) -> bool | None:
        """Return whether a frozen answer is wrong; None if no person has judged it."""
        answer = cast(JsonObject, event.output)
        right = self._right(event, place)
        if right is None:
            return None
        if not answer.get("ok") or right is False:
            return True
        output = answer.get("output")
        return not all(_agrees(field, output, right) for field in self.fields.values())

    def _right(self, event: Event, place: int) -> JsonObject | Literal[False] | None:
        """Return the right answer of a row; False if no right answer exists, None if it is not known yet."""
        truth = self.known.truth
        if truth in (None, "gold") and not self.looked and place < self.known.pilot:
            values = self._gold_of(event.row, event.id)
            if values is not None:
                return values
        if truth == "gold":
            return None
        verdict = self.review.verdict(event.row, AUDIT, event.input)
        if verdict.kind == "open":
            return None
        if verdict.kind != "answer":
            return False
        output = verdict.output
        return {name: field.take(output) for name, field in self.fields.items()}

    def _gold_of(self, row: int, name: str) -> JsonObject | None:
        """Return the gold of a row if it has gold for all promised fields; else None."""
        found = None if self._gold is None else self._gold.place(row, name)
        if found is None or self._gold is None:
            return None
        values = self._gold.row(found).values
        return dict(values) if self.fields.keys() <= values.keys() else None

    def _walked(self) -> tuple[Walk, Workload, list[int]]:
        """Return the tests so far, what must be done next, and the number of judged rows in each band."""
        version = self._scan.version, self.log.count, self.review.thresholds
        if self._known_walk is None or self._known_walk[0] != version:
            self._known_walk = version, self._walk()
        return self._known_walk[1]

    def _walk(self) -> tuple[Walk, Workload, list[int]]:
        thresholds, known = self.thresholds, self.known
        bands = self._scan.bands(thresholds)
        done, none = ([0] * (len(thresholds) + 1) for _ in range(2))
        bands[-1] += known.rows - sum(bands)
        for index, answered in self._judged().items():
            place = band(thresholds, self._scan.doubt(index)) if self._scan.is_done(index) else -1
            (done if answered else none)[place] += 1
        lost = [sum(none[place + 1 :]) for place in range(len(thresholds))]
        error, _ = self._error()
        tables = Tables.of_bands(self.promise, bands, error, lost)
        if self.before:
            tables = replace(tables, before=self.before, before_wrong=self._before_wrong(error))
        walk = Walk(tables)
        for place, wrong in outcomes_in_order(self.outcomes()):
            walk.add(place, wrong=wrong)
        judged = [one + other for one, other in zip(done, none, strict=True)]
        return walk, plan(walk, judged, first=known.first), judged

    def _judged(self) -> dict[int, bool]:
        """Return the rows that people have decided, each with whether a right answer exists."""
        found: dict[int, bool] = {}
        judged = [*self.review.judged_rows()]
        digests = self._scan.digests({row for row, _ in judged})
        for row, queue in judged:
            verdict = self.review.verdict(row, queue, digests.get(row, ""))
            if verdict.decided and (queue == AUDIT or row not in found):
                found[row] = verdict.kind == "answer"
        return found

    def _before_wrong(self, error: float) -> float:
        """Return how many of the rows before the audit count as wrong. Rows that people have answered count with the
        error of people; rows with gold count if they are wrong; all others count."""
        judged, found = self._judged(), 0.0
        rows = self.order_before()
        for index, record in zip(rows, self._scan.records(rows), strict=True):
            gold = None if record is None else self._gold_of(index, str(record.get("job_id")))
            if judged.get(index, False):
                found += error
            elif record is None or gold is None or not record.get("ok"):
                found += 1
            else:
                output = cast(JsonValue, record.get("output"))
                found += not all(_agrees(field, output, gold) for field in self.fields.values())
        return round(found, 6)

    def _error(self) -> tuple[float, int]:
        """Return the error of people, and the number of rows judged twice from which it was measured."""
        agreement = self.review.agreement()
        pairs, same = (0, 0) if agreement is None else (agreement.rows, agreement.right)
        return people_error(pairs - same, pairs, self.known.people_error), pairs

    def standing(self, *, spent: float | None = None) -> PromiseStanding:
        """Return how the promise stands. ``spent``: what the models have cost."""
        self._scan.catch_up()
        known, scan = self.known, self._scan
        walk, work, judged = self._walked()
        kept = self._kept(walk)
        state: PromiseState = "kept"
        why = "it is proved, and all rows that people must repair are repaired"
        left = cost = None
        best = kept if kept is not None else walk.passed
        if kept is None:
            left = self._left(walk, judged)
            cost = None if known.price is None else (left[0] * known.price, left[1] * known.price)
            state, why = self._open(walk, work, judged, spent)
        shown = best if best is not None else walk.next
        now = self._now(walk.tables)
        place = 0 if shown is None else shown
        error, twice = self._error()
        begun = self.begun is not None
        return PromiseStanding(
            state,
            known.promise.text,
            why,
            self.truth,
            known.rows,
            self._coverage(),
            walk.drawn,
            walk.wrong[place] if begun else 0,
            None if best is None or not walk.drawn else walk.bound(best, now),
            walk.measured(place) if walk.drawn else None,
            self.thresholds[place] if begun and shown is not None else None,
            error,
            twice,
            self.review.judgements,
            work.audit,
            work.repair,
            left,
            cost,
            None if state != "not yet" else self._next(work, scan.done),
            voided=self.voided,
        )

    def _now(self, tables: Tables) -> Tables:
        """Return the tables of the present moment, in which rows that are sent on and not repaired yet are wrong."""
        judged, thresholds = self._judged(), self.thresholds
        answered = [0] * (len(thresholds) + 1)
        for index, has_answer in judged.items():
            if has_answer and self._scan.is_done(index):
                answered[band(thresholds, self._scan.doubt(index))] += 1
        lost = [sent - sum(answered[place + 1 :]) for place, sent in enumerate(tables.sent)]
        return replace(tables, lost=lost)

    def _kept(self, walk: Walk) -> int | None:
        """Return the last threshold whose table keeps the promise now; None if there is none."""
        if walk.passed is None or self._scan.done < self.known.rows or self.begun is None:
            return None
        for place in range(walk.passed, -1, -1):
            most = self._now(walk.tables).most()[place]
            if walk.most[place] < 0 or most < 0:
                continue
            if most >= walk.most[place] or walk.refutes(place, most + 1):
                return place
        return None

    def _open(self, walk: Walk, work: Workload, judged: Sequence[int], spent: float | None) -> tuple[PromiseState, str]:
        """Return the state of a promise that is not kept yet, and the reason."""
        known, used = self.known, self.review.judgements
        limits = [math.inf if known.max_people is None else known.max_people - used]
        if known.max_cost is not None and known.price:
            limits.append((known.max_cost - (spent or 0.0)) / known.price - used)
        allowed = min(limits) / (1 + self._overlap)
        if known.truth == "gold" and self.looked:
            return "impossible", "the gold of the pilot was looked at before, so it proves nothing about this prompt"
        if known.truth == "gold" and walk.drawn >= known.pilot and self._scan.done >= known.rows:
            return "impossible", f"the gold of the {known.pilot} rows of the pilot does not show it"
        if not possible(walk, judged, allowed):
            if math.isinf(allowed):
                return "impossible", "no table with these answers can keep it any more"
            limit = "max_people" if min(limits) == limits[0] else "max_cost"
            return "impossible", f"{limit} is reached before, even if every further judgement finds the answers right"
        if self.looked and not walk.drawn:
            return "not yet", (
                "the gold of the pilot was looked at before, with another prompt, so it proves nothing about this one; "
                "people judge the next rows of the order"
            )
        if self._scan.done < known.rows and not work.audit and not work.repair:
            return "not yet", f"{known.rows - self._scan.done:,} rows wait for the models"
        if work.audit:
            needed, waits, _ = self.unjudged()
            now = "" if waits == needed else f"; {waits:,} of them wait now"
            return "not yet", f"people judge {needed:,} more random rows, as far as is known now{now}"
        if work.repair:
            return "not yet", f"the audit allows it; {work.repair:,} rows wait for people to repair them"
        return "not yet", f"{known.rows - self._scan.done:,} rows wait for the models"

    def _left(self, walk: Walk, judged: Sequence[int]) -> tuple[int, int]:
        low, high = interval(walk, judged, first=self.known.first)
        return math.floor(low * (1 + self._overlap)), math.ceil(high * (1 + self._overlap))

    def _next(self, work: Workload, done: int) -> NextStep:
        if work.audit and self.begun is not None:
            for place in range(self.before, self.before + self.known.rows):
                index = self._order(place)
                if index is None or not self._scan.is_done(index):
                    return "models"
                event = self.review.frozen.get(index)
                if event is None or self._wrong(event, place) is None:
                    return "audit"
        if self.begun is None:
            first = self._order(self._next_offset())
            return "audit" if first is not None and self._scan.is_done(first) else "models"
        return "repair" if work.repair else "models"

    def _coverage(self) -> float:
        """Return the share of rows that have an answer of the models or of people."""
        more = 0
        for index, answered in self._judged().items():
            if self._scan.is_done(index):
                has_one = self._scan.doubt(index) < NEVER
                more += answered - has_one
        return (self._scan.ok + more) / self.known.rows if self.known.rows else 0.0

    @property
    def truth(self) -> str:
        """Text that says whose answers count as right."""
        by_gold = sum(
            not self.looked
            and self.known.truth in (None, "gold")
            and place < self.known.pilot
            and self._gold_of(event.row, event.id) is not None
            for place, (event, _, _) in enumerate(self.audited(), start=self.before)
        )
        audited = self._walked()[0].drawn
        if self.known.truth == "gold" or (audited and by_gold == audited):
            return f"the gold of the {self.known.pilot} rows of the pilot"
        return ("the gold of the pilot and " if by_gold else "") + "people's blind answers"


def _doubt(event: Event) -> float | None:
    known = cast(JsonObject, event.output).get("doubt")
    return float(known) if isinstance(known, int | float) else None


def _agrees(field: GoldField, output: JsonValue, right: Mapping[str, JsonValue]) -> bool:
    return field.right(field.take(output), right.get(field.name))


def _index_of(line: bytes) -> int:
    """Return the position of the row in a line of gold, without reading the rest; -1 if it has none."""
    begin, end = line.find(b":") + 1, line.find(b",")
    try:
        return int(line[begin:end])
    except ValueError:
        return -1


def _last_model(facts: JsonObject) -> str:
    """Return the name of the last model of a cascade."""
    cascade = cast(JsonObject, facts.get("cascade") or {})
    entries = cast("list[JsonObject]", cascade.get("entries") or [])
    return str(entries[-1]["name"]) if entries else ""


def head_rows(run: RunReader) -> list[tuple[int, str]]:
    """Return the first rows of the audit's order, as the run recorded them at its start."""
    found = []
    for line in run.kept_lines(HEAD):
        try:
            row = from_json(line)
        except ValueError:
            continue
        if isinstance(row, list) and len(row) == 2 and isinstance(row[0], int):
            found.append((row[0], str(row[1])))
    return found
