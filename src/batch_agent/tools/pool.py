"""The tool pool of one run: starts calls, lets identical ones share a run, keeps results, limits rates and times.

A call is started synchronously, from inside a stream's callback, and awaited later. What several agents wait for is a
flight: one run of one call. Each agent has a PendingCall on it; the flight is cancelled when the last of them has
abandoned it, and only then. Foreign code runs in ``_execute`` alone, and leaves it as text or as a ToolError.
Nothing is ever tried again here: the model sees the failure and decides.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from batch_agent.errors import ToolError, ToolFailed, ToolTimeout, UnknownTool
from batch_agent.foreign import describe, message_of
from batch_agent.messages import ToolCall
from batch_agent.tools.base import Tool
from batch_agent.tools.cache import Key, ResultCache
from batch_agent.tools.latency import Tally, ToolStatistics
from batch_agent.tools.rate import RateGate
from batch_agent.tools.render import cut_tokens, render
from batch_agent.tools.schema import Arguments
from batch_agent.tools.threads import Threads

__all__ = ["PendingCall", "ToolOutcome", "ToolPool", "ToolStatistics"]

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
Source = Literal["run", "shared", "cache"]


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """How a call ended: ``text`` is what the model reads, also of a failure. ``seconds`` is from asking to having."""

    text: str
    ok: bool
    source: Source
    seconds: float


@dataclass(slots=True, eq=False)
class _Flight:
    """One run of a call, and how many agents still want it."""

    key: Key | None  # None: nobody else may join
    asked: float
    done: asyncio.Future[ToolOutcome]
    interested: int = 0
    task: asyncio.Task[None] | None = None


class PendingCall:
    """One agent's part in a flight."""

    __slots__ = ("_asked", "_flight", "_holds", "_joined")

    def __init__(self, flight: _Flight, asked: float, *, joined: bool = False) -> None:
        self._flight = flight
        self._asked = asked
        self._joined = joined
        self._holds = True
        flight.interested += 1

    async def wait(self) -> ToolOutcome:
        """How the call ended; failures too are outcomes. Cancelling the wait leaves the call alone."""
        outcome = await asyncio.shield(self._flight.done)
        if not self._joined:
            return outcome
        return replace(outcome, source="shared", seconds=outcome.seconds - (self._asked - self._flight.asked))

    def seconds(self, now: float) -> float:
        """How long it has been under way for this agent: until now, or until it ended."""
        done = self._flight.done
        ended = self._flight.asked + done.result().seconds if done.done() else now
        return max(0.0, ended - self._asked)

    def abandon(self) -> None:
        """This agent no longer wants the call. When the last one leaves, what is still running is cancelled."""
        if not self._holds:
            return
        self._holds = False
        self._flight.interested -= 1
        if self._flight.interested == 0 and self._flight.task is not None:
            self._flight.task.cancel()


@dataclass(frozen=True, slots=True)
class _Offer:
    """A tool in this run."""

    tool: Tool
    gate: RateGate | None
    tally: Tally = field(default_factory=Tally)


