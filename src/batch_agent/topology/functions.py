"""Sources and functions of a pipeline: stages that produce rows without a model.

Functions are user code. They run in threads, one row after another, so that agents continue beside a slow one; an
exception fails only its row. Output is read only as the next stage has room, so a generator may be endless. ``pump``
does the work of a node until its rows have ended, or the run's time is up.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterable, Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from batch_agent.blocking import in_thread
from batch_agent.compiler.fields import fields_of, own_id
from batch_agent.dispatch.row_channel import FULL, RowChannel
from batch_agent.errors import InputError, Interrupted, SpecError, WorkerFailed
from batch_agent.foreign import describe
from batch_agent.job import AgentError, UnreadableRow
from batch_agent.run.rows import Rows, UniqueIds
from batch_agent.run.shared import Shared
from batch_agent.topology.items import InOrder, Item, Receiver

BREATHER = 128  # inputs read before the event loop may run other tasks
SLICE = 0.05  # seconds that a thread works before it delivers what it has made
# Exceptions of the user's code that must not end our process.
FOREIGN = (Exception, SystemExit, asyncio.CancelledError)

T = TypeVar("T")


class InputSource:
    """The inputs of a pipeline whose first stage is not a stage of agents."""

    def __init__(self, inputs: Iterable[object] | AsyncIterable[object], out: Receiver, id_column: str | None) -> None:
        self._rows, self._out, self._id_column = Rows(inputs), out, id_column
        self._ids = UniqueIds()
        self._reader: asyncio.Task[None] | None = None

    async def pump(self, shared: Shared) -> None:
        """Read the inputs as they are needed. It has a feed, so that it stops when nothing new may start."""
        self._reader = asyncio.current_task()
        feed = shared.dispatcher.feed(self.stop)
        feed.expect(0)
        feed.set_reading(True)
        why = "the inputs were not read to their end"
        try:
            count = 0
            while await self._out.room():
                values = await self._rows.read(1)
                if not values:
                    why = ""
                    break
                self._out.put(self._item(count, values[0]))
                count += 1
                if count % BREATHER == 0:
                    await asyncio.sleep(0)
        finally:
            self._reader = None
            self._out.close(why)
            feed.close()

    def _item(self, index: int, value: object) -> Item:
        if isinstance(value, UnreadableRow):
            return Item(index, error=AgentError.of(InputError(value.message)))
        try:
            name = own_id(fields_of(value), self._id_column)
            return Item(index, value, name=name if name is None else self._ids.unique(name))
        except InputError:  # a function may take what is no row
            return Item(index, value)

    def stop(self) -> None:
        """Read no more inputs."""
        if self._reader is not None:
            self._reader.cancel()


class FunctionNode:
    """Calls a function for each row. ``make`` returns the rows that one becomes."""

    def __init__(self, function: Callable[[Any], Any], out: Receiver) -> None:
        self._function, self._out = function, out
        self._inlet: RowChannel[Item] = RowChannel()
        self._why = ""

    def put(self, item: Item) -> None:
        self._inlet.put(item)

    async def room(self) -> bool:
        return await self._inlet.room()

    def close(self, why: str) -> None:
        self._why = why
        self._inlet.close()

    async def pump(self, shared: Shared) -> None:
        try:
            while items := await self._inlet.take_all():
                made = chain.from_iterable(map(self.make, items))
                more = True
                while more and await self._out.room():
                    rows, more = await _until_time_is_up(partial(_next_of, made), shared)
                    for row in rows:
                        self.pass_on(row)
                if more:  # the next stage takes no more rows
                    break
        except Interrupted as error:
            self._why = str(error)
        self._inlet.close()
        self._out.close(self._why)

    def make(self, item: Item) -> Iterator[Item]:
        """Return the rows made from one; runs in a thread."""
        raise NotImplementedError

    def pass_on(self, item: Item) -> None:
        self._out.put(item)


class FlatMapNode(FunctionNode):
    """Numbers its rows in the order of their source rows, so the rows of a later one wait until the earlier ones are
    known."""

    def __init__(self, function: Callable[[Any], Iterable[object]], out: Receiver) -> None:
        super().__init__(function, out)
        self._order = InOrder()
        self._count = 0

    def put(self, item: Item) -> None:
        for ready in self._order.add(item):
            super().put(ready)

    def make(self, item: Item) -> Iterator[Item]:
        if item.left_out:
            return
        if not item.ok:
            yield item
            return
        try:
            for number, value in enumerate(_plain(self._function(item.value))):
                name = None if item.name is None else f"{item.name}.{number}"
                yield Item(0, value, name=name, carried=item.carried)
        except FOREIGN as error:
            yield replace(item, error=_failure("flat_map", error))

    def pass_on(self, item: Item) -> None:
        self._out.put(replace(item, index=self._count))
        self._count += 1


class FilterNode(FunctionNode):
    def make(self, item: Item) -> Iterator[Item]:
        if item.ok:
            try:
                item = replace(item, left_out=not _plain(self._function(item.value)))
            except FOREIGN as error:
                item = replace(item, error=_failure("filter", error))
        yield item


class KeyNode(FunctionNode):
    """Makes ``(key, value)`` of a row. On the side that is looked up, a row without a key ends the pipeline, because it
    might be the one that another row needs."""

    def __init__(self, function: Callable[[Any], Hashable], out: Receiver, *, looked_up: bool = False) -> None:
        super().__init__(function, out)
        self._looked_up = looked_up

    def make(self, item: Item) -> Iterator[Item]:
        if item.ok:
            try:
                key = _plain(self._function(item.value))
                hash(key)
                item = replace(item, value=(key, item.value))
            except FOREIGN as error:
                if self._looked_up:
                    raise SpecError(f"join: the key of a row raised {describe(error)}") from error
                item = replace(item, error=_failure("join", error))
        yield item


async def _until_time_is_up(function: Callable[[], T], shared: Shared) -> T:
    """Run a function in a thread. Raises Interrupted when the run's time is up; the thread is then abandoned."""
    if shared.spending.time_is_up:
        raise shared.spending.refusal()
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    work = in_thread(function)
    work.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
    await shared.dispatcher.wait_for_tools(ended)
    return work.result()


def _next_of(rows: Iterator[T]) -> tuple[list[T], bool]:
    """Return the next rows, and whether there may be more: as many as fit the channel, or as are made in a moment."""
    until, made = time.monotonic() + SLICE, []
    for row in rows:
        made.append(row)
        if len(made) >= FULL or time.monotonic() > until:
            return made, True
    return made, False


def _plain(made: T) -> T:
    if inspect.isawaitable(made):
        if inspect.iscoroutine(made):
            made.close()
        raise TypeError("it is async, but a plain function is needed here")
    return made


def _failure(stage: str, error: BaseException) -> AgentError:
    return AgentError.of(WorkerFailed(f"the function of {stage} raised {describe(error)}"))
