"""Questions on what a server does for many agents: cache, load, priorities, concurrency, cancelled requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from batch_agent.backends.base import Load
from batch_agent.backends.engines.engine import SHARED, EngineBackend
from batch_agent.conformance.answers import STORY
from batch_agent.conformance.finding import Finding, emulated, missing, not_asked, unclear, works
from batch_agent.conformance.subject import Subject, flag
from batch_agent.errors import BackendError, Rejected

AT_ONCE, SHORT_SECONDS = 8, 0.02
LONG_TOKENS = 1_024
FREED_SECONDS, READINGS = 3.0, 12  # how long a server may take to notice a cancelled request
TURN_SECONDS, TURN_TOKENS = 600.0, 4_096  # the usual limit of a turn, and a long answer


async def prefix_cache(s: Subject) -> Finding:
    sharing = await s.sharing()
    if sharing.share is None:
        return unclear("it does not report cached tokens", flag(s, "cached"))
    if sharing.share >= SHARED:
        return works(f"{sharing.cached_tokens:,} of {sharing.prompt_tokens:,} tokens were cached")
    return missing("requests with one prefix share nothing", flag(s, "cache"))


async def cache_report(s: Subject) -> Finding:
    sharing = await s.sharing()
    if sharing.cached_tokens and sharing.in_answer:
        return works("in the usage of each answer")
    if sharing.cached_tokens:
        return emulated("read from the server's metrics, for all requests together", flag(s, "cached"))
    return missing("the hit rate and evicted contexts stay unknown", flag(s, "cached"))


async def load(s: Subject) -> Finding:
    if not s.backend.capabilities.reports_load:
        return emulated("no load: the number of requests at once is found from answer times")
    told = await _load(s)
    if told is None:
        return missing("it reports no load", flag(s, "load"))
    return works(f"{told.running} running, {told.waiting} waiting")


async def load_counts(s: Subject) -> Finding:
    if await _load(s) is None:
        return not_asked("it reports no load")
    begun = asyncio.Event()
    asking = asyncio.create_task(s.hear(STORY, streamed=True, on_begin=begun.set, max_tokens=LONG_TOKENS))
    try:
        await _either(begun, asking)
        told = await _load(s)
    finally:
        await _ended(asking)
    if told is not None and told.running >= 1:
        return works(f"{told.running} running while one request was answered")
    return unclear("no request was shown as running while one was answered: the numbers may lag")


async def kv_size(s: Subject) -> Finding:
    if not s.backend.capabilities.reports_load:
        return emulated("unknown: contexts are admitted by what answers show of evictions")
    told = await _load(s)
    if told is not None and told.kv_tokens:
        return works(f"{told.kv_tokens:,} tokens")
    return emulated("not reported: contexts are admitted by what answers show of evictions", flag(s, "load"))


async def priority(s: Subject) -> Finding:
    if isinstance(s.backend, EngineBackend):
        with suppress(BackendError):  # a server without metrics
            state = await s.backend.state(await s.sharing())
            if state is not None and state.by_priority is not None:
                lack = missing("requests are served in their order", flag(s, "priority"))
                return works() if state.by_priority else lack
    if not s.is_chat:
        return not_asked("this wire has no priorities")
    try:
        await s.raw("Say hello.", {"priority": 1}, max_tokens=1)
    except Rejected as error:
        return missing(f"refused with {error.status}", flag(s, "priority"))
    return unclear("accepted; the server does not report whether it uses it", flag(s, "priority"))


async def at_once(s: Subject) -> Finding:
    await s.hear(STORY, max_tokens=32)
    _, one = await s.timed(STORY, max_tokens=32)
    began = time.perf_counter()
    await asyncio.gather(*(s.hear(f"{STORY} ({number})", max_tokens=32) for number in range(AT_ONCE)))
    return judge_at_once(one, time.perf_counter() - began, flag(s, "concurrency"))


def judge_at_once(one: float, together: float, advice: str) -> Finding:
    """Return a finding from two measured times: ``one`` is the seconds of a single answer, ``together`` those of
    ``AT_ONCE`` requests sent together."""
    ratio = together / max(one, 1e-6)
    note = f"{AT_ONCE} requests took {ratio:.1f} times as long as one"
    if ratio < AT_ONCE / 2:
        return works(note)
    if one < SHORT_SECONDS:  # opening connections takes longer than the answers
        return unclear(f"{note}, but one takes only {1000 * one:.0f} ms")
    return missing(f"{note}: they wait for each other", advice)


async def abort(s: Subject) -> Finding:
    """Return whether a cancelled request frees its slot at the server. If not, time limits and hedges fill the
    server."""
    _, before = await s.timed(STORY, max_tokens=8)
    idle = await _running(s)
    begun = asyncio.Event()
    asking = asyncio.create_task(
        s.hear("Write a story of 900 words.", streamed=True, on_begin=begun.set, max_tokens=LONG_TOKENS)
    )
    try:
        await _either(begun, asking)
        if asking.done():
            await asking
            return unclear("the answer was complete before it could be cancelled")
        busy = await _reading(s, lambda running: idle is not None and running > idle)
    finally:
        await _ended(asking)
    if idle is None or busy is None:
        _, after = await s.timed(STORY, max_tokens=8)
        took = f"the next answer took {after:.2f} s, {before:.2f} s before"
        if after > before + FREED_SECONDS:
            return missing(f"{took}: a cancelled request keeps its slot")
        why = "it reports no load" if idle is None else "its load did not show the request"
        return unclear(f"{why}; {took}")
    left = time.perf_counter()
    if await _reading(s, lambda running: running <= idle) is not None:
        return works(f"after {time.perf_counter() - left:.1f} s at most")
    return missing(f"a cancelled request still ran {FREED_SECONDS:g} s later")


async def time_limit(s: Subject) -> Finding:
    heard, seconds = await s.timed("Write a story of 900 words.", max_tokens=32)
    tokens = heard.usage.completion_tokens
    if not tokens:
        return unclear("its answers are not counted")
    pace = tokens / max(seconds, 1e-6)
    needed = TURN_TOKENS / pace
    note = f"{pace:.0f} tokens a second for one request"
    if needed < TURN_SECONDS:
        return works(note)
    return missing(f"{note}: {TURN_TOKENS:,} tokens take {needed:.0f} s", f"timeout_per_turn={needed * 1.5:.0f}")


async def _reading(s: Subject, wanted: Callable[[int], bool]) -> int | None:
    """Return the number of running requests once it is as wanted; None if that does not happen soon. The load that
    servers report lags behind."""
    for _ in range(READINGS):
        running = await _running(s)
        if running is not None and wanted(running):
            return running
        await asyncio.sleep(FREED_SECONDS / READINGS)
    return None


async def _running(s: Subject) -> int | None:
    told = await _load(s)
    return None if told is None else told.running


async def _load(s: Subject) -> Load | None:
    """Return the load of the server; None if it has no page with it."""
    if not s.backend.capabilities.reports_load:
        return None
    try:
        return await s.backend.load(next(iter(s.backend.servers)))
    except BackendError:
        return None


async def _either(begun: asyncio.Event, asking: asyncio.Task[object]) -> None:
    """Wait until the answer has begun or has ended."""
    waiting = asyncio.create_task(begun.wait())
    try:
        await asyncio.wait([waiting, asking], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def _ended(asking: asyncio.Task[object]) -> None:
    """Cancel a request that is still running, and wait for its end."""
    asking.cancel()
    await asyncio.wait([asking])
    if not asking.cancelled():
        asking.exception()
