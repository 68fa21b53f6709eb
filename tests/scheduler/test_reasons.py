"""Why a server is down, limited, or its cache has its size: rule, evidence, since when."""

from __future__ import annotations

import asyncio

from batch_agent import BatchAgent
from batch_agent.backends.base import Load
from batch_agent.errors import Unavailable
from batch_agent.events import HealthChanged, RunEvent
from batch_agent.scheduler import server_events as events
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.server_state import ServerState
from batch_agent.testing import Request, Say, ScriptedBackend, run_virtual
from batch_agent.testing.replies import ScriptedReply


def test_the_size_of_a_cache_has_a_reason_and_a_history() -> None:
    server = ServerState("gpu")
    server.on(events.Reading(Load(kv_tokens=65_536)), 1.0)
    (why,) = server.why()
    assert (why.about, why.rule, why.evidence, why.since) == (
        "cache", "the engine's report is believed", "65536 tokens", 1.0,
    )  # fmt: skip
    server.on(events.Reading(Load(kv_tokens=65_536)), 2.0)
    assert server.why() == [why]
    for _ in range(N.several):
        server.memory.found(distance=100_000, certain=100_000)
    server.on(events.Reading(Load(kv_tokens=65_536)), 3.0)
    assert [each.rule for each in server.why()] == ["the cache is larger than reported"]
    server.on(events.ReadingLost(), 4.0)
    assert not server.why()
    assert [each.rule for each in server.past] == [
        "the engine's report is believed",
        "the cache is larger than reported",
    ]


def test_an_outage_is_explained_in_the_status_and_in_the_events_and_is_history_afterwards() -> None:
    down = True
    seen: list[RunEvent] = []

    def script(request: Request) -> ScriptedReply:
        if down:
            raise Unavailable("connection refused", unreached=True)
        return Say("ok", latency=1.0)

    async def run() -> None:
        nonlocal down
        backend = ScriptedBackend(lambda request: Say("ok", latency=1.0) if request.text == "0" else script(request))
        async with BatchAgent.open(
            task="{input}", inputs=["0", "1", "2"], backend=backend, max_inflight=1, sinks=[seen.append]
        ) as run:
            results = run.results()
            await anext(results)
            while not any(type(event) is HealthChanged for event in seen):
                await asyncio.sleep(1)
            status = run.status()
            (endpoint,) = status["endpoints"]
            health = next(why for why in endpoint["why"] if why["about"] == "health")
            assert (health["rule"], health["evidence"]) == ("the server is unreachable", "connection refused")
            assert 0 <= status["at"] - health["since"] < 5
            down = False
            async for _ in results:
                pass
            (endpoint,) = run.status()["endpoints"]
            assert not any(why["about"] == "health" for why in endpoint["why"])
            assert any(why["rule"] == "the server is unreachable" for why in endpoint["history"])

    run_virtual(run())
    changes = [event for event in seen if isinstance(event, HealthChanged)]
    assert changes[0].rule == "the server is unreachable"
    assert (changes[-1].state, changes[-1].rule) == ("healthy", "")
