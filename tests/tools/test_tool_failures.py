"""Calls that fail: what the model is told, and what is not touched by it."""

import asyncio
import signal
from collections.abc import Callable
from typing import Annotated

import pytest
from pydantic import AfterValidator
from tests.tools.tool_calls import Counter, call, settle

from batch_agent.errors import ToolError
from batch_agent.messages import ToolCall
from batch_agent.tools import Tool, ToolPool
from batch_agent.tools.base import resolve_tools


async def outcome_of(open_pool, tool: Callable[..., object], **arguments: object):  # type: ignore[no-untyped-def]
    async with open_pool(tool) as pool:
        name = next(iter(pool.statistics()))
        return await pool.start(call(name, **arguments)).wait()


async def test_a_tool_error_is_told_to_the_model_as_it_is(open_pool) -> None:
    def polite() -> None:
        raise ToolError("no such city; try Berlin")

    outcome = await outcome_of(open_pool, polite)
    assert (outcome.text, outcome.ok) == ("Error: no such city; try Berlin", False)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("k"), TimeoutError("inner"), OSError(2, "gone")])
async def test_any_other_exception_is_named_without_a_traceback(
    open_pool, error: Exception, asynchronous: bool
) -> None:
    def broken() -> None:
        raise error

    async def broken_async() -> None:
        raise error

    outcome = await outcome_of(open_pool, broken_async if asynchronous else broken)
    assert not outcome.ok
    assert outcome.text == f"Error: broken{'_async' * asynchronous} failed: {type(error).__name__}: {error}"


class Unusual(BaseException):
    pass


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), asyncio.CancelledError(), Unusual("odd")])
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_tool_cannot_end_the_process_or_the_run(open_pool, error: BaseException, asynchronous: bool) -> None:
    def broken() -> None:
        raise error

    async def broken_async() -> None:
        await asyncio.sleep(0)
        raise error

    outcome = await outcome_of(open_pool, broken_async if asynchronous else broken)
    assert not outcome.ok
    assert outcome.text.startswith("Error: broken")


async def test_a_keyboard_interrupt_in_a_tools_thread_is_the_tools_own(open_pool) -> None:
    def broken() -> None:
        raise KeyboardInterrupt

    assert (await outcome_of(open_pool, broken)).text == "Error: broken failed: KeyboardInterrupt"


def _own_handler(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("handler", [signal.default_int_handler, _own_handler])
def test_a_keyboard_interrupt_of_ctrl_c_is_the_users_and_one_that_a_tool_raises_is_its_own(handler) -> None:  # type: ignore[no-untyped-def]
    async def interrupted() -> None:
        signal.signal(signal.SIGINT, handler)
        signal.raise_signal(signal.SIGINT)

    async def broken() -> None:
        raise KeyboardInterrupt

    tasks = []

    def spawn(course):  # type: ignore[no-untyped-def]
        tasks.append(asyncio.get_running_loop().create_task(course))
        return tasks[-1]

    async def use() -> str:
        pool = ToolPool(resolve_tools([interrupted, broken]), timeout=None, spawn=spawn)
        failed = await pool.start(call("broken")).wait()
        assert failed.text == "Error: broken failed: KeyboardInterrupt"
        await pool.start(call("interrupted")).wait()
        return "unreachable"

    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(use())
    finally:
        signal.signal(signal.SIGINT, before)
    assert isinstance(tasks[1].exception(), KeyboardInterrupt)


def test_a_call_whose_coroutine_is_closed_has_not_failed() -> None:
    tasks = []

    def spawn(course):  # type: ignore[no-untyped-def]
        tasks.append(asyncio.get_running_loop().create_task(course))
        return tasks[-1]

    async def use() -> ToolPool:
        pool = ToolPool(resolve_tools([Counter().tool()]), timeout=None, spawn=spawn)
        pool.start(call("look"))
        await settle()
        return pool

    with asyncio.Runner() as runner:
        pool = runner.run(use())
        tasks[0].get_coro().close()
        assert (pool.statistics()["look"].runs, pool.statistics()["look"].failures) == (1, 0)
        tasks[0].cancel()
        runner.run(asyncio.wait(tasks))
        assert isinstance(tasks[0].exception(), RuntimeError)  # there is nothing left to run


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()])
async def test_a_validator_or_a_cache_key_cannot_end_the_run_either(open_pool, error: BaseException) -> None:
    def refuse(n: int) -> int:
        raise error

    def look(n: Annotated[int, AfterValidator(refuse)]) -> int:
        return n

    async with open_pool(look, Tool.define(name="keyed", cacheable=True, cache_key=refuse)(lambda n: n)) as pool:
        wrong = await pool.start(call("look", n=1)).wait()
        keyed = await pool.start(call("keyed", n=1)).wait()
    assert wrong.text.startswith("Error: the arguments do not fit:\n- n: " + type(error).__name__)
    assert keyed.text.startswith("Error: keyed failed: its cache_key raised " + type(error).__name__)


