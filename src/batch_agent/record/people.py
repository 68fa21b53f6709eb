"""The review of a run: which rows people see, what a person gets and gives, and what is delivered in the end.

``PeopleReview`` joins the log of a review with the rows of the run. It reads the record and appends to the log alone,
so it works while the run works, after it, and beside other processes that review the same run. Methods block. Use it in
one thread at a time.
"""

from __future__ import annotations

import heapq
import logging
import shlex
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import NamedTuple, Self, cast

from pydantic import JsonValue

from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import (
    BackendError,
    BadResponse,
    Cancelled,
    Interrupted,
    OutcomeUnknown,
    OutputError,
    RateLimited,
    RecordUnreadable,
    ReplayMismatch,
    SpecError,
    Timeout,
    Unavailable,
)
from batch_agent.files.gold import GivenGold, GoldRows, checked_gold
from batch_agent.files.results import to_json
from batch_agent.files.tables import Record
from batch_agent.messages import JsonObject
from batch_agent.record.address import SCHEMES, RunPlace
from batch_agent.record.attached import AttachedFile, attached
from batch_agent.record.doubts import input_digest
from batch_agent.record.keys import row_of
from batch_agent.record.learned import promise_of
from batch_agent.record.reader import RowLines, RunReader, open_run
from batch_agent.record.review import log_of
from batch_agent.record.rundir import REVIEWED, RUN, SCHEMA, stage_names
from batch_agent.record.score_reader import part_of, schema_of
from batch_agent.trust.form import ReviewForm
from batch_agent.trust.gold import OUTPUT, fields_in, shown_cell
from batch_agent.trust.order import KeyedOrder
from batch_agent.trust.review import (
    AUDIT,
    AUDIT_KEY,
    QUEUES,
    REPAIR,
    Event,
    EventKind,
    Left,
    PeopleVerdict,
    Queue,
    Review,
    ReviewRow,
    person,
)

logger = logging.getLogger("batch_agent")

PEOPLE = "people"  # the entry of a cascade, and who answered a row
OVERLAP, LEASE = 0.1, 600.0
LONGEST_NAME = 80
# Failures that say nothing of a row: the models try it again.
OUTSIDE = frozenset(
    each.type
    for each in (
        *(BackendError, Timeout, RateLimited, Unavailable, BadResponse),
        *(Cancelled, Interrupted, ReplayMismatch, RecordUnreadable, OutcomeUnknown),
    )
)


class Refusal(SpecError):
    """An answer of a person was refused, for the reason in the message."""


class Shown(NamedTuple):
    """A row as it is shown to a person. In the audit ``model`` is None, because nothing of the model's answer is
    shown."""

    row: ReviewRow
    value: JsonValue  # the input
    files: Sequence[AttachedFile]
    model: JsonObject | None
    until: float | None


def for_people(record: Record, *, cascade: bool) -> bool:
    """Return whether a row waits for people: it was escalated to them; or, without a cascade, it failed because of its
    content."""
    if cascade or record.get("waits_for") is not None:
        return record.get("waits_for") == PEOPLE
    error = record.get("error")
    return not record.get("ok") and isinstance(error, dict) and error.get("type") not in OUTSIDE


def for_models(record: Record) -> bool:
    """Return whether a model must still answer a row: the row waits for one, or failed for a reason outside of it."""
    error, waits = record.get("error"), record.get("waits_for")
    failed = not record.get("ok") and isinstance(error, dict) and error.get("type") in OUTSIDE
    return waits not in (None, PEOPLE) or (failed and waits is None)


