"""Many servers as one backend: runs on real sockets, on a virtual clock where time matters."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.fleet.proxies import nobody

from batch_agent import BatchAgent, Fleet, SpecError
from batch_agent.backends.base import Backend, Capabilities, Load, ModelRequest, RequestShape
from batch_agent.errors import RunUnreachable, Unavailable
from batch_agent.events import Event, HealthChanged
from batch_agent.job import AgentResult
from batch_agent.messages import Conversation, Message, Reply
from batch_agent.testing import (
    CallTools,
    Cut,
    Fail,
    Hang,
    Request,
    Say,
    ScriptedBackend,
    ScriptedServer,
    ToolUse,
    virtual_clock,
)

ROWS = [str(number) for number in range(300)]


def saying(text: str, latency: float = 0.1) -> Callable[[Request], Say]:
    return lambda request: Say(text, latency=latency)


async def servers(stack: AsyncExitStack, *names: str, latency: float = 0.1) -> list[ScriptedServer]:
    return [await stack.enter_async_context(ScriptedServer(saying(name, latency))) for name in names]


def names(backend: Backend) -> tuple[str, ...]:
    return tuple(backend.servers)


async def finish(backend: object, **options: Any) -> list[AgentResult[str]]:
    known = {"task": "{input}", "inputs": ROWS, "model": "m", "max_inflight": 24} | options
    return list(await BatchAgent.run(backend=backend, **known))


@virtual_clock
async def test_a_list_of_urls_is_a_fleet_and_every_server_has_its_share() -> None:
    async with AsyncExitStack() as stack:
        known = await servers(stack, "a", "b", "c")
        results = await finish([server.backend_url for server in known])
    shares = Counter(result.output for result in results)
    assert all(results) and set(shares) == {"a", "b", "c"}
    assert min(shares.values()) >= 80


@virtual_clock
async def test_a_hostfile_is_a_fleet_and_tags_select(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        worker, critic = await servers(stack, "worker", "critic")
        hosts = tmp_path / "hosts.txt"
        hosts.write_text(f"{worker.address} role=worker\n{critic.address} role=critic\n")
        results = await finish(f"fleet://{hosts}?role=worker", inputs=ROWS[:20])
        assert {result.output for result in results} == {"worker"}
        with pytest.raises(SpecError, match="has role=judge"):
            await finish(f"fleet://{hosts}?role=judge")


async def test_a_relative_path_is_looked_up_where_the_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "hosts.txt").write_text("gpu-1\nsglang://gpu-2\nhttps://gpu-3/v1\n")
    monkeypatch.chdir(tmp_path)
    spec = BatchAgent.plan(task="{input}", inputs=["x"], backend="fleet://lists/hosts.txt", model="m")
    assert names(spec.backend) == ("vllm://gpu-1:8000", "sglang://gpu-2:30000", "https://gpu-3/v1")
    assert spec.backend.name == "fleet://lists/hosts.txt"


@pytest.mark.parametrize("mode", ["dead", "hangs", "500", "reset"])
def test_a_server_that_goes_away_takes_no_row_with_it(mode: str) -> None:
    @virtual_clock
    async def scenario() -> None:
        gone = {"hangs": Hang(), "500": Fail(500), "reset": Cut(), "dead": None}[mode]
        loop = asyncio.get_running_loop()

        def script(request: Request) -> object:
            now = loop.time()
            if now < 0.5:
                return Say("b", latency=0.1)
            if gone is None:
                raise Unavailable("connection refused", unreached=True)
            return gone

        events: list[Event] = []
        fleet = Fleet([ScriptedBackend(saying("a")), ScriptedBackend(script), ScriptedBackend(saying("c"))])
        async with BatchAgent.open(
            task="{input}", inputs=ROWS * 5, backend=fleet, max_inflight=24, max_retries=0, sinks=[events.append]
        ) as run:
            results = [result async for result in run.results()]
        assert all(results), next(result.error for result in results if not result)
        assert Counter(result.output for result in results)["b"] < 100
        assert any(isinstance(event, HealthChanged) and event.state == "down" for event in events)
        longest = max(result.timings.total for result in results)
        assert longest < 15, "a row waits for the verdict at the most, not for the server"

    scenario()


@virtual_clock
async def test_a_server_that_is_not_there_yet_is_knocked_at_and_joins_when_it_comes() -> None:
    async with AsyncExitStack() as stack:
        (first,) = await servers(stack, "a", latency=0.5)
        place = f"vllm://{nobody()}"
        port = int(place.rpartition(":")[2])

        async def come_later() -> None:
            await asyncio.sleep(5)
            await stack.enter_async_context(ScriptedServer(saying("b"), port=port))

        async with asyncio.TaskGroup() as group:
            group.create_task(come_later())
            results = await finish([first.backend_url, place], inputs=ROWS * 2)
    shares = Counter(result.output for result in results)
    assert all(results) and shares["b"] > 50
    assert all(result.attempts <= 2 for result in results)


@virtual_clock
async def test_a_server_that_never_answers_holds_a_row_no_longer_than_it_takes_to_see_that() -> None:
    async with AsyncExitStack() as stack:
        (first,) = await servers(stack, "a")
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # the kernel connects, nobody reads
        results = await finish([first.backend_url, f"vllm://127.0.0.1:{silent.getsockname()[1]}"])
    assert all(results)
    assert max(result.timings.total for result in results) < 30


@virtual_clock
async def test_when_no_server_answers_the_run_is_unreachable() -> None:
    with pytest.raises(RunUnreachable):
        await finish([f"vllm://{nobody()}", f"vllm://{nobody()}"], inputs=ROWS[:5])


@virtual_clock
async def test_an_agents_turns_stay_on_one_server() -> None:
    async with AsyncExitStack() as stack:
        asked: dict[str, set[int]] = {}

        def script(place: int) -> Callable[[Request], Say]:
            def answer(request: Request) -> Say:
                asked.setdefault(str(request.messages[0]["content"]), set()).add(place)
                done = sum(message["role"] == "assistant" for message in request.messages)
                return Say("done", latency=0.1) if done >= 3 else CallTools(ToolUse("look", {}), latency=0.1)

            return answer

        known = [await stack.enter_async_context(ScriptedServer(script(place))) for place in range(4)]

        async def look() -> str:
            """Look."""
            return "seen"

        results = await finish(
            [server.backend_url for server in known], inputs=ROWS[:40], tools=[look], max_inflight=40
        )
    assert all(results)
    assert all(len(places) == 1 for places in asked.values())


@virtual_clock
async def test_rows_with_one_affinity_share_a_server() -> None:
    async with AsyncExitStack() as stack:
        known = await servers(stack, "a", "b", "c")
        rows = [{"site": f"site {number % 40}", "n": number} for number in range(120)]
        results = await finish(
            [server.backend_url for server in known], task="{site} {n}", inputs=rows, affinity="site", max_inflight=120
        )
    homes: dict[str, set[str]] = {}
    for result in results:
        homes.setdefault(str(dict(result.input)["site"]), set()).add(str(result.output))  # type: ignore[call-overload]
    assert all(len(found) == 1 for found in homes.values())
    assert len({name for found in homes.values() for name in found}) == 3


def test_an_affinity_that_no_row_has_is_an_error_before_anything_is_sent() -> None:
    with pytest.raises(SpecError, match="affinity: the first input has no field 'site'"):
        BatchAgent.plan(task="{n}", inputs=[{"n": 1}], backend=["vllm://a", "vllm://b"], model="m", affinity="site")


@virtual_clock
async def test_a_model_goes_only_to_the_servers_that_have_it() -> None:
    async with AsyncExitStack() as stack:
        small = await stack.enter_async_context(ScriptedServer(saying("small"), models=["small"]))
        large = await stack.enter_async_context(ScriptedServer(saying("large"), models=["large"]))
        urls = [small.backend_url, large.backend_url]
        results = await finish(urls, model="large", inputs=ROWS[:30])
        assert {result.output for result in results} == {"large"}
        assert not small.requests
        with pytest.raises(SpecError, match="small, large"):
            await finish(urls, model=None)
        async with Fleet(urls) as fleet:
            assert await fleet.models() == ["small", "large"]


@virtual_clock
async def test_servers_join_and_leave_a_run_under_way() -> None:
    async with AsyncExitStack() as stack:
        first, second, third = await servers(stack, "a", "b", "c")
        fleet = Fleet([first.backend_url, second.backend_url])
        outputs: list[str] = []
        async with BatchAgent.open(task="{input}", inputs=ROWS * 3, backend=fleet, model="m", max_inflight=24) as run:
            async for result in run.results():
                outputs.append(str(result.output))
                if len(outputs) == 300:
                    fleet.add(third.backend_url)
                    fleet.remove(second.backend_url)
    assert len(outputs) == 900 and "None" not in outputs
    assert Counter(outputs[:300])["c"] == 0 and Counter(outputs[400:])["b"] == 0
    assert Counter(outputs[400:])["c"] > 150
    assert names(fleet) == (first.backend_url, third.backend_url)


def test_no_endpoint_is_not_taken_for_the_usual_backend() -> None:
    with pytest.raises(SpecError, match="a NoneType cannot be an endpoint"):
        Fleet(["vllm://a", None])  # type: ignore[list-item]


def test_what_cannot_be_removed_is_said() -> None:
    fleet = Fleet(["vllm://a", "vllm://b"])
    with pytest.raises(SpecError, match="no endpoint 'vllm://c'"):
        fleet.remove("vllm://c")
    fleet.remove("vllm://a")
    with pytest.raises(SpecError, match="last endpoint"):
        fleet.remove("vllm://b")


@virtual_clock
async def test_two_runs_on_one_fleet_share_its_slots_and_what_one_does_not_want_is_the_others() -> None:
    able = Capabilities(default_inflight=64)
    fleet = Fleet([ScriptedBackend(saying("x"), capabilities=able) for _ in range(2)])

    async def run(rows: Sequence[str], seen: list[int]) -> None:
        async with BatchAgent.open(task="{input}", inputs=list(rows), backend=fleet) as run:
            async for _ in run.results():
                seen.append(run.shared.dispatcher.scheduler.inflight)

    alone: list[int] = []
    shared: list[int] = []
    async with asyncio.TaskGroup() as group:
        first = group.create_task(run(ROWS * 10, alone))
        await asyncio.sleep(0.25)
        done = len(alone)
        second = group.create_task(run(ROWS * 3, shared))
        await asyncio.sleep(1.0)
        assert abs(len(alone) - done - len(shared)) <= 256, "while both want slots each gets half"
        await second
        done = len(alone)
        await asyncio.sleep(0.5)
        assert len(alone) - done >= 4 * 128 and not first.done(), "alone again"


@virtual_clock
async def test_a_straggler_is_asked_elsewhere_and_the_first_answer_counts() -> None:
    slow = ScriptedBackend(lambda request: Say("slow", latency=100 if "7" in str(request.messages[-1]) else 0.1))
    fast = ScriptedBackend(saying("fast"))
    results = await finish(Fleet([slow, fast]), model="scripted", inputs=ROWS[:20], hedge=1.0)
    assert all(results)
    assert max(result.timings.inference for result in results) < 2
    assert slow.inflight == 0, "the other request was ended"


@virtual_clock
async def test_a_second_request_that_never_got_a_slot_is_not_waited_for_when_the_first_has_failed() -> None:
    silent, answering = ScriptedBackend(lambda _: Hang()), ScriptedBackend(saying("here"))
    options = {"hedge": 1.0, "max_inflight": 1, "timeout_per_turn": 5.0, "max_retries": 1}
    (result,) = await finish(Fleet([silent, answering]), model="scripted", inputs=ROWS[:1], **options)
    assert (result.output, len(silent.requests)) == ("here", 1)


@virtual_clock
async def test_at_the_end_of_a_batch_what_a_much_slower_server_has_is_taken_back_once() -> None:
    slow, fast = ScriptedBackend(saying("slow", 5.0)), ScriptedBackend(saying("fast"))
    results = await finish(Fleet([slow, fast]), model="scripted", inputs=ROWS[:20])
    assert [result.output for result in results] == ["fast"] * 20
    assert len(fast.requests) == 20 and len(slow.requests) <= 16


def working(slots: int, seconds: float) -> ScriptedBackend:
    """A server that computes ``slots`` requests at once; others wait in its queue."""
    gate = asyncio.Semaphore(slots)

    async def answer(request: Request) -> Say:
        async with gate:
            await asyncio.sleep(seconds)
        return Say("ok")

    return ScriptedBackend(answer)


@pytest.mark.parametrize("rows", [200, 300, 500])
def test_a_batch_ends_before_the_one_server_that_is_much_slower_has_answered(rows: int) -> None:
    @virtual_clock
    async def scenario() -> None:
        fleet = Fleet([*(working(16, 0.2) for _ in range(7)), working(16, 1.6)])
        began = asyncio.get_running_loop().time()
        inputs = [str(n) for n in range(rows)]
        assert all(await finish(fleet, model="scripted", inputs=inputs, max_inflight=None))
        assert asyncio.get_running_loop().time() - began < 1.6

    scenario()


@virtual_clock
async def test_at_the_end_of_a_batch_a_few_milliseconds_move_nothing() -> None:
    slow, fast = ScriptedBackend(saying("slow", 0.09)), ScriptedBackend(saying("fast", 0.01))
    results = await finish(Fleet([slow, fast]), model="scripted", inputs=ROWS[:2])
    assert all(results) and len(slow.requests) + len(fast.requests) == 2


@virtual_clock
async def test_a_recorded_run_on_a_fleet_is_resumed_without_asking_again(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        known = await servers(stack, "a", "b")
        urls = [server.backend_url for server in known]
        await finish(urls, inputs=ROWS[:20], run_dir=tmp_path / "run")
        asked = sum(server.received for server in known)
        again = await finish(urls[:1], inputs=ROWS[:20], run_dir=tmp_path / "run", resume=True, hedge=0.01)
        assert all(result.resumed for result in again)
        assert sum(len(server.requests) for server in known) == 20
        assert asked >= 20


@virtual_clock
async def test_a_request_that_was_granted_no_endpoint_goes_to_one_that_is_reached() -> None:
    async with AsyncExitStack() as stack:
        (server,) = await servers(stack, "a")
        async with Fleet([f"vllm://{nobody()}", server.backend_url]) as fleet:
            replies = await fleet.generate_batch(["one", "two"], RequestShape("m"))
            assert [reply.text for reply in replies if isinstance(reply, Reply)] == ["a", "a"]
            with pytest.raises(Unavailable, match="no longer part"):
                await fleet.infer(request_to("gone"))


async def test_the_load_of_a_fleet_is_the_sum_of_those_that_report_it() -> None:
    async with AsyncExitStack() as stack:
        known = await servers(stack, "a", "b", latency=0.0)
        fleet = await stack.enter_async_context(
            Fleet([*(server.backend_url for server in known), f"vllm://{nobody()}"])
        )
        one = ScriptedBackend(saying("x"))
        assert await fleet.load() == Load(running=0, waiting=0)
        hanging = await stack.enter_async_context(ScriptedServer(lambda request: Hang()))
        fleet.add(hanging.backend_url)
        asking = asyncio.create_task(fleet.infer(request_to(hanging.backend_url)))
        await hanging.wait_inflight(1)
        assert await fleet.load() == Load(running=1, waiting=0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert await Fleet([one, one]).load() is None


def request_to(endpoint: str) -> ModelRequest:
    return ModelRequest(RequestShape("m"), Conversation([Message("user", "x")]), "0", endpoint=endpoint)


async def test_proxies_of_the_environment_do_not_touch_servers_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with AsyncExitStack() as stack:
        known = await servers(stack, "a", "b", latency=0.0)
        results = await finish([server.backend_url for server in known], inputs=ROWS[:10])
    assert all(results)


def test_keys_are_never_shown() -> None:
    fleet = Fleet(["https://user:secret@a/v1", {"url": "vllm://b", "api_key": "hidden"}], headers={"X-Key": "quiet"})
    shown = f"{fleet!r} {fleet.name} {fleet.capabilities} {fleet.servers}"
    assert not any(word in shown for word in ("secret", "hidden", "quiet"))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([], "needs at least one endpoint"),
        ("fleet://hosts.txt", "list of endpoints"),
        (["fleet://hosts.txt"], "cannot contain a fleet"),
        ([["vllm://a"]], "cannot be an endpoint of a fleet"),
        ([{"url": "vllm://a", "weight": 0}], "vllm://a: weight must be"),
        ([{"url": "vllm://a", "weight": "much"}], "vllm://a: weight must be"),
        ([{"url": "vllm://a", "context": "long"}], "vllm://a: context must be"),
        (["gpu-1"], "not a URL"),
        ([7], "backend is a int"),
    ],
)
def test_what_cannot_be_a_fleet_is_said(given: Any, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        Fleet(given)
