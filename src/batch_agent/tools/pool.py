"""The tool pool of one run: starts calls, shares identical ones, caches results, and enforces rates and timeouts.

A call is started synchronously, in the callback of a stream, and awaited later. Agents wait for an execution
(``execution.py``), which is one run of one call. It passes the gates of its tool; then the tool's code runs behind a
boundary (``run_foreign``) and returns text or raises ToolError. If a tool looks up many keys at once, its executions
wait for the execution of their batch, which passes the gates. The pool does not retry: the model sees the failure and
decides.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from batch_agent.backends.base import Found, Once
from batch_agent.errors import ToolError, ToolFailed, ToolTimeout, UnknownTool
from batch_agent.foreign import boundary, describe, is_ctrl_c, message_of
from batch_agent.job import Job
from batch_agent.messages import ToolCall, content_text, images_of, with_images
from batch_agent.tools.base import (
    GATHERING,
    Answers,
    Batching,
    Keys,
    Spawn,
    Tool,
    ask_all,
    read_answers,
)
from batch_agent.tools.context import CallTrace, ModelAccess, ToolContext
from batch_agent.tools.execution import (
    ENDING_SECONDS,
    CallSlots,
    EndedCall,
    Execution,
    Gate,
    Key,
    PendingCall,
    RateGate,
    ResultCache,
    ToolOutcome,
    ToolStatistics,
    ToolTally,
    Traffic,
)
from batch_agent.tools.mcp.address import McpServer
from batch_agent.tools.schema import MAX_TOKENS, Arguments, cut_tokens, render_result
from batch_agent.tools.threads import THREADS, Threads

if TYPE_CHECKING:
    from batch_agent.tools.mcp.connection import McpConnection

T = TypeVar("T")
Work = Callable[[], object]
Read = Callable[[object], T]


async def run_foreign(name: str, work: Work, read: Read[T], threads: Threads | None) -> T:
    """Run ``work``, await its result if it is awaitable, and return it converted by ``read``. ``work`` runs in a thread
    unless ``threads`` is None. ``name`` is the tool's name in errors."""
    task = asyncio.current_task()
    try:
        if threads is None:
            return read(await cast(Awaitable[object], work()))
        return await _in_thread(name, work, read, threads)
    except ToolError:
        raise
    except BaseException as error:
        if task is None or _is_for(task, error):
            raise
        raise failed(name, error) from error


async def _in_thread(name: str, work: Work, read: Read[T], threads: Threads) -> T:
    def begin() -> tuple[T] | Awaitable[object]:
        try:
            value = work()
            # Converting a large result takes time too, and may call the tool's own objects.
            return value if inspect.isawaitable(value) else (read(value),)
        except Exception:
            raise
        except BaseException as error:
            # SystemExit or KeyboardInterrupt of a tool must not look like our own on the event loop.
            raise failed(name, error) from error

    result = await threads.run(begin)
    return result[0] if isinstance(result, tuple) else read(await result)


def failed(name: str, error: BaseException) -> ToolFailed:
    if isinstance(error, asyncio.CancelledError):
        return ToolFailed(f"{name} failed: something it waited for was cancelled")
    return ToolFailed(f"{name} failed: {describe(error)}")


def _is_for(task: asyncio.Task[object], error: BaseException) -> bool:
    """Return whether an exception on the event loop is meant for the task that runs a tool, and is not the tool's own
    error."""
    match error:
        case asyncio.CancelledError():
            return task.cancelling() > 0
        case GeneratorExit():  # for the task if its coroutine is being closed, not run
            return asyncio.current_task(task.get_loop()) is not task
        case KeyboardInterrupt():
            return is_ctrl_c(error)
    return False


__all__ = ["PendingCall", "ToolOutcome", "ToolPool", "ToolStatistics"]

TraceOf = Callable[[], CallTrace]
logger = logging.getLogger("batch_agent")