class _Rows:
    """The places of the finished rows of a run, and what the queues need of them: 17 bytes per row, and the rows to
    repair."""

    def __init__(self, run: RunReader, is_for_people: Callable[[Record], bool]) -> None:
        self._run, self._is_for_people = run, is_for_people
        self._order = KeyedOrder(AUDIT_KEY)
        self._lines: RowLines | None = None
        self._forget()

    def _forget(self) -> None:
        self._places = array("q")
        self._ranks = array("Q")
        self.repair: dict[int, tuple[float, ReviewRow]] = {}
        self.for_models: set[int] = set()
        self.version = 0  # it changes when rows come

    def catch_up(self) -> None:
        """Read the rows that are new."""
        if self._lines is None or self._lines.replaced():
            self.close()
            self._lines = self._run.lines()
            self._lines.replaced()
            version = self.version
            self._forget()
            self.version = version + 1
        while page := self._lines.block():
            self.version += 1
            for place, record in page:
                self._add(place, record)

    def _add(self, place: int, record: Record) -> None:
        index, name = cast(int, record["index"]), str(record.get("job_id"))
        if index >= len(self._places):
            more = index + 1 - len(self._places)
            self._places.extend(repeat(-1, more))
            self._ranks.extend(repeat(0, more))
        self._places[index] = place
        self._ranks[index] = int.from_bytes(self._order.rank(name)[:8])
        self.repair.pop(index, None)
        self.for_models.discard(index)
        if for_models(record):
            self.for_models.add(index)
        if self._is_for_people(record):
            doubt = record.get("doubt")
            known = float(doubt) if isinstance(doubt, int | float) and record.get("ok") else 2.0  # the most doubtful
            self.repair[index] = -known, ReviewRow(index, name, REPAIR, input_digest(record.get("input")))

    def first(self, count: int, most: float) -> list[int]:
        """Return the first rows of the audit's order. ``most``: only rows in this lower share of all hashes."""
        limit = int(most * 2**64)
        ranked = ((self._ranks[index], index) for index, place in enumerate(self._places) if place >= 0)
        return [index for rank, index in heapq.nsmallest(count, ranked) if rank < limit]

    def records(self, indexes: Sequence[int]) -> list[Record | None]:
        known = [index for index in indexes if 0 <= index < len(self._places) and self._places[index] >= 0]
        assert self._lines is not None, "the rows were read"
        found = dict(zip(known, self._lines.read([self._places[index] for index in known]), strict=True))
        return [found.get(index) for index in indexes]

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def answered_failures(run: RunReader) -> dict[int, bytes]:
    """Return the failed rows that people have decided, with the digests of their inputs. Models are not asked about
    them again, because that would be paid for nothing. Reads all results if there is a review."""
    with closing(log_of(run)) as log:
        if not log.exists():
            return {}
    with PeopleReview(run) as review:
        review.log.catch_up(review.review)
        judged = {row for row, _ in review.review.judged_rows()}
        failed = (each for each in run.rows if not each.get("ok") and each["index"] in judged)
        return {
            cast(int, each["index"]): row_of(each.get("input"), "") for each in failed if review.verdict(each).decided
        }


