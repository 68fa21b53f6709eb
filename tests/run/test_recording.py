"""What is recorded when, and what a run that is stopped in between makes of it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel

from batch_agent import AgentResult, BatchAgent, Tool
from batch_agent.agent.dialogue import MOST_CALLS
from batch_agent.errors import SpecError
from batch_agent.record.directory import DirectoryStore
from batch_agent.record.lock import is_locked
from batch_agent.record.sqlite import SqliteJournal
from batch_agent.record.store import KeptStep
from batch_agent.run.run import Run
from batch_agent.testing import CallTools, Fail, Hang, Request, Say, ScriptedBackend, ToolUse, virtual_clock


def echo(request: Request) -> Say:
    return Say(request.text)


async def run(directory: Path, script: Any = echo, **options: Any) -> tuple[list[AgentResult[Any]], ScriptedBackend]:
    backend = ScriptedBackend(script)
    known = {"task": "{input}", "inputs": ["a"], "run_dir": directory, "resume": True, "max_retries": 0}
    return await BatchAgent.run(backend=backend, **{**known, **options}), backend


# Calls of one answer


async def test_a_write_that_ended_is_known_although_an_earlier_call_of_its_answer_still_ran(tmp_path: Path) -> None:
    sent: list[str] = []

    @Tool.define(effect="write")
    async def send(to: str) -> str:
        if to == "never":
            await asyncio.get_running_loop().create_future()
        sent.append(to)
        return f"sent to {to}"

    def script(request: Request) -> Say:
        if request.turn == 0:
            return CallTools(ToolUse("send", {"to": "never"}), ToolUse("send", {"to": "them"}))
        return Say("done")

    async with BatchAgent.open(
        task="{input}", inputs=["a"], tools=[send], backend=ScriptedBackend(script), run_dir=tmp_path
    ):
        while not sent:
            await asyncio.sleep(0)
    [result], _ = await run(tmp_path, script, tools=[send])
    told = [message.content for message in result.messages if message.role == "tool"]
    assert "its outcome is unknown" in told[0]
    assert (told[1], sent) == ("sent to them", ["them"])


@virtual_clock
async def test_a_call_that_ends_after_its_agent_failed_leaves_no_trace_behind_the_failure(tmp_path: Path) -> None:
    @Tool.define(cacheable=True)
    async def slow(key: str) -> str:
        await asyncio.sleep(8)
        return "late"

    def script(request: Request) -> Say:
        return CallTools(ToolUse("slow", {"key": "k"})) if request.turn == 0 else Say("done")

    async def delayed() -> Any:
        yield "early"
        await asyncio.sleep(5)
        yield "later"  # shares the call, so that it goes on when the first has given it up

    options: dict[str, Any] = {"tools": [slow], "timeout_per_agent": 6, "retry_failed": False}
    first, _ = await run(tmp_path, script, inputs=delayed(), **options)
    assert [result.error and result.error.type for result in first] == ["TimeoutError", None]
    again, backend = await run(tmp_path, script, inputs=["early", "later"], **options)
    assert [(result.error, result.resumed) for result in again] == [(first[0].error, True), (None, True)]
    assert backend.requests == []


@pytest.mark.parametrize("streaming", [True, False])
async def test_an_answer_with_very_many_calls_is_an_error_that_the_model_sees(tmp_path: Path, streaming: bool) -> None:
    wrote: list[int] = []

    @Tool.define(effect="write")
    async def write(n: int) -> str:
        wrote.append(n)
        return "written"

    def script(request: Request) -> Say:
        count = (2000, MOST_CALLS)[request.turn] if request.turn < 2 else 0
        return CallTools(*(ToolUse("write", {"n": n}) for n in range(count))) if count else Say("done")

    options = {"tools": [write], "streaming_tool_dispatch": streaming}
    [result], _ = await run(tmp_path, script, **options)
    told = [message.content for message in result.messages if message.role == "tool"]
    assert (result.output, len(told), wrote) == ("done", 2000 + MOST_CALLS, list(range(MOST_CALLS)))
    assert set(told[:2000]) == {"Error: not run: 2000 calls in one answer are too many; ask for at most 64 at once."}
    [again], backend = await run(tmp_path, script, **options)
    assert (again.messages, backend.requests) == (result.messages, [])


async def test_calls_that_began_early_of_an_answer_with_too_many_are_given_up() -> None:
    started, ended = 0, 0

    @Tool.define(effect="read", cacheable=False)
    async def read(n: int) -> str:
        nonlocal started, ended
        started += 1
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            ended += 1

    def script(request: Request) -> Say:
        return CallTools(*(ToolUse("read", {"n": n}) for n in range(200))) if request.turn == 0 else Say("done")

    [result] = await BatchAgent.run(task="{input}", inputs=["a"], tools=[read], backend=ScriptedBackend(script))
    assert result.ok and started == ended <= MOST_CALLS


# Limits and answers


class Answer(BaseModel):
    word: str


async def test_answers_asked_for_again_come_on_top_of_max_turns() -> None:
    @Tool.define(effect="read")
    async def look(n: int) -> str:
        return "seen"

    def script(request: Request) -> Say:
        if request.turn in (0, 2):
            return CallTools(ToolUse("look", {"n": request.turn}))
        return Say("no JSON") if request.turn == 1 else Say('{"word": "w"}')

    options: dict[str, Any] = {"task": "{input}", "inputs": ["a"], "tools": [look], "output_schema": Answer}
    [result] = await BatchAgent.run(backend=ScriptedBackend(script), max_turns=3, **options)
    assert (result.output, result.turns) == (Answer(word="w"), 4)
    [result] = await BatchAgent.run(backend=ScriptedBackend(script), max_turns=2, **options)
    assert (result.error and result.error.type, result.turns) == ("LimitExceeded", 3)


@pytest.mark.parametrize("text", ["", " \n", "<think>let me see</think>"])
async def test_an_answer_without_an_answer_is_asked_for_again_and_then_an_error(tmp_path: Path, text: str) -> None:
    [result], backend = await run(tmp_path, lambda _: Say(text), max_retries=1)
    assert (result.ok, result.output, result.error and result.error.type) == (False, None, "BadResponse")
    assert (len(backend.requests), result.raw_text) == (2, text)
    [mended], _ = await run(tmp_path, lambda _: Say("text"))
    assert mended.output == "text"


async def test_an_answer_without_text_that_calls_a_tool_is_one(tmp_path: Path) -> None:
    @Tool.define(effect="read")
    async def look(n: int) -> str:
        return "seen"

    def script(request: Request) -> Say:
        return CallTools(ToolUse("look", {"n": 1})) if request.turn == 0 else Say("done")

    [result], _ = await run(tmp_path, script, tools=[look])
    assert result.output == "done"


# Stopping


class SlowDisk(SqliteJournal):
    """Commits nothing until it may."""

    may_commit: threading.Event
    reached: threading.Event

    def commit(self, steps: Sequence[KeptStep], *written: Any) -> None:
        if steps:
            self.reached.set()
            assert self.may_commit.wait(10)
        super().commit(steps, *written)


async def test_a_row_that_is_on_its_way_to_the_disk_when_the_run_is_cancelled_is_delivered_as_what_it_is(
    tmp_path: Path,
) -> None:
    may_commit, reached = threading.Event(), threading.Event()

    def open_journal(path: Path, *, begun: bool) -> SlowDisk:
        disk = SlowDisk.open(path, begun=begun)
        disk.may_commit, disk.reached = may_commit, reached
        return disk

    def script(request: Request) -> Any:
        return {"good": Say("answer"), "bad": Say("cut", finish_reason="length"), "slow": Hang()}[request.text]

    prepared = BatchAgent.plan(
        task="{input}",
        inputs=["bad", "good", "slow"],
        backend=ScriptedBackend(script),
        run_dir=tmp_path,
        truncated="fail",
    )
    record = DirectoryStore(tmp_path, open_journal=open_journal)
    async with Run[str](prepared, record=lambda spec: record) as stopped:
        await asyncio.to_thread(reached.wait, 10)
        stopped.cancel()
        asyncio.get_running_loop().call_later(0.01, may_commit.set)
        results = {result.input: result async for result in stopped.results()}
    assert {row: result.error and result.error.type for row, result in results.items()} == {
        "good": None,
        "bad": "Truncated",
        "slow": "Interrupted",
    }
    assert results["good"].output == "answer"
    again, backend = await run(tmp_path, lambda _: Say("new"), inputs=["good", "bad", "slow"], retry_failed=False)
    assert ([result.output for result in again], len(backend.requests)) == (["answer", None, "new"], 1)


async def test_a_run_that_is_cancelled_twice_leaves_no_lock_behind(tmp_path: Path) -> None:
    for turns in range(0, 40, 3):
        running = asyncio.ensure_future(run(tmp_path, lambda _: Hang()))
        for pause in (turns, turns % 7, 1):
            for _ in range(pause):
                await asyncio.sleep(0)
            running.cancel()
        await asyncio.wait([running])
        assert not is_locked(tmp_path / "run.lock")


# The directory


async def test_a_run_directory_is_its_owner_s_alone(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "new"
    for _ in range(2):
        await run(directory, lambda request: Fail(400) if request.text == "b" else echo(request), inputs=["a", "b"])
        assert directory.stat().st_mode & 0o777 == 0o700
        files = {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}
        assert set(files.values()) == {0o600}, files
        assert files.keys() >= {"run.json", "journal.db", "results.jsonl", "failures.jsonl", "summary.json", "run.lock"}


@pytest.mark.parametrize("option", ["run_dir", "checkpoint_dir"])
async def test_an_empty_name_of_a_directory_is_refused(option: str) -> None:
    for name in ("", " "):
        with pytest.raises(SpecError, match="run_dir is empty"):
            await BatchAgent.run(task="{input}", inputs=["a"], backend=ScriptedBackend(echo), **{option: name})


async def test_checkpoint_dir_goes_on_with_what_is_there(tmp_path: Path) -> None:
    requests = 0
    for _ in range(2):
        backend = ScriptedBackend(echo)
        await BatchAgent.run(task="{input}", inputs=["a"], backend=backend, checkpoint_dir=tmp_path)
        requests += len(backend.requests)
    assert requests == 1
    with pytest.raises(SpecError, match="holds a run already"):
        await BatchAgent.run(
            task="{input}", inputs=["a"], backend=ScriptedBackend(echo), checkpoint_dir=tmp_path, resume=False
        )


class Span(NamedTuple):
    start: bytes
    length: timedelta


async def test_outputs_are_written_as_their_schema_writes_them(tmp_path: Path) -> None:
    for _ in range(2):
        [result], _ = await run(tmp_path, lambda _: Say('["abc", "PT1H30M"]'), output_schema=Span)
        assert result.output == Span(b"abc", timedelta(minutes=90))
        [line] = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
        assert line["output"] == ["abc", "PT1H30M"]
