"""What stages do with rows: each is put what the stage before it has ready, and puts on what it makes of it.

Nothing here waits. A stage of agents is a run that takes its rows from a channel; ``engine.run.together`` hands its
results back. Functions are the user's own: what one raises fails its row alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any

from batch_agent.dispatch.row_channel import RowChannel
from batch_agent.engine.run.prepare import Prepared
from batch_agent.engine.run.rows import Rows
from batch_agent.engine.run.run import Run
from batch_agent.errors import BatchAgentError, InputError, Interrupted, JobError, SpecError, WorkerFailed
from batch_agent.foreign import describe
from batch_agent.job import AgentError, AgentResult, Failure, Placed, UnreadableRow
from batch_agent.observe.metrics import Statistics
from batch_agent.topology.items import InOrder, Item, Receiver


class Source:
    """The inputs of a pipeline whose first stage is not one of agents."""

    def __init__(self, inputs: Iterable[object] | AsyncIterable[object]) -> None:
        self._rows = Rows(inputs)
        self._count = 0
        self._ended = False
        self.out: Receiver = Collector()

    async def fetch(self) -> None:
        """One more row, or the end."""
        values = await self._rows.read(1)
        if not values:
            self._ended = True
            self.out.close("")
            return
        [value] = values
        if isinstance(value, UnreadableRow):
            self.out.put(Item(self._count, error=AgentError.of(InputError(value.message))))
        else:
            self.out.put(Item(self._count, value))
        self._count += 1

    async def pump(self) -> None:
        while not self._ended:
            await self.fetch()


class AgentNode:
    """``channel`` is None where the run reads the inputs of the pipeline itself."""

    run: Run[Any]

    def __init__(self, name: str, prepared: Prepared, channel: RowChannel | None, out: Receiver) -> None:
        self.name, self.prepared = name, prepared
        self.results: list[AgentResult[Any]] = []
        self._inlet, self._out = channel, out
        self._why = ""

    def put(self, item: Item) -> None:
        assert self._inlet is not None
        if item.ok:
            self._inlet.put(Placed(item.index, item.value))
            return
        if item.error is not None:  # a row that failed before is a failed row of this stage too
            self.results.append(Failure(item.index, str(item.index), item.value, False, None, item.error))
        self._out.put(item)

    def close(self, why: str) -> None:
        assert self._inlet is not None
        self._why = why
        self._inlet.close()

    def take(self, result: AgentResult[Any]) -> None:
        self.results.append(result)
        self._out.put(Item.of(result))

    def end(self) -> None:
        self._out.close(self._why or undone(self.name, self.run.statistics()))

    def fail(self, error: BatchAgentError) -> None:
        raise error


def undone(name: str, statistics: Statistics) -> str:
    """Why a stage did not come to its end; nothing where it did."""
    if statistics.ended == "complete":
        return ""
    reason = f": {statistics.reason}" if statistics.reason else ""
    return f"the stage {name!r} ended before it was done ({statistics.ended}{reason})"


class FlatMapNode:
    """Rows are numbered anew, in the order of the rows that they come from; so those of a later one wait until the
    earlier ones are known."""

    def __init__(self, function: Callable[[Any], Iterable[object]], out: Receiver) -> None:
        self._function, self._out = function, out
        self._order = InOrder()
        self._count = 0

    def put(self, item: Item) -> None:
        for ready in self._order.add(item):
            for row in self._rows(ready):
                self._out.put(replace(row, index=self._count))
                self._count += 1

    def _rows(self, item: Item) -> list[Item]:
        if not item.ok:
            return [] if item.left_out else [item]
        try:
            return [Item(0, value) for value in self._function(item.value)]
        except Exception as error:
            return [replace(item, error=_failure("flat_map", error))]

    def close(self, why: str) -> None:
        self._out.close(why)


class FilterNode:
    def __init__(self, function: Callable[[Any], object], out: Receiver) -> None:
        self._function, self._out = function, out

    def put(self, item: Item) -> None:
        if item.ok:
            try:
                item = replace(item, left_out=not self._function(item.value))
            except Exception as error:
                item = replace(item, error=_failure("filter", error))
        self._out.put(item)

    def close(self, why: str) -> None:
        self._out.close(why)


class JoinNode:
    """Pairs each row with the one of ``other`` that has its key. A pair goes on as soon as both are there."""

    def __init__(self, key: Callable[[Any], Hashable], other_key: Callable[[Any], Hashable], out: Receiver) -> None:
        self.other = OtherSide(self, other_key)
        self._key, self._out = key, out
        self._waiting: dict[Hashable, list[Item]] = {}
        self._others: dict[Hashable, object] = {}
        self._ends: list[str] = []

    def put(self, item: Item) -> None:
        if not item.ok:
            self._out.put(item)
            return
        try:
            key = self._key(item.value)
            known = key in self._others
        except Exception as error:
            self._out.put(replace(item, error=_failure("join", error)))
            return
        if known:
            self._out.put(replace(item, value=(item.value, self._others[key])))
        else:
            self._waiting.setdefault(key, []).append(item)

    def put_other(self, key: Hashable, value: object) -> None:
        if key in self._others:  # whichever was taken, it would be a guess
            raise SpecError(f"join: two rows have the key {key!r} on the side that is looked up")
        self._others[key] = value
        for item in self._waiting.pop(key, ()):
            self._out.put(replace(item, value=(item.value, value)))

    def close(self, why: str) -> None:
        self._ends.append(why)
        if len(self._ends) < 2:
            return
        why = next(filter(None, self._ends), "")
        for key, items in self._waiting.items():
            missed: JobError = Interrupted(why) if why else InputError(f"join: no row has the key {key!r}")
            for item in items:
                self._out.put(replace(item, error=AgentError.of(missed)))
        self._out.close(why)


class OtherSide:
    """Rows of it that failed are missed by those that look for them."""

    def __init__(self, join: JoinNode, key: Callable[[Any], Hashable]) -> None:
        self._join, self._key = join, key

    def put(self, item: Item) -> None:
        if item.ok:
            try:
                key = self._key(item.value)
                hash(key)
            except Exception as error:
                raise SpecError(f"join: the key of a row raised {describe(error)}") from error
            self._join.put_other(key, item.value)

    def close(self, why: str) -> None:
        self._join.close(why)


class Collector:
    """The end of a pipeline."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.why = ""

    def put(self, item: Item) -> None:
        self.items.append(item)

    def close(self, why: str) -> None:
        self.why = why


def error_of(error: BatchAgentError) -> AgentError:
    return AgentError.of(error) if isinstance(error, JobError) else AgentError("run", type(error).__name__, str(error))


def _failure(stage: str, error: Exception) -> AgentError:
    return AgentError.of(WorkerFailed(f"the function of {stage} raised {describe(error)}"))
