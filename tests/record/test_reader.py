"""A recorded run as its reader shows it: the same for a run directory and for a run in Redis."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tests.record.redis_servers import needs_redis

from batch_agent import BatchAgent, Pipeline, Tool
from batch_agent.cli.main import main
from batch_agent.record.lock import Lock
from batch_agent.record.reader import DirectoryReader, look, open_run
from batch_agent.record.rundir import FAILURES, LOCK, RESULTS, RUN
from batch_agent.run.run import Run
from batch_agent.testing import CallTools, Fail, Request, Say, ScriptedBackend, ScriptedServer, ToolUse

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


@Tool.define(cacheable=True)
def look_up(sku: str) -> str:
    """Looks it up."""
    return f"{sku} is a kettle"


def numbered() -> Callable[[Request], Say]:
    """Answers that all differ. Later requests are answered first."""
    count = itertools.count()

    def answer(request: Request) -> Say:
        number = next(count)
        return Say(f"answer {number}", latency=max(0.0, 0.1 - 0.02 * number))

    return answer


async def read(place: str, function: Callable[[Any], Any]) -> Any:
    """What a function reads of a run, in a thread, as commands do."""

    def call() -> Any:
        with open_run(place) as reader:
            return function(reader)

    return await asyncio.to_thread(call)


def outputs_and_replies(reader: Any) -> list[tuple[str, str]]:
    """The output of each row, and the last answer of the agent that the reader finds for it."""
    rows = [(record["output"], reader.past(where, record)) for where, record in reader.rows.placed()]
    return [(output, past.turns[-1].reply.text) for output, past in rows]


async def test_each_of_several_identical_rows_has_its_own_conversation(place: str) -> None:
    async with ScriptedServer(numbered(), models=["m"]) as server:
        inputs = [{"text": "the same"}] * 5
        await BatchAgent.run(task="Do {text}", inputs=inputs, backend=server.backend_url, model="m", run_dir=place)
    found = await read(place, outputs_and_replies)
    assert len({output for output, _ in found}) == 5
    assert all(output == reply for output, reply in found)


async def test_identical_rows_of_a_later_stage_have_their_own_conversations_too(place: str) -> None:
    async with (
        ScriptedServer(lambda request: Say('{"text": "equal"}'), models=["m"]) as first,
        ScriptedServer(numbered(), models=["m"]) as second,
    ):
        rows = [{"text": f"row {number}"} for number in range(5)]
        stages = Pipeline(rows).map(task="Do {text}", name="read", output_schema=SCHEMA)
        stages = stages.map(task="Say {text}", name="say", backend=second.backend_url)
        await stages.run(backend=first.backend_url, model="m", run_dir=place)

    def of_stage(reader: Any) -> list[tuple[str, str]]:
        with reader.stage("say") as stage:
            return outputs_and_replies(stage)

    found = await read(place, of_stage)
    assert len({output for output, _ in found}) == 5
    assert all(output == reply for output, reply in found)


async def test_status_and_export_agree_after_a_stopped_session(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with ScriptedServer(lambda request: Say("fine"), models=["m"]) as server:
        common: dict[str, Any] = {"inputs": [{"text": f"{row}"} for row in range(10)], "model": "m", "run_dir": place}
        await BatchAgent.run(task="Do {text}", backend=server.backend_url, **common)
    asked = asyncio.Event()

    async def never(request: Request) -> Say:
        asked.set()
        await asyncio.Event().wait()
        return Say("never")

    async with ScriptedServer(never, models=["m"]) as server:  # another task: every row is sent again
        common |= {"resume": True, "on_change": "resend"}
        again = BatchAgent.run(task="Do it {text}", backend=server.backend_url, **common)
        working = asyncio.create_task(again)
        await asked.wait()
        working.cancel()
        await asyncio.wait([working])
    view = await asyncio.to_thread(look, place)
    await asyncio.to_thread(main, ["export", place, "--output", str(tmp_path / "out.jsonl")])
    exported = len((tmp_path / "out.jsonl").read_text().splitlines())
    assert (view.latest.ok, view.latest.failed, exported) == (0, 0, 0)  # no row is done with this task


@needs_redis
async def test_rows_of_earlier_sessions_count_before_they_are_fed_again(url: str, tmp_path: Path) -> None:
    class Rows:
        """Rows that end, or that do not come."""

        def __init__(self, count: int, *, ends: bool) -> None:
            self.count, self.ends, self.waits = count, ends, asyncio.Event()

        async def __aiter__(self) -> AsyncIterator[dict[str, str]]:
            for row in range(self.count):
                yield {"text": str(row)}
            self.waits.set()
            if not self.ends:
                await asyncio.Event().wait()

    async with ScriptedServer(lambda request: Say("fine"), models=["m"]) as server:
        options: dict[str, Any] = {"task": "{text}", "backend": server.backend_url, "model": "m", "run_dir": url}
        await BatchAgent.run(inputs=Rows(6, ends=True), **options)
        rows = Rows(2, ends=False)
        working = asyncio.create_task(BatchAgent.run(inputs=rows, resume=True, **options))
        await rows.waits.wait()
        working.cancel()
        await asyncio.wait([working])
    view = await asyncio.to_thread(look, url)
    exported = await read(url, lambda reader: len(list(reader.rows)))
    assert view.latest.ok == exported == 6


async def test_a_killed_session_is_counted_by_its_result_lines(tmp_path: Path) -> None:
    async with ScriptedServer(lambda request: Say("fine"), models=["m"]) as server:
        inputs = [{"text": f"{row}"} for row in range(4)]
        await BatchAgent.run(task="{text}", inputs=inputs, backend=server.backend_url, model="m", run_dir=tmp_path)
    facts = json.loads((tmp_path / RUN).read_text())
    (tmp_path / RUN).write_text(json.dumps({**facts, "state": "running"}))  # as after kill -9
    lines = (tmp_path / RESULTS).read_bytes().splitlines(keepends=True)
    (tmp_path / RESULTS).write_bytes(b"".join(lines[:3]) + lines[3][:20])
    (tmp_path / f"{RESULTS}.new").write_bytes(lines[0])  # a session that was killed had begun to write these
    (tmp_path / f"{FAILURES}.new").write_bytes(b'{"index":1,"job_id":"1","type":"Timeout"}\n')
    view = look(tmp_path)
    with DirectoryReader(tmp_path) as reader:
        records = list(reader.rows)
    assert (view.state, view.latest.ok, view.latest.failed) == ("interrupted", 2, 1)
    assert [record["ok"] for record in records].count(True) == 2
    assert len(records) == 3


def test_a_run_whose_model_is_loading_is_starting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = Lock(tmp_path / LOCK)
    try:
        assert main(["status", str(tmp_path)]) == 0
        assert "starting" in capsys.readouterr().out
        (tmp_path / RUN).write_text(json.dumps({"state": "complete", "rows": {}}))  # of an earlier session
        assert look(tmp_path).state == "starting"
    finally:
        lock.release()
    assert look(tmp_path).state == "complete"


@needs_redis
async def test_a_run_in_redis_whose_model_is_loading_is_starting(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Loading(ScriptedBackend):
        async def __aenter__(self) -> Self:
            self.begun.set()
            await self.ready.wait()
            return await super().__aenter__()

        begun, ready = asyncio.Event(), asyncio.Event()

    async def state() -> str:
        return (await asyncio.to_thread(look, url)).state

    async with ScriptedServer(lambda request: Say("fine"), models=["m"]) as server:
        options: dict[str, Any] = {"task": "{input}", "inputs": ["a"], "model": "m", "run_dir": url}
        prepared = BatchAgent.plan(backend=server.backend_url, **options)
        backend = Loading(lambda request: Say("fine"))
        async with Run[object](replace(prepared, backend=backend)) as run:
            await backend.begun.wait()
            while await asyncio.to_thread(main, ["status", url]):
                await asyncio.sleep(0)
            assert "starting" in capsys.readouterr().out
            backend.ready.set()
            assert [result.output async for result in run.results()] == ["fine"]
        assert await state() == "complete"


class Held:
    """A server whose agents look something up, and whose second answers never come."""

    def __init__(self, rows: int) -> None:
        self.left, self.all_wait = rows, asyncio.Event()

    async def answer(self, request: Request) -> Say:
        if not request.turn:
            return CallTools(ToolUse("look_up", {"sku": "K-1"}))
        self.left -= 1
        if not self.left:
            self.all_wait.set()
        await asyncio.Event().wait()
        return Say("never")


@pytest.mark.covers("show with inputs of unfinished rows", "pipeline")
async def test_unfinished_rows_of_a_stage_are_shown_with_what_the_stage_before_answered(
    place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def moods(request: Request) -> Say:
        return Say(json.dumps({"text": f"mood of {request.messages[-1]['content']}"}))

    held = Held(3)
    async with ScriptedServer(moods, models=["m"]) as first, ScriptedServer(held.answer, models=["m"]) as second:
        rows = [{"text": f"row {number}"} for number in range(3)]
        stages = Pipeline(rows).map(task="Do {text}", name="read", output_schema=SCHEMA)
        stages = stages.map(task="Say {text}", name="say", backend=second.backend_url, tools=[look_up])
        working = asyncio.create_task(stages.run(backend=first.backend_url, model="m", run_dir=place))
        await held.all_wait.wait()
        working.cancel()
        await asyncio.wait([working])
    assert await asyncio.to_thread(main, ["show", place, "--unfinished"]) == 0
    shown = capsys.readouterr().out
    assert [f"say, row {row}: not done" in shown for row in range(3)] == [True] * 3
    assert [f"mood of Do row {row}" in shown for row in range(3)] == [True] * 3
    assert shown.count("K-1 is a kettle") == 3


async def test_a_row_whose_input_is_not_available_is_shown_and_the_reason_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = Held(1)
    async with ScriptedServer(held.answer, models=["m"]) as server:
        options: dict[str, Any] = {"task": "Do {text}", "tools": [look_up], "backend": server.backend_url, "model": "m"}
        run = BatchAgent.run(inputs=[{"text": "x"}], run_dir=tmp_path, **options)
        working = asyncio.create_task(run)
        await held.all_wait.wait()
        working.cancel()
        await asyncio.wait([working])
    assert await asyncio.to_thread(main, ["show", str(tmp_path), "--unfinished"]) == 0
    captured = capsys.readouterr()
    assert "a row whose input is unknown: not done" in captured.out
    assert "the inputs of 1 row are not available" in captured.err


@needs_redis
async def test_unfinished_rows_keep_their_steps_when_a_run_is_copied(url: str, tmp_path: Path) -> None:
    held = Held(2)
    async with ScriptedServer(held.answer, models=["m"]) as server:
        options: dict[str, Any] = {"task": "Do {text}", "tools": [look_up], "backend": server.backend_url, "model": "m"}
        inputs = [{"text": "x"}, {"text": "y"}]
        working = asyncio.create_task(BatchAgent.run(inputs=inputs, run_dir=url, **options))
        await held.all_wait.wait()
        working.cancel()
        await asyncio.wait([working])

    def turns(reader: Any) -> list[int]:
        return [len(row.past.turns) for row in reader.unfinished() if row.past is not None]

    copies = [f"{url}-2", str(tmp_path / "copied")]
    for copy in copies:
        assert await asyncio.to_thread(main, ["copy", url, copy, "--import-from", str(Path(__file__).parent)]) == 0
    assert [await read(copy, turns) for copy in copies] == [[1, 1], [1, 1]]


@pytest.mark.covers("streamed text in the page", "Redis")
@needs_redis
async def test_the_text_that_a_row_in_redis_streams_reaches_a_viewer(url: str) -> None:
    words = " ".join(f"word{number}" for number in range(120))

    def answer(request: Request) -> Say:
        if not request.turn:
            return CallTools(ToolUse("look_up", {"sku": "K-1"}))
        return Say(words, chunk_delay=0.02)

    async with ScriptedServer(answer, models=["m"]) as server:
        options: dict[str, Any] = {"task": "Do {text}", "tools": [look_up], "backend": server.backend_url, "model": "m"}
        run = BatchAgent.run(inputs=[{"id": "a", "text": "x"}, {"id": "b", "text": "y"}], run_dir=url, **options)
        working = asyncio.create_task(run)
        await server.wait_requests(3)
        sizes: list[int] = []
        with open_run(url) as reader:
            async for live, _ in reader.follow("b"):
                if live["saying"]:
                    assert live["job_id"] == "b"
                    sizes.append(len(str(live["saying"])))
        results = await working
    assert len(sizes) >= 2 and sizes == sorted(sizes) and sizes[0] < len(words)
    assert [result.ok for result in results] == [True, True]


async def test_the_timeline_has_the_turns_of_a_run(place: str) -> None:
    async with ScriptedServer(lambda request: Fail(400) if "3" in str(request.messages) else Say("fine")) as server:
        inputs = [{"text": f"{row}"} for row in range(5)]
        await BatchAgent.run(task="{text}", inputs=inputs, backend=server.backend_url, model="m", run_dir=place)
    found = await read(place, lambda reader: reader.timeline())
    answered = {span[3] for span in found.spans if span[0] == "turn" and not span[8]}
    assert answered == {0, 1, 2, 4}
    assert found.headers[-1]["task"] == "{text}"
    assert found.samples[-1][2:4] == [5, 1]  # done, failed
