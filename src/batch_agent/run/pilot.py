"""The pilot of a run: a random sample of the rows goes first, and the other rows wait until they may follow.

``Rows`` hands out the rows of the pilot first. The other rows follow after ``go_on``, and never after ``stop``. A
pipeline has one pilot, of its inputs; it is done when everything that became of these rows is done.
"""

from __future__ import annotations

import asyncio
import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from batch_agent.agent.dryrun import most_cost
from batch_agent.agent.prepare import Prepared
from batch_agent.blocking import in_thread
from batch_agent.compiler.fields import fields_of, own_id
from batch_agent.errors import InputError, SpecError
from batch_agent.files.inputs import rows_again
from batch_agent.job import AgentResult, Placed, UnreadableRow
from batch_agent.messages import JsonObject
from batch_agent.observe.outlook import Outlook, RowWork, work_of
from batch_agent.results import Results, Summary
from batch_agent.run.rows import UniqueIds
from batch_agent.spec import BatchSpec
from batch_agent.trust.order import PILOT_KEY, KeyedOrder

if TYPE_CHECKING:
    from batch_agent.run.run import Run

T = TypeVar("T")


class Pilot:
    """The pilot of a run. ``rows`` rows go first, in the order of the hash of their ids with ``key``. ``only``: no
    others follow. ``of`` is the number of rows of the table, and ``last`` the hash of the pilot's last row; both are
    known after ``choose``."""

    def __init__(self, rows: int, key: str | None = None, *, only: bool = False) -> None:
        self.rows, self.only = rows, only
        self.of, self.last = 0, ""
        self.indexes: frozenset[int] = frozenset()
        self.results: dict[int, AgentResult[Any]] = {}
        self.first: object = None  # the first row of the table
        self.passed = False  # an earlier session stopped after it, or continued
        self._passed = 0  # rows of the largest pilot of which that is true
        self.read = False  # all its rows were read
        self.on_decided: Callable[[], None] = lambda: None
        self.on_read: Callable[[], None] = lambda: None
        self.closed = False  # the run has ended
        self._began = self.seconds = 0.0  # when its first row could be read; seconds until all were done
        self.on_closed: Callable[[], None] = lambda: None
        self._places: dict[int, int] = {}
        self._sorted: list[int] = []
        self._key = key
        self._goes_on: bool | None = None
        self._decided = asyncio.Event()
        self._ended = asyncio.Event()
        self._keeps = True  # results are kept for ``Run.pilot``
        self.asked = False  # ``Run.pilot`` was called
        self.complete = False  # all its rows are done

    @classmethod
    def of_spec(cls, spec: BatchSpec) -> Self | None:
        return None if spec.pilot is None else cls(spec.pilot, spec.pilot_key, only=spec.pilot_only)

    # Which rows

    def draw_by(self, key: str) -> None:
        """Order the rows by this key. If the run has a promise, the pilot is then the beginning of its audit."""
        self._key = key

    def choose(self, inputs: Iterable[object], id_column: str | None) -> list[Placed]:
        """Return the rows of the pilot in their order. Reads all inputs once."""
        order = KeyedOrder(PILOT_KEY if self._key is None else self._key)

        def ranked() -> Iterator[tuple[bytes, int, Placed]]:
            for placed in named(rows_again(inputs), id_column, warns=True):
                if not self.of:
                    self.first = placed.value
                self.of += 1
                name = str(placed.index) if placed.name is None else placed.name
                yield order.rank(name), placed.index, placed

        chosen = heapq.nsmallest(self.rows, ranked())
        self._places = {index: place for place, (_, index, _) in enumerate(chosen)}
        self._sorted = sorted(self._places)
        self.indexes = frozenset(self._places)
        self.last = chosen[-1][0].hex() if chosen else ""
        if self.covers_all:
            self.go_on()
        elif self.only:
            self.stop()
        return [placed for _, _, placed in chosen]

    def others(self, inputs: Iterable[object], id_column: str | None) -> Iterator[Placed]:
        """Yield the rows that are not in the pilot, in the order of the inputs."""
        return (row for row in named(inputs, id_column, warns=False) if row.index not in self.indexes)

    def place(self, index: int) -> int:
        """Return the position at which the row with this index is read."""
        if (place := self._places.get(index)) is not None:
            return place
        return len(self.indexes) + index - bisect_left(self._sorted, index)

    @property
    def covers_all(self) -> bool:
        """Whether the pilot has all rows of the table."""
        return 0 < self.of <= self.rows

    # Whether the others follow

    def go_on(self) -> None:
        """Let the other rows follow. Only the first decision counts."""
        if self.only and not self.covers_all:
            return
        if not self.asked:  # results that are taken as they come need not stay in memory
            self._keeps = False
            self.results.clear()
        self._decide(goes_on=True)

    def stop(self) -> None:
        """Let no other row follow."""
        self._decide(goes_on=False)

    def _decide(self, *, goes_on: bool) -> None:
        if self._goes_on is None:
            self._goes_on = goes_on
            self._decided.set()
            self.on_decided()

    @property
    def decided(self) -> bool:
        return self._decided.is_set()

    @property
    def stopped(self) -> bool:
        """Whether no other row follows."""
        return self._goes_on is False

    async def wait_decided(self) -> bool:
        """Wait until it is decided whether the other rows follow. If they do not, also wait until the rows of the pilot
        are done: rows that wait in a queue would otherwise not be started."""
        await self._decided.wait()
        if self.stopped:
            await self._ended.wait()
        return self._goes_on is True

    # Whether it is done

    def begin_rows(self) -> None:
        """Record that the pilot's rows were chosen, and are read next."""
        self._began = asyncio.get_running_loop().time()

    def reach(self) -> None:
        """Record that all rows of the pilot were read, and that the others wait."""
        if not self.read:
            self.read = True
            self.on_read()

    def took(self, result: AgentResult[Any]) -> None:
        """Count a result of the run."""
        if result.index in self.indexes and self._keeps:
            self.results[result.index] = result
            if len(self.results) == len(self.indexes):
                self.end()

    def end(self) -> None:
        """Record that all rows of the pilot are done."""
        self.complete = True
        self.seconds = asyncio.get_running_loop().time() - self._began
        self._ended.set()

    def close(self) -> None:
        """Record that the run has ended."""
        self.closed = True
        self._ended.set()
        self.on_closed()

    async def wait_ended(self) -> None:
        self.asked = True
        if not self._keeps:
            raise RuntimeError("call pilot() before you take the results of the run")
        await self._ended.wait()

    # Its record

    def begin(self, recorded: object, *, same: bool) -> JsonObject:
        """Return the description of the pilot for the record. ``recorded`` is the earlier one; ``same``: its answers
        are still valid. The run does not stop again at a pilot that was passed, or at a smaller one in the same
        order."""
        before = recorded if isinstance(recorded, dict) else {}
        count = before.get("passed")
        if same and before.get("key") == self._key and isinstance(count, int):
            self._passed = count
            self.passed = count >= self.rows
        return self.to_json()

    def to_json(self) -> JsonObject:
        """Return the pilot as JSON. ``stopped``: no other row will follow, as far as is known now."""
        table: JsonObject = {"rows": self.rows, "key": self._key, "of": self.of, "last": self.last}
        return {**table, "passed": self._passed, "stopped": self._goes_on is not True}

    def pass_by(self) -> None:
        """Record that a session stopped after the pilot or continued: later sessions do not stop again."""
        self._passed = max(self._passed, self.rows)


