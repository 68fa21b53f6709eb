"""A standby: a server with a model of its own, which answers while all other servers of the fleet are down."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batch_agent import BatchAgent, Fleet, SpecError
from batch_agent.backends.base import RequestShape
from batch_agent.cli.main import main
from batch_agent.errors import RunRejected, RunUnreachable, Unavailable
from batch_agent.messages import Reply, Usage
from batch_agent.observe.numbers import of_record
from batch_agent.record.reader import look, open_run
from batch_agent.results import Results
from batch_agent.testing import CallTools, Fail, Hang, Request, Say, ScriptedServer, ToolUse, virtual_clock
from fleet.proxies import nobody

USAGE = Usage(1000, completion_tokens=100)
OWN = {"input": 0.1, "output": 0.1}
PAID = {"input": 1.0, "output": 10.0}
OWN_COST, PAID_COST = 1100 * 0.1 / 1e6, (1000 * 1.0 + 100 * 10.0) / 1e6


def say(name: str, latency: float = 0.05) -> Callable[[Request], Say]:
    return lambda request: Say(name, usage=USAGE, latency=latency)


def standby(server: ScriptedServer, **others: Any) -> dict[str, Any]:
    return {"url": server.backend_url, "model": "big", "when": "unreachable", "prices": PAID, **others}


async def run(*backend: object, rows: int = 40, **others: Any) -> Results[Any]:
    given = {"task": "Do {input}", "inputs": [f"row-{number}" for number in range(rows)], "model": "m", "prices": OWN}
    return await BatchAgent.run(backend=list(backend), **{**given, "max_inflight": 4, "progress": False, **others})


def by_model(results: Results[Any]) -> Counter[str | None]:
    return Counter(result.answered_by for result in results)


@virtual_clock
async def test_a_standby_gets_nothing_while_another_server_works() -> None:
    async with (
        ScriptedServer(say("own"), models=["m"]) as own,
        ScriptedServer(say("paid"), models=["big"]) as paid,
    ):
        results = await run(own.backend_url, f"vllm://{nobody()}", standby(paid))
    assert all(results) and by_model(results) == {"m": 40}
    assert not paid.requests


@virtual_clock
async def test_rows_go_to_the_standby_while_all_others_are_down_and_return_when_one_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = nobody()
    async with ScriptedServer(say("paid"), models=["big"]) as paid, asyncio.TaskGroup() as group:
        running = group.create_task(run(f"vllm://{place}", standby(paid), rows=300, control_requests=False))
        await asyncio.sleep(1.5)
        async with ScriptedServer(say("own"), models=["m"], port=int(place.rpartition(":")[2])) as own:
            results = await running
    counts = by_model(results)
    assert all(results) and set(counts) == {"m", "big"} and min(counts.values()) > 20
    assert {str(request.body["model"]) for request in paid.requests} == {"big"}
    assert {str(request.body["model"]) for request in own.requests} == {"m"}
    for result in results:
        assert (result.output, result.cost) == (
            ("own", pytest.approx(OWN_COST)) if result.answered_by == "m" else ("paid", pytest.approx(PAID_COST))
        )
    statistics = results.summary.statistics
    assert statistics.cost == pytest.approx(counts["m"] * OWN_COST + counts["big"] * PAID_COST)
    assert dict(statistics.answered_by) == dict(counts)
    told = [
        record.message for record in caplog.records if "standby" in record.message or "rows go to" in record.message
    ]
    assert "rows go to big at" in told[0] and "connection refused" in told[0]
    assert "is up again" in told[1] and len(told) == 2


@virtual_clock
async def test_a_row_with_turns_of_both_models_names_both() -> None:
    place = nobody()

    def look() -> str:
        """Look."""
        return "seen"

    def answer(name: str) -> Callable[[Request], object]:
        return lambda request: Say(name, usage=USAGE) if request.turn else CallTools(ToolUse("look", {}), usage=USAGE)

    async with ScriptedServer(say("paid"), models=["big"]) as paid:
        own = ScriptedServer(answer("own"), models=["m"], port=int(place.rpartition(":")[2]))
        closing = asyncio.Event()

        async def slow_look() -> str:
            """Look."""
            await closing.wait()
            return "seen"

        slow_look.__name__ = "look"
        await own.__aenter__()
        running = asyncio.create_task(run(f"vllm://{place}", standby(paid), rows=2, tools=[slow_look]))
        await own.wait_requests(2)
        await asyncio.sleep(1)
        await own.__aexit__(None, None, None)
        closing.set()
        results = await running
    assert [(result.output, result.answered_by) for result in results] == [("paid", "m + big")] * 2
    assert [result.cost for result in results] == [pytest.approx(OWN_COST + PAID_COST)] * 2


@virtual_clock
async def test_a_refusal_of_every_request_at_the_start_ends_the_run_and_the_standby_is_not_asked() -> None:
    async with (
        ScriptedServer(lambda request: Fail(401), models=["m"]) as own,
        ScriptedServer(say("paid"), models=["big"]) as paid,
    ):
        with pytest.raises(RunRejected):
            await run(own.backend_url, standby(paid))
        assert not paid.requests


@virtual_clock
async def test_a_server_that_hangs_counts_as_down() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()

    def hangs(request: Request) -> object:
        return Say("own", usage=USAGE, latency=0.05) if loop.time() < began + 0.5 else Hang()

    async with (
        ScriptedServer(hangs, models=["m"]) as own,
        ScriptedServer(say("paid"), models=["big"]) as paid,
    ):
        results = await run(own.backend_url, standby(paid), rows=200)
    counts = by_model(results)
    assert all(results) and counts["m"] >= 20 and counts["big"] > 100
    assert max(result.timings.total for result in results) < 200


@virtual_clock
async def test_a_run_whose_standby_is_down_too_waits_and_then_ends_as_unreachable() -> None:
    with pytest.raises(RunUnreachable, match=r"connection refused.*; (the standby|and) vllm://.*connection refused"):
        await run(
            f"vllm://{nobody()}", {"url": f"vllm://{nobody()}", "model": "big", "when": "unreachable"}, max_outage=20
        )


@virtual_clock
async def test_a_budget_counts_the_prices_of_the_model_that_answers() -> None:
    async with ScriptedServer(say("paid"), models=["big"]) as paid:
        results = await run(f"vllm://{nobody()}", standby(paid), max_cost=10 * PAID_COST, max_tokens=100)
    assert results.summary.statistics.ended == "out of budget"
    assert 8 <= sum(map(bool, results)) <= 10
    assert results.cost is not None and results.cost <= 10 * PAID_COST + 1e-9


@virtual_clock
async def test_a_standby_without_a_price_makes_the_cost_a_minimum() -> None:
    async with ScriptedServer(say("paid"), models=["big"]) as paid:
        given = standby(paid)
        del given["prices"]
        with pytest.raises(SpecError, match=r'no price of the standby big at .* is known; give "prices"'):
            await run(f"vllm://{nobody()}", given, max_cost=1.0)
        results = await run(f"vllm://{nobody()}", given, prices=None, rows=2)
        assert all(results) and results.cost is None
    place = nobody()
    async with ScriptedServer(say("own"), models=["m"], port=int(place.rpartition(":")[2])) as own:
        given = {"url": f"vllm://{nobody()}", "model": "big", "when": "unreachable"}
        assert (await run(own.backend_url, given, rows=2)).cost == pytest.approx(2 * OWN_COST)


@virtual_clock
async def test_a_resumed_run_keeps_the_answers_of_a_standby_and_says_whose_they_are(tmp_path: Path) -> None:
    place = nobody()
    async with ScriptedServer(say("paid"), models=["big"]) as paid:
        backend = [f"vllm://{place}", standby(paid)]
        first = await run(*backend, rows=6, run_dir=tmp_path / "run")
        assert by_model(first) == {"big": 6} and len(paid.requests) == 6
    async with ScriptedServer(say("own"), models=["m"], port=int(place.rpartition(":")[2])) as own:
        again = await run(own.backend_url, rows=9, run_dir=tmp_path / "run", resume=True)
        assert len(own.requests) == 3
    assert [result.resumed for result in again] == [True] * 6 + [False] * 3
    assert [result.answered_by for result in again] == ["big"] * 6 + [None] * 3  # that session has no standby
    assert dict(of_record(look(tmp_path / "run")).answered_by) == {"big": 6}


@virtual_clock
async def test_the_record_has_the_backend_with_its_standby_for_a_resume_that_names_none(tmp_path: Path) -> None:
    async with ScriptedServer(say("paid"), models=["big"]) as paid:
        backend = [f"vllm://{nobody()}", standby(paid)]
        await run(*backend, rows=2, run_dir=tmp_path / "run")
        again = await BatchAgent.run(
            task="Do {input}", inputs=[f"row-{n}" for n in range(4)], run_dir=tmp_path / "run", resume=True, prices=OWN
        )
    assert by_model(again) == {"big": 4}


@virtual_clock
async def test_every_surface_says_how_many_rows_the_standby_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(tmp_path / "run")
    async with ScriptedServer(say("paid"), models=["big"]) as paid:
        results = await run(f"vllm://{nobody()}", standby(paid), rows=3, run_dir=place)
    assert "answers  3 rows by big" in str(results.summary)
    assert main(["status", place]) == 0
    assert "answers  3 rows by big" in capsys.readouterr().out
    assert main(["status", place, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answered_by"] == {"big": 3}
    assert main(["show", place, "--row", "0"]) == 0
    shown = capsys.readouterr().out
    assert "answered by big" in shown and "turn 1, big, a standby" in shown
    assert main(["export", place, "--output", str(tmp_path / "rows.csv")]) == 0
    assert "answered_by" in (tmp_path / "rows.csv").read_text().splitlines()[0]
    assert "big" in (tmp_path / "rows.csv").read_text()
    with open_run(place) as reader:
        assert {record["answered_by"] for record in reader.rows} == {"big"}


@virtual_clock
async def test_answers_of_a_standby_are_not_cached(tmp_path: Path) -> None:
    cached = {"cache": str(tmp_path / "cache"), "temperature": 0, "rows": 2}
    place = nobody()
    async with ScriptedServer(say("paid"), models=["big"]) as paid:
        await run(f"vllm://{place}", standby(paid), **cached)
        async with ScriptedServer(say("own"), models=["m"], port=int(place.rpartition(":")[2])):
            results = await run(f"vllm://{place}", standby(paid), **cached)
    assert [result.output for result in results] == ["own"] * 2


async def test_a_standby_that_would_not_answer_is_said_when_the_run_starts(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        ScriptedServer(say("own"), models=["m"]) as own,
        ScriptedServer(say("paid"), models=["other"]) as paid,
    ):
        await run(own.backend_url, standby(paid), rows=2)
        assert "the standby big at" in caplog.text and "it lists other" in caplog.text
        caplog.clear()
        await run(own.backend_url, {**standby(paid), "model": "other"}, rows=2)
        assert "standby" not in caplog.text
    assert caplog.records == [] or all(record.levelno < logging.WARNING for record in caplog.records)


async def test_the_key_and_headers_of_the_run_do_not_go_to_a_standby() -> None:
    async with ScriptedServer(say("paid"), models=["big"]) as paid:
        async with Fleet(
            [f"vllm://{nobody()}", standby(paid, api_key="its-own")], api_key="secret", headers={"X-Own": "secret"}
        ) as fleet:
            (reply,) = await fleet.generate_batch(["hello"], RequestShape("m"))
        assert isinstance(reply, Reply) and (reply.text, reply.answered_by) == ("paid", "big")
        assert all("secret" not in str(request.headers) for request in paid.requests)
        assert "its-own" in str(paid.requests[0].headers)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"when": "slow", "model": "big"}, "when is 'slow'; the only condition is \"unreachable\""),
        ({"when": "unreachable"}, "a standby needs the model"),
        ({"prices": PAID, "model": "big"}, 'prices are for a standby, with "when"'),
        ({"when": "unreachable", "model": "big", "prices": 3}, "prices is not a mapping"),
        ({"when": "unreachable", "model": "big", "prices": {"gpu_hour": 2}}, "a standby is paid by the token"),
        ({"when": "unreachable", "model": "big", "prices": {"inputs": 2}}, "there is no 'inputs'"),
    ],
)
def test_what_cannot_be_a_standby_is_said(given: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        Fleet(["vllm://a", {"url": "vllm://b", **given}])


def test_a_fleet_has_a_server_that_is_no_standby() -> None:
    one = {"url": "vllm://b", "model": "big", "when": "unreachable"}
    with pytest.raises(SpecError, match="every endpoint of the fleet is a standby"):
        Fleet([one])
    fleet = Fleet(["vllm://a", one])
    with pytest.raises(SpecError, match="the last endpoint of a fleet cannot be removed"):
        fleet.remove("vllm://a")
    with pytest.raises(SpecError, match="a batch API cannot be a standby"):
        Fleet(["vllm://a", {"url": "openai-batch://", "model": "big", "when": "unreachable", "api_key": "k"}])


def test_a_price_by_the_hour_beside_a_standby_is_refused() -> None:
    one = {"url": "vllm://b", "model": "big", "when": "unreachable"}
    with pytest.raises(SpecError, match="gpu_hour counts time, but a standby is paid by the token"):
        BatchAgent.plan(task="{input}", inputs=["x"], backend=["vllm://a", one], model="m", prices={"gpu_hour": 2})


async def test_a_request_without_an_endpoint_goes_to_the_standby_only_if_no_other_is_reached() -> None:
    async with (
        ScriptedServer(say("own"), models=["m"]) as own,
        ScriptedServer(say("paid"), models=["big"]) as paid,
        Fleet([standby(paid), own.backend_url]) as fleet,
    ):
        replies = await fleet.generate_batch(["one", "two"], RequestShape("m"))
        assert [reply.text for reply in replies if isinstance(reply, Reply)] == ["own"] * 2
        assert not isinstance(replies[0], Unavailable) and not paid.requests


@virtual_clock
async def test_the_rows_of_a_killed_run_are_counted_from_its_lines(tmp_path: Path) -> None:
    place = tmp_path / "run"
    async with ScriptedServer(say("paid"), models=["big"]) as paid:
        await run(f"vllm://{nobody()}", standby(paid), rows=3, run_dir=place)
    facts = json.loads((place / "run.json").read_text())
    facts |= {"state": "running", "answered_by": {"big": 1}}  # as if it was killed within a second
    (place / "run.json").write_text(json.dumps(facts))
    assert look(place).state == "interrupted" and dict(of_record(look(place)).answered_by) == {"big": 3}


def test_the_plan_names_the_standby_and_its_price() -> None:
    one = {"url": "vllm://b", "model": "big", "when": "unreachable", "prices": PAID}
    plan = str(BatchAgent.plan(task="{input}", inputs=["x"], backend=["vllm://a", one], model="m"))
    assert "big at vllm://b while all other servers are down; the prices given" in plan
