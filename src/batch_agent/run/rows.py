"""Reads inputs as they are needed: a list, an iterator, an async iterator, or another run's results. Compiles them."""

from __future__ import annotations

import asyncio
import logging
import os
from array import array
from collections import Counter
from collections.abc import AsyncIterable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from batch_agent.blocking import in_thread
from batch_agent.compiler.plan import Plan
from batch_agent.dispatch.cancellation import cancelled_by_us
from batch_agent.dispatch.row_channel import RowChannel
from batch_agent.errors import JobError
from batch_agent.files.read import LazyRows
from batch_agent.foreign import describe
from batch_agent.job import AgentError, AgentResult, Failure, Job, Placed

if TYPE_CHECKING:
    from batch_agent.run.learning import AuditFirst
    from batch_agent.run.pilot import Pilot

READERS = max(2, min(8, os.cpu_count() or 1))  # documents that are read at once
BUCKET_IDS = 32  # ids of a bucket, on average, after which the number of buckets is doubled
NAMED_IDS = 5  # repeated ids that are named in warnings
_END = object()

logger = logging.getLogger("batch_agent")


class UniqueIds:
    """Makes the ids of rows unique: the second row with the id ``a`` gets ``a~2``. It warns about such ids. It stores a
    hash of each id, about 12 bytes, because inputs may be long."""

    def __init__(self, *, warns: bool = True) -> None:
        self._warns = warns
        self._buckets = [array("q")]  # of hashes; their number is a power of two, and grows with that of the ids
        self._count = 0
        self._copies: Counter[str] = Counter()

    def unique(self, name: str) -> str:
        """Return the id under which a row with the id ``name`` is known."""
        if self._is_new(name):
            return name
        self._copies[name] += 1
        if self._warns and len(self._copies) <= NAMED_IDS and self._copies[name] == 1:
            words = f"more than one row has the id {name!r}: the next ones are {name}~2, {name}~3, …"
            more = ". Further repeated ids are not named" if len(self._copies) == NAMED_IDS else ""
            logger.warning("%s%s", words, more)
        while not self._is_new(copy := f"{name}~{self._copies[name] + 1}"):
            self._copies[name] += 1
        return copy

    def _is_new(self, name: str) -> bool:
        number, buckets = hash(name), self._buckets
        bucket = buckets[number & (len(buckets) - 1)]
        if number in bucket:
            return False
        bucket.append(number)
        self._count += 1
        if self._count > BUCKET_IDS * len(buckets):
            bit = len(buckets)
            self._buckets = [array("q", [each for each in old if not each & bit]) for old in buckets]
            self._buckets += [array("q", [each for each in old if each & bit]) for old in buckets]
        return True