# Concurrent async calls: more than threads, because they are cheap, but limited, because most hold a connection. If the
# same number of cancelled calls does not stop, new calls fail.
ASYNC_CALLS = 1024
LONGEST_WITH_PROGRESS = 10  # maximum time of a call that reports progress, in multiples of its timeout
MOST_IDENTITIES = 4096  # texts of arguments whose identity is kept, for each tool
NOBODY = Job(-1, "", None, "")  # for calls that belong to no agent
_CANCELLED = ToolOutcome("Error: the call was cancelled", False, "run", 0.0)


@dataclass(slots=True, eq=False)
class Batch:
    """The calls that one run of a batch function answers, by the identity of the call. All of them wait for
    ``execution``."""

    execution: Execution
    keys: dict[str, object] = field(default_factory=dict)
    answers: Answers = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Offer:
    """A tool in this run, with the gates that its calls or batches pass."""

    tool: Tool
    gates: tuple[Gate, ...]
    tally: ToolTally = field(default_factory=ToolTally)
    gathering: Batch | None = None
    # Of calls whose results are cached: the identity of each text of arguments.
    identities: dict[str, str] = field(default_factory=dict)


class ToolPool:
    """The tools of one run. ``timeout``, in seconds, is for tools without their own. ``spawn`` starts a task that the
    pool owns: closing the pool ends the task, or abandons it with a warning.

    ``on_waiting`` is called with the number of agents blocked on saturated tools (by a rate, a limit, or a lack of
    threads or async slots) when that number changes.

    ``once`` shares calls with the other workers of a run.

    ``prewarm_max_age`` is for how many seconds a prewarmed result is valid.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        timeout: float | None,
        spawn: Spawn,
        on_waiting: Callable[[int], None] | None = None,
        prewarm_max_age: float | None = None,
        once: Once | None = None,
    ) -> None:
        self._on_loop = CallSlots(ASYNC_CALLS)
        self._in_threads = CallSlots(THREADS)
        self._offers: dict[str, _Offer] = {}
        self._timeout = timeout
        self._spawn = spawn
        self._prewarm_max_age = prewarm_max_age
        self.once = once
        self._now = asyncio.get_running_loop().time
        self._written: set[McpServer | None] = set()  # resources that a tool can write
        self._traffic = Traffic(on_waiting)
        self._cache = ResultCache()
        self._executions: dict[Key, Execution] = {}
        self._tasks: dict[asyncio.Task[None], Execution] = {}
        self._threads = Threads()
        self._opened: dict[McpServer, McpConnection] = {}
        self._writes: Counter[McpServer] = Counter()  # counts starts and ends; earlier reads are stale
        self._state: dict[str, Any] = {}  # shared by the tools of this run
        self.models: ModelAccess | None = None
        self._closed = False
        for tool in tools:
            self.add(tool)

    def add(self, tool: Tool) -> None:
        """Offer one more tool."""
        slots = self._on_loop if tool.is_async else self._in_threads
        self._offers[tool.name] = _Offer(tool, (*_own_gates(tool), slots))
        if tool.effect == "write":
            self._written.add(tool.resource)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def waiting(self) -> int:
        return self._traffic.waiting

    def knows(self, name: str) -> bool:
        return name in self._offers

    def usual_seconds(self, name: str) -> float | None:
        """Return the expected seconds of a call that starts now: the wait for the tool's rate limit plus the 75th
        percentile of its runs. None while the tool has not run."""
        offer = self._offers.get(name)
        seconds = None if offer is None else offer.tally.latency.quantile(0.75)
        if offer is None or seconds is None:
            return None
        return seconds + sum(gate.expected_wait() for gate in offer.gates if isinstance(gate, RateGate))

    def can_start_early(self, name: str) -> bool:
        """Return whether a call may start before the model's answer is complete. The answer may still fail and be
        requested again, so a write must not start early."""
        offer = self._offers.get(name)
        return offer is not None and offer.tool.effect == "read"

    def start(self, call: ToolCall, job: Job = NOBODY, turn: int = 0, trace: TraceOf | None = None) -> PendingCall:
        """Start a call at once, for a turn of a job. An invalid call ends at once, with a failure for the model."""
        offer = self._offers.get(call.name)
        if offer is None:
            return EndedCall(_failure(self._unknown(call.name), 0.0))
        tool, tally = offer.tool, offer.tally
        tally.calls += 1
        if self._closed:
            return EndedCall(_failure(ToolFailed("the run has ended"), 0.0))
        known = offer.identities.get(call.arguments)
        if known is not None and (found := self._from_cache(offer, self._key(tool, known))) is not None:
            return found
        try:
            arguments = tool.signature.parse(call.arguments)
            identity = "" if tool.effect == "write" and tool.declared else _identity(tool, arguments)
        except ToolError as error:
            return EndedCall(_failure(error, 0.0, offer))
        context = None
        if tool.signature.context is not None:
            place = "" if trace is None else trace().traceparent
            context = ToolContext(job.input, job.job_id, job.index, turn, self._state, place, models=self.models)
            arguments = replace(arguments, values={**arguments.values, tool.signature.context: context})
            identity = f"{job.index} {identity}"  # a tool that sees its row may answer each row differently
        if tool.effect == "write":
            if not tool.declared:
                tally.compare(identity)
            return self._launch(offer, arguments, None, context, trace)
        own = tool.cache_key is not None or context is not None  # the same text may be another call later
        if tool.cacheable and not own and len(offer.identities) < MOST_IDENTITIES:
            offer.identities[call.arguments] = identity
        return self._share(offer, arguments, self._key(tool, identity), context, trace)

    def prewarm(self, call: ToolCall) -> PendingCall | None:
        """Start a call that a model is expected to make. Returns None if it is not started: its result is not
        cacheable, is cached or in flight, or the call would have to wait, because calls of models come first. A tool
        with a ToolContext is not prewarmed."""
        offer = self._offers.get(call.name)
        if offer is None or self._closed or not offer.tool.cacheable or offer.tool.signature.context is not None:
            return None
        try:
            arguments = offer.tool.signature.parse(call.arguments)
            key = self._key(offer.tool, _identity(offer.tool, arguments))
        except ToolError:
            return None
        if self._cache.get(key, self._now()) is not None or self._under_way(key) is not None:
            return None
        execution = Execution(call.name, key, self._now(), self._traffic, unasked=True)
        if offer.tool.batching is None and not execution.pass_nowait(offer.gates):
            return None
        offer.tally.prewarmed += 1
        return self._begin_execution(offer, arguments, execution)

    def _key(self, tool: Tool, identity: str) -> Key:
        """Return the identity of a read. It changes after each write to the resource of the tool."""
        writes = "" if tool.resource is None else f"{self._writes[tool.resource]} "
        return tool.name, f"{writes}{identity}"

    def statistics(self) -> dict[str, ToolStatistics]:
        return {name: offer.tally.statistics(name) for name, offer in self._offers.items()}

    async def close(self) -> None:
        """Cancel running calls and end the threads. Waiting agents get a failure. A tool that ignores its cancellation
        is logged and abandoned: it must not keep the run from ending."""
        self._closed = True
        try:
            if self._tasks:
                for execution in self._tasks.values():
                    execution.cancel()
                _, stuck = await asyncio.wait(list(self._tasks), timeout=ENDING_SECONDS)
                self._leave_behind(stuck)
            for opened in self._opened.values():
                await opened.close()
        finally:
            self._threads.close()

    def _leave_behind(self, stuck: set[asyncio.Task[None]]) -> None:
        for name, count in Counter(self._tasks[task].name for task in stuck).items():
            logger.warning("%s does not stop when cancelled: the run ends without waiting for %d calls", name, count)
        for task in stuck:
            asyncio._unregister_task(task)  # otherwise asyncio.run would wait for it forever
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # logged above
            self._tasks[task].finish(_CANCELLED)

    def refuse(self, name: str, offered: Collection[str]) -> PendingCall:
        """Return the failed call of a tool that its agent was not offered."""
        return EndedCall(_failure(self._unknown(name, offered), 0.0))

    def _unknown(self, name: str, offered: Collection[str] | None = None) -> UnknownTool:
        known = [*self._offers] if offered is None else sorted(offered)
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        shown = name if len(name) <= 64 else f"{name[:64]}..."
        return UnknownTool(f"there is no tool {shown!r}; {hint}The tools are: {', '.join(known) or 'none'}")

    def _share(
        self, offer: _Offer, arguments: Arguments, key: Key, context: ToolContext | None, trace: TraceOf | None
    ) -> PendingCall:
        if offer.tool.cacheable and (found := self._from_cache(offer, key)) is not None:
            return found
        execution = self._under_way(key)
        if execution is not None:
            offer.tally.shared += 1
            offer.tally.prewarm_hits += execution.unasked
            execution.unasked = False
            return PendingCall(execution, self._now(), joined=True)
        if offer.tool.cacheable and self._prewarm_max_age is not None:
            offer.tally.prewarm_misses += 1
        return self._launch(offer, arguments, key, context, trace)

    def _from_cache(self, offer: _Offer, key: Key) -> PendingCall | None:
        found = self._cache.get(key, self._now())
        if found is None:
            return None
        offer.tally.cache_hits += 1
        offer.tally.prewarm_hits += self._cache.asked(key)
        return EndedCall(ToolOutcome(content_text(found), True, "cache", 0.0, images_of(found)))

    def _under_way(self, key: Key) -> Execution | None:
        """Return the running execution of this call, if other agents can join it; else None."""
        execution = self._executions.get(key)
        return execution if execution is not None and execution.interested and execution.end is None else None

    def _launch(
        self, offer: _Offer, arguments: Arguments, key: Key | None, context: ToolContext | None, trace: TraceOf | None
    ) -> PendingCall:
        execution = Execution(offer.tool.name, key, self._now(), self._traffic, context=context)
        with nullcontext() if trace is None else trace().entered():
            return self._begin_execution(offer, arguments, execution)

    def _begin_execution(self, offer: _Offer, arguments: Arguments, execution: Execution) -> PendingCall:
        carry_out = self._carry_out if offer.tool.batching is None else self._join_batch
        if self._is_for_all(offer.tool, execution):
            self._begin(
                execution, self._carry_out_once(offer, execution, partial(carry_out, offer, arguments, execution))
            )
        else:
            self._begin(execution, carry_out(offer, arguments, execution))
        if execution.key is not None:
            self._executions[execution.key] = execution
        return PendingCall(execution, execution.asked)

    def _begin(self, execution: Execution, course: Coroutine[Any, Any, None]) -> None:
        try:
            execution.task = self._spawn(course)
        except BaseException:
            course.close()
            raise
        self._tasks[execution.task] = execution
        execution.task.add_done_callback(self._ended)

    async def _carry_out(self, offer: _Offer, arguments: Arguments, execution: Execution) -> None:
        tool = offer.tool
        await execution.pass_gates(offer.gates)
        self._note_write(tool)
        read = partial(render_result, max_tokens=tool.max_tokens)
        try:
            work = await self._work(offer, arguments, execution)
            found = await self._execute(offer, execution, partial(self._run, offer, work, read))
            end = ToolOutcome(content_text(found), True, "run", self._now() - execution.asked, images_of(found))
        except ToolError as error:
            if execution.end is None:
                execution.finish(_failure(error, self._now() - execution.asked, offer))
            return
        finally:
            self._note_write(tool)
        self._finish(offer, execution, end)

    def _is_for_all(self, tool: Tool, execution: Execution) -> bool:
        """Return whether other workers may use the result of this call: it depends on no row, and on nothing that this
        worker has written."""
        if self.once is None or execution.key is None or execution.unasked or tool.signature.context is not None:
            return False
        return tool.resource is None or tool.resource not in self._written

    async def _carry_out_once(
        self, offer: _Offer, execution: Execution, carry_out: Callable[[], Awaitable[None]]
    ) -> None:
        """Take the result of another worker, or run the call so that others may wait for it."""
        assert self.once is not None and execution.key is not None
        key = shared_key(offer.tool, execution.key)
        found = await self.once.begin(key)
        if isinstance(found, Found):
            offer.tally.shared += 1
            self._finish(offer, execution, ToolOutcome(found.text, found.ok, "shared", self._now() - execution.asked))
            return
        try:
            await carry_out()
        finally:
            end, keep = execution.end, 0.0
            # Only text is shared between workers: a result with images is computed by each.
            shown = Found(end.text, end.ok) if isinstance(end, ToolOutcome) and not end.images else None
            if offer.tool.cacheable and shown is not None and shown.ok:
                keep = math.inf if offer.tool.ttl is None else offer.tool.ttl
            self.once.end(key, found, shown, keep)

    def _note_write(self, tool: Tool) -> None:
        if tool.resource is not None and tool.effect == "write":
            self._writes[tool.resource] += 1

    async def _work(self, offer: _Offer, arguments: Arguments, execution: Execution) -> Callable[[], object]:
        tool = offer.tool
        if tool.resource is None:
            return partial(tool.function, **arguments.values)
        opened = self._opened.get(tool.resource)
        if opened is None:
            opened = self._opened[tool.resource] = tool.resource.open(self._spawn)
        await opened.ready()  # the timeout of a call does not include the start of a server
        return partial(tool.function, opened, partial(self._alive, offer, execution), **arguments.values)

    async def _join_batch(self, offer: _Offer, arguments: Arguments, execution: Execution) -> None:
        """Run a call for one key, as a part of the batch that collects keys, or of a new batch."""
        batching = offer.tool.batching
        batch = offer.gathering
        joins = True
        assert batching is not None and execution.key is not None
        if batch is None or not batch.execution.interested or len(batch.keys) >= batching.max_batch:
            batch = Batch(Execution(offer.tool.name, None, execution.asked, self._traffic))
            joins = False
            self._begin(batch.execution, self._carry_out_batch(offer, batching, batch))
            offer.gathering = batch
        _, identity = execution.key
        batch.keys[identity] = arguments.values[batching.key_arg]
        offer.tally.shared += joins
        pending = PendingCall(batch.execution, execution.asked, joined=joins)
        try:
            end = await pending.wait()
        finally:
            pending.abandon()
        answer = batch.answers.get(identity)
        if isinstance(answer, ToolError):
            end = replace(_failure(answer, end.seconds, offer), source=end.source)
        elif answer is not None:
            end = replace(end, text=answer)
        self._finish(offer, execution, end)

    async def _carry_out_batch(self, offer: _Offer, batching: Batching, batch: Batch) -> None:
        """Collect keys for ``GATHERING`` seconds and until the batch has passed the gates; then run it."""
        execution, max_tokens = batch.execution, offer.tool.max_tokens
        await asyncio.sleep(GATHERING)
        await execution.pass_gates(offer.gates)
        if offer.gathering is batch:
            offer.gathering = None

        def ask(keys: Keys) -> Coroutine[Any, Any, Answers]:
            work = partial(batching.function, list(keys.values()))
            return self._run(offer, work, lambda found: read_answers(batching, keys, found, max_tokens))

        try:
            batch.answers = await self._execute(offer, execution, lambda: ask_all(batch.keys, ask))
            end = ToolOutcome("", True, "run", self._now() - execution.asked)
        except ToolError as error:
            end = _failure(error, self._now() - execution.asked, offer)
        if execution.end is None:
            execution.finish(end)

    def _finish(self, offer: _Offer, execution: Execution, end: ToolOutcome) -> None:
        if execution.end is not None:
            return
        if end.ok and offer.tool.cacheable and execution.key is not None:
            limits = (offer.tool.ttl, self._prewarm_max_age if execution.unasked else None)
            ttl = min((limit for limit in limits if limit is not None), default=None)
            now = self._now()
            self._cache.put(execution.key, with_images(end.text, end.images), now, ttl, unasked=execution.unasked)
        execution.finish(end)

    async def _execute(self, offer: _Offer, execution: Execution, work: Callable[[], Awaitable[T]]) -> T:
        """Start the timeout of a call and run it. The timeout does not include the wait at gates."""
        if offer.tool.is_async and self._traffic.stuck >= ASYNC_CALLS:
            raise ToolError(f"not started: {self._traffic.stuck} earlier calls that were cancelled are still running")
        execution.began = self._now()
        self._start_clock(offer, execution)
        return await work()

    def _start_clock(self, offer: _Offer, execution: Execution) -> None:
        seconds = self._timeout if offer.tool.timeout is None else offer.tool.timeout
        began = self._now() if execution.began is None else execution.began
        if seconds is not None and self._now() - began <= seconds * LONGEST_WITH_PROGRESS:
            execution.set_clock(seconds, partial(self._time_is_over, offer, execution, seconds))

    def _alive(self, offer: _Offer, execution: Execution) -> None:
        if execution.end is None:
            self._start_clock(offer, execution)

    async def _run(self, offer: _Offer, work: Callable[[], object], read: Callable[[object], T]) -> T:
        offer.tally.runs += 1
        began = self._now()
        try:
            return await run_foreign(offer.tool.name, work, read, None if offer.tool.is_async else self._threads)
        finally:
            offer.tally.latency.add(self._now() - began)

    def _time_is_over(self, offer: _Offer, execution: Execution, seconds: float) -> None:
        """End the call for all waiting agents, even if the tool ignores its cancellation."""
        if execution.end is not None:
            return
        error = ToolTimeout(f"{offer.tool.name} timed out: it ran longer than {seconds:g} s")
        execution.cancel()
        execution.finish(_failure(error, self._now() - execution.asked, offer))

    def _ended(self, task: asyncio.Task[None]) -> None:
        execution = self._tasks.pop(task)
        execution.task_ended()
        if execution.key is not None and self._executions.get(execution.key) is execution:
            del self._executions[execution.key]
        if execution.end is not None:
            return
        error = None if task.cancelled() or not execution.interested else task.exception()
        # Cancelled, perhaps before its first step; or an internal error, which is raised in the waiting agents.
        execution.finish(error if isinstance(error, Exception) else _CANCELLED)


def shared_key(tool: Tool, key: Key) -> str:
    """Return the identity of a call among all workers of a run."""
    return blake2b(f"{tool.name}\0{tool.version}\0{key[1]}".encode(), digest_size=20).hexdigest()


def _own_gates(tool: Tool) -> Iterator[Gate]:
    """Yield the tool's own gates. Its limit comes before its rate, so that a call starts when the rate admits it."""
    if tool.max_concurrent is not None:
        yield CallSlots(tool.max_concurrent)
    if tool.rate_limit is not None:
        yield RateGate(tool.rate_limit)


def _identity(tool: Tool, arguments: Arguments) -> str:
    """Return the identity of a call: its ``cache_key``, or all arguments. Raises only ToolError."""
    if tool.cache_key is None:
        return tool.signature.identity(arguments)
    with boundary(lambda raised: ToolFailed(f"{tool.name} failed: its cache_key raised {raised}"), ToolError):
        return repr(tool.cache_key(**arguments.values))


def _failure(error: ToolError, seconds: float, offer: _Offer | None = None) -> ToolOutcome:
    """Return the outcome of an error, and count it for its tool. Errors are cut even if the tool's results are not."""
    message = message_of(error) or "the tool failed and gave no reason"
    max_tokens = None if offer is None else offer.tool.max_tokens
    if offer is not None:
        offer.tally.fail(message.removeprefix(f"{offer.tool.name} failed: "))
    return ToolOutcome(f"Error: {cut_tokens(message, max_tokens or MAX_TOKENS)}", False, "run", seconds)