class PeopleReview:
    """The review of a run; of a pipeline, that of a stage or of the last stage. ``overlap`` and ``lease`` replace the
    run's options."""

    def __init__(
        self, whole: RunReader, stage: str = "", *, overlap: float | None = None, lease: float | None = None
    ) -> None:
        self.whole = whole
        self.stage = stage
        self._closing = ExitStack()
        if stage and stage not in whole.begun_stages():
            raise SpecError(f"{whole.name} has no stage {stage!r}, or it has not begun")
        self.run = self._closing.enter_context(whole.stage(stage) if stage else part_of(whole))
        facts = self.run.facts()
        options = facts.get(REVIEWED)
        self._options: JsonObject = options if isinstance(options, dict) else {}
        self._known = facts.get(SCHEMA), facts.get(REVIEWED)
        self.schema, self._typed = schema_of(facts)
        self.form = form_of(self.schema, typed=self._typed, promise=facts.get("promise"))
        self.overlap = _number(overlap, self._options.get("overlap"), OVERLAP)
        self.lease = _number(lease, self._options.get("lease"), LEASE)
        self.review = Review(self.form.same, overlap=self.overlap, fits=self._is_answer)
        self.log = log_of(self.run)
        self._closing.callback(self.log.close)
        cascade = facts.get("cascade")
        self.has_cascade = isinstance(cascade, dict)
        self.expected = self.has_cascade and cast(JsonObject, cascade).get(PEOPLE) is True  # the run needs people
        self.model = str(facts.get("model") or "model")
        self._rows = _Rows(self.run, lambda record: for_people(record, cascade=self.expected))
        self._closing.callback(self._rows.close)
        self._audit: tuple[object, list[ReviewRow]] = None, []
        self._repair: tuple[object, list[ReviewRow]] = None, []
        self._void: tuple[object, int] = None, 0
        self.promise = promise_of(self.run, self.review, self.log, overlap=self.overlap)
        if self.promise is not None:
            self._closing.callback(self.promise.close)

    @classmethod
    def open(
        cls, run: str | RunPlace, stage: str = "", *, overlap: float | None = None, lease: float | None = None
    ) -> Self:
        """Return the review of a run, with all rows and events read so far. Closing it also closes the record."""
        with ExitStack() as opened:
            review = cls(opened.enter_context(open_run(run)), stage, overlap=overlap, lease=lease)
            opened.callback(review._closing.close)
            review.catch_up()
            review._closing = opened.pop_all()
        return review

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closing.close()

    def catch_up(self) -> None:
        """Read the rows and the events that are new."""
        self._rows.catch_up()
        if self.promise is not None:
            self.promise.catch_up()
        self.log.catch_up(self.review)

    def _is_answer(self, output: JsonValue, queue: Queue) -> bool:
        """Return whether a recorded answer is still valid: the schema may have changed since."""
        try:
            self.form.read(output, queue)
        except ValueError:
            return False
        return True

    # The queues

    def queue(self, only: Queue | None = None) -> list[ReviewRow]:
        """Return the rows that people see, with those that are judged, in the order in which they are shown."""
        audit = self._audited()
        if only == AUDIT:
            return audit
        repair = self._to_repair(audit)
        return repair if only == REPAIR else [*audit, *repair]

    def _to_repair(self, audit: list[ReviewRow]) -> list[ReviewRow]:
        known = self._rows.version, self.log.count, audit
        if self.promise is None and self._repair[0] == known:
            return self._repair[1]
        waits = {row.row for row in audit if not self._goes_to_repair(row)}
        ranks = self._rows.repair
        if self.promise is not None:
            ranks = {row.row: (-doubt, row) for doubt, row in self.promise.repair()} | ranks
        ranked = sorted((rank, row.row, row) for rank, row in ranks.values() if row.row not in waits)
        self._repair = known, [row for _, _, row in ranked]
        return self._repair[1]

    def _audited(self) -> list[ReviewRow]:
        """Return the rows of the audit, in its order. While the run works, only those that are certain to be near the
        beginning: a row that ends later may come before others."""
        if self.promise is not None:
            return self.promise.audit()
        count = self.review.audit_rows
        if not count:
            return []
        view = self.run.view()
        works, known = view.state in ("starting", "running"), view.total
        most = 1.0 if not works else min(1.0, count / known) if known else 0.0
        version = self._rows.version, count, most
        if self._audit[0] != version:
            rows = self._rows.first(count, most)
            self._audit = version, [*self._named(rows, AUDIT)]
        return self._audit[1]

    def _named(self, indexes: Sequence[int], queue: Queue) -> Iterator[ReviewRow]:
        for index, record in zip(indexes, self._rows.records(indexes), strict=True):
            if record is not None:
                yield ReviewRow(index, str(record.get("job_id")), queue, input_digest(record.get("input")))

    def _goes_to_repair(self, row: ReviewRow) -> bool:
        """Return whether a row of the audit needs a repair afterwards: it was skipped for good; or people left fields
        empty, and the model has no value for them."""
        verdict = self.review.verdict(row.row, AUDIT, row.input)
        if verdict.kind != "answer":
            return verdict.kind == "skipped"
        [record] = self._rows.records([row.row])
        return record is not None and not self.fits(self.form.merged(record.get("output"), verdict.output))  # type: ignore[arg-type]

    def left(self, who: str = "") -> dict[Queue, Left]:
        """Return the counts of rows that are left in each queue."""
        left = self.review.left(self.queue(), who)
        more = 0 if self.promise is None else self.promise.unjudged()[-1]
        audit = left[AUDIT]
        return {**left, AUDIT: audit._replace(open=audit.open + more, yours=audit.yours + (more if who else 0))}

    @property
    def waiting(self) -> int:
        """The number of rows without an answer of people that counts."""
        return sum(left.open + left.disputed for left in self.left().values())

    def audit(self, rows: int, who: str) -> None:
        """Let people audit the first ``rows`` rows of the order, unless as many are audited already."""
        if self.promise is not None:
            raise SpecError("the promise of this run says which rows are audited: leave out --audit")
        self.catch_up()

        def decide(now: float) -> tuple[list[Event], None]:
            new = rows > self.review.audit_rows
            return [Event(0, "audit", who, rows=rows)] if new else [], None

        self.log.change(self.review, decide)

    def prepare(self) -> None:
        """Read new rows and events before rows are given to a person. For the audit of a promise, the answers of the
        next rows are recorded first."""
        self.catch_up()
        if self.promise is not None:
            self.promise.freeze()

    # What a person gets

    def next(self, who: str, queue: Queue | None = None) -> Shown | None:
        """Give a person the next row; None if there is none now."""
        name = checked_name(who)
        self.prepare()

        def decide(now: float) -> tuple[list[Event], tuple[ReviewRow, float] | None]:
            row = self.review.next_of(self.queue(queue), name, now)
            if row is None:
                return [], None
            until = now + self.lease
            return [event_of_row("lease", row, name, until=until)], (row, until)

        given = self.log.change(self.review, decide)
        return None if given is None else self._shown(*given)

    def _shown(self, row: ReviewRow, until: float | None) -> Shown:
        [record] = self._rows.records([row.row])
        if record is None:
            raise Refusal(f"row {row.id} is no longer in the record: ask for the next row")
        model = None if row.queue == AUDIT else model_answer(record)
        return Shown(row, cast(JsonValue, record.get("input")), self.files(record), model, until)

    def files(self, record: Record) -> list[AttachedFile]:
        """Return the images and documents that a row names."""
        return attached(record, self._options)

    def file(self, row: int, number: int, who: str) -> AttachedFile:
        """Return a file of a row that a person holds or has judged. Raises Refusal."""
        self.catch_up()
        if not self.review.has_seen(row, who):
            raise Refusal("this row was not given to you")
        [record] = self._rows.records([row])
        files = [] if record is None else self.files(record)
        if not 0 <= number < len(files):
            raise Refusal("the row has no such file")
        return files[number]

    def records(self, rows: Sequence[ReviewRow]) -> list[Record]:
        """Return the records of these rows; {} for a row that is no longer in the record."""
        return [{} if each is None else each for each in self._rows.records([row.row for row in rows])]

    def free_row(self, who: str) -> None:
        """Free the row that a person holds, so that others get it at once."""
        name = checked_name(who)

        def decide(now: float) -> tuple[list[Event], None]:
            held = [each for each in self.review.held_by(name, now) if each.until is not None]
            rows = [ReviewRow(each.row, each.id, each.queue, each.input) for each in held]
            return [event_of_row("free", row, name) for row in rows], None

        self.log.change(self.review, decide)

    # What a person gives

    def judge(
        self, who: str, row: int, queue: Queue, kind: EventKind, given: JsonValue = None, digest: str = ""
    ) -> PeopleVerdict:
        """Record what a person says of a row: ``answer`` with the values in ``given``, ``none`` (no right answer
        exists) or ``skip``. Returns the verdict. Raises Refusal. ``digest`` is that of the input that the person
        saw."""
        name = checked_name(who)
        self._rows.catch_up()
        self.log.catch_up(self.review)
        # A row may leave its queue while a person looks at it: the answer is a good one.
        place = self.row(row, queue) or next(self._named([row], queue), None)
        if place is None:
            raise Refusal("this row is not in the record any more: ask for the next row")
        if digest and digest != place.input:
            raise Refusal("this row was edited since you got it: look at it again")
        output = self.read(given, place) if kind == "answer" else None

        def decide(now: float) -> tuple[list[Event], None]:
            if why := self.review.refusal(place, name):
                raise Refusal(why)
            return [event_of_row(kind, place, name, output=output)], None

        self.log.change(self.review, decide)
        return self.review.verdict(place.row, place.queue, place.input)

    def undo(self, who: str) -> Shown | None:
        """Take back a person's latest judgement or skip, and give that row to the person again. Returns None if the row
        is in no queue now. Raises Refusal if there is nothing to undo, or if the person has seen the model's answer
        since, so that a blind judgement is no longer possible."""
        name = checked_name(who)
        self._rows.catch_up()

        def decide(now: float) -> tuple[list[Event], tuple[ReviewRow, float] | None]:
            last = self.review.last_of(name)
            if last is None:
                raise Refusal("there is nothing of yours to undo")
            if last.queue == AUDIT and self.review.has_seen(last.row, name, REPAIR):
                raise Refusal("you have seen the models' answers to this row since: your blind judgement of it stays")
            row = self.row(last.row, last.queue)
            undone = ReviewRow(last.row, last.id, last.queue, last.input)
            events = [event_of_row("undo", undone, name, undoes=last.n)]
            if row is None:
                return events, None
            until = now + self.lease
            return [*events, event_of_row("lease", row, name, until=until)], (row, until)

        given = self.log.change(self.review, decide)
        return None if given is None else self._shown(*given)

    def row(self, row: int, queue: Queue) -> ReviewRow | None:
        """Return a row of a queue; None if it is not in it. A row that the models answer again stays in the queue in
        which it was judged."""
        return next((each for each in self.queue(queue) if each.row == row), None)

    def read(self, given: JsonValue, row: ReviewRow) -> JsonValue:
        """Return the answer that a person gave. In a repair, fields that the person left empty get the model's values.
        Raises Refusal."""
        model: JsonValue = None
        if row.queue == REPAIR:
            [record] = self._rows.records([row.row])
            model = None if record is None else cast(JsonValue, record.get("output"))
        names = {field.name for field in self.form.fields}
        own = {name: model[name] for name in model if name in names} if isinstance(model, dict) else model
        try:
            output = self.form.read(self.form.merged(own, given), row.queue)
        except ValueError as error:
            raise Refusal(str(error)) from None
        output = self.form.merged(model, output)  # with what the schema allows beside its fields
        if row.queue == REPAIR and (why := self.problem(output)) is not None:
            raise Refusal(f"the answer does not fit the schema: {why}")
        return output

    def problem(self, output: JsonValue) -> str | None:
        """Return the reason why an answer does not fit the schema; None if it does."""
        if self.schema is None:
            return None
        try:
            self.schema.read_written(to_json(output))
        except OutputError as error:
            return str(error).partition("\n")[0]
        return None

    def fits(self, output: JsonValue) -> bool:
        return self.problem(output) is None

    # What is delivered

    def verdict(self, record: Record) -> PeopleVerdict:
        """Return the verdict of people on a row: that of the audit if it is decided, else that of the repair."""
        index, digest = cast(int, record["index"]), input_digest(record.get("input"))
        every = [self.review.verdict(index, queue, digest) for queue in QUEUES]
        return next((each for each in every if each.decided), PeopleVerdict())

    def delivered(self, record: Record) -> Record:
        """Return a record with the answer of people, if there is one. The answer of the model is then under
        ``model``."""
        verdict, model = self.verdict(record), cast(JsonValue, record.get("output"))
        if verdict.decided:
            record = {name: value for name, value in record.items() if name not in ("escalated", "waits_for")}
        found = {**record, "answered_by": record.get("answered_by") or self.model, "model": model}
        if verdict.kind == "answer":
            output = self.form.merged(model, verdict.output)
            return {**found, "ok": True, "output": output, "error": None, "answered_by": PEOPLE}
        if verdict.kind == "none":
            said = {"stage": PEOPLE, "type": "NoRightAnswer", "message": "people found no right answer to this row"}
            error = {**said, "retryable": False}
            return {**found, "ok": False, "output": None, "error": error, "answered_by": PEOPLE}
        return found

    def lines(self, who: str = "") -> list[str]:
        """Return lines that say what was judged and what is left."""
        left = self.left(who)
        core = self.review
        said = list[str]()
        waits = {queue: each.open + each.disputed for queue, each in left.items()}
        parts = ", ".join(f"{count:,} {queue}" for queue, count in waits.items() if count)
        judged = sum(each.judged for each in left.values())
        total = sum(waits.values())
        said.append(
            f"{judged:,} {'row' if judged == 1 else 'rows'} judged"
            + (f" by {', '.join(core.people)}" if core.people else "")
            + (f"; {total:,} wait ({parts})" if total else "; none waits")
        )
        if disputed := sum(each.disputed for each in left.values()):
            said.append(f"{disputed:,} of them count as wrong until a third person decides: two people differ")
        for queue in QUEUES:
            if (agreement := core.agreement(queue)) is not None:
                low, high = agreement.interval
                said.append(
                    f"agreement of two people in the {queue}: {agreement.right:,} of {agreement.rows:,} rows, "
                    f"{agreement.right / agreement.rows:.2f} ({low:.2f} to {high:.2f})"
                )
        if len(core.people) == 1:
            said.append("one person's answers, not checked")
        if gone := self.voided + core.outdated:
            said.append(f"{gone:,} judgements do not count: their row or the schema was edited since")
        return said

    def to_json(self) -> JsonObject:
        """Return what was judged and what is left, as one object."""
        agreement: JsonObject = {}
        for queue in QUEUES:
            if (found := self.review.agreement(queue)) is not None:
                agreement[queue] = {"right": found.right, "rows": found.rows, "interval": [*found.interval]}
        left = {queue: each._asdict() for queue, each in self.left().items()}
        return {
            "waiting": self.waiting,
            "queues": {queue: {name: each[name] for name in each if name != "yours"} for queue, each in left.items()},
            "people": [*self.review.people],
            "judgements": self.review.judgements,
            "agreement": agreement,
            "void": self.voided + self.review.outdated,
        }

    @property
    def voided(self) -> int:
        """The number of judgements that do not count because their row was edited since."""
        known = self._rows.version, self.log.count
        if self._void[0] == known:
            return self._void[1]
        judged = [*self.review.judged_rows()]
        records = self._rows.records([row for row, _ in judged])
        digests = ["" if record is None else input_digest(record.get("input")) for record in records]
        pairs = zip(judged, digests, strict=True)
        self._void = known, sum(self.review.void(row, queue, digest) for (row, queue), digest in pairs)
        return self._void[1]

    @property
    def outdated(self) -> bool:
        """Whether the schema or the options of the run have changed since this object was made."""
        facts = self.run.kept_facts()
        return bool(facts) and (facts.get(SCHEMA), facts.get(REVIEWED)) != self._known

    @property
    def begun(self) -> bool:
        """Whether people have judged any row."""
        return bool(self.review.people)

    @property
    def models_have_work(self) -> bool:
        """Whether the models have work left that no process does now: rows that are not done, that failed for a reason
        outside of them, or that wait for a model; or rows that the promise needs next."""
        state = self.whole.view().state
        if state in ("starting", "running"):
            return False
        if state in ("interrupted", "out of budget", "unreachable") or self._rows.for_models:
            return True
        if self.promise is None:
            return False
        standing = self.promise.standing()
        return not standing.kept and standing.next == "models"


