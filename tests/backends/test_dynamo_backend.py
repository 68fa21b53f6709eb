"""dynamo:// on a real socket, against a server that says what Dynamo 1.6 was seen to say."""

from __future__ import annotations

from typing import Any

import pytest

from batch_agent import BatchAgent, Tool
from batch_agent.backends.base import Facts, Load, ModelRequest, RequestShape
from batch_agent.backends.engines.dynamo import DynamoBackend
from batch_agent.backends.registry import open_backend
from batch_agent.errors import BackendError, SpecError, Unavailable
from batch_agent.messages import Conversation, Message
from batch_agent.testing import CallTools, Fail, Request, Say, ScriptedServer, ToolUse
from batch_agent.testing.contract.wire import Exchange, WireServer, answer, stream

KNOWN = {"model", "messages", "max_tokens", "temperature", "top_p", "seed", "stop", "tools", "tool_choice"}
KNOWN |= {"response_format", "stream", "stream_options", "nvext", "cache_salt", "chat_template_kwargs"}
HINTS = {"priority", "osl", "speculative_prefill"}


def dynamo(port: int, options: str = "") -> DynamoBackend:
    backend, _ = open_backend(f"dynamo://127.0.0.1:{port}{options}", model="m", api_key=None, environ={})
    assert isinstance(backend, DynamoBackend)
    return backend


def test_it_listens_on_8000_where_nothing_else_is_said() -> None:
    backend, _ = open_backend("dynamo://gpu", model=None, api_key=None, environ={})
    assert isinstance(backend, DynamoBackend)
    assert str(backend._chat.url) == "http://gpu:8000/v1/chat/completions"


# What a run tells it


@Tool.define(cacheable=True)
async def look(page: int) -> str:
    return f"page {page}"


def two_turns(request: Request) -> Say:
    unknown = request.body.keys() - KNOWN
    assert not unknown, f"a Dynamo server would refuse {unknown}"
    assert request.body.get("nvext", {}).keys() <= {"agent_hints"}
    assert request.body.get("nvext", {}).get("agent_hints", {}).keys() <= HINTS
    return CallTools(ToolUse("look", {"page": 1})) if request.turn == 0 else Say("done")


class Headers(ScriptedServer):
    """Keeps the headers of what was asked."""

    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.headers: list[dict[str, str]] = []

    async def _complete(self, http: Any) -> Any:
        self.headers.append({name.lower(): value for name, value in http.headers.items()})
        return await super()._complete(http)


async def asked(script: Any = two_turns, **options: Any) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    async with Headers(script) as server:
        known: dict[str, Any] = {"task": "{input}", "inputs": ["a"], "tools": [look], "max_turns": 4, "max_tokens": 50}
        results = await BatchAgent.run(backend=f"dynamo://{server.address}", **{**known, **options})
        assert [result.error for result in results] == [None] * len(results)
        return [request.body for request in server.requests], server.headers


async def test_it_is_told_how_near_its_end_an_agent_is_and_what_its_answers_take() -> None:
    first, second = (body["nvext"]["agent_hints"] for body in (await asked())[0])
    assert first == {"priority": -4, "speculative_prefill": True}
    assert (second["priority"], second["speculative_prefill"]) == (-3, True)
    assert 0 < second["osl"] <= 50


async def test_hints_can_be_turned_off_and_sessions_stay() -> None:
    bodies, headers = await asked(nvext_agent_hints=False)
    assert not any("nvext" in body for body in bodies)
    assert all("x-dynamo-session-id" in each for each in headers)


async def test_each_agent_has_a_session_which_ends_with_its_last_turn() -> None:
    _, headers = await asked(inputs=["a", "b"], max_turns=2, max_inflight=1)
    sessions = [each["x-dynamo-session-id"] for each in headers]
    assert len(set(sessions)) == 2
    last = {
        session: [each.get("x-dynamo-session-final") for each in headers if each["x-dynamo-session-id"] == session]
        for session in sessions
    }
    assert list(last.values()) == [[None, "true"]] * 2


