"""A runtime over HTTP: ``POST /tick`` for many agents, ``POST /observe`` for one, ``GET /health``, ``GET /metrics``.

Nothing blocks: ticks of several clients overlap, and /health answers meanwhile. An invalid request gets
``{"error": why}``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import cast

from aiohttp import web
from pydantic import JsonValue
from pydantic_core import to_json

from batch_agent.dispatch.request_numbers import RequestNumbers
from batch_agent.door import PATIENCE_SECONDS, Door, RequestRefused, json_response, read_body, read_object, routes
from batch_agent.foreign import encodable
from batch_agent.messages import JsonObject
from batch_agent.observe.exposition import Counter, Gauge, Histogram, metrics_response, page
from batch_agent.ticks.agent import Action
from batch_agent.ticks.plain import plain
from batch_agent.ticks.runtime import AgentRuntime

MAX_BODY_BYTES = 64 * 1024 * 1024
OBSERVATION_KEYS = ("observations", "observation")
AGENTS_KEYS = ("agents", "perceptions")


class TickServer:
    """Serves until it is cancelled. Running ticks are then answered with the actions that exist. With a ``key``,
    clients must send it."""

    def __init__(self, runtime: AgentRuntime, key: str = "") -> None:
        self._runtime, self._key = runtime, key
        self._ticks = 0
        self._newest: dict[str, int] = {}  # tick by agent, for observations without a tick
        self._is_stopping = False
        self._requests = runtime.observer = RequestNumbers()
        self._decisions = Counter(
            "batch_agent_tick_actions_total", "Actions by source: an answer, a fallback.", ("source",)
        )
        self._tick_time = Histogram("batch_agent_tick_duration_seconds", "Time of a tick.")

    async def serve(self, host: str, port: int, ready: Callable[[str], None]) -> None:
        table = {
            "/tick": {"POST": self._tick},
            "/observe": {"POST": self._observe},
            "/health": {"GET": self._health},
            "/metrics": {"GET": self._show_metrics},
            "/": {"GET": self._health},
        }
        handler, health = routes(table), ("/", "/health")
        # A tick continues when its client leaves: it has changed the agents.
        door = Door(handler, _refused, host=host, port=port, key=self._key, keyless=health, cancels=False)
        async with door:
            try:
                ready(door.url)
                await asyncio.get_running_loop().create_future()
            finally:
                self._is_stopping = True
                await self._runtime.stop()

    async def _health(self, request: web.BaseRequest) -> web.Response:
        return _json({"status": "ok", "agents": len(self._runtime.agents), "ticks": self._ticks})

    async def _show_metrics(self, request: web.BaseRequest) -> web.Response:
        agents = Gauge("batch_agent_agents", "Agents of the runtime.")
        agents.set(len(self._runtime.agents))
        requests = self._requests.families(self._runtime.dispatchers)
        return metrics_response(page([agents, self._decisions, self._tick_time, *requests]))

    async def _tick(self, request: web.BaseRequest) -> web.Response:
        body = await _body(request)
        tick = _tick_of(body)
        actions = await self._decide(tick, _observations(body))
        return _json({"tick": tick, "actions": [_entry(name, action) for name, action in actions.items()]})

    async def _observe(self, request: web.BaseRequest) -> web.Response:
        body = await _body(request)
        agent_id = _agent_id(body, "the observation")
        tick = _tick_of(body) if "tick" in body else self._newest.get(agent_id, 0) + 1
        entry = _entry(agent_id, (await self._decide(tick, {agent_id: _observation(body)}))[agent_id])
        return _json({**entry, **cast(JsonObject, entry["action"]), "tick": tick})

    async def _decide(self, tick: int, observations: Mapping[str, JsonValue]) -> dict[str, Action]:
        if self._is_stopping:
            raise RequestRefused(503, "the server is stopping")
        known = self._runtime.agents
        self._newest.update({agent_id: tick for agent_id in observations if agent_id in known})
        clock = asyncio.get_running_loop().time
        began = clock()
        actions = await self._runtime.process_tick(tick, observations)
        self._tick_time.observe(clock() - began)
        for action in actions.values():
            self._decisions.add(1, action.source)
        self._ticks += 1
        return actions


def _refused(request: web.BaseRequest, refused: RequestRefused) -> web.Response:
    return _json({"error": encodable(str(refused))}, refused.status)


async def _body(request: web.BaseRequest) -> JsonObject:
    data = await read_body(request, PATIENCE_SECONDS, MAX_BODY_BYTES)
    return read_object(data, json.loads)  # which also reads lone surrogates and NaN


def _tick_of(body: JsonObject) -> int:
    tick = body.get("tick")
    if isinstance(tick, float) and tick.is_integer():  # some game engines have only floats
        tick = int(tick)
    if isinstance(tick, bool) or not isinstance(tick, int):
        raise RequestRefused(400, f"tick must be a whole number, not {tick!r}")
    return tick


def _observations(body: JsonObject) -> dict[str, JsonValue]:
    agents = next((body[key] for key in AGENTS_KEYS if key in body), None)
    if not isinstance(agents, list):
        raise RequestRefused(400, 'agents must be a list, of {"agent_id": …, "observations": {…}} each')
    found: dict[str, JsonValue] = {}
    for place, agent in enumerate(agents):
        agent_id = _agent_id(agent, f"agents[{place}]")
        if agent_id in found:
            raise RequestRefused(400, f"agents[{place}]: {agent_id!r} is listed twice")
        found[agent_id] = _observation(cast(JsonObject, agent))
    return found


def _agent_id(value: JsonValue, where: str) -> str:
    agent_id = value.get("agent_id") if isinstance(value, dict) else None
    if not isinstance(agent_id, str) or not agent_id:
        raise RequestRefused(400, f"{where} must be an object with an agent_id, as text")
    return agent_id


def _observation(body: JsonObject) -> JsonValue:
    """Return the observation of a body. It may be under a key of its own, or be the fields beside the id."""
    beside: JsonValue = {name: value for name, value in body.items() if name not in ("agent_id", "tick")}
    return next((body[key] for key in OBSERVATION_KEYS if key in body), beside)


def _entry(agent_id: str, action: Action) -> JsonObject:
    return {
        "agent_id": encodable(agent_id),
        "action": plain({**action.as_json(), "reasoning": action.reasoning or ""}),
        "source": action.source,
        "seen_tick": action.seen_tick,
    }


def _json(value: JsonObject, status: int = 200) -> web.Response:
    return json_response(to_json(value, inf_nan_mode="null"), status)