def form_of(schema: OutputSchema[object] | None, *, typed: bool, promise: object = None) -> ReviewForm:
    """Return the form of answers with this schema. ``typed``: the schema is known; a known schema of None means text.
    If a ``promise`` is about one field, the form asks only for that field."""
    names = fields_in(None if schema is None else schema.written_schema)
    gold = checked_gold({name: name for name in names or [OUTPUT]}, schema, known=typed)
    promised = promise.get("field") if isinstance(promise, dict) else None
    wanted = frozenset(name for name in names if name == promised)
    return ReviewForm([*gold.fields.values()], whole=not names, wanted=wanted)


def model_answer(record: Record) -> JsonObject:
    """Return the model's answer to a row, for a person who repairs it."""
    error = record.get("error")
    earlier = record.get("earlier")
    return {
        "output": cast(JsonValue, record.get("output")),
        "error": f"{error.get('type')}: {error.get('message')}" if isinstance(error, dict) else None,
        "text": cast(JsonValue, record.get("raw_text")),
        "doubt": cast(JsonValue, record.get("doubt")),
        "answered_by": cast(JsonValue, record.get("answered_by")),
        "earlier": cast(JsonValue, earlier) if isinstance(earlier, list) else [],
    }


def checked_name(who: object) -> str:
    """Return the name of a person. Raises Refusal if it is invalid."""
    name = " ".join(who.split()) if isinstance(who, str) else ""
    if not name or not name.isprintable() or len(name) > LONGEST_NAME or not person(name):
        raise Refusal(f"a name of 1 to {LONGEST_NAME} characters is needed, not {shown_cell(who)}")
    return name


