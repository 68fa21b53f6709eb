"""What stages do with rows: each receives the finished rows of the previous stage, and passes on its own.

A stage of agents is a run that takes its rows from a channel; ``run.collecting`` returns its results. Sources and
functions are in ``flow``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from batch_agent.agent.prepare import Prepared
from batch_agent.compiler.fields import fields_of
from batch_agent.dispatch.row_channel import RowChannel
from batch_agent.errors import BatchAgentError, InputError, Interrupted, JobError, SpecError
from batch_agent.job import AgentError, AgentResult, Failure, Placed
from batch_agent.observe.statistics import Statistics
from batch_agent.run.pilot import Pilot
from batch_agent.run.run import Run


@dataclass(frozen=True, slots=True)
class Item:
    """A row on its way between stages. ``name`` is the id of the row from which it was made, or None. ``carried`` are
    fields of earlier rows."""

    index: int
    value: object = None
    error: AgentError | None = None
    left_out: bool = False
    name: str | None = None
    carried: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, result: AgentResult[Any], carry: Sequence[str] = ()) -> Item:
        """Return the row of the next stage: the output of this row, and those of its input fields that ``carry``
        names."""
        name = None if result.job_id == str(result.index) else result.job_id
        carried = carried_by(result.input, carry)
        return cls(result.index, result.output, result.error, name=name, carried=carried)

    @property
    def job_id(self) -> str:
        return str(self.index) if self.name is None else self.name

    def placed(self) -> Placed:
        """Return the item as a row of agents: its value; if there are carried fields, a dict of these and the item's
        own fields."""
        value = self.value
        if self.carried and (value is None or _fields(value)):
            value = {**self.carried, **_fields(value)}
        return Placed(self.index, value, self.name)

    @property
    def ok(self) -> bool:
        return self.error is None and not self.left_out


def carried_by(row: object, carry: Sequence[str]) -> dict[str, object]:
    """Return the fields that a row carries to later stages."""
    fields = _fields(row) if carry else {}
    return {name: fields[name] for name in carry if name in fields}


def _fields(value: object) -> Mapping[str, object]:
    try:
        return fields_of(value)
    except InputError:  # no row, such as a pair of a join; the next stage says so
        return {}


class Receiver(Protocol):
    """Receives the rows of a stage. A source or a function awaits ``room`` before it makes more; False means that no
    more are accepted. ``close`` is called once, after the last row; ``why`` is the reason why some rows are missing, or
    ""."""

    def put(self, item: Item) -> None: ...

    async def room(self) -> bool: ...

    def close(self, why: str) -> None: ...


class InProgress:
    """Counts the rows that a node of the pipeline has received and not passed on. ``on_none`` is called when there are
    none left."""

    def __init__(self) -> None:
        self.count = 0
        self.on_none: Callable[[], None] = lambda: None

    def add(self, rows: int = 1) -> None:
        self.count += rows

    def done(self, rows: int = 1) -> None:
        self.count -= rows
        if not self.count:
            self.on_none()


class InOrder:
    """Accepts items in any order and returns them by their place: their index, if ``place`` says nothing else."""

    def __init__(self, place: Callable[[int], int] = lambda index: index) -> None:
        self._place = place
        self._waiting: dict[int, Item] = {}
        self._next = 0

    def add(self, item: Item) -> Iterator[Item]:
        self._waiting[self._place(item.index)] = item
        while self._next in self._waiting:
            yield self._waiting.pop(self._next)
            self._next += 1


class AgentNode:
    """A stage of agents. ``channel`` is None if the run reads the inputs of the pipeline itself."""

    run: Run[Any]

    def __init__(
        self,
        name: str,
        prepared: Prepared,
        channel: RowChannel[object] | None,
        out: Receiver,
        progress: InProgress | None = None,
    ) -> None:
        self.name, self.prepared = name, prepared
        self._progress = progress or InProgress()
        self.pilot: Pilot | None = None  # of its rows, if it reads the inputs itself
        self.counts = False  # its rows were made of those of the pilot
        self.order: Callable[[int], tuple[int, ...]] = lambda index: (index,)
        self.results: list[AgentResult[Any]] = []
        self.failed_before = 0  # rows that came as failures
        self._inlet, self._out = channel, out
        self._why = ""

    def put(self, item: Item) -> None:
        assert self._inlet is not None
        if item.ok:
            self._progress.add()
            self._inlet.put(item.placed())
            return
        if item.error is not None:  # a row that failed earlier also fails in this stage
            self.failed_before += 1
            self.results.append(Failure(item.index, item.job_id, item.placed().value, False, None, item.error))
        self._out.put(item)

    async def room(self) -> bool:
        assert self._inlet is not None
        return await self._inlet.room()

    def close(self, why: str) -> None:
        assert self._inlet is not None
        self._why = why
        self._inlet.close()

    def take(self, result: AgentResult[Any]) -> None:
        self.results.append(result)
        if self._inlet is None:  # else it was counted when it was put
            self._progress.add()
        self._out.put(Item.of(result, self.prepared.carry))
        self._progress.done()

    def pass_recorded(self, items: Iterable[Item], *, complete: bool) -> None:
        """Pass recorded results on, without running the stage. ``complete``: these are all results."""
        for item in items:
            self._out.put(item)
        if complete:
            self._out.close("")

    def end(self) -> None:
        if self._inlet is not None:
            self._inlet.close()
        self._out.close(self._why or undone(self.name, self.run.statistics()))

    def fail(self, error: BatchAgentError) -> None:
        raise error


def undone(name: str, statistics: Statistics) -> str:
    """Return the reason why a stage did not finish; "" if it did."""
    if statistics.ended == "complete":
        return ""
    reason = f": {statistics.reason}" if statistics.reason else ""
    return f"the stage {name!r} ended before it finished ({statistics.ended}{reason})"


class JoinNode:
    """Pairs each row with the row of the ``other`` side that has the same key. Rows arrive as ``(key, value)``; a pair
    is passed on as soon as both are there."""

    def __init__(self, out: Receiver, progress: InProgress) -> None:
        self.other: Receiver = _OtherSide(self)
        self._out, self._progress = out, progress
        self._waiting: dict[Hashable, list[Item]] = {}
        self._others: dict[Hashable, object] = {}
        self._ends: list[str] = []

    def put(self, item: Item) -> None:
        if not item.ok:
            self._out.put(item)
            return
        key, value = cast("tuple[Hashable, object]", item.value)
        item = replace(item, value=value)
        if key in self._others:
            self._pair(item, self._others[key])
        else:
            self._waiting.setdefault(key, []).append(item)
            if not self._ends:  # else no row will come that has this key
                self._progress.add()

    def put_other(self, key: Hashable, value: object) -> None:
        if key in self._others:  # either choice would be a guess
            raise SpecError(f"join: two rows have the key {key!r} on the side that is looked up")
        self._others[key] = value
        for item in self._waiting.pop(key, ()):
            self._pair(item, value)
            self._progress.done()

    def _pair(self, item: Item, other: object) -> None:
        self._out.put(replace(item, value=(item.value, other)))

    async def room(self) -> bool:
        return await self._out.room()

    def close(self, why: str) -> None:
        """Called when one of the two sides has ended."""
        self._ends.append(why)
        if len(self._ends) < 2:
            if waiting := sum(map(len, self._waiting.values())):
                self._progress.done(waiting)
            return
        why = next(filter(None, self._ends), "")
        for key, items in self._waiting.items():
            missed: JobError = Interrupted(why) if why else InputError(f"join: no row has the key {key!r}")
            for item in items:
                self._out.put(replace(item, error=AgentError.of(missed)))
        self._out.close(why)


class _OtherSide:
    """The side of a join that is looked up. If one of its rows failed, the rows that need it have no partner."""

    def __init__(self, join: JoinNode) -> None:
        self._join = join
        self.room = join.room
        self.close = join.close

    def put(self, item: Item) -> None:
        if item.ok:
            self._join.put_other(*cast("tuple[Hashable, object]", item.value))


class Collector:
    """The end of a pipeline."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.why = ""

    def put(self, item: Item) -> None:
        self.items.append(item)

    async def room(self) -> bool:
        return True

    def close(self, why: str) -> None:
        self.why = why


def error_of(error: BatchAgentError) -> AgentError:
    return AgentError.of(error) if isinstance(error, JobError) else AgentError("run", type(error).__name__, str(error))
