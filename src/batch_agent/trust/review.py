"""What people have answered, and which row a person gets next.

The log of a review is a list of events, which only grows. ``Review`` is what they say together: of each row and queue
the judgements that stand, who holds it, and the verdict. It knows no clock: the caller says what time it is.

Two queues: in the *audit* a person sees the row alone, in the *repair* also the answer of the model. A judgement in one
queue is none in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from pydantic import JsonValue

from batch_agent.trust.gold import normalised
from batch_agent.trust.intervals import Share, share
from batch_agent.trust.order import KeyedOrder

Queue = Literal["audit", "repair"]
EventKind = Literal["answer", "none", "skip", "undo", "lease", "free", "audit", "thresholds", "frozen"]
VerdictKind = Literal["open", "answer", "none", "skipped", "disputed"]
AUDIT: Queue = "audit"
REPAIR: Queue = "repair"
QUEUES: tuple[Queue, ...] = (AUDIT, REPAIR)

OVERLAP_KEY = "batch-agent overlap"
AUDIT_KEY = "batch-agent audit"  # of an audit without a promise; not that of the pilot, whose rows were looked at
MOST_SKIPS = 2  # of a row in the audit, after which it is wrong
JUDGES = 3  # the third decides


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the log. ``row`` is the position of a row, ``input`` a digest of its input when it was shown.

    ``answer``, ``none`` (no right answer exists) and ``skip`` are a person's. ``undo`` takes back the event whose id is
    ``undoes``. ``lease`` gives a row to a person ``until`` a time; None: until it is judged or freed. ``audit`` says
    that the first ``rows`` rows of the order are audited. ``thresholds`` begins the audit of a promise: ``id`` is the
    key of the order, ``input`` identifies what was asked, ``rows`` rows of the order come before this audit, and
    ``output`` has the thresholds. ``frozen`` is the answer of a row that this audit judges.
    """

    n: int
    kind: EventKind
    who: str = ""
    at: float = 0.0
    row: int = -1
    id: str = ""
    queue: Queue = REPAIR
    input: str = ""
    output: JsonValue = None
    undoes: int = 0
    until: float | None = None
    rows: int = 0


class PeopleVerdict(NamedTuple):
    """The verdict of people on a row in a queue. ``open``: no person has judged it. ``skipped``: it was skipped twice,
    which counts as wrong. ``disputed``: two people differ, and a third one decides; until then it is wrong. ``judges``
    is the number of people who judged it."""

    kind: VerdictKind = "open"
    output: JsonValue = None
    judges: int = 0

    @property
    def decided(self) -> bool:
        """Whether the row has an answer that counts, or people said that no right answer exists."""
        return self.kind in ("answer", "none")


class ReviewRow(NamedTuple):
    """A row in a queue, as the reader of the record shows it now. ``input`` is the digest of its input; "" if it is
    unknown."""

    row: int
    id: str
    queue: Queue
    input: str = ""


class Left(NamedTuple):
    """Counts of rows in a queue. ``open``: no person has judged them. ``disputed``: two people differ. ``second``: they
    wait for a second person. ``yours``: those of the three kinds above that this person may judge. ``judged``: they
    have a judgement, or were skipped for good."""

    open: int = 0
    disputed: int = 0
    second: int = 0
    yours: int = 0
    judged: int = 0


@lru_cache(4096)
def person(name: str) -> str:
    """Return the key of a person: names that differ only in case or spaces are the same person."""
    return normalised(name)


@dataclass(slots=True)
class _Judged:
    """The events of one row in one queue."""

    standing: list[Event] = field(default_factory=list)  # answers, and 'no right answer', one per person
    skips: list[Event] = field(default_factory=list)
    leases: dict[str, Event] = field(default_factory=dict)  # person → latest; it stays when its time is over

    def of(self, digest: str) -> tuple[list[Event], list[Event]]:
        """Return the judgements and the skips of the row that count: those of the input with this digest, or all if the
        digest is ""."""
        if not digest:
            return self.standing, self.skips
        return [each for each in self.standing if each.input == digest], [
            each for each in self.skips if each.input == digest
        ]