class Unspeakable(ToolError):
    def __str__(self) -> str:
        raise ValueError("no words")


async def test_a_tool_error_that_has_no_words_is_still_told(open_pool) -> None:
    def silent() -> None:
        raise Unspeakable

    assert (await outcome_of(open_pool, silent)).text == "Error: the tool failed and gave no reason"


async def test_a_group_of_exceptions_is_a_failure(open_pool) -> None:
    async def many() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(-1, result=None))
            raise ValueError("one of many")

    assert not (await outcome_of(open_pool, many)).ok


async def test_a_result_that_cannot_be_written_is_a_failure(open_pool) -> None:
    def circular() -> object:
        value: list[object] = []
        value.append(value)
        return value

    assert not (await outcome_of(open_pool, circular)).ok


async def test_a_tool_that_lets_a_cancellation_of_its_own_escape_fails(open_pool) -> None:
    async def careless() -> None:
        inner = asyncio.ensure_future(asyncio.sleep(10))
        inner.cancel()
        await inner

    outcome = await outcome_of(open_pool, careless)
    assert not outcome.ok
    assert "cancelled" in outcome.text


async def test_an_unknown_tool_is_told_to_the_model(open_pool) -> None:
    async with open_pool(Tool.read_file) as pool:
        outcome = await pool.start(call("read_fil")).wait()
    assert not outcome.ok
    assert outcome.text == "Error: there is no tool 'read_fil'; did you mean 'read_file'? The tools are: read_file"


async def test_wrong_arguments_do_not_reach_the_tool(open_pool) -> None:
    counter = Counter()
    async with open_pool(counter.tool()) as pool:
        outcome = await pool.start(ToolCall("id", "look", '{"n": "many"}')).wait()
    assert not outcome.ok
    assert outcome.text.startswith("Error: the arguments do not fit:\n- n: ")
    assert counter.runs == 0


async def test_a_result_is_cut_and_says_so(open_pool) -> None:
    @Tool.define(max_tokens=10)
    def long() -> list[str]:
        return ["word"] * 1000

    @Tool.define(max_tokens=10)
    def loud() -> None:
        raise ToolError("no" * 1000)

    @Tool.define(max_tokens=None)
    def endless() -> str:
        return "word" * 20_000

    @Tool.define(max_tokens=None)
    def shouting() -> None:
        raise ToolError("no" * 100_000)

    def plain() -> str:
        return "word" * 20_000

    assert "[cut:" in (await outcome_of(open_pool, long)).text
    assert (await outcome_of(open_pool, endless)).text == "word" * 20_000
    assert "about 4000 of 20000 tokens are left out" in (await outcome_of(open_pool, plain)).text
    assert "[cut:" in (await outcome_of(open_pool, shouting)).text
    assert len((await outcome_of(open_pool, loud)).text) < 200