def event_of_row(kind: EventKind, row: ReviewRow, who: str, **more: object) -> Event:
    """Return an event about a row, for the log."""
    return replace(Event(0, kind, who, 0.0, row.row, row.id, row.queue, row.input), **more)  # type: ignore[arg-type]


def _number(*given: object) -> float:
    return next(float(each) for each in given if isinstance(each, int | float))


def is_run(given: object) -> bool:
    """Return whether an option names a recorded run: its directory, or its URL in Redis."""
    if isinstance(given, str) and given.startswith(tuple(f"{scheme}://" for scheme in SCHEMES)):
        return True
    try:
        return isinstance(given, str | Path) and (Path(given) / RUN).is_file()
    except (OSError, ValueError):  # a text that is no path
        return False


def given_gold(given: GivenGold) -> GivenGold:
    """Return the gold that an option gives. If it names a run, this is the answers of people in its audit."""
    if not is_run(given):
        return given
    with PeopleReview.open(cast("str | Path", given)) as review:
        return GoldRows(str(given), review_gold(review))


def review_command_of(name: str, stage: str = "") -> str:
    """Return the command that reviews a run."""
    return f"batch-agent review {shlex.quote(name)}" + (f" --stage {stage}" if stage else "")


def people_of(run: RunReader, stage: str = "") -> PeopleReview | None:
    """Return the review of a run if people work on it, or if it needs people. None for other runs: there, the models
    try failed rows again. The caller closes it."""
    try:
        review = PeopleReview(run, stage)
    except SpecError:  # there is no run, or its last stage has not begun
        return None
    if review.expected or review.log.exists():
        review.catch_up()
        if review.expected or review.begun or review.review.audit_rows:
            return review
    review.close()
    return None


