"""Runs in Redis with several workers, all in this process: each is a run of its own, on a server of their own."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from math import inf
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).parents[1] / "record"))
from tests.record.redis_servers import RedisServer, needs_redis

from batch_agent import AgentContext, BatchAgent, SpecError, Tool
from batch_agent.errors import StoreError
from batch_agent.messages import Message
from batch_agent.record import row_json
from batch_agent.record.address import StoreAddress
from batch_agent.record.redis.store import RedisRunStore
from batch_agent.run.joined_worker import JoinedWorker, NoRunCame, WorkReport
from batch_agent.run.joined_worker import work as join
from batch_agent.run.trust import Trust, sign
from batch_agent.testing import CallTools, Request, Say, ScriptedServer, ToolUse

HERE = Path(__file__).parent
pytestmark = needs_redis
written: list[str] = []


class Verdict(BaseModel):
    """What each answer is."""

    label: str


@Tool.define(effect="write")
def note(what: str) -> str:
    """Write something down."""
    written.append(what)
    return "written"


@pytest.fixture
def url(url: str) -> str:
    written.clear()
    return url


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer(answer, models=["m"]) as server:
        yield server


def answer(request: Request) -> Say:
    text = str(request.messages[-1]["content"]) if request.messages[-1]["role"] == "user" else ""
    if "write" in text:
        return CallTools(ToolUse("note", {"what": text}))
    return Say(f"said: {text}")


def options(server: ScriptedServer, url: str, rows: int, **others: Any) -> dict[str, Any]:
    inputs = [{"row": f"row {row}"} for row in range(rows)]
    plain = {"task": "Do {row}", "inputs": inputs, "backend": server.backend_url, "model": "m", "run_dir": url}
    return {**plain, "lease": 5.0, **others}


async def work(url: str, **others: Any) -> WorkReport:
    return await join(url, import_from=HERE, wait=20.0, **others)


async def impatient(url: str) -> WorkReport:
    """A worker that takes rows as soon as their leases have ended."""
    store = RedisRunStore.at(StoreAddress.parse(url))
    store.polite = False
    try:
        return await JoinedWorker(store, Trust(), import_from=HERE, wait=20.0).work()
    finally:
        store.close()


async def test_a_transcript_is_decoded_when_it_is_first_read(
    server: ScriptedServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, texts = list[int](), row_json._texts

    def noted(data: bytes, index: int) -> tuple[str, tuple[Message, ...]]:
        decoded.append(index)
        return texts(data, index)

    monkeypatch.setattr(row_json, "_texts", noted)
    results = await BatchAgent.run(**options(server, url, 3), progress=False)
    assert [result.input for result in results] == [{"row": f"row {row}"} for row in range(3)] and not decoded
    assert [message.content for message in results[1].messages] == ["Do row 1", "said: Do row 1"] and decoded == [1]


async def test_every_row_is_done_once_whichever_worker_has_it(server: ScriptedServer, url: str) -> None:
    async with asyncio.TaskGroup() as tasks:
        workers = [tasks.create_task(work(url)) for _ in range(2)]
        run = tasks.create_task(BatchAgent.run(**options(server, url, 100, feed_only=True), progress=False))
    results = run.result()
    assert [result.output for result in results] == [f"said: Do row {row}" for row in range(100)]
    assert [result.input for result in results] == [{"row": f"row {row}"} for row in range(100)]
    assert sum(worker.result().rows for worker in workers) == 100
    assert {worker.result().why for worker in workers} == {"done"}
    assert server.received == 100
    assert results.summary.statistics.usage.completion_tokens > 0


async def test_a_run_that_feeds_is_a_worker_too_and_its_outputs_are_instances_of_the_schema(url: str) -> None:
    async with ScriptedServer(lambda request: Say('{"label": "good"}'), models=["m"]) as typed:
        results = await BatchAgent.run(**options(typed, url, 5, output_schema=Verdict), progress=False)
    assert [result.output for result in results] == [Verdict(label="good")] * 5


async def test_a_resumed_run_asks_only_what_is_not_done_and_delivers_everything_once(url: str) -> None:
    failing = {"row 3"}

    def script(request: Request) -> Say:
        text = str(request.messages[-1]["content"])
        if any(text.endswith(row) for row in failing):
            return Say("no", finish_reason="content_filter")
        return Say(f"said: {text}")

    async with ScriptedServer(script, models=["m"]) as server:
        first = await BatchAgent.run(**options(server, url, 5), progress=False)
        asked = server.received
        with pytest.raises(SpecError, match="holds a run already"):
            await BatchAgent.run(**options(server, url, 5), progress=False)
        failing.clear()
        again = await BatchAgent.run(**options(server, url, 7, resume=True), progress=False)
    failed = sum(not result.ok for result in first)
    assert [result.index for result in again] == list(range(7))
    assert all(result.ok for result in again)
    assert sum(result.resumed for result in again) == 5 - failed
    assert server.received == asked + 2 + failed


async def test_a_worker_waits_for_the_resume_of_a_complete_run_with_failed_rows(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    failing = {"row 3"}

    def script(request: Request) -> Say:
        text = str(request.messages[-1]["content"])
        return Say("no", finish_reason="content_filter") if any(map(text.endswith, failing)) else Say("yes")

    async with ScriptedServer(script, models=["m"]) as server:
        await BatchAgent.run(**options(server, url, 5), progress=False)
        for retries in (0, 1):  # a resumed run that retries nothing is complete again: the worker leaves
            caplog.clear()
            async with asyncio.TaskGroup() as tasks:
                worker = tasks.create_task(join(url, import_from=HERE, wait=inf))
                while "no process has resumed it to retry them" not in caplog.text:
                    assert not worker.done()
                    await asyncio.sleep(0.01)
                if retries:
                    failing.clear()
                again = {"resume": True, "retry_failed": bool(retries), "feed_only": bool(retries)}
                results = await BatchAgent.run(**options(server, url, 5, **again), progress=False)
            assert (sum(result.ok for result in results), worker.result()) == (4 + retries, WorkReport(retries, "done"))
        assert await join(url, import_from=HERE, wait=inf) == WorkReport(0, "done"), "nothing is left to retry"


async def test_forced_rows_keep_their_answers_under_another_task_and_schema_and_the_old_ones_stay(url: str) -> None:
    def script(request: Request) -> Say:
        if "row 3" in str(request.messages[-1]["content"]):
            return Say("no", finish_reason="content_filter")
        return Say('{"label": "good"}')

    async with ScriptedServer(script, models=["m"]) as server:

        async def run(rows: int, **others: Any) -> list[Any]:
            return list(await BatchAgent.run(**options(server, url, rows, **others), progress=False))

        plain = await run(4)
        asked = server.received
        new: dict[str, Any] = {"task": "Now do {row}", "output_schema": Verdict, "retry_failed": False}
        forced = await run(5, force_resume=True, **new)
        assert [result.output for result in forced if result.ok] == [Verdict(label="good")] * 4
        assert [result.resumed for result in forced] == [True] * 4 + [False]
        assert not forced[3].ok and server.received == asked + 1

        again = await run(5, resume=True, **new)
        assert all(result.resumed for result in again) and server.received == asked + 1
        back = await run(4, resume=True, retry_failed=False, on_change="resend")
    assert [result.output for result in back] == [result.output for result in plain]
    assert server.received == asked + 1


async def test_each_forced_answer_is_used_once(server: ScriptedServer, url: str) -> None:
    same = {"inputs": [{"row": "same"}] * 2}
    await BatchAgent.run(**options(server, url, 0, **same), progress=False)
    more = {"inputs": [{"row": "same"}] * 3, "task": "Now do {row}", "force_resume": True}
    results = await BatchAgent.run(**options(server, url, 0, **more), progress=False)
    assert sorted(result.output for result in results) == ["said: Do same", "said: Do same", "said: Now do same"]


async def test_forced_rows_of_which_only_the_result_was_kept_are_answered_from_it(
    server: ScriptedServer, url: str
) -> None:
    await BatchAgent.run(**options(server, url, 3, keep="results"), progress=False)
    changed = {"task": "Now do {row}", "force_resume": True, "keep": "results"}
    results = await BatchAgent.run(**options(server, url, 3, **changed), progress=False)
    assert [result.output for result in results] == [f"said: Do row {row}" for row in range(3)]
    assert server.received == 3


async def test_a_worker_that_lost_its_lease_records_and_delivers_nothing_and_the_write_runs_once(
    url: str, redis: RedisServer
) -> None:
    """The first worker is cut off during its second turn, after the write."""
    second_turn, go_on = asyncio.Event(), asyncio.Event()

    async def script(request: Request) -> Say:
        if request.turn == 0:
            return CallTools(ToolUse("note", {"what": "row 0"}))
        if not second_turn.is_set():
            second_turn.set()
            await go_on.wait()
            return Say("late")
        return Say("in time")

    async with ScriptedServer(script, models=["m"]) as server, asyncio.TaskGroup() as tasks:
        feeding = BatchAgent.run(
            **options(server, url, 1, feed_only=True, tools=[note], max_turns=3, lease=600.0), progress=False
        )
        run = tasks.create_task(feeding)
        cut_off = tasks.create_task(work(url))
        await second_turn.wait()
        expire(url)
        taking_over = tasks.create_task(impatient(url))
        results = await run
        go_on.set()
    assert [result.output for result in results] == ["in time"]
    assert written == ["row 0"]
    assert server.received == 3  # of the first worker's two requests, the second was asked again
    assert (cut_off.result().rows, taking_over.result().rows) == (0, 1)


async def test_what_cannot_travel_is_refused_before_anything_is_sent(server: ScriptedServer, url: str) -> None:
    def local(what: str) -> str:
        return what

    refused: list[tuple[dict[str, Any], str]] = [
        ({"tools": [local]}, "has no name that another process can import"),
        ({"worker": lambda row, ctx: row}, "has no name that another process can import"),
        ({"backend": {"url": server.backend_url, "api_key": "secret"}}, "api_key would be stored"),
        ({"backend": "openai://me:secret@host/v1"}, "a password in the URL would be stored"),
    ]
    for others, message in refused:
        with pytest.raises(SpecError, match=message) as error:
            await BatchAgent.run(**options(server, url, 1, **others), progress=False)
        assert "secret" not in str(error.value)
    assert server.received == 0


async def test_options_of_shared_runs_say_what_they_need(server: ScriptedServer, url: str) -> None:
    with pytest.raises(SpecError, match="is a stage: give its run"):
        await BatchAgent.run(**options(server, f"{url}/stage", 1))
    with pytest.raises(SpecError, match="lease is for a run that several processes share"):
        await BatchAgent.run(**{**options(server, url, 1, feed_only=True), "run_dir": None, "lease": 15.0})


async def test_a_worker_with_other_code_or_another_version_is_refused_and_told_what_differs(
    server: ScriptedServer, url: str
) -> None:
    async with BatchAgent.open(**options(server, url, 1, feed_only=True, tools=[note])) as run:
        store = RedisRunStore.at(StoreAddress.parse(url))
        while store.facts() is None:
            await asyncio.sleep(0.01)
        facts = store.facts()
        assert facts is not None
        good = dict(facts)

        async def refusal(**changed: Any) -> str:
            said = sign({**good, **changed})
            store.connection.call(
                lambda client: client.execute_command("HSET", store.key("run"), "facts", to_text(said))
            )
            with pytest.raises(SpecError) as error:
                await work(url)
            return str(error.value)

        spec = good["spec"]
        assert isinstance(spec, dict)
        assert "in: task" in await refusal(spec={**spec, "task": "Other {row}"})
        assert "in: the tool note, the tool read_file" in await refusal(spec={**spec, "tools": ["read_file"]})
        assert "no_such_module" in await refusal(spec={**spec, "tools": ["no_such_module:tool"]})
        assert "batch-agent 0.1" in await refusal(versions={"batch-agent": "0.1"})
        store.close()
        run.cancel()


async def test_a_worker_waits_for_a_run_and_says_what_it_waits_for(
    redis: RedisServer, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NoRunCame, match="there is no run"):
        await join(url, wait=0.3)
    assert "there is no run. This worker waits for 0.3 s (--wait)" in caplog.text
    with pytest.raises(SpecError, match="is unreachable"):
        await join("redis://127.0.0.1:1/0/x", wait=0.3)
    assert "redis://127.0.0.1:1/0/x is unreachable" in caplog.text
    assert "This worker tries again for 0.3 s (--wait)" in caplog.text
    for wrong in ("redis://:hunter2@127.0.0.1:1/0/x", "rediss://me:hunter2@127.0.0.1:1/0/x"):
        with pytest.raises(SpecError, match="is unreachable") as error:
            await join(wrong, wait=0.0)
        assert "hunter2" not in str(error.value)
    with pytest.raises(SpecError, match="names no run"):
        await join(redis.url, wait=0.0)


async def test_a_worker_that_is_asked_to_leave_hands_its_rows_to_the_others(url: str) -> None:
    began, go_on = asyncio.Event(), asyncio.Event()

    async def script(request: Request) -> Say:
        began.set()
        await go_on.wait()
        return Say("done")

    async with ScriptedServer(script, models=["m"]) as server, asyncio.TaskGroup() as tasks:
        run = tasks.create_task(BatchAgent.run(**options(server, url, 20, feed_only=True, lease=600.0), progress=False))
        store = RedisRunStore.at(StoreAddress.parse(url))
        leaver = JoinedWorker(store, Trust(), wait=20.0)
        leaving = tasks.create_task(leaver.work())
        await began.wait()
        leaver.cancel()
        report = await leaving
        store.close()
        go_on.set()
        staying = tasks.create_task(work(url))
        results = await run
    assert all(result.ok for result in results)
    assert (report.rows, staying.result().rows) == (0, 20)


async def test_a_drained_run_lets_rows_under_way_finish_and_its_resume_does_the_rest(url: str) -> None:
    began, go_on = asyncio.Event(), asyncio.Event()

    async def script(request: Request) -> Say:
        began.set()
        await go_on.wait()
        return Say("done")

    async with ScriptedServer(script, models=["m"]) as server:
        async with BatchAgent.open(**options(server, url, 30, max_inflight=2, max_agents=2)) as run:
            await began.wait()
            run.drain()
            go_on.set()
            done = [result async for result in run.results()]
        assert 0 < len(done) < 30
        assert run.statistics().ended == "drained"
        again = await BatchAgent.run(**options(server, url, 30, resume=True), progress=False)
    assert [result.index for result in again] == list(range(30))
    assert server.received == 30


async def test_a_second_feeder_is_refused_while_the_first_lives(server: ScriptedServer, url: str) -> None:
    async with BatchAgent.open(**options(server, url, 1, feed_only=True, lease=1.5)) as run:
        store = RedisRunStore.at(StoreAddress.parse(url))
        while store.facts() is None:
            await asyncio.sleep(0.01)
        store.close()
        with pytest.raises(StoreError, match="is fed by another process"):
            await BatchAgent.run(**options(server, url, 1, resume=True, lease=1.5), progress=False)
        run.cancel()


async def test_rows_that_cannot_be_used_are_failures_of_their_own(server: ScriptedServer, url: str) -> None:
    inputs = [{"row": "good"}, {"row": b"bytes"}, {"other": 1}, {"row": "good too"}]
    results = await BatchAgent.run(**{**options(server, url, 0), "inputs": inputs}, progress=False)
    assert [result.ok for result in results] == [True, False, False, True]
    assert Counter(result.error.stage for result in results if result.error) == {"compile": 2}


def to_text(value: object) -> bytes:
    from batch_agent.files.results import to_json

    return to_json(value)


def expire(url: str) -> None:
    """Every lease ends now, and whoever looks may take the rows at once."""
    from tests.record.test_run_stores import let_time_pass

    let_time_pass(StoreAddress.parse(url), 1e6)


async def use_a_file(row: dict[str, str], ctx: AgentContext) -> str:
    """A worker that needs a directory of its own."""
    (ctx.workdir / "draft").write_text(row["row"])
    return (ctx.workdir / "draft").read_text()


async def test_a_worker_beside_the_feeder_has_its_files_in_a_temporary_directory(
    server: ScriptedServer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    results = await BatchAgent.run(**options(server, url, 2, worker=use_a_file), progress=False)
    assert [result.output for result in results] == ["row 0", "row 1"]
    assert [*tmp_path.iterdir()] == []