def named(inputs: Iterable[object], id_column: str | None, *, warns: bool) -> Iterator[Placed]:
    """Yield each input with its index and its own id, if it has one. Ids are made unique in the order of the inputs."""
    ids = UniqueIds(warns=warns)
    for index, value in enumerate(inputs):
        yield Placed(index, value, None if (own := _own_id(value, id_column)) is None else ids.unique(own))


def _own_id(value: object, id_column: str | None) -> str | None:
    if isinstance(value, UnreadableRow):
        return None
    try:
        return own_id(fields_of(value), id_column)
    except InputError:  # this row fails alone
        return None


async def results_of_pilot(run: Run[T]) -> Results[T]:
    """Wait until the pilot's rows are done, and return their results in input order."""
    if (pilot := run.pilot_rows) is None:
        raise SpecError("this run has no pilot: give pilot=N, the number of rows that go first")
    await pilot.wait_ended()
    results = [pilot.results[index] for index in sorted(pilot.results)]
    summary = Summary(run.statistics(), run.tool_statistics(), pilot=await outlook_of_run(run, results))
    return Results(results, summary, run.plan.spec.output_schema, gold=run.gold())


async def outlook_of_run(run: Run[Any], results: Sequence[AgentResult[Any]]) -> Outlook | None:
    """Return what the results of the pilot say about all rows of a run that is not a pipeline; None if they are not
    complete."""
    assert run.pilot_rows is not None
    return await outlook_of(run.pilot_rows, [*map(work_of, results)], run.parts, least_prompt(results))


def least_prompt(results: Iterable[AgentResult[Any]]) -> int | None:
    """Return the tokens of the shortest prompt that the server has counted."""
    prompts = (result.usage.prompt_tokens for result in results if result.turns == 1)
    return min(filter(None, prompts), default=None)


async def outlook_of(
    pilot: Pilot, work: Sequence[RowWork], parts: Mapping[str, Prepared], least: int | None = None
) -> Outlook | None:
    """Return what the pilot says about all rows; None if it is not complete. ``work`` is the work of its rows in all
    stages, which are ``parts``. ``least``: tokens of the shortest prompt."""
    if not pilot.complete or not work:
        return None
    most = await in_thread(partial(most_cost, next(iter(parts.values())), least)) if len(parts) == 1 else None
    return Outlook.made_of(work, rows=len(pilot.indexes), of=pilot.of, elapsed=pilot.seconds, most=most)
