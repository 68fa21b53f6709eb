"""A runtime over HTTP, on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from tests.ticks.worlds import agent_in, call, registered, says

from batch_agent.testing import Hang, Request, Say, ScriptedBackend
from batch_agent.ticks import AgentRuntime
from batch_agent.ticks.plain import ITEMS
from batch_agent.ticks.server import TickServer


def script(request: Request) -> Say:
    return says(call(agent_in(request)))


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        data = {"data": body} if isinstance(body, str | bytes) else {"json": body}
        async with self._session.post(self._url + path, **data) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._session.get(self._url + path) as response:
            return response.status, await response.json()

    async def text(self, path: str) -> str:
        async with self._session.get(self._url + path) as response:
            return await response.text()


@asynccontextmanager
async def serving(runtime: AgentRuntime) -> AsyncIterator[Client]:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(TickServer(runtime).serve("127.0.0.1", 0, ready.set_result))
    async with aiohttp.ClientSession() as session:
        yield Client(session, await ready)
        task.cancel()
        await asyncio.wait([task])


async def test_a_tick_is_answered_with_an_action_for_each_agent() -> None:
    async with serving(registered(AgentRuntime(backend=ScriptedBackend(script)), "a", "b")) as client:
        agents = [{"agent_id": name, "observations": {"x": 1}} for name in ("b", "a", "ghost")]
        status, body = await client.post("/tick", {"tick": 4, "agents": agents})
    assert status == 200 and body["tick"] == 4
    assert [entry["agent_id"] for entry in body["actions"]] == ["b", "a", "ghost"]
    assert body["actions"][0] == {
        "agent_id": "b",
        "action": {"tool": "move", "params": {"direction": "b"}, "reasoning": "because"},
        "source": "answer",
        "seen_tick": 4,
    }
    assert body["actions"][2]["action"]["tool"] == "idle"


async def test_one_agent_observes_with_its_observation_beside_its_id() -> None:
    backend = ScriptedBackend(script)
    async with serving(registered(AgentRuntime(backend=backend), "a")) as client:
        status, body = await client.post("/observe", {"agent_id": "a", "position": [0, 1], "nearby": ["berry"]})
        assert status == 200
        assert {key: body[key] for key in ("agent_id", "tool", "params", "reasoning")} == {
            "agent_id": "a",
            "tool": "move",
            "params": {"direction": "a"},
            "reasoning": "because",
        }
        assert body["action"]["tool"] == "move"
        await client.post("/observe", {"agent_id": "a", "tick": 9, "observation": {"nearby": ["wolf"]}})
    assert "{'position': [0, 1], 'nearby': ['berry']}" in backend.requests[0].text
    assert "{'nearby': ['wolf']}" in backend.requests[1].text


async def test_health_answers_while_a_tick_thinks_and_another_client_is_served() -> None:
    backend = ScriptedBackend(lambda request: Hang() if agent_in(request) == "slow" else script(request))
    async with serving(registered(AgentRuntime(backend=backend), "slow", "quick")) as client:
        ticking = asyncio.create_task(client.post("/tick", {"tick": 1, "agents": [{"agent_id": "slow"}]}))
        while not backend.inflight:
            await asyncio.sleep(0.001)
        assert await client.get("/health") == (200, {"status": "ok", "agents": 2, "ticks": 0})
        status, body = await client.post("/tick", {"tick": 1, "agents": [{"agent_id": "quick"}]})
        assert status == 200 and body["actions"][0]["source"] == "answer"
        assert not ticking.done()
        ticking.cancel()


async def test_stopping_answers_the_tick_that_is_under_way() -> None:
    backend = ScriptedBackend(lambda request: Hang())
    async with serving(registered(AgentRuntime(backend=backend), "a")) as client:
        ticking = asyncio.create_task(client.post("/tick", {"tick": 1, "agents": [{"agent_id": "a"}]}))
        while not backend.inflight:
            await asyncio.sleep(0.001)
    status, body = await ticking
    assert status == 200 and body["actions"][0]["source"] == "fallback"
    assert backend.entered == 0


async def test_odd_values_cost_no_other_agent_its_action() -> None:
    agents = '[{"agent_id": "a", "x": "\\ud800", "y": NaN}, {"agent_id": "\\ud800"}, {"agent_id": "b"}]'
    body = f'{{"tick": 1, "agents": {agents}}}'
    async with serving(registered(AgentRuntime(backend=ScriptedBackend(script)), "a", "b", "\ud800")) as client:
        status, answer = await client.post("/tick", body)
        assert status == 200 and [entry["source"] for entry in answer["actions"]] == ["answer"] * 3
        many = [{"agent_id": str(number)} for number in range(ITEMS // 5)]
        status, answer = await client.post("/tick", {"tick": 1, "agents": many})
        assert [entry["agent_id"] for entry in answer["actions"]] == [agent["agent_id"] for agent in many]
        assert (await client.post("/tick", "[" * 100_000))[0] == 400


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/tick", "{", "not JSON"),
        ("/tick", "[]", "object"),
        ("/tick", {"agents": []}, "tick"),
        ("/tick", {"tick": "one", "agents": []}, "tick"),
        ("/tick", {"tick": True, "agents": []}, "tick"),
        ("/tick", {"tick": 1}, "agents"),
        ("/tick", {"tick": 1, "agents": [3]}, r"agents[0]"),
        ("/tick", {"tick": 1, "agents": [{"observations": {}}]}, "agent_id"),
        ("/tick", {"tick": 1, "agents": [{"agent_id": "a"}, {"agent_id": "a"}]}, "twice"),
        ("/observe", {"position": 1}, "agent_id"),
        ("/observe", {"agent_id": 7}, "agent_id"),
        ("/observe", {"agent_id": "a", "tick": 1.5}, "tick"),
    ],
)
async def test_bad_input_is_a_400_with_words(path: str, body: object, said: str) -> None:
    async with serving(registered(AgentRuntime(backend=ScriptedBackend(script)), "a")) as client:
        status, answer = await client.post(path, body)
        assert status == 400 and said in answer["error"]
        assert (await client.get("/health"))[0] == 200
        assert (await client.get("/tick"))[0] == 405
        assert (await client.get("/nothing"))[0] == 404


async def test_prometheus_reads_ticks_and_requests() -> None:
    async with serving(registered(AgentRuntime(backend=ScriptedBackend(script)), "a")) as client:
        await client.post("/tick", {"tick": 1, "agents": [{"agent_id": "a", "observations": {"x": 1}}]})
        text = await client.text("/metrics")
    assert 'batch_agent_tick_actions_total{source="answer"} 1\n' in text
    assert "batch_agent_tick_duration_seconds_count 1\n" in text
    assert "batch_agent_turn_duration_seconds_count 1\n" in text
    assert 'batch_agent_endpoint_up{endpoint="scripted://"} 1\n' in text