class ToolPool:
    """``timeout``, in seconds, is for tools that have none of their own; ``spawn`` starts a task and owns it."""

    def __init__(self, tools: Sequence[Tool], *, timeout: float | None, spawn: Spawn) -> None:
        self._offers = {t.name: _Offer(t, RateGate(t.rate_limit) if t.rate_limit is not None else None) for t in tools}
        self._timeout = timeout
        self._spawn = spawn
        self._cache = ResultCache()
        self._flights: dict[Key, _Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = Threads()
        self._closed = False

    def can_start_early(self, name: str) -> bool:
        """Whether a call may run before the answer that asks for it is complete: such an answer may yet be lost and
        asked for again, which a write must not notice."""
        offer = self._offers.get(name)
        return offer is not None and offer.tool.effect == "read"

    def start(self, call: ToolCall) -> PendingCall:
        """Begins a call at once. A call that cannot be is settled at once, as a failure the model can read."""
        offer = self._offers.get(call.name)
        if offer is None:
            return self._settled(self._unknown(call.name))
        tool, tally = offer.tool, offer.tally
        tally.calls += 1
        if self._closed:
            return self._settled(ToolFailed("the run has ended"))
        try:
            arguments = tool.signature.parse(call.arguments)
            identity = "" if tool.effect == "write" and tool.declared else tool.identity(arguments)
        except ToolError as error:
            tally.failures += 1
            return self._settled(error, tool.max_tokens)
        if tool.effect == "write":
            if not tool.declared:
                tally.compare(identity)
            return self._launch(offer, arguments, None)
        return self._share(offer, arguments, (tool.name, identity))

    def statistics(self) -> dict[str, ToolStatistics]:
        return {name: offer.tally.statistics(name) for name, offer in self._offers.items()}

    async def close(self) -> None:
        """Cancels what is running and ends the threads. Whoever still waits gets a failure."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._threads.close()

    def _unknown(self, name: str) -> UnknownTool:
        near = difflib.get_close_matches(name, self._offers, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return UnknownTool(f"there is no tool {name!r}; {hint}The tools are: {', '.join(self._offers) or 'none'}")

    def _share(self, offer: _Offer, arguments: Arguments, key: Key) -> PendingCall:
        now = asyncio.get_running_loop().time()
        if offer.tool.cacheable and (text := self._cache.get(key, now)) is not None:
            offer.tally.cache_hits += 1
            return self._settled(ToolOutcome(text, True, "cache", 0.0))
        flight = self._flights.get(key)
        if flight is not None and flight.interested:
            offer.tally.shared += 1
            return PendingCall(flight, now, joined=True)
        return self._launch(offer, arguments, key)

    def _settled(self, end: ToolOutcome | ToolError, max_tokens: int | None = None) -> PendingCall:
        loop = asyncio.get_running_loop()
        flight = _Flight(None, loop.time(), loop.create_future())
        flight.done.set_result(_failure(end, 0.0, max_tokens) if isinstance(end, ToolError) else end)
        return PendingCall(flight, flight.asked)

    def _launch(self, offer: _Offer, arguments: Arguments, key: Key | None) -> PendingCall:
        loop = asyncio.get_running_loop()
        flight = _Flight(key, loop.time(), loop.create_future())
        if key is not None:
            self._flights[key] = flight
        course = self._fly(offer, arguments, flight)
        try:
            flight.task = self._spawn(course)
        except BaseException:
            course.close()
            raise
        self._tasks.add(flight.task)
        flight.task.add_done_callback(lambda task: self._ended(task, flight))
        return PendingCall(flight, flight.asked)

    async def _fly(self, offer: _Offer, arguments: Arguments, flight: _Flight) -> None:
        tool, tally, clock = offer.tool, offer.tally, asyncio.get_running_loop().time
        if offer.gate is not None:
            await offer.gate.wait_turn()
        try:
            text = cut_tokens(await self._run(offer, arguments), tool.max_tokens)
        except ToolError as error:
            tally.failures += 1
            self._land(flight, _failure(error, clock() - flight.asked, tool.max_tokens))
            return
        now = clock()
        if tool.cacheable and flight.key is not None:
            self._cache.put(flight.key, text, now, tool.ttl)
        self._land(flight, ToolOutcome(text, True, "run", now - flight.asked))

    async def _run(self, offer: _Offer, arguments: Arguments) -> str:
        """One run, with its thread where it needs one; neither the wait for that nor for the rate limit is timed."""
        if offer.tool.is_async:
            return await self._execute(offer, arguments)
        async with self._threads.slot():
            return await self._execute(offer, arguments)

    async def _execute(self, offer: _Offer, arguments: Arguments) -> str:
        """The boundary: whatever a tool does, what leaves here is its text, a ToolError, or our own cancellation."""
        tool, task, clock = offer.tool, asyncio.current_task(), asyncio.get_running_loop().time
        seconds = self._timeout if tool.timeout is None else tool.timeout
        limit = asyncio.timeout(seconds)
        offer.tally.runs += 1
        began = clock()
        try:
            async with limit:
                return await self._call(tool, arguments)
        except ToolError:
            raise
        except BaseException as error:
            if isinstance(error, TimeoutError) and limit.expired():
                raise ToolTimeout(f"{tool.name} was given up: it ran longer than {seconds:g} s") from None
            if task is None or _is_for(task, error):
                raise
            raise _failed(tool, error) from error
        finally:
            offer.tally.latency.add(clock() - began)

    async def _call(self, tool: Tool, arguments: Arguments) -> str:
        if tool.is_async:
            return render(await cast(Awaitable[object], tool.function(**arguments.values)))

        def work() -> str | Awaitable[object]:
            try:
                value = tool.function(**arguments.values)
                # Rendering a large result is work too, and may call the tool's own objects.
                return value if inspect.isawaitable(value) else render(value)
            except Exception:
                raise
            except BaseException as error:
                # A thread of the pool is nobody's to exit or interrupt; on the loop this would look meant for us.
                raise _failed(tool, error) from error

        result = await self._threads.run(work)
        return result if isinstance(result, str) else render(await result)

    def _ended(self, task: asyncio.Task[None], flight: _Flight) -> None:
        self._tasks.discard(task)
        if not flight.done.done():  # cancelled, perhaps before its first step
            self._land(flight, _failure(ToolFailed("the call was cancelled"), 0.0, None))

    def _land(self, flight: _Flight, outcome: ToolOutcome) -> None:
        if flight.key is not None and self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
        flight.done.set_result(outcome)


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


def _failure(error: ToolError, seconds: float, max_tokens: int | None) -> ToolOutcome:
    message = message_of(error) or "the tool failed and gave no reason"
    return ToolOutcome(f"Error: {cut_tokens(message, max_tokens)}", False, "run", seconds)
