"""A function of the user's as the worker of each row: what it can do, and how it is recorded and resumed."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from batch_agent import AgentContext, AgentResult, BatchAgent, BlockingContext, Tool
from batch_agent.backends.base import ModelRequest, OnToolCall
from batch_agent.errors import BackendError, JobError, OutcomeUnknown, RowEnded, ToolError
from batch_agent.messages import Reply
from batch_agent.testing import CallTools, Fail, Hang, Request, Say, ScriptedBackend, ToolUse, virtual_clock

ran: list[str] = []


@pytest.fixture(autouse=True)
def nothing_ran_yet() -> None:
    ran.clear()


@Tool.define(effect="write")
async def note(text: str) -> str:
    ran.append(text)
    return f"noted {text}"


@Tool.define(effect="read")
async def look_up(text: str) -> str:
    ran.append(text)
    if text == "bad":
        raise ToolError("nothing is known")
    return f"about {text}"


def echo(request: Request) -> Say:
    return Say(f"answer to {request.text}")


async def run(worker: Any, backend: ScriptedBackend, directory: Path | None = None, **options: Any) -> Any:
    known = {"inputs": ["a"], "max_retries": 0, "tools": [note, look_up], "resume": directory is not None}
    return await BatchAgent.run(worker=worker, backend=backend, run_dir=directory, **{**known, **options})


async def test_a_worker_asks_and_calls_and_what_it_returns_is_the_output() -> None:
    async def work(row: str, ctx: AgentContext) -> object:
        first, second = await asyncio.gather(ctx.ask(f"{row} 1"), ctx.ask([{"role": "user", "content": f"{row} 2"}]))
        noted = await ctx.call("note", text=first.text)
        return {"said": [first.text, second.text], "noted": noted, "usage": second.usage.completion_tokens > 0}

    backend = ScriptedBackend(echo)
    [result] = await run(work, backend, system_prompt="Be brief.")
    assert result.output == {
        "said": ["answer to a 1", "answer to a 2"],
        "noted": "noted answer to a 1",
        "usage": True,
    }
    assert (result.turns, ran) == (2, ["answer to a 1"])
    assert [message["content"] for message in backend.requests[0].messages] == ["Be brief.", "a 1"]
    assert [message.role for message in result.messages] == ["system", "user", "assistant"]


async def test_without_messages_the_rows_own_conversation_goes_on() -> None:
    async def work(row: object, ctx: AgentContext) -> object:
        first = await ctx.ask(tools=["note"])
        for call in first.tool_calls:
            await ctx.call(call)
        ctx.say("Are you sure?")
        return (await ctx.ask()).text

    def script(request: Request) -> Say:
        return CallTools(ToolUse("note", {"text": "it"})) if request.turn == 0 else Say("yes")

    [result] = await run(work, ScriptedBackend(script), task="Do {input}")
    assert (result.output, ran) == ("yes", ["it"])
    assert [(m.role, m.content) for m in result.messages] == [
        ("user", "Do a"),
        ("assistant", ""),
        ("tool", "noted it"),
        ("user", "Are you sure?"),
        ("assistant", "yes"),
    ]


class Answer(BaseModel):
    word: str


@pytest.mark.parametrize("returned", [Answer(word="x"), {"word": "x"}, '{"word": "x"}'])
async def test_an_instance_a_mapping_and_json_text_are_validated(returned: object) -> None:
    async def work(row: object, ctx: AgentContext) -> object:
        return returned

    [result] = await run(work, ScriptedBackend(), output_schema=Answer)
    assert result.output == Answer(word="x")


async def test_the_tool_loop_is_a_function_of_the_context() -> None:
    async def work(row: object, ctx: AgentContext) -> object:
        words = await asyncio.gather(*(ctx.loop(f"{row}{n}", output_schema=Answer) for n in range(2)))
        return [answer.word for answer in words]

    def script(request: Request) -> Say:
        if request.turn == 0:
            return CallTools(ToolUse("look_up", {"text": request.text}))
        return Say("no JSON") if request.turn == 1 else Say('{"word": "done"}')

    [result] = await run(work, ScriptedBackend(script), max_retries=1)
    assert (result.output, sorted(ran), result.turns) == (["done", "done"], ["a0", "a1"], 6)


async def test_a_plain_function_runs_in_a_thread_and_waits_for_what_it_asks(tmp_path: Path) -> None:
    def work(row: str, ctx: BlockingContext) -> object:
        ctx.save("said.txt", ctx.ask("hello").text)
        return ctx.call("note", text=row)

    results = await run(work, ScriptedBackend(echo), tmp_path, inputs=["a", "b"])
    assert [result.output for result in results] == ["noted a", "noted b"]
    assert [result.artifacts["said.txt"].read_text() for result in results] == ["answer to hello"] * 2
    again = await run(work, ScriptedBackend(lambda _: Fail(500)), tmp_path, inputs=["a", "b"])
    assert [(result.output, result.resumed) for result in again] == [("noted a", True), ("noted b", True)]
    assert (again[0].artifacts, sorted(ran)) == (results[0].artifacts, ["a", "b"])


async def test_asks_at_once_are_found_again_in_any_order_and_another_question_is_sent(tmp_path: Path) -> None:
    order = [0, 1, 2]

    async def work(row: object, ctx: AgentContext) -> object:
        replies = await asyncio.gather(*(ctx.ask(f"question {n}") for n in order))
        if order == [0, 1, 2]:
            await ctx.ask("never answered")
        return sorted(reply.text for reply in replies)

    stop = ScriptedBackend(lambda request: Hang() if "never" in request.text else echo(request))
    async with BatchAgent.open(worker=work, inputs=["a"], backend=stop, run_dir=tmp_path):
        while len(stop.requests) < 4:
            await asyncio.sleep(0)
    order = [2, 0, 1, 9]
    backend = ScriptedBackend(lambda request: Say(f"new {request.text}"))
    [result] = await run(work, backend, tmp_path, tools=())
    assert [request.text for request in backend.requests] == ["question 9"]
    assert result.output == [f"answer to question {n}" for n in range(3)] + ["new question 9"]
    assert (result.turns, result.resumed) == (4, False)


async def test_the_same_question_asked_twice_has_two_answers_and_each_its_own_place(tmp_path: Path) -> None:
    started = asyncio.Event()

    async def work(row: object, ctx: AgentContext) -> object:
        texts = [reply.text for reply in await asyncio.gather(ctx.ask("roll"), ctx.ask("roll"))]
        if not started.is_set():
            started.set()
            await asyncio.get_running_loop().create_future()
        return texts

    def script(request: Request) -> Say:  # the second is answered first
        return Say(f"number {request.number}", latency=0.05 if request.number == 0 else 0.0)

    backend = ScriptedBackend(script)
    async with BatchAgent.open(worker=work, inputs=["a"], backend=backend, run_dir=tmp_path):
        await started.wait()
    [result] = await run(work, backend, tmp_path, tools=())
    assert (result.output, len(backend.requests)) == (["number 0", "number 1"], 2)


async def test_a_call_is_made_once_whatever_it_stands_beside(tmp_path: Path) -> None:
    interrupted = True

    async def work(row: object, ctx: AgentContext) -> object:
        texts = [await ctx.call("note", text="before")]
        await ctx.ask("go")
        texts += await asyncio.gather(ctx.call("note", text="twice"), ctx.call("note", text="twice"))
        if interrupted:
            await ctx.ask("wait")
        return texts

    backend = ScriptedBackend(lambda request: Hang() if request.text == "wait" else echo(request))
    async with BatchAgent.open(worker=work, inputs=["a"], tools=[note], backend=backend, run_dir=tmp_path):
        while len(backend.requests) < 2:
            await asyncio.sleep(0)
    interrupted = False
    for _ in range(2):
        [result] = await run(work, backend, tmp_path, tools=[note])
        assert result.output == ["noted before", "noted twice", "noted twice"]
        assert (ran, len(backend.requests)) == (["before", "twice", "twice"], 2)


async def test_a_write_that_was_interrupted_is_not_run_again_and_the_worker_is_told(tmp_path: Path) -> None:
    @Tool.define(effect="write")
    async def send(to: str) -> str:
        ran.append(to)
        return str(await asyncio.get_running_loop().create_future())

    async def work(row: object, ctx: AgentContext) -> object:
        try:
            return await ctx.call("send", to="x")
        except OutcomeUnknown as error:
            return f"careful: {error}"

    async with BatchAgent.open(worker=work, inputs=["a"], tools=[send], backend=ScriptedBackend(), run_dir=tmp_path):
        while not ran:
            await asyncio.sleep(0)
    [result] = await run(work, ScriptedBackend(), tmp_path, tools=[send])
    assert result.output.startswith("careful: the run was interrupted while send was running")
    assert ran == ["x"]


async def test_a_row_that_failed_makes_failed_reads_again_and_no_write(tmp_path: Path) -> None:
    fails = True

    async def work(row: object, ctx: AgentContext) -> object:
        await ctx.call("note", text="once")
        return await ctx.call("look_up", text="bad" if fails else "good")

    [failed] = await run(work, ScriptedBackend(), tmp_path)
    assert failed.error is not None and (failed.error.type, failed.error.message) == ("ToolFailed", "nothing is known")
    await run(work, ScriptedBackend(), tmp_path)
    fails = False
    [result] = await run(work, ScriptedBackend(), tmp_path)
    assert (result.output, ran) == ("about good", ["once", "bad", "bad", "good"])


async def test_a_worker_may_make_up_for_a_request_that_failed(tmp_path: Path) -> None:
    async def work(row: object, ctx: AgentContext) -> object:
        try:
            return (await ctx.ask("first")).text
        except BackendError:
            return (await ctx.ask("second")).text

    backend = ScriptedBackend(lambda request: Fail(422) if request.text == "first" else echo(request))
    [result] = await run(work, backend, tmp_path)
    assert result.output == "answer to second"


async def test_a_row_is_another_when_any_of_its_fields_is(tmp_path: Path) -> None:
    async def work(row: dict[str, object], ctx: AgentContext) -> object:
        return row["unused"]

    options = {"task": "{used}", "tools": ()}
    await run(work, ScriptedBackend(), tmp_path, inputs=[{"used": 1, "unused": "old"}], **options)
    options |= {"inputs": [{"used": 1, "unused": "new"}], "on_change": "resend"}
    [result] = await run(work, ScriptedBackend(), tmp_path, **options)
    assert (result.output, result.resumed) == ("new", False)


def results_of(results: list[AgentResult[Any]]) -> list[object]:
    return [result.error.type if result.error else result.output for result in results]


@virtual_clock
async def test_a_worker_that_misbehaves_fails_its_own_row_and_nothing_stays_behind() -> None:
    left: list[BaseException] = []

    async def late(ctx: AgentContext) -> None:
        try:
            await ctx.ask("late")
        except Exception as error:  # noqa: BLE001
            left.append(error)

    async def work(row: str, ctx: AgentContext) -> object:
        match row:
            case "raises":
                raise KeyError("x")
            case "hangs":
                await asyncio.sleep(1000)
            case "not json":
                return {1, 2}
            case "unknown tool":
                await ctx.call("nothing")
            case "leaves":
                tasks.append(asyncio.create_task(late(ctx)))
                await asyncio.sleep(0.01)
                return "left"
            case "later":
                contexts.append(ctx)
        return "fine"

    tasks: list[asyncio.Task[None]] = []
    contexts: list[AgentContext] = []
    rows = ["raises", "hangs", "not json", "unknown tool", "leaves", "later"]
    backend = ScriptedBackend(lambda request: Hang())
    results = await run(work, backend, inputs=rows, timeout_per_agent=5)
    assert results_of(results) == ["WorkerFailed", "TimeoutError", "WorkerFailed", "UnknownTool", "left", "fine"]
    assert "not JSON" in results[2].error.message
    await asyncio.gather(*tasks)
    await late(contexts[0])
    assert [str(error)[:27] for error in left] == ["the row of this context has"] * 2


@virtual_clock
async def test_a_worker_that_ignores_its_cancellation_cannot_keep_the_run(caplog: pytest.LogCaptureFixture) -> None:
    over = False

    async def work(row: str, ctx: AgentContext) -> object:
        while not over:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1)
        return "never"

    [result] = await run(work, ScriptedBackend(), timeout_per_agent=5)
    assert results_of([result]) == ["TimeoutError"]
    assert "does not stop when it is cancelled" in caplog.text
    over = True
    await asyncio.sleep(2)


@virtual_clock
async def test_a_worker_cannot_make_up_for_the_end_of_the_budget_or_of_the_time(tmp_path: Path) -> None:
    async def stubborn(row: str, ctx: AgentContext) -> object:
        for _ in range(20):
            with suppress(Exception):
                await ctx.ask("again")
        return "done"

    async def idle(row: str, ctx: AgentContext) -> object:
        await ctx.call("slow_note", text="once")
        await asyncio.sleep(10_000)

    @Tool.define(effect="write")
    async def slow_note(text: str) -> str:
        await asyncio.sleep(60)
        ran.append(text)
        return text

    backend = ScriptedBackend(lambda _: Say("more", latency=1))
    limited = BatchAgent.open(worker=stubborn, inputs=["a"], backend=backend, max_total_tokens=100)
    async with limited as running:
        assert [result.error and result.error.type async for result in running.results()] == ["Interrupted"]
    timed = {"worker": idle, "inputs": ["a"], "tools": [slow_note], "run_dir": tmp_path, "resume": True}
    for seconds in (30.0, 10.0):
        async with BatchAgent.open(backend=backend, max_wall_time=seconds, **timed) as running:
            assert [result.error and result.error.type async for result in running.results()] == ["Interrupted"]
    assert ran == ["once"]


async def test_options_of_an_ask_are_checked_and_an_exit_is_the_row_s_alone() -> None:
    async def work(row: str, ctx: AgentContext) -> object:
        match row:
            case "misspelt":
                await ctx.ask("x", temprature=1)  # type: ignore[call-arg]
            case "wrong":
                await ctx.ask("x", temperature=99)
            case "no tool":
                await ctx.ask("x", tools=["nothing"])
            case "nothing":
                await ctx.ask()
            case "exits":
                raise SystemExit(3)
        return (await ctx.ask("x", temperature=0.5, model="other")).text

    backend = ScriptedBackend(echo)
    rows = ["misspelt", "wrong", "no tool", "nothing", "exits", "fine"]
    results = await run(work, backend, inputs=rows, model="usual")
    messages = [result.error.message if result.error else "" for result in results]
    assert "ask has no option 'temprature'" in messages[0]
    assert "temperature: must be a number from 0 to 10" in messages[1]
    assert "nothing is not a tool of this run" in messages[2]
    assert "the run has no task" in messages[3]
    assert "SystemExit: 3" in messages[4]
    [request] = backend.requests
    assert (request.body["model"], request.body["temperature"]) == ("other", 0.5)


async def test_a_worker_that_has_changed_works_on_finished_rows_again_and_repeats_nothing(tmp_path: Path) -> None:
    async def before(row: str, ctx: AgentContext) -> object:
        return [(await ctx.ask("same")).text, await ctx.call("note", text=row)]

    async def after(row: str, ctx: AgentContext) -> object:
        return [(await ctx.ask("same")).text, (await ctx.ask("other")).text, await ctx.call("note", text=row)]

    backend = ScriptedBackend(echo)
    [first] = await run(before, backend, tmp_path)
    [kept] = await run(after, backend, tmp_path, force_resume=True)
    assert (kept.output, len(backend.requests)) == (first.output, 1)
    for _ in range(2):
        [changed] = await run(after, backend, tmp_path, task="now with a task: {input}", on_change="resend")
        assert changed.output == ["answer to same", "answer to other", "noted a"]
        assert ([request.text for request in backend.requests], ran) == (["same", "other"], ["a"])
    assert (changed.resumed, changed.turns) == (True, 2)


async def test_a_plain_function_that_hangs_is_given_up_and_what_it_asks_later_is_refused() -> None:
    release, left = threading.Event(), asyncio.Event()
    loop, errors = asyncio.get_running_loop(), list[JobError]()

    def work(row: str, ctx: BlockingContext) -> object:
        if row == "hangs":
            release.wait()
            try:
                ctx.ask("late")
            except JobError as error:
                errors.append(error)
            loop.call_soon_threadsafe(left.set)
        return "done"

    results = await run(work, ScriptedBackend(), inputs=["hangs", "b"], timeout_per_agent=0.2)
    assert results_of(results) == ["TimeoutError", "done"]
    release.set()
    await left.wait()
    assert [type(error) for error in errors] == [RowEnded]


@virtual_clock
async def test_a_loop_starts_reads_while_the_answer_is_streamed_and_says_how_many_turns_are_left() -> None:
    loop, started = asyncio.get_running_loop(), dict[str, float]()

    @Tool.define(effect="read")
    async def read(n: int) -> str:
        started["read"] = loop.time()
        return "read"

    @Tool.define(effect="write")
    async def write(n: int) -> str:
        started["write"] = loop.time()
        return "written"

    async def work(row: str, ctx: AgentContext) -> object:
        return await ctx.loop(row, max_turns=4)

    class Seen(ScriptedBackend):
        async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
            left.append(request.turns_left)
            return await super().infer(request, on_tool_call)

    def script(request: Request) -> Say:
        if request.turn == 0:
            return CallTools(ToolUse("read", {"n": 1}), ToolUse("write", {"n": 2}), chunk_delay=1.0)
        return Say("done")

    left: list[int] = []
    [result] = await run(work, Seen(script), tools=[read, write])
    assert (result.output, started["read"] < started["write"]) == ("done", True)
    assert left == [4, 3]


async def test_a_loop_takes_tools_that_the_run_does_not_have(tmp_path: Path) -> None:
    def shout(text: str) -> str:
        """Shout it."""
        ran.append(text)
        return text.upper()

    @Tool.define(effect="write", name="note")
    async def another(text: str) -> str:
        return "never"

    async def work(row: str, ctx: AgentContext) -> object:
        if row == "same name":
            return await ctx.loop(row, tools=[another])
        said = await ctx.loop(row, tools=[shout, "look_up", note])
        return [said, await ctx.call("shout", text="more")]

    def script(request: Request) -> Say:
        if request.turn == 0:
            names = [tool["function"]["name"] for tool in request.body["tools"]]
            return CallTools(*(ToolUse(name, {"text": f"{request.text} {name}"}) for name in names))
        return Say(f"{request.text}!")

    backend = ScriptedBackend(script)
    results = await run(work, backend, tmp_path, inputs=["a", "b", "same name"])
    assert [result.output for result in results[:2]] == [["noted a note!", "MORE"], ["noted b note!", "MORE"]]
    assert "the run has another tool called note" in results[2].error.message
    assert sorted(ran)[:3] == ["a look_up", "a note", "a shout"]
    again = await run(work, ScriptedBackend(lambda _: Fail(500)), tmp_path, inputs=["a", "b"], force_resume=True)
    assert [result.output for result in again] == [result.output for result in results[:2]]


async def test_a_text_that_was_cut_is_kept_when_the_run_says_so_and_says_that_it_was_cut(tmp_path: Path) -> None:
    async def work(row: str, ctx: AgentContext) -> object:
        reply = await ctx.ask(row)
        return [reply.text, reply.truncated]

    backend = ScriptedBackend(lambda request: Say("half of", finish_reason="length"))
    for _ in range(2):
        [kept] = await run(work, backend, tmp_path, truncated="keep")
        assert (kept.output, kept.truncated) == (["half of", True], True)
    assert len(backend.requests) == 1
    [failed] = await run(work, backend, truncated="fail")
    assert failed.error is not None and failed.error.type == "Truncated"
    [whole] = await run(work, ScriptedBackend([Say("all")]), truncated="keep")
    assert (whole.output, whole.truncated) == (["all", False], False)


def broken(row: str) -> object:
    return {}[row]


async def test_the_error_of_a_worker_says_where_it_was_raised_and_has_its_traceback(tmp_path: Path) -> None:
    async def work(row: str, ctx: AgentContext) -> object:
        return broken(row)

    for _ in range(2):
        [result] = await run(work, ScriptedBackend(), tmp_path, retry_failed=False)
        assert "KeyError: 'a'" in result.error.message
        assert "test_user_workers.py, line " in result.error.message
        assert "in broken: return {}[row]" in result.error.message
        assert result.error.traceback.startswith("Traceback (most recent call last):")
        assert "return broken(row)" in result.error.traceback and "batch_agent/agent" not in result.error.traceback
    assert "return broken(row)" in (tmp_path / "failures.jsonl").read_text()


def test_a_traceback_of_run_sync_shows_only_the_workers_code() -> None:
    [result] = BatchAgent.run_sync(worker=lambda row, ctx: broken(row), inputs=["a"], backend=ScriptedBackend())
    assert "KeyError: 'a'" in result.error.traceback and "batch_agent" not in result.error.traceback


async def test_a_write_of_the_tool_loop_is_not_made_again_by_a_worker_that_takes_over_its_record(
    tmp_path: Path,
) -> None:
    def script(request: Request) -> Say:
        return CallTools(ToolUse("note", {"text": "it"})) if request.turn == 0 else Say("done")

    async def work(row: str, ctx: AgentContext) -> object:
        return [await ctx.call("note", text="it"), await ctx.call("note", text="more")]

    options = {"task": "{input}", "force_resume": True}
    known = {"inputs": ["a"], "tools": [note, look_up], "task": "{input}"}
    await BatchAgent.run(backend=ScriptedBackend(script), run_dir=tmp_path, **known)
    [result] = await run(work, ScriptedBackend(), tmp_path, **options)
    assert (result.output, ran) == (["noted it", "noted more"], ["it", "more"])


async def test_a_write_of_a_worker_is_not_made_again_by_the_tool_loop_that_takes_over_its_record(
    tmp_path: Path,
) -> None:
    async def work(row: str, ctx: AgentContext) -> object:
        await ctx.call("note", text="it")
        raise ValueError("not finished")

    fails = True

    def script(request: Request) -> Say | Fail:
        if request.turn == 0:
            return CallTools(ToolUse("note", {"text": "it"}), ToolUse("note", {"text": "it"}))
        return Fail(400) if fails else Say(request.text)

    await run(work, ScriptedBackend(), tmp_path, task="{input}")
    options = {"inputs": ["a"], "tools": [note, look_up], "task": "{input}", "resume": True, "force_resume": True}
    backend = ScriptedBackend(script)
    for _ in range(3):
        [result] = await BatchAgent.run(backend=backend, run_dir=tmp_path, **options)
        fails = False
    assert (result.output, ran, len(backend.requests)) == ("noted it", ["it", "it"], 4)
