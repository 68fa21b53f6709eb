"""Is a server there? One probe for everything that speaks HTTP, on real sockets."""

from __future__ import annotations

import pytest

from batch_agent.backends.base import Backend, ModelRequest, OnToolCall, Probe
from batch_agent.backends.http.backend import HttpClient, probe_server
from batch_agent.backends.openai.chat import OpenAIBackend
from batch_agent.fleet.backend import Fleet
from batch_agent.messages import Reply
from batch_agent.testing import ScriptedBackend, virtual_clock
from batch_agent.testing.contract.wire import Exchange, Step, WireServer, answer, raw

MODELS = answer({"data": [{"id": "m"}, {"id": "n"}]})
HEALTHY = answer(b"")
NO_PAGE = answer(b"", 404)
GARBAGE = raw(b"\x00\x01 what is this\r\n\r\n")
CUT = raw(b"")


async def silent(exchange: Exchange) -> None:
    await exchange.reader.read(1)  # until the client leaves


def paths(health: Step, models: Step) -> Step:
    async def step(exchange: Exchange) -> None:
        await (health if exchange.path == "/health" else models)(exchange)

    return step


async def probed(health: Step, models: Step) -> Probe:
    async with WireServer(paths(health, models)) as server, HttpClient(server.url) as client:
        return await probe_server(client)


@pytest.mark.parametrize("health", [HEALTHY, NO_PAGE, answer(b"", 405), answer(b"", 501), answer(b"", 403)])
async def test_a_server_that_names_its_models_is_up_with_or_without_a_health_page(health: Step) -> None:
    assert await probed(health, MODELS) == Probe("up", models=("m", "n"))


@pytest.mark.parametrize(
    ("health", "models", "state", "reason"),
    [
        (answer(b"stuck", 503), MODELS, "down", "answered 503: stuck"),
        (GARBAGE, MODELS, "down", "not valid HTTP"),
        (CUT, MODELS, "down", "closed the connection"),
        (HEALTHY, answer(b"", 500), "down", "answered 500"),
        (HEALTHY, GARBAGE, "down", "not valid HTTP"),
        (HEALTHY, answer(b"<html>", kind="text/html"), "down", "not a list of models"),
        (HEALTHY, answer({"data": []}), "down", "lists no model: still loading"),
        (NO_PAGE, answer(b"", 401), "up", "401"),
        (NO_PAGE, answer(b"", 403), "up", "403"),
        (HEALTHY, answer(b"", 404), "up", "404"),
        (NO_PAGE, answer(b"", 404), "unknown", "404"),
        (NO_PAGE, answer(b"", 429), "unknown", "429"),
    ],
)
async def test_what_a_server_answers_says_whether_it_is_up_and_why_not(
    health: Step, models: Step, state: str, reason: str
) -> None:
    found = await probed(health, models)
    assert (found.state, found.models or None) == (state, None)
    assert reason in found.reason


@virtual_clock
async def test_a_server_that_does_not_answer_is_down_after_the_limit() -> None:
    for health in (silent, HEALTHY):
        assert await probed(health, silent) == Probe("down", "no answer in 2 s")


async def test_nobody_at_the_port_is_down() -> None:
    async with WireServer(HEALTHY) as server:
        client = HttpClient(server.url)
    async with client:
        found = await probe_server(client)
    assert found.state == "down"
    assert "connection refused" in found.reason


class Mute(Backend):
    """Has but what a backend must have."""

    name = "mute://"

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        return Reply("")


async def test_a_fleet_asks_the_member_that_is_named() -> None:
    away = ScriptedBackend()
    away.health = Probe("down", "scripted so")
    server = WireServer(paths(HEALTHY, MODELS))
    async with server, Fleet([OpenAIBackend(server.url), away, Mute()]) as fleet:
        found = [await fleet.probe(name) for name in fleet.servers]
        gone = await fleet.probe("vllm://gone:8000")
    assert found == [Probe("up", models=("m", "n")), away.health, Probe("unknown")]
    assert gone.state == "down"
