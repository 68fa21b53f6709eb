"""What is measured of endpoints, and where they bend."""

from __future__ import annotations

import asyncio
import socket

import pytest

from batch_agent.backends.simulated import EngineModel
from batch_agent.fleet.bench import Bench, MeasuredAnswer, Measurement, Wanted, bench_all, knee
from batch_agent.fleet.hostfile import parse_hosts
from batch_agent.messages import Usage
from batch_agent.testing import Fail, Hang, Say, ScriptedServer, virtual_clock
from batch_agent.testing.server import SimulatedServer

QUICK = Wanted(steps=(2, 4, 8, 16), seconds=5.0, tokens_in=75, tokens_out=15)


def test_the_knee_is_the_fewest_in_flight_that_bring_nearly_the_most() -> None:
    assert knee({16: 100.0, 32: 190.0, 64: 300.0, 128: 310.0, 256: 305.0}) == 64
    assert knee({16: 100.0, 32: 50.0}) == 16
    assert knee({16: 100.0, 32: None}) == 16


def test_nothing_is_divided_by_nothing() -> None:
    assert knee({}) is None
    assert knee({16: None, 32: 0.0}) is None
    nothing = Measurement(16)
    assert (nothing.tokens_per_second, nothing.requests_per_second, nothing.latency) == (None, None, None)
    at_once = Measurement(1, [MeasuredAnswer(0.0, 0.0, Usage(1, completion_tokens=1))])
    assert at_once.tokens_per_second is None


def test_the_first_wave_is_left_out_where_there_are_later_ones() -> None:
    first = [MeasuredAnswer(4.0, 4.0, Usage(10, completion_tokens=10)) for _ in range(2)]
    later = [MeasuredAnswer(5.0, 1.0, Usage(10, completion_tokens=10)) for _ in range(2)]
    assert Measurement(2, first).tokens_per_second == 5.0
    assert Measurement(2, first + later).tokens_per_second == 20.0
    assert Measurement(2, first + later).latency == 1.0


async def measured(wanted: Wanted, *lines: str) -> list[Bench]:
    benches = [Bench(host) for host in parse_hosts("\n".join(lines), "test")]
    await bench_all(benches, wanted, environ={})
    return benches


@virtual_clock
async def test_each_endpoint_has_its_steps_and_a_knee_where_its_engine_is_full() -> None:
    engine = EngineModel(max_num_seqs=4, step_seconds=0.05)
    async with SimulatedServer(engine) as server:
        [bench] = await measured(QUICK, server.address)
    assert [step.inflight for step in bench.steps] == [2, 4, 8, 16]
    assert bench.reason == ""
    assert bench.knee == 4
    assert 60 <= bench.tokens_in <= 90
    answers = [answer for step in bench.steps for answer in step.answers]
    assert {answer.usage.completion_tokens for answer in answers} == {15}
    assert all(answer.usage.cached_tokens < 20 for answer in answers)


@virtual_clock
async def test_a_dead_endpoint_and_one_that_hangs_have_their_reasons_and_the_others_their_numbers() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
    once = iter([Say("x")])
    async with (
        ScriptedServer(lambda request: Say("x", latency=1.0), models=["m"]) as good,
        ScriptedServer(lambda request: next(once, Hang()), models=["m"]) as hangs,
        ScriptedServer(lambda request: Hang(), models=["m"]) as silent,
    ):
        dead, slow, stuck, fine = await measured(QUICK, nobody, silent.address, hangs.address, good.address)
    assert "refused" in dead.reason
    assert slow.reason == "no request was answered within 60 s"
    assert stuck.reason == "0 answers in 5 s are too few for 2 in flight"
    assert [len(bench.steps) for bench in (dead, slow, stuck, fine)] == [0, 0, 0, 4]
    assert dead.knee is None
    assert fine.knee == 16


@virtual_clock
async def test_a_server_that_knows_no_ignore_eos_is_asked_without() -> None:
    def strict(request: object) -> Say | Fail:
        return Fail(400) if "ignore_eos" in request.body else Say("x", latency=1.0)  # type: ignore[attr-defined]

    async with ScriptedServer(strict, models=["m"]) as server:
        [bench] = await measured(QUICK, server.address)
    assert len(bench.steps) == 4
    assert not any(step.failures for step in bench.steps)


@virtual_clock
async def test_what_was_measured_is_there_when_it_is_broken_off() -> None:
    async with ScriptedServer(lambda request: Say("x", latency=1.0), models=["m"]) as server:
        [host] = parse_hosts(server.address, "test")
        bench = Bench(host)
        going = asyncio.create_task(bench_all([bench], QUICK, environ={}))
        await asyncio.sleep(8)
        going.cancel()
        with pytest.raises(asyncio.CancelledError):
            await going
        await server.wait_idle()
    assert [step.inflight for step in bench.steps] == [2]
    assert bench.knee == 2
