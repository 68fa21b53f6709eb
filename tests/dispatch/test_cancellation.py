"""What a cancellation leaves behind."""

from __future__ import annotations

import asyncio
import gc

import pytest

from batch_agent.dispatch.cancellation import shielded


async def test_a_call_goes_on_after_its_caller_was_cancelled_and_its_error_is_not_reported() -> None:
    loop, reported = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    call: asyncio.Future[None] = loop.create_future()
    caller = asyncio.ensure_future(shielded(call))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not call.done()
    call.set_exception(OSError("too late"))
    await asyncio.sleep(0)
    del call
    gc.collect()
    assert reported == []


async def test_a_caller_gets_the_result_and_the_error_of_its_call() -> None:
    loop = asyncio.get_running_loop()
    good: asyncio.Future[int] = loop.create_future()
    bad: asyncio.Future[int] = loop.create_future()
    good.set_result(3)
    bad.set_exception(OSError("full"))
    assert await shielded(good) == 3
    with pytest.raises(OSError, match="full"):
        await shielded(bad)
