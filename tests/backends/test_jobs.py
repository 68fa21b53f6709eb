"""Rows through a provider's batch API: one job for each wave, noted before it is waited for, and never paid twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tests.record.redis_servers import RedisServer, needs_redis

from batch_agent import BatchAgent, Tool
from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.backends.batch import JobBackend, JobLedger, OpenAIJobs, Wave
from batch_agent.backends.registry import open_backend
from batch_agent.errors import Rejected, SpecError, StoreError, Unavailable
from batch_agent.messages import Conversation, Message, Usage
from batch_agent.record.memory import MemoryStore
from batch_agent.record.reader import open_run
from batch_agent.record.rundir import JOBS as FILE
from batch_agent.record.rundir import RunDir
from batch_agent.record.sqlite import TABLE, SqliteJournal
from batch_agent.run.copying import copy_to_directory
from batch_agent.scheduler.blame import outcome_of
from batch_agent.testing import (
    BatchJob,
    BatchServer,
    CallTools,
    Fail,
    Request,
    Say,
    ScriptedBackend,
    ToolUse,
    virtual_clock,
)


def say(text: str) -> Say:
    return Say(text, usage=Usage(10, 0, 5))


def echo(request: Request) -> Say:
    return say(f"heard {request.text}")


def url(server: BatchServer, scheme: str = "openai", **options: object) -> dict[str, str]:
    settings = "&".join(f"{name}={value}" for name, value in {"gather": 0.05, "look": 0.01, **options}.items())
    where = "/v1?tls=false&" if scheme == "openai" else "?"
    return {"url": f"{scheme}-batch://{server.address}{where}{settings}", "api_key": "k"}


async def ask(server: BatchServer, *rows: object, **options: Any) -> Any:
    given: dict[str, Any] = {"task": "{input}", "model": "test-model", "backend": url(server)}
    return await BatchAgent.run(inputs=list(rows), **given | options)


async def test_the_rows_of_a_run_are_one_job_and_each_gets_its_own_answer() -> None:
    async with BatchServer(echo, polls=3) as server:
        results = await ask(server, *(f"row {n}" for n in range(200)))
    assert [result.output for result in results] == [f"heard row {n}" for n in range(200)]
    assert [len(job.requests) for job in server.jobs] == [200]


async def test_two_rows_that_ask_the_same_get_two_answers() -> None:
    async with BatchServer(echo) as server:
        results = await ask(server, "same", "same")
    assert [result.output for result in results] == ["heard same", "heard same"]
    assert len(server.jobs[0].requests) == 2


async def test_agents_with_tools_go_in_waves_with_one_job_for_each_turn() -> None:
    @Tool.define(cacheable=True)
    def look_up(key: str) -> str:
        """Look up."""
        return f"value of {key}"

    def answer(request: Request) -> Say:
        return say(request.text) if request.turn else CallTools(ToolUse("look_up", {"key": request.text}))

    async with BatchServer(answer) as server:
        results = await ask(server, "a", "b", "c", tools=[look_up])
    assert [result.output for result in results] == ["value of a", "value of b", "value of c"]
    assert [len(job.requests) for job in server.jobs] == [3, 3]


async def test_a_row_that_is_refused_fails_alone() -> None:
    def answer(request: Request) -> Say | Fail:
        return Fail(400) if request.text == "bad" else say("fine")

    async with BatchServer(answer) as server:
        results = await ask(server, "a", "bad", "c")
    assert [result.ok for result in results] == [True, False, True]
    assert results[1].error.type == "Rejected"


async def test_a_job_that_expires_keeps_what_finished_and_the_rest_is_asked_again() -> None:
    async with BatchServer(echo, expires_after=2) as server:
        results = await ask(server, "a", "b", "c")
    assert [result.output for result in results] == ["heard a", "heard b", "heard c"]
    assert [len(job.requests) for job in server.jobs] == [3, 1]
    assert [result.attempts for result in results] == [1, 1, 2]


async def test_a_job_that_is_refused_as_a_whole_says_why() -> None:
    async with BatchServer(echo, invalid="the model is not available for batches") as server:
        results = await ask(server, "a", "b")
    assert all("the model is not available for batches" in result.error.message for result in results)
    assert len(server.jobs) == 1


async def test_a_provider_that_is_away_for_a_while_costs_nothing_but_time() -> None:
    async with BatchServer(echo) as server:
        server.refuse_next = [503, 500, 429]
        results = await ask(server, "a", "b")
        server.refuse_next = []
    assert all(results)
    assert len(server.jobs) == 1


@needs_redis
async def test_a_stopped_run_in_redis_and_a_copy_of_it_find_its_job_and_buy_nothing_again(
    redis: RedisServer, tmp_path: Path
) -> None:
    async with BatchServer(echo, polls=1_000_000) as server:
        given = {"backend": url(server)["url"], "api_key": "k", "run_dir": f"{redis.url}/jobs", "lease": 5.0}
        stopped = asyncio.create_task(ask(server, "a", "b", **given))
        while sum(len(job.requests) for job in server.jobs if job.polls) < 2:
            await asyncio.sleep(0.01)
        stopped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopped
        assert {job.status for job in server.jobs} == {"in_progress"}
        server.polls = 1
        with open_run(f"{redis.url}/jobs") as reader:
            copy_to_directory(reader, tmp_path / "copy")
        results = await ask(server, "a", "b", "c", **given, resume=True)
        assert sum(len(job.requests) for job in server.jobs) == 3
        del given["lease"]
        copied = await ask(server, "a", "b", **given | {"run_dir": tmp_path / "copy", "resume": True})
    assert [result.output for result in results] == ["heard a", "heard b", "heard c"]
    assert [result.output for result in copied] == ["heard a", "heard b"]
    assert sum(len(job.requests) for job in server.jobs) == 3


async def test_a_worker_that_leaves_does_not_end_the_waves_of_another() -> None:
    record = MemoryStore()
    mine, theirs = JobLedger(record), JobLedger(record)
    await mine.read()
    await theirs.intend("w", {"a": "0"})
    await mine.close({})
    assert [wave.name for wave in await JobLedger(record).read()] == ["w"]


async def test_a_worker_that_takes_a_row_over_finds_the_job_of_the_other_and_identical_rows_get_their_own_answers() -> (
    None
):
    record = MemoryStore()
    async with BatchServer(echo, polls=1_000_000) as server, AsyncExitStack() as opened:

        async def worker() -> JobBackend:
            backend, _ = open_backend(url(server), model="test-model", api_key=None)
            assert isinstance(backend, JobBackend)
            backend.keep(record, outlasts=True)
            await opened.enter_async_context(backend)
            return backend

        one, two = await worker(), await worker()
        lost = asyncio.ensure_future(asyncio.gather(*(one.infer(request("same", row)) for row in ("a", "b"))))
        while not server.jobs:
            await asyncio.sleep(0.01)
        taken = asyncio.ensure_future(two.infer(request("same", "b")))  # its own row "c" asks the same
        own = asyncio.ensure_future(two.infer(request("same", "c")))
        while len(server.jobs) < 2:
            await asyncio.sleep(0.01)
        lost.cancel()
        server.polls = 1
        assert (await taken).text == (await own).text == "heard same"
    assert [len(job.requests) for job in server.jobs] == [2, 1]


async def test_a_job_whose_submission_was_never_answered_is_found_again() -> None:
    async with BatchServer(echo) as server:
        server.drop_next = 1
        results = await ask(server, "a", "b")
    assert all(results)
    assert len(server.jobs) == 1


async def test_a_run_that_was_stopped_picks_its_job_up(tmp_path: Path) -> None:
    async with BatchServer(echo, polls=1_000_000) as server:
        stopped = asyncio.create_task(ask(server, "a", "b", run_dir=tmp_path))
        while not (server.jobs and server.jobs[0].polls):
            await asyncio.sleep(0.01)
        stopped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopped
        assert server.jobs[0].status == "in_progress", "a job that is noted is left to go on"
        server.polls = 1
        results = await ask(server, "a", "b", "c", run_dir=tmp_path, resume=True)
    assert [result.output for result in results] == ["heard a", "heard b", "heard c"]
    assert [len(job.requests) for job in server.jobs] == [2, 1]


async def test_a_job_that_was_sent_before_its_id_was_noted_is_found_by_its_name(tmp_path: Path) -> None:
    async with BatchServer(echo) as server:
        await ask(server, "a", run_dir=tmp_path / "first")
        [job] = server.jobs
        notes = [json.loads(line) for line in (tmp_path / "first" / FILE).read_text().splitlines()]
        other = tmp_path / "second"
        other.mkdir()
        (other / FILE).write_text(json.dumps(notes[0]) + "\n" + '{"wave": "cut sho')
        results = await ask(server, "a", run_dir=other, resume=True)
    assert results[0].output == "heard a"
    assert server.jobs == [job]


def lose(directory: Path, into: Path) -> Path:
    """The run directory of a process that was killed between the submission of a job and its answer."""
    into.mkdir()
    about_to = (directory / FILE).read_text().splitlines()[0]
    (into / FILE).write_text(about_to + "\n")
    return into


@pytest.mark.parametrize("scheme", ["openai", "anthropic"])
async def test_a_lost_job_is_found_among_many_newer_ones_although_the_list_fails_at_first(
    scheme: str, tmp_path: Path
) -> None:
    async with BatchServer(echo) as server:
        backend = url(server, scheme=scheme)
        await ask(server, "a", "b", run_dir=tmp_path / "first", backend=backend)
        server.jobs += [
            BatchJob(f"newer_{n}", {f"{n}-{m}": Request(0, "", {}) for m in "xy"}, status="expired") for n in range(300)
        ]
        server.refuse_next = [503, 503]
        killed = lose(tmp_path / "first", tmp_path / "killed")
        results = await ask(server, "a", "b", run_dir=killed, resume=True, backend=backend)
    assert [result.output for result in results] == ["heard a", "heard b"]
    assert len(server.jobs) == 301


async def test_a_job_that_may_be_the_lost_one_is_waited_for_and_what_was_never_made_is_asked(tmp_path: Path) -> None:
    async with BatchServer(echo, polls=5) as server:
        backend = url(server, scheme="anthropic")
        await ask(server, "a", "b", run_dir=tmp_path / "first", backend=backend)
        killed = lose(tmp_path / "first", tmp_path / "killed")
        server.jobs = [BatchJob("another", dict(zip("xy", server.jobs[0].requests.values(), strict=True)))]
        results = await ask(server, "a", "b", run_dir=killed, resume=True, backend=backend)
    assert [result.output for result in results] == ["heard a", "heard b"]
    assert [len(job.requests) for job in server.jobs] == [2, 2]
    assert server.jobs[0].polls == 5


class SilentList(OpenAIJobs):
    """A provider that takes jobs and does not answer, and whose list of jobs cannot be read."""

    submitted = 0

    async def candidates(self, wave: Wave) -> list[str]:
        raise Unavailable("no list")

    async def submit(self, bodies: Mapping[str, bytes], wave: str) -> str:
        self.submitted += 1
        raise Unavailable("the answer was lost")


@virtual_clock
async def test_nothing_is_bought_again_while_it_cannot_be_known_whether_it_was_bought() -> None:
    backend, _ = open_backend("openai-batch://127.0.0.1:9/v1?tls=false", model="m", api_key="k")
    assert isinstance(backend, JobBackend)
    backend._service = service = SilentList(backend._service.http)
    async with backend:
        for _ in range(2):
            with pytest.raises(Unavailable, match="no list"):
                await backend.infer(request("a"))
    assert service.submitted == 1


async def test_what_was_bought_before_a_kill_is_taken_although_its_advance_has_used_the_budget_up(
    tmp_path: Path,
) -> None:
    limits = {"max_total_tokens": 700, "max_tokens": 500}
    async with BatchServer(echo) as server:
        await ask(server, "a", run_dir=tmp_path / "first", **limits)
        killed = lose(tmp_path / "first", tmp_path / "killed")
        await BatchAgent.run(task="{input}", inputs=["z"], backend=ScriptedBackend(), run_dir=killed, resume=True)
        journal = SqliteJournal.open(killed / "journal.db")
        journal.begin(b"killed", "then")
        journal.set_fact(TABLE, '{"spent": {"budget tokens": 690}}')
        journal.close()
        results = await ask(server, "a", "b", run_dir=killed, resume=True, on_change="resend", **limits)
    assert [result.ok for result in results] == [True, False]
    assert results[1].error.type == "Interrupted"
    assert len(server.jobs) == 1


async def test_without_a_run_directory_a_job_that_nobody_waits_for_is_cancelled() -> None:
    async with BatchServer(echo, polls=1_000_000) as server:
        stopped = asyncio.create_task(ask(server, "a"))
        while not (server.jobs and server.jobs[0].polls):
            await asyncio.sleep(0.01)
        stopped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopped
        assert server.jobs[0].status == "cancelled"


async def test_answers_are_handed_out_once_so_that_a_failed_row_is_really_asked_again(tmp_path: Path) -> None:
    class Number(BaseModel):
        n: int

    answers = iter(["words"] * 4 + ['{"n": 1}'] * 4)
    given: dict[str, Any] = {"run_dir": tmp_path, "output_schema": Number, "max_retries": 0}
    async with BatchServer(lambda request: say(next(answers))) as server:
        first = await ask(server, "a", **given)
        again = await ask(server, "a", resume=True, **given)
        third = await ask(server, "a", resume=True, **given)
    assert [first[0].ok, again[0].ok, third[0].ok] == [False, False, False]
    assert len(server.jobs) == 3


async def test_a_wave_that_is_full_goes_and_the_next_one_begins() -> None:
    async with BatchServer(echo) as server:
        backend, _ = open_backend(url(server), model="test-model", api_key=None)
        assert isinstance(backend, JobBackend)
        service = backend._service
        assert isinstance(service, OpenAIJobs)
        service.most_requests = 2
        results = await ask(server, "a", "b", "c", backend=backend)
    assert all(results)
    assert sorted(len(job.requests) for job in server.jobs) == [1, 2]


def request(text: str, row: str = "") -> ModelRequest:
    return ModelRequest(RequestShape("test-model"), Conversation([Message("user", text)]), row or text)


async def test_whoever_asks_after_the_job_was_done_finds_the_answer_kept() -> None:
    async with BatchServer(echo) as server:
        backend, _ = open_backend(url(server), model="test-model", api_key=None)
        assert isinstance(backend, JobBackend)
        backend.keep(MemoryStore(), outlasts=True)
        with suppress(InterruptedError):  # as where a run is stopped before its answers are recorded
            async with backend:
                await asyncio.gather(*(backend.infer(request(text)) for text in "abc"))
                raise InterruptedError
        async with backend:
            late = [(await backend.infer(request(text))).text for text in "abc"]
    assert late == ["heard a", "heard b", "heard c"]
    assert len(server.jobs) == 1


async def test_what_a_job_left_undone_is_no_outage_of_the_server_that_tells_of_it() -> None:
    async with BatchServer(echo, expires_after=0) as server:
        backend, _ = open_backend(url(server), model="test-model", api_key=None)
        async with backend:
            with pytest.raises(Unavailable) as undone:
                await backend.infer(request("a"))
    assert outcome_of(undone.value) == "flawed", "taken for one, each row would be tried in a job of its own"


async def test_a_provider_that_was_never_reached_is_said_to_be_so_soon() -> None:
    async with BatchServer(echo) as server:
        pass  # it was there, and is no more
    backend, _ = open_backend(url(server), model="test-model", api_key=None)
    async with backend:
        with pytest.raises(Unavailable) as dead:
            await backend.infer(request("a"))
    assert dead.value.unreached


@pytest.mark.parametrize("scheme", ["openai-batch", "anthropic-batch"])
def test_an_answer_without_the_id_of_a_job_is_an_error_in_words(scheme: str) -> None:
    backend, _ = open_backend(f"{scheme}://h", model="m", api_key="k")
    assert isinstance(backend, JobBackend)
    with pytest.raises(Rejected, match="has no id, so this is no batch API"):
        backend._service.id_of(b'{"object": "list"}')


async def test_a_turn_that_was_given_up_and_is_asked_again_waits_for_the_same_job() -> None:
    async with BatchServer(echo, polls=1_000_000) as server:
        backend, _ = open_backend(url(server), model="test-model", api_key=None)
        async with backend:
            given_up = asyncio.create_task(backend.infer(request("a")))
            while not (server.jobs and server.jobs[0].polls):
                await asyncio.sleep(0.01)
            given_up.cancel()
            await asyncio.wait([given_up])
            server.polls = 1
            assert (await backend.infer(request("a"))).text == "heard a"
    assert len(server.jobs) == 1


async def test_whoever_drives_a_wave_may_leave_it_and_the_others_are_answered() -> None:
    async with BatchServer(echo, polls=1_000_000) as server:
        backend, _ = open_backend(url(server), model="test-model", api_key=None)
        async with backend:
            driver, other = (asyncio.create_task(backend.infer(request(text))) for text in ("a", "b"))
            while not (server.jobs and server.jobs[0].polls):
                await asyncio.sleep(0.01)
            driver.cancel()
            server.polls = 1
            assert (await other).text == "heard b"
    assert len(server.jobs) == 1


async def test_anthropics_batch_api_is_the_same_to_those_who_use_it() -> None:
    async with BatchServer(echo, polls=2) as server:
        backend = {"url": f"anthropic-batch://{server.address}?gather=0.05&look=0.01", "api_key": "k"}
        results = await ask(server, "a", "b", backend=backend)
    assert [result.output for result in results] == ["heard a", "heard b"]
    assert [len(job.requests) for job in server.jobs] == [2]


async def test_what_expires_or_is_refused_in_anthropics_api_has_its_type() -> None:
    def answer(request: Request) -> Say | Fail:
        return Fail(400) if request.text == "bad" else echo(request)

    async with BatchServer(answer, expires_after=2) as server:
        backend = {"url": f"anthropic-batch://{server.address}?gather=0.05&look=0.01", "api_key": "k"}
        results = await ask(server, "a", "bad", "c", backend=backend)
    assert [result.ok for result in results] == [True, False, True]
    assert results[1].error.type == "Rejected"
    assert [len(job.requests) for job in server.jobs] == [3, 1]


async def test_anthropics_own_client_takes_the_server_of_these_tests() -> None:
    anthropic = pytest.importorskip("anthropic")
    params = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}
    async with (
        BatchServer(echo) as server,
        anthropic.AsyncAnthropic(base_url=f"http://{server.address}", api_key="k", max_retries=0) as client,
    ):
        job = await client.messages.batches.create(requests=[{"custom_id": "a", "params": params}])
        done = await client.messages.batches.retrieve(job.id)
        results = [result async for result in await client.messages.batches.results(done.id)]
    assert [result.result.message.content[0].text for result in results] == ["heard x"]


async def test_the_server_of_these_tests_is_one_that_the_providers_own_client_takes() -> None:
    openai = pytest.importorskip("openai")
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "x"}]},
    }
    async with (
        BatchServer(echo) as server,
        openai.AsyncOpenAI(base_url=f"http://{server.address}/v1", api_key="k", max_retries=0) as client,
    ):
        file = await client.files.create(file=json.dumps(line).encode(), purpose="batch")
        job = await client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"a": "b"},
        )
        done = await client.batches.retrieve(job.id)
        content = await client.files.content(done.output_file_id)
    answer = json.loads(content.text)
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == "heard x"


async def test_the_price_is_half_and_a_turn_has_no_time_limit_but_the_users() -> None:
    async with BatchServer(echo) as server:
        backend, _ = open_backend(url(server), model="m", api_key=None)
        capabilities = backend.capabilities
    assert (capabilities.price, capabilities.patient, capabilities.streaming) == (0.5, True, False)


@pytest.mark.parametrize("wrong", ["gather=soon", "look=-1", "gather=inf"])
def test_a_wait_that_is_no_number_of_seconds_is_refused(wrong: str) -> None:
    with pytest.raises(SpecError, match="must be a number of seconds"):
        open_backend(f"openai-batch://h?{wrong}", model="m", api_key="k")


async def test_a_ledger_that_was_cut_short_goes_on_in_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b'{"wave":"one","requests":["a"]}\n{"wave":"two","requ')
    directory = RunDir.open(tmp_path, resume=True)
    ledger = JobLedger(directory)
    await ledger.sent("one", "job-1")
    entries = await ledger.read()
    assert [(wave.name, wave.job, wave.requests) for wave in entries] == [("one", "job-1", ("a",))]
    await ledger.close({})
    assert await ledger.read() == []
    directory.close()


async def test_a_flipped_bit_in_a_ledger_is_an_error_and_never_another_job(tmp_path: Path) -> None:
    directory = RunDir.open(tmp_path, resume=True)
    ledger, file = JobLedger(directory), tmp_path / FILE
    await ledger.intend("one", {"a": "0", "b": "1"})
    await ledger.sent("one", "job-1")

    async def recorded() -> list[tuple[object, ...]]:
        return [(wave.name, wave.job, wave.requests, wave.rows, wave.since) for wave in await ledger.read()]

    whole, entries = file.read_bytes(), await recorded()
    refused = 0
    for place in range(len(whole) - 1):  # without the last end of a line
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        try:
            assert await recorded() == entries
        except StoreError as error:
            refused += 1
            assert "of the record of batch jobs" in str(error) and "delete this line" in str(error)
    assert refused > len(whole) * 0.8
    directory.close()
