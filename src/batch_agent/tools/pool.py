"""The tool pool of one run: starts calls, lets identical ones share a run, keeps results, limits rates and times.

A call is started synchronously, from inside a stream's callback, and awaited later. What several agents wait for is a
flight (``flight.py``): one run of one call. It passes the gates of its tool; then foreign code runs, in ``_execute``
alone, and leaves it as text or as a ToolError. Nothing is ever tried again here: the model sees the failure and
decides.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

from batch_agent.errors import ToolError, ToolFailed, ToolTimeout, UnknownTool
from batch_agent.foreign import describe, message_of
from batch_agent.messages import ToolCall
from batch_agent.tools.base import Tool
from batch_agent.tools.cache import Key, ResultCache
from batch_agent.tools.flight import ENDING_SECONDS, Flight, PendingCall, ToolOutcome, Traffic
from batch_agent.tools.gates import Gate, Slots
from batch_agent.tools.latency import Tally, ToolStatistics
from batch_agent.tools.rate import RateGate
from batch_agent.tools.render import MAX_TOKENS, cut_tokens, render
from batch_agent.tools.schema import Arguments
from batch_agent.tools.threads import THREADS, Threads

__all__ = ["PendingCall", "ToolOutcome", "ToolPool", "ToolStatistics"]

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
logger = logging.getLogger("batch_agent")

# Async calls running at once: many more than threads, for they cost little here; but each mostly holds a connection. As
# many again may not stop when they are cancelled, before new ones fail instead.
ASYNC_CALLS = 1024
_CANCELLED = ToolOutcome("Error: the call was cancelled", False, "run", 0.0)


@dataclass(frozen=True, slots=True)
class _Offer:
    """A tool in this run, with the gates that its calls pass."""

    tool: Tool
    gates: tuple[Gate, ...]
    tally: Tally = field(default_factory=Tally)


class ToolPool:
    """``timeout``, in seconds, is for tools that have none of their own; ``spawn`` starts a task, which the pool then
    owns: leaving the pool ends it, or leaves it behind with a warning.

    ``on_waiting`` is told how many agents' calls wait for a tool that is itself the bottleneck (for its rate, its own
    limit, a thread or a place among the async calls), whenever that number changes.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        timeout: float | None,
        spawn: Spawn,
        on_waiting: Callable[[int], None] | None = None,
    ) -> None:
        on_loop, in_threads = Slots(ASYNC_CALLS), Slots(THREADS)
        self._offers = {t.name: _Offer(t, (*_own_gates(t), on_loop if t.is_async else in_threads)) for t in tools}
        self._timeout = timeout
        self._spawn = spawn
        self._traffic = Traffic(on_waiting)
        self._cache = ResultCache()
        self._flights: dict[Key, Flight] = {}
        self._tasks: dict[asyncio.Task[None], Flight] = {}
        self._threads = Threads()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def waiting(self) -> int:
        return self._traffic.waiting

    def has(self, tools: Sequence[Tool]) -> bool:
        """Whether it offers these very tools, and no others."""
        return {tool.name: tool for tool in tools} == {name: offer.tool for name, offer in self._offers.items()}

    def can_start_early(self, name: str) -> bool:
        """Whether a call may run before the answer that asks for it is complete: such an answer may yet be lost and
        asked for again, which a write must not notice."""
        offer = self._offers.get(name)
        return offer is not None and offer.tool.effect == "read"

    def start(self, call: ToolCall) -> PendingCall:
        """Begins a call at once. A call that cannot be is settled at once, as a failure the model can read."""
        offer = self._offers.get(call.name)
        if offer is None:
            return self._settled(_failure(self._unknown(call.name), 0.0))
        tool, tally = offer.tool, offer.tally
        tally.calls += 1
        if self._closed:
            return self._settled(_failure(ToolFailed("the run has ended"), 0.0))
        try:
            arguments = tool.signature.parse(call.arguments)
            identity = "" if tool.effect == "write" and tool.declared else tool.identity(arguments)
        except ToolError as error:
            return self._settled(_failure(error, 0.0, offer))
        if tool.effect == "write":
            if not tool.declared:
                tally.compare(identity)
            return self._launch(offer, arguments, None)
        return self._share(offer, arguments, (tool.name, identity))

    def statistics(self) -> dict[str, ToolStatistics]:
        return {name: offer.tally.statistics(name) for name, offer in self._offers.items()}

    async def close(self) -> None:
        """Cancels what is running and ends the threads. Whoever still waits gets a failure. A tool that ignores its
        cancellation is named and left behind: it cannot be stopped, and must not keep the run from ending."""
        self._closed = True
        try:
            if self._tasks:
                for flight in self._tasks.values():
                    flight.give_up()
                _, stuck = await asyncio.wait(list(self._tasks), timeout=ENDING_SECONDS)
                self._leave_behind(stuck)
        finally:
            self._threads.close()

    def _leave_behind(self, stuck: set[asyncio.Task[None]]) -> None:
        for name, count in Counter(self._tasks[task].name for task in stuck).items():
            logger.warning("%s does not stop when it is cancelled: the run ends without %d calls of it", name, count)
        for task in stuck:
            asyncio._unregister_task(task)  # or asyncio.run would wait for it, without end
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # it was said above
            self._tasks[task].land(_CANCELLED)

    def _unknown(self, name: str) -> UnknownTool:
        near = difflib.get_close_matches(name, self._offers, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        shown = name if len(name) <= 64 else f"{name[:64]}..."
        return UnknownTool(f"there is no tool {shown!r}; {hint}The tools are: {', '.join(self._offers) or 'none'}")

    def _share(self, offer: _Offer, arguments: Arguments, key: Key) -> PendingCall:
        now = asyncio.get_running_loop().time()
        if offer.tool.cacheable and (text := self._cache.get(key, now)) is not None:
            offer.tally.cache_hits += 1
            return self._settled(ToolOutcome(text, True, "cache", 0.0))
        flight = self._flights.get(key)
        if flight is not None and flight.interested and flight.end is None:
            offer.tally.shared += 1
            return PendingCall(flight, now, joined=True)
        return self._launch(offer, arguments, key)

    def _settled(self, end: ToolOutcome) -> PendingCall:
        now = asyncio.get_running_loop().time()
        return PendingCall(Flight("", None, now, self._traffic, end), now)

    def _launch(self, offer: _Offer, arguments: Arguments, key: Key | None) -> PendingCall:
        flight = Flight(offer.tool.name, key, asyncio.get_running_loop().time(), self._traffic)
        course = self._fly(offer, arguments, flight)
        try:
            flight.task = self._spawn(course)
        except BaseException:
            course.close()
            raise
        if key is not None:
            self._flights[key] = flight
        self._tasks[flight.task] = flight
        flight.task.add_done_callback(self._ended)
        return PendingCall(flight, flight.asked)

    async def _fly(self, offer: _Offer, arguments: Arguments, flight: Flight) -> None:
        tool, clock = offer.tool, asyncio.get_running_loop().time
        await flight.pass_gates(offer.gates)
        try:
            end = ToolOutcome(await self._execute(offer, arguments, flight), True, "run", clock() - flight.asked)
        except ToolError as error:
            if flight.end is None:
                flight.land(_failure(error, clock() - flight.asked, offer))
            return
        if flight.end is None:
            if tool.cacheable and flight.key is not None:
                self._cache.put(flight.key, end.text, clock(), tool.ttl)
            flight.land(end)

    async def _execute(self, offer: _Offer, arguments: Arguments, flight: Flight) -> str:
        """The boundary: whatever a tool does, what leaves here is its text, a ToolError, or our own cancellation.

        The time it may take begins here: waiting at a gate is not the tool's fault.
        """
        tool, task, loop = offer.tool, asyncio.current_task(), asyncio.get_running_loop()
        if tool.is_async and self._traffic.stuck >= ASYNC_CALLS:
            raise ToolError(f"not started: {self._traffic.stuck} earlier calls that were given up are still running")
        seconds = self._timeout if tool.timeout is None else tool.timeout
        if seconds is not None:
            flight.set_clock(seconds, partial(self._time_is_over, offer, flight, seconds))
        offer.tally.runs += 1
        began = loop.time()
        try:
            return await self._call(tool, arguments)
        except ToolError:
            raise
        except BaseException as error:
            if task is None or _is_for(task, error):
                raise
            raise _failed(tool, error) from error
        finally:
            offer.tally.latency.add(loop.time() - began)

    def _time_is_over(self, offer: _Offer, flight: Flight, seconds: float) -> None:
        """Ends the call for all who wait, whatever the tool makes of being cancelled."""
        if flight.end is not None:
            return
        error = ToolTimeout(f"{offer.tool.name} was given up: it ran longer than {seconds:g} s")
        flight.give_up()
        flight.land(_failure(error, asyncio.get_running_loop().time() - flight.asked, offer))

    async def _call(self, tool: Tool, arguments: Arguments) -> str:
        if tool.is_async:
            return render(await cast(Awaitable[object], tool.function(**arguments.values)), tool.max_tokens)

        def work() -> str | Awaitable[object]:
            try:
                value = tool.function(**arguments.values)
                # Rendering a large result is work too, and may call the tool's own objects.
                return value if inspect.isawaitable(value) else render(value, tool.max_tokens)
            except Exception:
                raise
            except BaseException as error:
                # A thread of the pool is nobody's to exit or interrupt; on the loop this would look meant for us.
                raise _failed(tool, error) from error

        result = await self._threads.run(work)
        return result if isinstance(result, str) else render(await result, tool.max_tokens)

    def _ended(self, task: asyncio.Task[None]) -> None:
        flight = self._tasks.pop(task)
        flight.task_ended()
        if flight.key is not None and self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
        if flight.end is not None:
            return
        error = None if task.cancelled() or not flight.interested else task.exception()
        # Cancelled, perhaps before its first step; or a fault of ours, which stops those who wait for the call.
        flight.land(error if isinstance(error, Exception) else _CANCELLED)


def _own_gates(tool: Tool) -> Iterator[Gate]:
    """The tool's own limit before its rate: who has been let through by the rate is to start then, and not later."""
    if tool.max_concurrent is not None:
        yield Slots(tool.max_concurrent)
    if tool.rate_limit is not None:
        yield RateGate(tool.rate_limit)


def _failed(tool: Tool, error: BaseException) -> ToolFailed:
    if isinstance(error, asyncio.CancelledError):
        return ToolFailed(f"{tool.name} failed: something it waited for was cancelled")
    return ToolFailed(f"{tool.name} failed: {describe(error)}")


def _is_for(task: asyncio.Task[object], error: BaseException) -> bool:
    """Whether an exception on the event loop is meant for the task that runs a tool, rather than the tool's own."""
    match error:
        case asyncio.CancelledError():
            return task.cancelling() > 0
        case GeneratorExit():  # ours when the coroutine is being closed, not run
            return asyncio.current_task(task.get_loop()) is not task
        case KeyboardInterrupt():
            return threading.current_thread() is threading.main_thread()
    return False


def _failure(error: ToolError, seconds: float, offer: _Offer | None = None) -> ToolOutcome:
    """Counted where it is a tool's. Cut even where results are not: no tool means to fail at length."""
    message = message_of(error) or "the tool failed and gave no reason"
    max_tokens = None if offer is None else offer.tool.max_tokens
    if offer is not None:
        offer.tally.fail(message.removeprefix(f"{offer.tool.name} failed: "))
    return ToolOutcome(f"Error: {cut_tokens(message, max_tokens or MAX_TOKENS)}", False, "run", seconds)