class Review:
    """The state of a review. ``same`` returns whether two answers are the same. ``fits`` returns whether an answer in a
    queue is valid under the present schema. ``overlap`` is the share of rows that two people judge."""

    def __init__(
        self,
        same: Callable[[JsonValue, JsonValue], bool],
        *,
        overlap: float,
        fits: Callable[[JsonValue, Queue], bool] = lambda output, queue: True,
    ) -> None:
        self._same = same
        self._overlap = overlap
        self._fits = fits
        self._order = KeyedOrder(OVERLAP_KEY)
        self.clear()

    # Events

    def clear(self) -> None:
        """Forget all events."""
        self._rows: dict[tuple[int, Queue], _Judged] = {}
        self._own: dict[str, list[Event]] = {}  # person → judgements and skips that stand, in order
        self._events: dict[int, Event] = {}  # judgements and skips by number
        self.names: dict[str, str] = {}  # person → name as it was first given
        self.audit_rows = 0  # asked for without a promise
        self.outdated = 0  # answers that the schema of now does not allow
        self.thresholds: Event | None = None  # of a promise, with what its audit was drawn by
        self.replaced: Event | None = None  # those of the audit before it, in which people had judged
        self.frozen: dict[int, Event] = {}  # the answers that the audit of a promise is about, by row

    def add(self, events: Iterable[Event]) -> None:
        """Apply the next events of the log."""
        for event in events:
            self._add(event)

    def _add(self, event: Event) -> None:
        who = person(event.who)
        if event.kind == "audit":
            self.audit_rows = max(self.audit_rows, event.rows)
            return
        if event.kind == "thresholds":
            if self.thresholds is not None and any(
                each.standing for (_, queue), each in self._rows.items() if queue == AUDIT
            ):
                self.replaced = self.thresholds
            self.thresholds, self.frozen = event, {}
            return
        if event.kind == "frozen":
            self.frozen[event.row] = event
            return
        if event.kind == "undo":
            self._undo(event, who)
            return
        judged = self._rows.setdefault((event.row, event.queue), _Judged())
        if event.kind == "lease":
            judged.leases[who] = event
            return
        if event.kind == "free":
            if (lease := judged.leases.get(who)) is not None:
                judged.leases[who] = replace(lease, until=0.0)
            return
        judged.leases.pop(who, None)
        if event.kind == "answer" and not self._fits(event.output, event.queue):
            self.outdated += 1
            return
        self.names.setdefault(who, event.who)
        if event.kind == "skip":
            judged.skips.append(event)
        else:
            judged.standing = [each for each in judged.standing if person(each.who) != who or each.input != event.input]
            judged.standing.append(event)
        self._own.setdefault(who, []).append(event)
        self._events[event.n] = event

    def _undo(self, event: Event, who: str) -> None:
        """Take back an event. Only the person who made it can do that."""
        undone = self._events.get(event.undoes)
        if undone is None or person(undone.who) != who:
            return
        del self._events[event.undoes]
        judged = self._rows[undone.row, undone.queue]
        for some in (judged.standing, judged.skips, self._own[who]):
            if undone in some:
                some.remove(undone)

    # Rows

    def verdict(self, row: int, queue: Queue, digest: str = "") -> PeopleVerdict:
        """Return the verdict of people on a row. ``digest`` is that of its present input: judgements of another input
        do not count."""
        judged = self._rows.get((row, queue))
        if judged is None:
            return PeopleVerdict()
        standing, skips = judged.of(digest)
        if not standing:
            return PeopleVerdict("skipped" if queue == AUDIT and len(skips) >= MOST_SKIPS else "open")
        first = standing[0]
        if len(standing) > 1 and not self._agree(first, standing[1]):
            if len(standing) < JUDGES:
                return PeopleVerdict("disputed", None, len(standing))
            first = standing[JUDGES - 1]
        return PeopleVerdict("answer" if first.kind == "answer" else "none", first.output, len(standing))

    def judges(self, row: int, queue: Queue) -> list[str]:
        """Return the names of the people whose judgement of a row counts."""
        judged = self._rows.get((row, queue))
        return [] if judged is None else [each.who for each in judged.standing]

    def void(self, row: int, queue: Queue, digest: str) -> int:
        """Return how many judgements of a row do not count because its input has changed since."""
        judged = self._rows.get((row, queue))
        return 0 if judged is None else sum(each.input != digest for each in judged.standing)

    def judged_rows(self) -> Iterator[tuple[int, Queue]]:
        """Yield the rows that a person has judged or skipped, with their queues."""
        return (key for key, judged in self._rows.items() if judged.standing or judged.skips)

    def judgements_of(self, row: int) -> list[Event]:
        """Return the judgements of a row that count, in both queues."""
        every = (self._rows.get((row, queue)) for queue in QUEUES)
        return [event for judged in every if judged is not None for event in judged.standing]

    def overlaps(self, name: str) -> bool:
        """Return whether two people judge the row with this id. A hash of the id decides, so that people cannot
        choose."""
        return int.from_bytes(self._order.rank(name)[:8]) < self._overlap * 2**64

    def _agree(self, one: Event, other: Event) -> bool:
        return one.kind == other.kind and (one.kind == "none" or self._same(one.output, other.output))

    def _wanted(self, place: ReviewRow, judged: _Judged) -> int:
        """Return how many people should judge a row."""
        standing, skips = judged.of(place.input)
        if place.queue == AUDIT and len(skips) >= MOST_SKIPS:
            return len(standing)
        if len(standing) > 1 and not self._agree(standing[0], standing[1]):
            return JUDGES
        return 2 if self.overlaps(place.id) else 1

    def _others_hold(self, judged: _Judged, who: str, now: float) -> int:
        return sum(_holds(lease, now) for name, lease in judged.leases.items() if name != who)

    def may_judge(self, place: ReviewRow, name: str, now: float | None) -> bool:
        """Return whether a person may get a row now. ``now`` None: whether the person may get it at any time, after the
        leases of other people."""
        return self._may(place, person(name), now)

    def _may(self, place: ReviewRow, who: str, now: float | None) -> bool:
        judged = self._rows.get((place.row, place.queue))
        if judged is None:
            return True
        standing, _ = judged.of(place.input)
        if any(person(each.who) == who for each in standing):
            return False
        held = 0 if now is None else self._others_hold(judged, who, now)
        return len(standing) + held < self._wanted(place, judged)

    # A person

    def next_of(self, places: Iterable[ReviewRow], name: str, now: float) -> ReviewRow | None:
        """Return the row that a person gets next: the one that the person holds, else the first that waits. Rows that
        the person has skipped come last. None if there is no row."""
        who = person(name)
        first = None
        last = None
        fewest = 0
        for place in places:
            judged = self._rows.get((place.row, place.queue))
            if judged is None:
                first = first or place
                continue
            if not self._may(place, who, now):
                continue
            lease = judged.leases.get(who)
            if lease is not None and lease.until is None:  # a file has it
                continue
            if lease is not None and _holds(lease, now):
                return place
            skipped = sum(person(each.who) == who for each in judged.of(place.input)[1])
            if not skipped:
                first = first or place
            elif last is None or skipped < fewest:
                last, fewest = place, skipped
        return first or last

    def refusal(self, place: ReviewRow, name: str) -> str:
        """Return the reason why a person cannot judge a row; "" if the person can. An answer after the end of the lease
        counts if no other person has answered; otherwise it counts as a second answer."""
        who = person(name)
        judged = self._rows.get((place.row, place.queue))
        standing = [] if judged is None else judged.of(place.input)[0]
        if any(person(each.who) == who for each in standing):
            return "you have judged this row already: undo that first"
        if judged is None or who not in judged.leases:
            return "this row was not given to you: ask for the next row"
        if judged.leases[who].input != place.input:
            return "this row was edited since you got it: ask for it again"
        if place.queue == AUDIT and not standing and len(judged.of(place.input)[1]) >= MOST_SKIPS:
            return "this row was skipped twice, and counts as wrong"
        return ""

    def last_of(self, name: str) -> Event | None:
        """Return the latest judgement or skip of a person that was not taken back; None if there is none."""
        own = self._own.get(person(name))
        return own[-1] if own else None

    def own_answer(self, place: ReviewRow, name: str) -> Event | None:
        """Return the judgement or skip of a row by this person; None if there is none."""
        judged = self._rows.get((place.row, place.queue))
        own = () if judged is None else judged.of(place.input)[0]
        return next((each for each in own if person(each.who) == person(name)), None)

    def held_by(self, name: str, now: float, *, for_good: bool = False) -> list[Event]:
        """Return the leases that a person has now. ``for_good``: only leases without an end, of rows that were written
        to a file for this person."""
        found = (judged.leases.get(person(name)) for judged in self._rows.values())
        return [each for each in found if each and _holds(each, now) and (each.until is None or not for_good)]

    def holds(self, row: ReviewRow, name: str, now: float) -> bool:
        """Return whether a person holds the lease of a row now."""
        judged = self._rows.get((row.row, row.queue))
        lease = None if judged is None else judged.leases.get(person(name))
        return lease is not None and _holds(lease, now)

    def has_seen(self, row: int, name: str, only: Queue | None = None) -> bool:
        """Return whether a row was given to a person; with ``only``, in this queue."""
        who = person(name)
        queues = QUEUES if only is None else (only,)
        every = [judged for queue in queues if (judged := self._rows.get((row, queue))) is not None]
        said = [event for judged in every for event in (*judged.standing, *judged.skips)]
        return any(who in judged.leases for judged in every) or any(person(event.who) == who for event in said)

    # Numbers

    def left(self, places: Iterable[ReviewRow], name: str = "") -> dict[Queue, Left]:
        """Return the counts of rows that are left in each queue."""
        counts = {queue: [0] * len(Left._fields) for queue in QUEUES}
        who = person(name)
        for place in places:
            count, judged = counts[place.queue], self._rows.get((place.row, place.queue))
            verdict = PeopleVerdict() if judged is None else self.verdict(place.row, place.queue, place.input)
            if verdict.kind == "open":
                count[0] += 1
            elif verdict.kind == "disputed":
                count[1] += 1
            elif judged is not None and verdict.judges == 1 and self._wanted(place, judged) > 1:
                count[2] += 1
            count[3] += bool(who) and self._may(place, who, None)
            count[4] += verdict.kind != "open"
        return {queue: Left(*count) for queue, count in counts.items()}

    @property
    def people(self) -> list[str]:
        """The names of the people who have judged."""
        return [name for who, name in self.names.items() if self._own.get(who)]

    @property
    def judgements(self) -> int:
        """The number of judgements that count, with second and third ones."""
        return sum(len(judged.standing) for judged in self._rows.values())

    def agreement(self, queue: Queue | None = None) -> Share | None:
        """Return the share of rows with two judgements in which both are the same, with its exact interval; None if no
        row has two judgements. A row whose input changed counts as another row."""
        rows = (
            [each for each in judged.standing if each.input == judged.standing[-1].input]
            for (_, own), judged in self._rows.items()
            if len(judged.standing) > 1 and queue in (None, own)
        )
        pairs = [self._agree(*standing[:2]) for standing in rows if len(standing) > 1]
        return share(sum(pairs), len(pairs)) if pairs else None


def _holds(lease: Event, now: float) -> bool:
    return lease.until is None or now < lease.until
