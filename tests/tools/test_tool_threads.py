import asyncio
import contextvars
import threading

import pytest

from batch_agent.errors import ToolError
from batch_agent.tools.threads import Threads

colour: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")


def ours() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("batch-agent-tool")]


async def test_a_function_runs_in_a_daemon_thread_with_the_callers_context() -> None:
    threads = Threads()
    colour.set("red")
    assert await threads.run(colour.get) == "red"
    assert await threads.run(lambda: threading.current_thread().daemon)
    await threads.run(lambda: colour.set("blue"))
    assert colour.get() == "red"
    threads.close()


async def test_an_idle_thread_is_used_again_and_closing_ends_it() -> None:
    threads = Threads()
    first = await threads.run(threading.get_ident)
    assert await threads.run(threading.get_ident) == first
    assert len(ours()) == 1
    threads.close()
    assert ours() == []


@pytest.mark.parametrize("error", [ValueError("x"), StopIteration("x"), TimeoutError("x")])
async def test_an_exception_comes_back(error: Exception) -> None:
    threads = Threads()

    def fail() -> None:
        raise error

    with pytest.raises((type(error), RuntimeError)):
        await threads.run(fail)
    threads.close()


def test_a_call_that_outlives_its_event_loop_leaves_no_thread() -> None:
    release = threading.Event()

    async def run() -> None:
        threads = Threads()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await threads.run(release.wait)
        threads.close()

    asyncio.run(run())
    (name,) = ours()
    (thread,) = (t for t in threading.enumerate() if t.name == name)
    release.set()
    thread.join(10)
    assert not thread.is_alive()


async def test_too_many_stuck_calls_are_an_error_and_not_ever_more_threads() -> None:
    threads, release = Threads(stuck_limit=2), threading.Event()
    stuck = [asyncio.create_task(threads.run(release.wait)) for _ in range(2)]
    await asyncio.sleep(0.01)
    for task in stuck:
        task.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)
    with pytest.raises(ToolError, match="2 earlier calls"):
        await threads.run(lambda: None)
    release.set()
    await until(lambda: threads._stuck == 0)
    assert await threads.run(lambda: "again") == "again"
    threads.close()


async def until(condition: object) -> None:
    async with asyncio.timeout(10):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.001)
