"""A dispatcher of a service: no outage ends it, whatever the server answers and for however long."""

from __future__ import annotations

import asyncio
from math import inf

import pytest

from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.dispatch.dispatcher import Dispatcher, ModelCall
from batch_agent.dispatch.policy import Policy
from batch_agent.errors import JobError
from batch_agent.messages import Conversation, Message
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.ordering import FIRST, AgentForecast
from batch_agent.testing import Cut, Fail, Hang, Request, Say, ScriptedBackend, virtual_clock
from batch_agent.testing.replies import ScriptedReply

SPENT = {"error": {"message": "You exceeded your quota", "code": "insufficient_quota"}}
LONG = 3 * 3600.0
REFUSALS: dict[str, ScriptedReply] = {
    **{str(status): Fail(status) for status in (401, 402, 403, 404, 429, 500, 503)},
    "spent": Fail(429, SPENT),
    "429 for a day": Fail(429, headers={"Retry-After": "86400"}),
    "503 for a day": Fail(503, headers={"Retry-After": "86400"}),
    "cut": Cut(after_chunks=0),
    "hang": Hang(),
}


def now() -> float:
    return asyncio.get_running_loop().time()


class Service:
    """Requests as ``serve`` sends them: of lines, and of people."""

    def __init__(self, backend: ScriptedBackend) -> None:
        self.backend = backend
        servers = backend.servers
        self.dispatcher = Dispatcher(backend, 8, servers=servers, max_outage=inf, control_requests=True)

    async def ask(self, text: str, *, person: bool = False) -> str:
        request = ModelRequest(RequestShape(model="m"), Conversation([Message("user", text)]), text)
        progress = AgentForecast(FIRST if person else 1, model="m")
        ticket = self.dispatcher.slots.claim(progress, FIRST if person else 0)
        try:
            policy = Policy(2 if person else 3, timeout=600.0)
            return (await self.dispatcher.ask(ModelCall(self.backend, request), policy, ticket=ticket)).text
        except JobError as error:
            return f"{type(error).__name__}: {error}"

    async def close(self) -> None:
        self.dispatcher.close()
        await self.dispatcher.wait_closed()


@pytest.mark.parametrize("begins", [0.0, 20.0])
@pytest.mark.parametrize("refusal", REFUSALS)
def test_the_first_good_answer_after_any_outage_brings_everything_back(refusal: str, begins: float) -> None:
    @virtual_clock
    async def scenario() -> None:
        ends, back = begins + LONG, inf

        def script(request: Request) -> ScriptedReply:
            nonlocal back
            if begins <= now() < ends:
                return REFUSALS[refusal]
            back = min(back, now()) if now() >= ends else back
            return Say("good", latency=0.5)

        service = Service(ScriptedBackend(script))
        early = [await service.ask(f"early {n}") for n in range(20 if begins else 0)]
        await asyncio.sleep(max(0.0, begins - now()))
        asked = [asyncio.create_task(service.ask(f"line {n}")) for n in range(20)]
        asked += [asyncio.create_task(service.ask(f"person {n}", person=True)) for n in range(3)]
        answers = await asyncio.gather(*asked)
        assert set(answers + early) == {"good"}
        assert service.dispatcher.over is None
        longest = {"hang": LONG * N.pause_share, "429 for a day": N.longest_hold, "503 for a day": N.longest_hold}
        assert ends <= back < ends + 2 * N.longest_pause + longest.get(refusal, 5)
        assert now() < back + 10
        assert len(service.backend.requests) < LONG / 3, "few trials are sent meanwhile"
        await service.close()

    scenario()


@virtual_clock
async def test_a_wait_of_a_day_that_was_a_mistake_is_over_in_seconds() -> None:
    def script(request: Request) -> ScriptedReply:
        return REFUSALS["429 for a day"] if now() < 3 else Say("good", latency=0.1)

    service = Service(ScriptedBackend(script))
    answers = await asyncio.gather(*(service.ask(f"line {n}") for n in range(40)))
    assert set(answers) == {"good"} and now() < 3 + 2 * N.busy
    await service.close()


@pytest.mark.parametrize("refusal", ["401", "402", "403", "404", "spent", "500", "429 for a day"])
def test_one_that_is_at_fault_fails_alone_and_soon(refusal: str) -> None:
    @virtual_clock
    async def scenario() -> None:
        def script(request: Request) -> ScriptedReply:
            return REFUSALS[refusal] if "bad" in request.text else Say("good", latency=0.1)

        service = Service(ScriptedBackend(script))
        texts = ["bad", *(f"line {n}" for n in range(30))]
        bad, *good = await asyncio.gather(*map(service.ask, texts))
        assert set(good) == {"good"} and "good" not in bad
        assert await service.ask("line alone") == "good"
        assert "good" not in await service.ask("bad alone")
        assert "good" not in await service.ask("bad person", person=True)
        assert now() < 400 and service.dispatcher.over is None
        await service.close()

    scenario()


@pytest.mark.parametrize("people", [0, 1, 5])
def test_a_server_that_hangs_from_the_start_is_down_soon(people: int) -> None:
    """All slots are in use, and people have more than there are: a control request needs one."""

    @virtual_clock
    async def scenario() -> None:
        service = Service(ScriptedBackend(lambda request: Hang()))
        asked = [asyncio.create_task(service.ask(f"line {n}")) for n in range(20)]
        await asyncio.sleep(3)
        asked += [asyncio.create_task(service.ask(f"person {n}", person=True)) for n in range(people)]
        (endpoint,) = service.dispatcher.scheduler.endpoints
        while not endpoint.health.is_down:
            await asyncio.sleep(1)
        assert now() < 120
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)
        await service.close()

    scenario()


@pytest.mark.parametrize("refusal", ["401", "404", "spent"])
@pytest.mark.parametrize("rows", [6, 30])
def test_one_at_fault_at_a_fresh_server_whose_answers_take_long_fails_alone(refusal: str, rows: int) -> None:
    """No answer, of a control request neither, has shown how long one takes."""

    @virtual_clock
    async def scenario() -> None:
        def script(request: Request) -> ScriptedReply:
            return REFUSALS[refusal] if "bad" in request.text else Say("good", latency=65.0)

        service = Service(ScriptedBackend(script))
        texts = ["line", "bad", *(f"line {n}" for n in range(rows - 2))]
        _, bad, *_ = answers = await asyncio.gather(*map(service.ask, texts))
        assert "good" not in bad and answers.count("good") == rows - 1
        asked = [request.text for request in service.backend.requests if "line" in request.text]
        assert len(asked) == rows - 1, "no line is sent twice"
        assert now() < 65 * (rows / 7 + 2)
        await service.close()

    scenario()
