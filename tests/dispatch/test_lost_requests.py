"""Requests that are never answered, although the server works: each is recalled once, and answered once."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from batch_agent import BatchAgent, Fleet, Tool
from batch_agent.backends.base import ClientBody, ModelRequest, Probe, RequestShape
from batch_agent.dispatch.dispatcher import Dispatcher, ModelCall
from batch_agent.dispatch.policy import Observer, Policy
from batch_agent.errors import RunUnreachable, Unavailable
from batch_agent.job import AgentResult
from batch_agent.messages import Conversation, Message
from batch_agent.observe.statistics import Statistics
from batch_agent.scheduler.ordering import AgentForecast
from batch_agent.testing import CallTools, Fail, Hang, Request, Say, ScriptedBackend, ToolUse, virtual_clock
from batch_agent.testing.replies import ScriptedReply


def now() -> float:
    return asyncio.get_running_loop().time()


async def finish(backend: object, rows: int, **options: Any) -> tuple[list[AgentResult[str]], Statistics]:
    inputs = [str(n) for n in range(rows)]
    async with BatchAgent.open(
        task="{input}", inputs=inputs, backend=backend, **{"max_inflight": 64, **options}
    ) as run:
        results = [result async for result in run.results()]
    return results, run.statistics()


class Losing(ScriptedBackend):
    """Loses the first request of a row."""

    def __init__(self, row: str) -> None:
        super().__init__(self._answer)
        self._row = row

    def _answer(self, request: Request) -> ScriptedReply:
        if request.text == self._row:
            self._row = ""
            return Hang()
        return Say("ok", latency=1.0)


@pytest.mark.parametrize("row", ["0", "50", "99"])
@pytest.mark.parametrize("max_inflight", [1, 64])
def test_a_lost_request_is_recalled_once(row: str, max_inflight: int) -> None:
    @virtual_clock
    async def scenario() -> None:
        backend = Losing(row)
        results, statistics = await finish(backend, 100, max_inflight=max_inflight)
        assert (statistics.ok, len({result.input for result in results})) == (100, 100)
        assert now() < 100 / max_inflight + 45
        assert sum(request.text == row for request in backend.requests) == 2

    scenario()


@virtual_clock
async def test_a_request_lost_by_one_of_twenty_servers_is_sent_to_another() -> None:
    losing = Losing("50")
    _, statistics = await finish(Fleet([Named(f"s{n}", losing) for n in range(20)]), 100)
    assert (statistics.ok, now() < 40) == (100, True)


class Named(ScriptedBackend):
    """The same script under a name of its own."""

    def __init__(self, name: str, server: Losing | Steady) -> None:
        super().__init__(server._answer)
        self._own = name

    @property
    def name(self) -> str:
        return f"scripted://{self._own}"


@pytest.mark.parametrize(("rows", "max_inflight"), [(1, 64), (20, 64), (8, 8)])
def test_long_answers_are_not_taken_for_lost_ones_before_any_answer_is_known(rows: int, max_inflight: int) -> None:
    @virtual_clock
    async def scenario() -> None:
        backend = ScriptedBackend(lambda request: Say("ok", latency=0.5 if request.is_control else 300.0))
        _, statistics = await finish(backend, rows, max_inflight=max_inflight)
        assert (statistics.ok, now() < 340) == (rows, True)
        controls = sum(request.is_control for request in backend.requests)
        assert len(backend.requests) - controls == rows + 1, "one is sent twice, to find out how long a row takes"
        assert controls < 7

    scenario()


class Silent(ScriptedBackend):
    """Answers nothing until ``until``. ``shows``: its probe hangs too."""

    def __init__(self, until: float, *, shows: bool, since: float = 0.0) -> None:
        super().__init__(self._answer)
        self._since, self._until, self._shows = since, until, shows

    @property
    def _is_silent(self) -> bool:
        return self._since <= now() < self._until

    def _answer(self, request: Request) -> ScriptedReply:
        return Hang() if self._is_silent else Say("ok", latency=1.0)

    async def probe(self, endpoint: str = "") -> Probe:
        if self._is_silent and self._shows:
            await asyncio.sleep(1000)
        return Probe("up")


@pytest.mark.parametrize("shows", [True, False])
@pytest.mark.parametrize(("rows", "max_inflight"), [(1, 64), (20, 64), (300, 64), (20, 1)])
@pytest.mark.parametrize("since", [0.0, 1.5])
def test_a_server_that_hangs_before_it_is_known_is_tried_again(
    rows: int, max_inflight: int, shows: bool, since: float
) -> None:
    @virtual_clock
    async def scenario() -> None:
        _, statistics = await finish(Silent(60.0, shows=shows, since=since), rows, max_inflight=max_inflight)
        assert (statistics.ok, statistics.ended) == (rows, "complete")
        assert now() < 60 + 2 * rows / max_inflight + 40

    scenario()


@pytest.mark.parametrize("max_inflight", [4, 64])
@pytest.mark.parametrize("until", [2.0, 20.0])
def test_requests_lost_by_a_server_that_hangs_at_first_are_recalled_after_half_a_minute(
    until: float, max_inflight: int
) -> None:
    @virtual_clock
    async def scenario() -> None:
        backend = Silent(until, shows=False)
        _, statistics = await finish(backend, 100, max_inflight=max_inflight)
        assert (statistics.ok, statistics.outages) == (100, ())
        assert now() < 33 + 100 / max_inflight
        assert sum(request.is_control for request in backend.requests) <= 2

    scenario()


@pytest.mark.parametrize(("max_inflight", "again"), [(16, 0), (3, 1)])
@pytest.mark.parametrize("seconds", [10.0, 25.0])
def test_a_few_slow_rows_at_the_end_are_not_taken_for_a_silent_server(
    seconds: float, max_inflight: int, again: int
) -> None:
    @virtual_clock
    async def scenario() -> None:
        def script(request: Request) -> ScriptedReply:
            is_slow = not request.is_control and int(request.text) >= 97
            return Say("ok", latency=seconds if is_slow else 1.0)

        backend = ScriptedBackend(script)
        _, statistics = await finish(backend, 100, max_inflight=max_inflight)
        assert (statistics.ok, statistics.outages) == (100, ())
        rows = [request for request in backend.requests if not request.is_control]
        # If no slot is free, one of them makes room for the control request.
        assert len(rows) <= 100 + again
        assert len(backend.requests) - len(rows) <= 2

    scenario()


@virtual_clock
async def test_a_stream_that_sends_is_not_lost() -> None:
    words = " ".join(str(n) for n in range(100))

    @Tool.define(effect="read")
    async def look() -> str:
        """Looks."""
        return "seen"

    def script(request: Request) -> ScriptedReply:
        if request.turn == 0:
            return CallTools(ToolUse("look"), latency=0.5)
        return Say(words, chunk_delay=1.0) if request.text == "seen" else Say("ok", latency=0.5)

    backend = ScriptedBackend(script)
    results, _ = await finish(backend, 3, tools=[look])
    assert all(result.output == words for result in results)
    assert len([request for request in backend.requests if not request.is_control]) == 6, "none was sent twice"


@pytest.mark.parametrize("max_inflight", [4, 16, 64])
def test_a_slow_row_among_quick_ones_keeps_its_request_while_a_second_one_is_sent(max_inflight: int) -> None:
    @virtual_clock
    async def scenario() -> None:
        def script(request: Request) -> ScriptedReply:
            return Say(request.text, latency=70.0 if request.text == "50" else 1.0)

        backend = ScriptedBackend(script)
        results, statistics = await finish(backend, 100, max_inflight=max_inflight)
        assert sorted(int(str(result.output)) for result in results) == list(range(100)), "each is delivered once"
        assert sum(request.text == "50" for request in backend.requests) == 2
        slow = next(result for result in results if result.input == "50")
        assert (slow.attempts, statistics.retries) == (2, 1), "the second request counts as an attempt"
        assert now() < 100 / max_inflight + 71, "the first request was answered"

    scenario()


@virtual_clock
async def test_the_failure_of_a_second_request_is_not_the_rows() -> None:
    sent: list[str] = []

    def script(request: Request) -> ScriptedReply:
        sent.append(request.text)
        if request.text == "50":
            return Fail(500, latency=0.1) if sent.count("50") == 2 else Say("ok", latency=70.0)
        return Say("ok", latency=1.0)

    results, statistics = await finish(ScriptedBackend(script), 100, max_inflight=16, max_retries=0)
    assert (statistics.ok, sent.count("50")) == (100, 2)
    assert all(result.ok for result in results)


@pytest.mark.parametrize(
    ("fields", "beside"),
    [
        ({}, True),
        ({"client": ClientBody("chat", {}, b"")}, True),
        ({"client": ClientBody("chat", {}, b""), "on_begin": lambda: None}, False),  # passed on as it comes
        ({"relay": lambda data: None}, False),
    ],
)
def test_a_request_whose_answer_is_read_as_it_comes_is_not_sent_beside_another(
    fields: dict[str, Any], beside: bool
) -> None:
    @virtual_clock
    async def scenario() -> None:
        backend = ScriptedBackend(lambda request: Say("ok"))
        dispatcher = Dispatcher(backend, 4)
        request = ModelRequest(RequestShape("m"), Conversation([Message("user", "hi")]), "row", **fields)
        slot = await dispatcher.slots.hold(dispatcher.slots.claim(AgentForecast(0), 0))
        assert dispatcher.seconds.start(slot, ModelCall(backend, request), Policy(), Observer()) is beside
        await dispatcher.seconds.end(slot)
        dispatcher.slots.release(slot)
        dispatcher.close()

    scenario()


@virtual_clock
async def test_a_single_row_lost_by_one_of_four_idle_servers_is_sent_to_another() -> None:
    losing = Losing("0")
    _, statistics = await finish(Fleet([Named(f"s{n}", losing) for n in range(4)]), 1)
    assert (statistics.ok, now() < 35) == (1, True)


@pytest.mark.parametrize(("rows", "max_inflight"), [(101, 20), (161, 16), (100, 16)])
def test_the_last_rows_at_a_server_that_hangs_end_seconds_after_it_is_back(rows: int, max_inflight: int) -> None:
    @virtual_clock
    async def scenario() -> None:
        last = float((rows - 1) // max_inflight)
        back = last + 10.0
        server = Silent(back, shows=False, since=last)
        _, statistics = await finish(server, rows, max_inflight=max_inflight)
        assert (statistics.ok, now() < back + 10) == (rows, True)

    scenario()


class Flapping(ScriptedBackend):
    """Works for ``works`` seconds of each ``period``; then it hangs, or refuses every other connection."""

    def __init__(self, works: float, period: float) -> None:
        super().__init__(self._answer)
        self._works, self._period = works, period

    @property
    def name(self) -> str:
        return "scripted://flapping"

    def _answer(self, request: Request) -> ScriptedReply:
        if now() % self._period < self._works:
            return Say("ok", latency=0.1)
        if request.number % 2:
            raise Unavailable("connection refused", unreached=True)
        return Hang()


@pytest.mark.parametrize(("works", "period"), [(0.5, 20.5), (0.2, 5.2), (1.0, 6.0), (0.3, 0.6)])
def test_rows_in_flight_at_a_server_that_goes_down_are_sent_to_others_that_work(works: float, period: float) -> None:
    @virtual_clock
    async def scenario() -> None:
        good = [Named(f"s{n}", Steady()) for n in range(3)]
        _, statistics = await finish(Fleet([*good, Flapping(works, period)]), 640, max_inflight=40)
        assert (statistics.ok, now() < 15) == (640, True), "the work takes 1.6 s"

    scenario()


class Steady(ScriptedBackend):
    def __init__(self) -> None:
        super().__init__(self._answer)

    def _answer(self, request: Request) -> ScriptedReply:
        return Say("ok", latency=0.1)


@pytest.mark.parametrize(("rows", "answered"), [(20, 0), (1, 0), (20, 8)])
def test_a_server_that_never_completes_an_answer_ends_a_run_soon_after_its_max_outage(rows: int, answered: int) -> None:
    @virtual_clock
    async def scenario() -> None:
        def script(request: Request) -> ScriptedReply:
            slow = request.number >= answered
            return Say("x" * 400, latency=0.2 if not slow else 400.0)

        backend = ScriptedBackend(script)
        with suppress(RunUnreachable):
            await finish(backend, rows, max_inflight=4, max_outage=10.0)
        assert now() < 60

    scenario()