class Rows:
    """Reads inputs. A plain iterator is advanced on the event loop, so one that blocks should be async. With a
    ``pilot``, its rows go first, and the others follow when it allows that; ``id_column`` is the field with their
    ids."""

    def __init__(
        self,
        inputs: Iterable[object] | AsyncIterable[object],
        pilot: Pilot | None = None,
        id_column: str | None = None,
    ) -> None:
        self._inputs = inputs
        self._pilot = pilot
        self._id_column = id_column
        self._waits = self._stopped = False  # rows wait behind the pilot; they do not follow
        self._file = inputs if isinstance(inputs, LazyRows) else None
        self.at_hand = isinstance(inputs, list | tuple | LazyRows)  # reading ahead costs nothing
        self.channel = inputs if isinstance(inputs, RowChannel) else None
        self._async = aiter(inputs) if isinstance(inputs, AsyncIterable) else None
        self._plain: Iterator[object] = iter(()) if isinstance(inputs, AsyncIterable) else iter(inputs)
        self._peeked: list[object] = []
        self._learning: AuditFirst | None = None
        self._failure: Exception | None = None  # of the input after those that were read
        self.seen = False  # there was at least one input

    @property
    def waiting(self) -> int | None:
        """Number of rows that can be read now; None if unknown."""
        return None if self.channel is None else self.channel.waiting

    @property
    def may_wait(self) -> bool:
        """Whether reading the next input may have to wait."""
        return self._waits or (self._async is not None and not self._peeked and not self.waiting)

    @property
    def stopped(self) -> bool:
        """Whether the rows of the pilot were read, and no others follow."""
        return self._stopped

    async def first(self, plan: Plan) -> object:
        """Return the first input, or None. ``read`` returns it again. Raises SpecError if it lacks a field of the task;
        a row that another stage made fails alone instead, later."""
        if self._pilot is not None:
            await self.choose(self._pilot)
            plan.total = self._pilot.of
            plan.check_first(self._pilot.first)
        self._peeked = await self.read(1)
        for value in self._peeked if self.channel is None else ():
            plan.check_first(unplaced(value))
        if self._pilot is not None:
            return self._pilot.first
        return unplaced(self._peeked[0]) if self._peeked else None

    async def choose(self, pilot: Pilot) -> None:
        """Find the rows of the pilot, which are read next."""
        chosen = await in_thread(partial(pilot.choose, self._countable, self._id_column))
        pilot.begin_rows()
        self._plain = iter(chosen)
        self._waits = True

    async def learn_first(self, learning: AuditFirst) -> None:
        """Hand out the rows of an audit first. The others follow when it is decided which of them go to the last
        model."""
        self._plain = await in_thread(partial(learning.lead, self._countable, self._id_column))
        self._learning = learning
        self._waits = True
        self._peeked = []

    @property
    def _countable(self) -> Iterable[object]:
        assert isinstance(self._inputs, Iterable), "inputs that cannot be counted are refused before"
        return self._inputs

    async def read(self, count: int) -> list[object]:
        """Return at most ``count`` next inputs; from an async iterator, only one. Empty at the end."""
        if self._peeked:
            values, self._peeked = self._peeked, []
            return values
        try:
            values = self._take(count) if self._async is None else await self._next()
            if not values and self._waits and self._pilot is not None:
                self._pilot.reach()
                self._stopped = not await self._pilot.wait_decided()
                self._waits = False
                if not self._stopped:
                    self._plain = self._pilot.others(self._countable, self._id_column)
                    values = self._take(count)
            elif not values and self._waits and self._learning is not None:
                await self._learning.wait()
                self._waits = False
                self._plain = self._learning.others(self._countable, self._id_column)
                values = self._take(count)
        except asyncio.CancelledError:
            if cancelled_by_us():
                raise
            raise RuntimeError("the inputs raised CancelledError") from None
        except (SystemExit, GeneratorExit) as error:  # it must not end this process, and must not escape from a task
            raise RuntimeError(f"the inputs raised {describe(error)}") from error
        self.seen = self.seen or bool(values)
        return values

    async def read_ready(self, count: int) -> list[object]:
        """Return what ``read`` returns; from a channel, all rows that have arrived."""
        if self.channel is None or self._peeked:
            return await self.read(count)
        values = await self.channel.take_all()
        self.seen = self.seen or bool(values)
        return values

    def close(self) -> None:
        """Close an input file. A generator of the user's is left to the user."""
        if self._file is not None:
            self._file.close()

    def _take(self, count: int) -> list[object]:
        if self._failure is not None:
            raise self._failure
        values: list[object] = []
        try:
            for value in islice(self._plain, count):
                values.append(value)
        except Exception as error:
            if not values:
                raise
            self._failure = error  # the inputs before it are processed
        return values

    async def _next(self) -> list[object]:
        assert self._async is not None
        value = await anext(self._async, _END)
        return [] if value is _END else [value]


async def compile_all(plan: Plan, first: int, values: Sequence[object]) -> list[Job | AgentResult[object]]:
    """Return the jobs of inputs that begin at index ``first``. Images and documents are read outside the event loop."""
    bare = [unplaced(value) for value in values]
    if not any(map(plan.shows, bare)):
        return _compile_each(plan, first, values)
    if any(map(plan.reads, bare)):
        return await _read_all(plan, first, values)
    return await in_thread(partial(_compile_each, plan, first, values))


def _compile_each(plan: Plan, first: int, values: Sequence[object]) -> list[Job | AgentResult[object]]:
    return [_compile(plan, first + place, value) for place, value in enumerate(values)]


async def _read_all(plan: Plan, first: int, values: Sequence[object]) -> list[Job | AgentResult[object]]:
    """Return the jobs of inputs with documents. Several documents are read at once."""
    free = asyncio.Semaphore(READERS)

    async def job(place: int, value: object) -> Job | AgentResult[object]:
        async with free:
            return await in_thread(partial(_compile, plan, first + place, value))

    async with asyncio.TaskGroup() as readers:
        tasks = [readers.create_task(job(place, value)) for place, value in enumerate(values)]
    return [task.result() for task in tasks]


def unplaced(value: object) -> object:
    return value.value if isinstance(value, Placed) else value


def _compile(plan: Plan, index: int, value: object) -> Job | AgentResult[object]:
    """Return the job of a row; if the row cannot be rendered, its failed result."""
    name = None
    if isinstance(value, Placed):
        index = value.index
        name = value.name
        value = value.value
    try:
        return plan.job(index, value, name)
    except JobError as error:
        return Failure(index, str(index) if name is None else name, value, False, None, AgentError.of(error))