async def test_a_turn_that_is_asked_for_again_leaves_its_session_whose_worker_may_be_dead() -> None:
    def script(request: Request) -> Say | Fail:
        return Fail(500) if request.number == 0 else two_turns(request)

    _, headers = await asked(script)
    first, again, second = (each["x-dynamo-session-id"] for each in headers)
    assert first == second != again


async def test_a_turn_without_tools_is_the_last_of_its_session_and_prepares_nothing() -> None:
    bodies, headers = await asked(tools=[], max_turns=5)
    assert "speculative_prefill" not in bodies[0]["nvext"]["agent_hints"]
    assert headers[0]["x-dynamo-session-final"] == "true"


async def test_what_the_user_says_in_nvext_stands_in_place_of_hints() -> None:
    bodies, _ = await asked(tools=[], extra_body={"nvext": {"agent_hints": {"priority": 9}}})
    assert bodies[0]["nvext"] == {"agent_hints": {"priority": 9}}


# What it refuses


@pytest.mark.parametrize("name", ["priority", "session_id", "request_id", "vllm_xargs", "kv_transfer_params"])
def test_a_field_that_it_is_known_to_refuse_is_refused_before_anything_is_sent(name: str) -> None:
    with pytest.raises(SpecError, match=f"{name!r}.*refuses"):
        BatchAgent.plan(task="{input}", inputs=["a"], backend="dynamo://gpu", model="m", extra_body={name: 1})


async def test_an_error_inside_a_stream_that_began_well_is_of_its_kind() -> None:
    error = {"error": {"message": "no worker left", "type": "Service Unavailable", "code": 503}}
    begun = {"choices": [{"index": 0, "delta": {"content": "so far"}}]}
    request = ModelRequest(RequestShape("m"), Conversation([Message("user", "hi")]), "job")
    async with WireServer(stream(begun, error)) as server, dynamo(server.port) as backend:
        with pytest.raises(Unavailable, match="no worker left"):
            await backend.infer(request, lambda call: None)
    assert request.said == ["so far"]


# What it tells

METRICS = b"""dynamo_frontend_inflight_requests{model="m"} 7
dynamo_frontend_queued_requests{model="m"} 5
dynamo_frontend_router_queue_pending_requests{model="m",policy_class="default",worker_type="decode"} 2
dynamo_frontend_input_sequence_tokens_sum{model="m"} 12163
dynamo_frontend_cached_tokens_sum{model="m"} 2560
dynamo_frontend_time_to_first_token_seconds_sum{model="m"} 0.35
dynamo_frontend_time_to_first_token_seconds_count{model="m"} 7
"""


async def test_how_busy_it_is_and_what_its_model_takes() -> None:
    models = {"data": [{"id": "m", "context_window": 4096}, {"id": "mock", "context_window": 0}]}

    async def told(exchange: Exchange) -> None:
        is_metrics = exchange.path == "/metrics"
        await (answer(METRICS, kind="text/plain") if is_metrics else answer(models))(exchange)

    async with WireServer(told) as server, dynamo(server.port, "?cache_salt=a") as backend:
        expected = Load(
            running=5,
            waiting=2,
            prefix_queries=12163,
            prefix_hits=2560,
        )
        assert await backend.load() == expected
        assert (await backend.facts("m"), await backend.facts("mock")) == (Facts(4096), Facts())


async def test_the_size_of_the_cache_is_that_of_all_workers() -> None:
    told = b"dynamo_frontend_inflight_requests 1\ndynamo_frontend_model_total_kv_blocks 100\n"
    told += b"dynamo_frontend_model_kv_cache_block_size 16\n"
    for more, size in ((b"dynamo_frontend_model_workers 2\n", 3200), (b"", None)):
        async with WireServer(answer(told + more, kind="text/plain")) as server, dynamo(server.port) as backend:
            assert (await backend.load()).kv_tokens == size


async def test_metrics_that_are_not_its_own_are_an_error() -> None:
    async with WireServer(answer(b"up 1\n", kind="text/plain")) as server, dynamo(server.port) as backend:
        with pytest.raises(BackendError, match="Dynamo"):
            await backend.load()