def reviews_of(run: RunReader) -> Iterator[tuple[str, PeopleReview]]:
    """Yield the names of a run's stages with their reviews; "" for a run without stages. Each review is closed
    afterwards."""
    for stage in run.begun_stages() or [""]:
        if (review := people_of(run, stage)) is not None:
            with review:
                yield stage, review


def waiting_words(run: RunReader, name: str = "") -> str:
    """Return text that says how many rows wait for people, with the command for them; "" if none waits. For a pipeline
    it has a line for each stage. ``name`` is the run's name on a command line."""
    said: list[str] = []
    last = (stage_names(run.facts()) or [""])[-1]
    for stage, review in reviews_of(run):
        waits = "row waits" if (count := review.waiting) == 1 else "rows wait"
        command = review_command_of(name or run.name, "" if stage == last else stage)
        said += [f"{count:,} {waits} for people: {command}"] if count else []
    return "\n".join(said)


def review_gold(review: PeopleReview) -> Mapping[str, Mapping[str, JsonValue]]:
    """Return the answers of a finished audit, by id and field. Raises SpecError if it is not finished."""
    review.catch_up()
    rows = review.queue(AUDIT)
    name, command = review.whole.name, review_command_of(review.whole.name)
    if not rows:
        raise SpecError(f"{name} has no audit: {command} --audit N lets people judge N random rows")
    left = review.left()[AUDIT]
    if waits := left.open + left.disputed:
        raise SpecError(f"the audit of {name} is not finished, {waits} of {len(rows)} rows wait: {command}")
    found: dict[str, Mapping[str, JsonValue]] = {}
    for row in rows:
        verdict = review.review.verdict(row.row, AUDIT, row.input)
        if verdict.kind == "answer":
            output = verdict.output
            found[row.id] = {OUTPUT: output} if review.form.whole else cast("Mapping[str, JsonValue]", output)
    if lost := len(rows) - len(found):
        logger.warning("gold: %d rows of the audit of %s have no right answer, and are no gold", lost, name)
    return found
