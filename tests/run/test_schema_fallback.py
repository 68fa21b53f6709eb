"""Runs on servers that do not keep to a schema: they refuse it, or ignore it, and no row is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from batch_agent import AgentResult, BatchAgent
from batch_agent.backends.openai.chat import OpenAIBackend
from batch_agent.backends.registry import open_backend
from batch_agent.events import Event, SchemaUnsupported
from batch_agent.observe.summary import summary_json, summary_lines
from batch_agent.testing import Fail, Request, Say, ScriptedServer

ROWS = [{"n": n} for n in range(40)]


class Word(BaseModel):
    word: str


def refuses(status: int, message: str) -> Callable[[Request], object]:
    def script(request: Request) -> object:
        if "response_format" in request.body:
            return Fail(status, {"error": {"message": message, "type": "invalid_request_error"}})
        return Say('{"word": "yes"}')

    return script


async def run(server: ScriptedServer, **options: object) -> tuple[list[AgentResult[Any]], list[Event], object]:
    events: list[Event] = []
    given = {"task": "Say {n}", "inputs": ROWS, "output_schema": Word, "model": "m", "backend": server.url} | options
    async with BatchAgent.open(**given, sinks=[events.append]) as batch:
        results = [result async for result in batch.results()]
        return results, events, batch.statistics()


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "This response_format type is unavailable now"),
        (422, '[{"type":"extra_forbidden","loc":["body","response_format"]}]'),
        (400, "json_schema is not supported by this model"),
        (501, "structured outputs are not implemented"),
        (400, "Bad Request"),
    ],
)
async def test_a_server_that_refuses_schemas_is_asked_without_and_no_row_pays_for_it(status: int, message: str) -> None:
    async with ScriptedServer(refuses(status, message)) as server:
        results, events, statistics = await run(server, max_retries=0)
        refused = sum("response_format" in request.body for request in server.requests)
    assert [(result.ok, result.output, result.attempts) for result in results] == [(True, Word(word="yes"), 1)] * 40
    assert len(server.requests) == 40 + refused
    [told] = [event for event in events if isinstance(event, SchemaUnsupported)]
    assert "refused the output schema" in told.reason
    assert message.partition('"')[0] in told.reason
    assert any(line.strip().startswith("schema") and "refused" in line for line in summary_lines(statistics))
    assert summary_json(statistics)["schema_note"] == told.reason


async def test_after_the_first_refusals_the_schema_is_not_sent_any_more() -> None:
    async with ScriptedServer(refuses(400, "response_format is not supported")) as server:
        await run(server, max_inflight=1)
        assert ["response_format" in request.body for request in server.requests] == [True] + [False] * 40


async def test_the_prompt_tells_the_schema_to_a_server_of_which_nothing_is_known() -> None:
    async with ScriptedServer(lambda request: Say('{"word": "yes"}')) as server:
        await run(server, inputs=ROWS[:1])
        [request] = server.requests
    assert request.schema is not None
    assert '"word"' in str(request.messages[0]["content"])


async def test_a_server_that_ignores_schemas_is_found_out_and_its_answers_are_repaired() -> None:
    def script(request: Request) -> object:
        return Say('{"word": "yes"}' if request.turn else "Surely: yes")

    async with ScriptedServer(script) as server:
        results, events, statistics = await run(server, max_inflight=2)
        sent = ["response_format" in request.body for request in server.requests]
    assert all(result.ok for result in results)
    assert sum(sent) <= 2
    [told] = [event for event in events if isinstance(event, SchemaUnsupported)]
    assert "did not enforce it" in told.reason
    assert any("did not enforce it" in line for line in summary_lines(statistics))


async def test_a_server_that_keeps_to_schemas_is_sent_them_all_along() -> None:
    async with ScriptedServer(lambda request: Say('{"word": "yes"}')) as server:
        _, events, statistics = await run(server)
        assert all("response_format" in request.body for request in server.requests)
    assert not any(isinstance(event, SchemaUnsupported) for event in events)
    assert not any(line.strip().startswith("schema") for line in summary_lines(statistics))


async def test_a_row_that_is_refused_for_itself_is_not_blamed_on_the_schema() -> None:
    def script(request: Request) -> object:
        return Fail(400, {"error": {"message": "no such topic"}}) if "Say 7" in request.text else Say('{"word": "yes"}')

    async with ScriptedServer(script) as server:
        results, events, _ = await run(server, max_inflight=1)
    assert [result.index for result in results if not result.ok] == [7]
    assert not any(isinstance(event, SchemaUnsupported) for event in events)


async def test_what_is_found_out_is_remembered_by_the_backend_and_said_by_the_next_run() -> None:
    async with ScriptedServer(refuses(400, "response_format is not supported")) as server:
        backend, _ = open_backend(server.url, model="m", api_key=None, environ={})
        await run(server, backend=backend)
        assert not backend.capabilities.native_schema
        before = len(server.requests)
        results, events, _ = await run(server, backend=backend)
        assert not any("response_format" in request.body for request in server.requests[before:])
    assert all(result.ok for result in results)
    assert sum(isinstance(event, SchemaUnsupported) for event in events) == 1


async def test_a_refusal_in_so_many_words_is_believed_of_a_server_that_should_know_schemas_too() -> None:
    def script(request: Request) -> object:
        if "response_format" in request.body:
            return Fail(400, {"error": {"message": "Invalid parameter: 'response_format' is not supported"}})
        return Say('{"word": "yes"}')

    async with ScriptedServer(script) as server:
        results, events, _ = await run(server, backend=server.backend_url)
    assert all(result.ok for result in results)
    assert any(isinstance(event, SchemaUnsupported) for event in events)


@pytest.mark.parametrize("native", [True, False])
async def test_what_the_user_says_of_schemas_is_not_doubted(native: bool) -> None:
    async with ScriptedServer(lambda request: Say('{"word": "yes"}')) as server:
        await run(server, backend=f"{server.url}?native_schema={native}".lower(), inputs=ROWS[:1])
        [request] = server.requests
    assert (request.schema is not None) is native
    assert (request.messages[0]["role"] == "system") is not native


async def test_a_turn_that_must_not_offer_tools_falls_back_too() -> None:
    def look_up(word: str) -> str:
        """Look a word up."""
        return word

    def script(request: Request) -> object:
        if "response_format" in request.body:
            return Fail(400, {"error": {"message": "response_format is not supported"}})
        return Say('{"word": "yes"}' if request.turn else "Surely: yes")

    async with ScriptedServer(script) as server:
        results, _, _ = await run(server, tools=[look_up], inputs=ROWS[:3])
    assert all(result.ok for result in results)


def test_a_plain_backend_object_sends_what_it_is_given() -> None:
    assert OpenAIBackend("http://host/v1").capabilities.schema_proven
