"""BatchServer: its answers and its refusals. tests/backends/test_jobs.py runs batches against it."""

from __future__ import annotations

import json

import aiohttp
import pytest

from batch_agent import BatchAgent
from batch_agent.testing import BatchServer, Body, Cut, Fail, Hang, Say

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
JOB = {"input_file_id": "file-0", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
PARAMS = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
VERSION = {"anthropic-version": "2023-06-01"}


async def submitted(server: BatchServer, *lines: object, **job: object) -> tuple[int, dict]:
    """Submit a job of OpenAI's API, and return the answer."""
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", "".join(json.dumps(line) + "\n" for line in lines), filename="batch.jsonl")
    async with aiohttp.ClientSession(f"http://{server.address}") as client:
        await client.post("/v1/files", data=form)
        async with client.post("/v1/batches", json=JOB | job) as answer:
            return answer.status, await answer.json()


async def submitted_messages(server: BatchServer, body: object) -> tuple[int, dict]:
    async with (
        aiohttp.ClientSession(f"http://{server.address}", headers=VERSION) as client,
        client.post("/v1/messages/batches", json=body) as answer,
    ):
        return answer.status, await answer.json()


@pytest.mark.parametrize("scheme", ["openai_url", "anthropic_url"])
async def test_a_list_of_replies_answers_the_rows_in_their_order(scheme: str) -> None:
    script = [Say("one"), Fail(400), Hang(), Say("three")]
    async with BatchServer(script) as server:
        backend = getattr(server, scheme)
        results = await BatchAgent.run(task="{input}", inputs=["a", "b", "c"], backend=backend, api_key="k", model="m")
    assert [result.output for result in results] == ["one", None, "three"]
    assert results[1].error is not None and results[1].error.type == "Rejected"
    assert [len(job.requests) for job in server.jobs] == [3, 1], "what expired is sent again"
    assert [request.text for request in server.requests] == ["a", "b", "c", "c"]


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ({"completion_window": "1h"}, "completion_window"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"priority": 1}, "Unknown parameter"),
        ({"input_file_id": "file-9"}, "no such file"),
        ({"metadata": {"wave": "x" * 513}}, "metadata"),
    ],
)
async def test_a_wrong_job_is_refused(job: dict, says: str) -> None:
    async with BatchServer() as server:
        status, answer = await submitted(server, LINE, **job)
    assert status in (400, 404) and says in answer["error"]["message"]
    assert server.jobs == []


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([LINE, LINE], "twice"),
        ([LINE | {"url": "/v1/completions"}], "url"),
        ([LINE, LINE | {"custom_id": "b", "body": CHAT | {"model": "n"}}], "same model"),
        (["words"], "not a JSON object"),
    ],
)
async def test_a_wrong_file_fails_its_job(lines: list, says: str) -> None:
    async with BatchServer() as server:
        status, answer = await submitted(server, *lines)
    assert (status, answer["status"]) == (200, "failed")
    assert says in answer["errors"]["data"][0]["message"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"requests": []}, "a list of"),
        ({"requests": [{"custom_id": "a", "params": PARAMS, "method": "POST"}]}, "a list of"),
        ({"requests": [{"custom_id": "a", "params": PARAMS}] * 2}, "twice"),
        ({"requests": [{"custom_id": "a b", "params": PARAMS}]}, "must match"),
    ],
)
async def test_a_wrong_job_of_messages_is_refused_in_the_words_of_that_api(body: dict, says: str) -> None:
    async with BatchServer() as server:
        status, answer = await submitted_messages(server, body)
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert says in answer["error"]["message"]


async def test_a_request_that_the_api_would_refuse_fails_within_its_job() -> None:
    requests = [{"custom_id": "good", "params": PARAMS}, {"custom_id": "bad", "params": PARAMS | {"max_tokens": None}}]
    requests.append({"custom_id": "streamed", "params": PARAMS | {"stream": True}})
    async with BatchServer() as server:
        await submitted_messages(server, {"requests": requests})
        [job] = server.jobs
        await server.poll(job)
    assert {own: status for own, (status, _) in job.answers.items()} == {"good": 200, "bad": 400, "streamed": 400}


async def test_a_key_that_is_given_is_needed() -> None:
    async with BatchServer(api_key="secret") as server:
        assert (await submitted_messages(server, {"requests": []}))[0] == 401


async def test_a_reply_that_no_batch_job_can_have_is_an_error_of_the_script() -> None:
    async with BatchServer([Cut()]) as server:
        await submitted(server, LINE)
        with pytest.raises(TypeError, match="not Cut"):
            await server.poll(server.jobs[0])


async def test_any_json_can_be_the_body_of_an_answer() -> None:
    async with BatchServer([Body({"choices": []})]) as server:
        await submitted(server, LINE)
        await server.poll(server.jobs[0])
    assert server.jobs[0].answers == {"a": (200, {"choices": []})}
