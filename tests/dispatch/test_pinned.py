"""Questions for one endpoint: shared slots, outages that are waited out for a while, answers that are passed on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from math import inf

import pytest

from batch_agent.backends.base import Probe
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.policy import Policy, Question
from batch_agent.errors import BackendError, Timeout, Unavailable
from batch_agent.messages import Reply
from batch_agent.scheduler.core import Ticket
from batch_agent.scheduler.ordering import LAST, AgentForecast
from batch_agent.scheduler.server import Endpoint
from batch_agent.scheduler.server_state import ServerState
from batch_agent.testing import virtual_clock

Answer = Callable[[], Awaitable[Reply]]


class Asked(Question):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def send(self, endpoint: str) -> Reply:
        return await self._answer()


class Probes:
    """A backend that is nothing but its probes."""

    name = "two servers"

    def __init__(self) -> None:
        self.state: Probe = Probe("up")

    async def probe(self, endpoint: str = "") -> Probe:
        return self.state


def two(max_inflight: int = 8, **options: object) -> tuple[Dispatcher, Endpoint, Endpoint, Probes]:
    probes = Probes()
    servers = {name: ServerState(name) for name in ("first", "second")}
    dispatcher = Dispatcher(probes, max_inflight, servers=servers, max_outage=inf, **options)  # type: ignore[arg-type]
    first, second = dispatcher.scheduler.endpoints
    return dispatcher, first, second, probes


def claim(dispatcher: Dispatcher, endpoint: Endpoint) -> Ticket:
    return dispatcher.slots.claim(AgentForecast(LAST), LAST, pinned=endpoint)


async def ask(dispatcher: Dispatcher, endpoint: Endpoint, answer: Answer, policy: Policy | None = None) -> str:
    return (await dispatcher.ask(Asked(answer), policy or Policy(), ticket=claim(dispatcher, endpoint))).text


async def hangs() -> Reply:
    await asyncio.Event().wait()
    raise AssertionError("it never ends")


async def refuses() -> Reply:
    raise Unavailable("connection refused", unreached=True)


@virtual_clock
async def test_an_endpoint_that_hangs_holds_no_more_than_its_share_of_the_slots() -> None:
    dispatcher, hung, well, _ = two(max_inflight=4)

    async def quick() -> Reply:
        await asyncio.sleep(0.001)
        return Reply("done")

    tasks, answers = [], []
    for _ in range(50):
        tasks.append(asyncio.create_task(ask(dispatcher, hung, hangs)))
        answers.append(asyncio.create_task(ask(dispatcher, well, quick)))
    assert await asyncio.gather(*answers) == ["done"] * 50
    assert (hung.inflight, well.inflight) == (4, 0)  # when nobody else waits they are free to take
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert (dispatcher.scheduler.inflight, dispatcher.scheduler.waiting) == (0, 0)
    dispatcher.close()


@virtual_clock
async def test_an_outage_is_waited_out_until_the_time_that_the_policy_gives() -> None:
    dispatcher, down, well, probes = two()
    probes.state = Probe("down", "it is away")
    clock = asyncio.get_running_loop().time
    began = clock()
    never_sent = asyncio.create_task(ask(dispatcher, down, refuses, Policy(wait_until=began + 10)))
    with pytest.raises(Unavailable, match="it is away"):
        await ask(dispatcher, down, refuses, Policy(wait_until=began + 20))
    assert clock() == began + 20
    with pytest.raises(Unavailable):
        await never_sent

    async def says() -> Reply:
        return Reply("here")

    late = asyncio.create_task(ask(dispatcher, down, says, Policy(wait_until=began + 60)))
    await asyncio.sleep(10)
    assert not late.done()
    assert await ask(dispatcher, well, says) == "here"
    probes.state = Probe("up")
    assert await late == "here"
    assert clock() < began + 40
    dispatcher.close()


@virtual_clock
async def test_where_probes_are_trusted_an_outage_ends_without_a_trial() -> None:
    dispatcher, down, _, _ = two(trust_probes=True)
    dispatcher.endpoints.found(down, Probe("down", "no answer"))
    assert (down.is_working, down.health.reason) == (False, "no answer")
    probing = dispatcher.endpoints.probe(down)
    assert probing is not None
    await probing
    assert down.is_working
    dispatcher.close()


@virtual_clock
@pytest.mark.parametrize(("pause", "ends"), [(2.0, "whole"), (4.0, "cut")])
async def test_an_answer_that_has_begun_is_cut_only_when_no_more_of_it_comes(pause: float, ends: str) -> None:
    dispatcher, down, _, probes = two(trust_probes=True)
    probes.state = Probe("down", "no answer")
    ticket, begun = claim(dispatcher, down), False

    async def streams() -> Reply:
        nonlocal begun
        for _ in range(4):
            await asyncio.sleep(pause)
            begun = True
            dispatcher.endpoints.flights.heard(ticket, asyncio.get_running_loop().time())
        return Reply("whole")

    policy = Policy(wanted=lambda error: not begun)
    asking = asyncio.create_task(dispatcher.ask(Asked(streams), policy, ticket=ticket))
    await asyncio.sleep(pause + 0.1)
    dispatcher.endpoints.found(down, probes.state)
    try:
        ended = (await asking).text
    except BackendError as error:
        ended = "cut" if isinstance(error, Timeout) else str(error)
    assert ended == ends
    dispatcher.close()
