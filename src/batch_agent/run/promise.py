"""The promise of a run while it runs: draws the rows of its audit before anything is sent, and says how it stands."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from contextlib import closing
from functools import partial
from typing import Self, cast

from batch_agent.agent.prepare import Prepared
from batch_agent.errors import SpecError
from batch_agent.files.inputs import rows_again
from batch_agent.files.results import to_json
from batch_agent.job import UnreadableRow
from batch_agent.messages import JsonObject
from batch_agent.record.address import RunPlace
from batch_agent.record.keys import row_of
from batch_agent.record.learned import LAST
from batch_agent.record.people import PeopleReview
from batch_agent.record.promise import (
    HEAD,
    HEAD_ROWS,
    PROMISE,
    SUMS,
    PromiseFacts,
    PromiseStanding,
    audit_key,
    row_digest,
)
from batch_agent.record.reader import RunReader, open_run
from batch_agent.record.store import RunStore, Store
from batch_agent.run.delivery import Delivery
from batch_agent.run.feeder import Feeder
from batch_agent.run.learning import LEARNED, UNTOLD, AuditFirst
from batch_agent.run.pilot import Pilot, named
from batch_agent.run.recording import in_thread
from batch_agent.run.rows import Rows
from batch_agent.run.scoring import keep_lines
from batch_agent.trust.order import KeyedOrder
from batch_agent.trust.promise import fixed_size, read_promise


class PromiseOfRun:
    """The promise of a run that this process feeds. Call ``draw`` first."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._run = str(prepared.spec.run_dir)
        self._drawn: PromiseFacts | None = None
        self._head: list[tuple[int, str]] = []

    @classmethod
    def of(cls, prepared: Prepared) -> Self | None:
        """Return the promise of a run that has one. Raises SpecError for a run whose promise could not be proved."""
        if prepared.promise is None:
            return None
        if prepared.spec.run_dir is None:
            raise SpecError(
                "promise needs a record, in which the answers of people and the audit are: give run_dir (on the "
                "command line leave --no-run-dir out)"
            )
        return cls(prepared)

    async def draw(self, store: Store, pilot: Pilot | None) -> None:
        """Draw the rows of the audit; the pilot is their beginning. Reads all inputs twice."""
        inputs = cast("Iterable[object]", self._prepared.spec.inputs)
        recorded = await store.facts()
        drawing = partial(draw_audit, self._prepared, inputs, recorded or {}, self._run)
        drawn, self._head = await in_thread(drawing)
        self._drawn = drawn
        if pilot is not None:
            pilot.draw_by(drawn.key)

    def facts(self) -> JsonObject:
        """Return the description of the promise for the record."""
        assert self._drawn is not None, "the rows are drawn first"
        learns = {LEARNED: UNTOLD} if self._drawn.truth == LAST else {}
        return {PROMISE: self._drawn.to_json(), **learns}

    async def begin(self, prepared: Prepared, feeder: Feeder, rows: Rows, delivery: Delivery[object]) -> None:
        """Record the first rows of the audit. If the last model is the truth, these rows are fed first."""
        await in_thread(partial(self._keep, feeder.store.fed))
        if prepared.spec.truth != LAST or prepared.cascade is None:
            return
        names = prepared.cascade.names(prepared)
        delivery.learning = learning = AuditFirst(self._run, names, prepared.schema, feeder.record)
        await learning.begin()
        if not learning.decided:
            await rows.learn_first(learning)

    def _keep(self, store: RunStore) -> None:
        keep_lines(store, HEAD, (to_json(row) + b"\n" for row in self._head))

    def settle(self) -> None:
        """Record, at the end of a session, the results of the audit so far. May block."""
        standing_of(self._run, settles=True)

    def standing(self) -> PromiseStanding | None:
        """Return how the promise stands. May block."""
        return None if self._drawn is None else standing_of(self._run)


def draw_audit(
    prepared: Prepared, inputs: Iterable[object], recorded: JsonObject, run: str
) -> tuple[PromiseFacts, list[tuple[int, str]]]:
    """Return the facts of the promise, and the first rows of the audit with their ids. ``recorded`` are the facts of an
    earlier session. Raises SpecError for another beacon after the audit began."""
    spec, promise = prepared.spec, prepared.promise
    assert promise is not None, "only a run with a promise has an audit"
    rows = total = 0
    for placed in named(rows_again(inputs), spec.id_column, warns=False):
        value = None if isinstance(placed.value, UnreadableRow) else placed.value
        total = (total + row_digest(_name(placed.index, placed.name), row_of(value, ""))) % SUMS
        rows += 1
    digest, before = f"{total:032x}", PromiseFacts.of(recorded)
    beacon = spec.beacon if spec.beacon is not None or before is None else before.beacon
    if before is not None and beacon != before.beacon and _has_begun(run):
        raise SpecError(
            "beacon: the audit of this run has begun, so its rows cannot be drawn again: leave beacon out, or start "
            "another run"
        )
    key = audit_key(promise, rows, digest, beacon)
    order = KeyedOrder(key)
    ranked = (
        (order.rank(_name(placed.index, placed.name)), placed.index, _name(placed.index, placed.name))
        for placed in named(rows_again(inputs), spec.id_column, warns=False)
    )
    head = [(index, name) for _, index, name in heapq.nsmallest(HEAD_ROWS, ranked)]
    prices = spec.prices or {}
    facts = PromiseFacts(
        promise,
        rows,
        digest,
        key,
        pilot=min(spec.pilot or 0, rows),
        people_error=float(spec.people_error),
        max_people=spec.max_people,
        max_cost=spec.max_cost,
        price=prices.get("people"),
        truth=spec.truth,
        beacon=beacon,
        doubt=prepared.doubted is not None,
        tolerance=None if spec.tolerance is None else {**spec.tolerance},
        audit=fixed_size(promise, rows) if spec.truth == LAST else 0,
    )
    return facts, head


def _name(index: int, name: str | None) -> str:
    return str(index) if name is None else name


def _has_begun(run: str) -> bool:
    with PeopleReview.open(run) as review:
        return review.review.thresholds is not None


def standing_of(run: str | RunPlace, *, settles: bool = False) -> PromiseStanding | None:
    """Return how the promise of a recorded run stands; None if it has none. ``settles``: the results of the audit so
    far are recorded first, as at the end of a run. Blocks."""
    with open_run(run) as reader:
        return standing_in(reader, settles=settles)


def standing_in(run: RunReader, *, settles: bool = False) -> PromiseStanding | None:
    """Return how the promise of an open run stands; None if it has none. ``settles`` as in ``standing_of``."""
    if PromiseFacts.of(run.facts()) is None:
        return None
    with PeopleReview(run) as review:
        review.catch_up()
        if settles:
            review.prepare()
        assert review.promise is not None, "the run has one"
        return review.promise.standing(spent=run.view().progress.cost)


def priced(run: str, text: str) -> PromiseStanding:
    """Return how another promise about the table of a recorded run would stand, by the audit that was made for its own.
    Blocks. Raises SpecError for a run without a promise."""
    promise = read_promise(text)
    with PeopleReview.open(run) as review:
        if review.promise is None:
            raise SpecError(f"{run} has no promise, so it has no audit by which another one could be priced")
        with closing(review.promise.priced(promise)) as other:
            return other.standing(spent=review.whole.view().progress.cost)
