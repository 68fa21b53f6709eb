"""Runs with limits: what may be spent is not exceeded, calls in flight finish, and the run says which limit it was."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batch_agent import AgentResult, BatchAgent, SpecError, Tool
from batch_agent.events import Event, TurnFinished
from batch_agent.messages import Usage
from batch_agent.observe.statistics import Statistics
from batch_agent.testing import CallTools, Cut, Fail, Hang, Request, Say, ScriptedBackend, ToolUse, virtual_clock
from batch_agent.testing.wire import Script

USAGE = Usage(prompt_tokens=100, cached_tokens=40, completion_tokens=50, reasoning_tokens=10)
PRICES = {"input": 1.0, "cached": 0.5, "output": 2.0}
COST = (60 * 1.0 + 40 * 0.5 + 50 * 2.0) / 1e6


async def finish(script: Script, **options: object) -> tuple[list[AgentResult[str]], Statistics, ScriptedBackend]:
    backend = ScriptedBackend(script)
    options = {"task": "{input}", "inputs": map(str, range(1000)), "backend": backend, "model": "m"} | options
    async with BatchAgent.open(**options) as run:  # type: ignore[call-overload]
        results = [result async for result in run.results()]
    assert backend.inflight == backend.entered == 0
    return results, run.statistics(), backend


def ends(results: list[AgentResult[str]]) -> list[str]:
    return [result.error.type if result.error else "ok" for result in results]


# Cost


async def test_each_row_and_the_run_have_their_cost() -> None:
    results, statistics, _ = await finish(lambda _: Say("ok", usage=USAGE), inputs=["a", "b"], prices=PRICES)
    assert [result.cost for result in results] == [pytest.approx(COST)] * 2
    assert [result.usage for result in results] == [USAGE] * 2
    assert statistics.cost == pytest.approx(2 * COST)


async def test_a_row_costs_what_all_its_turns_cost() -> None:
    @Tool.define(effect="read")
    def look() -> str:
        return "seen"

    def script(request: Request) -> Say:
        return (
            Say("done", usage=USAGE)
            if request.messages[-1]["role"] == "tool"
            else CallTools(ToolUse("look"), usage=USAGE)
        )

    results, _, _ = await finish(script, inputs=["a"], tools=[look], prices=PRICES)
    assert results[0].cost == pytest.approx(2 * COST)


async def test_without_a_price_there_is_no_cost() -> None:
    results, statistics, _ = await finish(lambda _: Say("ok"), inputs=["a"])
    assert results[0].cost is None
    assert statistics.cost is None


async def test_a_row_that_never_asked_has_no_cost() -> None:
    results, statistics, _ = await finish(lambda _: Fail(400), inputs=["a"], prices=PRICES)
    assert (ends(results), results[0].cost, statistics.cost) == (["Rejected"], None, None)


@virtual_clock
async def test_gpu_time_is_shared_by_the_calls_in_flight_and_counts_in_full_for_the_run() -> None:
    results, statistics, _ = await finish(
        lambda request: Say("ok", latency=int(request.text)),
        inputs=["10", "30"],
        prices={"gpu_hour": 3600.0, "gpus": 2},
    )
    assert [result.cost for result in results] == [pytest.approx(10.0), pytest.approx(10.0 + 40.0)]
    assert statistics.cost == pytest.approx(60.0)


# Limits


async def test_the_limit_on_tokens_ends_the_run_out_of_budget_and_is_not_exceeded() -> None:
    results, statistics, backend = await finish(
        lambda _: Say("ok", usage=USAGE), max_total_tokens=1_600, max_tokens=50, max_inflight=4
    )
    assert statistics.ended == "out of budget"
    assert "max_total_tokens 1,600: 1,500 are spent" in statistics.reason
    assert statistics.usage.prompt_tokens + statistics.usage.completion_tokens == 1_500
    assert ends(results) == ["ok"] * len(backend.requests) == ["ok"] * 10


async def test_the_limit_on_cost_ends_the_run_out_of_budget_and_is_not_exceeded() -> None:
    _, statistics, _ = await finish(
        lambda _: Say("ok", usage=USAGE), max_cost=20.5 * COST, max_tokens=50, prices=PRICES, max_inflight=8
    )
    assert statistics.ended == "out of budget" and statistics.reason.startswith("max_cost $")
    assert statistics.cost is not None and 19 * COST < statistics.cost <= 20.5 * COST


def counting(density: Callable[[int], float], template: int) -> Script:
    """A server with so many tokens a byte, by the number of the row, that adds a template to each prompt."""

    def script(request: Request) -> Say:
        size = sum(len(str(message["content"]).encode()) for message in request.messages)
        size += len(json.dumps(request.body.get("tools", "")))
        tokens = math.ceil(size * density(int(request.text.split()[0]))) + template
        return Say("ok", latency=1, usage=Usage(tokens, completion_tokens=50))

    return script


def long_rows(count: int) -> Iterator[str]:
    return (f"{number} {'x' * 800}" for number in range(count))


def long_texts(letters: str) -> list[str]:
    """Texts that may have far more tokens than they are expected to have, so that a call waits for others."""
    return [letter * 4_000 for letter in letters]


@Tool.define(effect="read")
def described() -> str:
    """A tool that is described at length. """ + "At length. " * 50
    return ""


@virtual_clock
async def test_a_limit_is_not_exceeded_however_dense_the_prompts_are() -> None:
    for density in (1.0, 0.6, 0.1):
        for template in (0, 400):
            for tools in ((), (described,)):
                for limit in (2_000, 9_000, 60_000):
                    _, statistics, backend = await finish(
                        counting(lambda _, density=density: density, template),
                        inputs=long_rows(1000),
                        tools=tools,
                        max_total_tokens=limit,
                        max_tokens=50,
                        max_inflight=64,
                    )
                    spent = statistics.usage.prompt_tokens + statistics.usage.completion_tokens
                    assert spent <= limit, (density, template, tools, limit)
                    assert statistics.ended == "out of budget" or len(backend.requests) == 1000
                    assert spent > limit - 2_500 or statistics.ended == "complete", (density, template, tools, limit)


@virtual_clock
async def test_a_limit_is_not_exceeded_where_the_first_prompt_is_the_least_dense() -> None:
    for limit in (3_000, 20_000, 60_000):
        _, statistics, _ = await finish(
            counting(lambda number: 1.0 if number else 0.1, 20),
            inputs=long_rows(1000),
            max_total_tokens=limit,
            max_tokens=50,
            max_inflight=64,
        )
        assert limit - 1_000 < statistics.usage.prompt_tokens + statistics.usage.completion_tokens <= limit


@virtual_clock
async def test_a_limit_that_is_far_away_slows_nothing_down() -> None:
    _, statistics, backend = await finish(
        counting(lambda _: 1.0, 20), inputs=long_rows(640), max_cost=1, max_tokens=50, prices=PRICES, max_inflight=64
    )
    assert (statistics.ended, statistics.elapsed, backend.peak_inflight) == ("complete", 10, 64)


@virtual_clock
async def test_a_limit_that_calls_in_flight_might_meet_slows_the_run_down_a_little() -> None:
    _, statistics, backend = await finish(
        counting(lambda _: 0.25, 20), inputs=long_rows(128), max_total_tokens=60_000, max_tokens=50, max_inflight=64
    )
    assert (statistics.ended, statistics.elapsed) == ("complete", 4)
    assert backend.peak_inflight > 40


@virtual_clock
async def test_a_call_that_does_not_fit_beside_others_waits_for_them() -> None:
    _, statistics, backend = await finish(
        lambda _: Say("ok", latency=1, usage=Usage(10, completion_tokens=10)),
        inputs=map(str, range(20)),
        max_total_tokens=1_300,
        max_tokens=500,
        max_inflight=10,
    )
    assert backend.peak_inflight == 2
    assert (statistics.ok, statistics.ended) == (20, "complete")


@pytest.mark.parametrize("max_inflight", [1, 7, None])
async def test_only_as_many_agents_start_as_can_be_told_no(max_inflight: int | None) -> None:
    _, statistics, _ = await finish(
        lambda _: Say("ok", usage=USAGE),
        inputs=map(str, range(100_000)),
        max_total_tokens=1_600,
        max_inflight=max_inflight,
    )
    assert statistics.ended == "out of budget"
    assert statistics.started < 200


async def test_a_first_call_that_can_never_fit_is_not_sent() -> None:
    results, statistics, backend = await finish(lambda _: Say("ok"), max_total_tokens=100, max_tokens=200)
    assert backend.requests == []
    assert results[0].error is not None and "out of budget: max_total_tokens 100" in results[0].error.message
    assert (results[0].attempts, statistics.ok) == (0, 0)


@virtual_clock
async def test_agents_that_cost_more_than_expected_go_on_while_their_turns_fit_and_end_as_interrupted_when_not() -> (
    None
):
    @Tool.define(effect="read")
    async def wait(seconds: int) -> str:
        await asyncio.sleep(seconds)
        return "x"

    def script(request: Request) -> Say:
        usage, row = Usage(10, completion_tokens=90), int(request.messages[0]["content"])
        calls = sum(message["role"] == "tool" for message in request.messages)
        if calls == (1 if row < 6 else 4):
            return Say("done", usage=usage)
        return CallTools(ToolUse("wait", {"seconds": 10}), usage=usage)

    results, statistics, _ = await finish(
        script, inputs=map(str, range(20)), tools=[wait], max_total_tokens=1_720, max_tokens=90, max_inflight=8
    )
    assert ends(results).count("ok") >= 6 and set(ends(results)) == {"ok", "Interrupted"}
    interrupted = next(result for result in results if not result.ok)
    assert interrupted.turns >= 1 and interrupted.messages[-1].role == "tool"
    assert 1_500 < statistics.usage.prompt_tokens + statistics.usage.completion_tokens <= 1_720


@virtual_clock
async def test_after_max_wall_time_calls_in_flight_finish_and_no_new_one_is_sent() -> None:
    results, statistics, backend = await finish(lambda _: Say("ok", latency=10), max_wall_time=25, max_inflight=3)
    assert len(backend.requests) == 9
    assert ends(results) == ["ok"] * 9
    assert (statistics.ended, statistics.reason) == ("out of budget", "max_wall_time, 25 s, is over")
    assert statistics.elapsed == 30


@virtual_clock
async def test_a_limit_on_cost_is_a_limit_on_time_where_time_costs() -> None:
    _, statistics, backend = await finish(
        lambda _: Say("ok", latency=10), max_cost=15, prices={"gpu_hour": 3600.0}, max_inflight=1
    )
    assert len(backend.requests) == 2
    assert statistics.reason == "max_cost $15 is spent on GPU time"


@virtual_clock
async def test_a_limit_that_keeps_nothing_from_being_done_does_not_end_the_run() -> None:
    _, statistics, _ = await finish(lambda _: Say("ok", latency=10), inputs=["a", "b"], max_wall_time=5)
    assert (statistics.ended, statistics.ok, statistics.reason) == ("complete", 2, "")


async def test_a_run_within_its_limits_is_complete() -> None:
    _, statistics, _ = await finish(
        lambda _: Say("ok", usage=USAGE),
        inputs=["a"],
        max_total_tokens=10_000,
        max_cost=1,
        max_wall_time=60,
        prices=PRICES,
    )
    assert statistics.ended == "complete"


async def test_a_refused_request_costs_nothing_of_the_budget() -> None:
    def script(request: Request) -> Say | Fail:
        return Fail(400) if int(request.text) < 15 else Say("ok", usage=USAGE)

    _, statistics, _ = await finish(script, inputs=map(str, range(17)), max_total_tokens=400, max_tokens=50)
    assert (statistics.ok, statistics.ended) == (2, "complete")


async def test_an_answer_that_broke_off_is_counted_as_it_was_reserved() -> None:
    _, statistics, backend = await finish(
        lambda _: Cut(),
        max_total_tokens=1_800,
        max_tokens=500,
        max_retries=0,
        max_inflight=2,
        control_requests=False,
    )
    assert len(backend.requests) == 3
    assert (statistics.ended, statistics.usage) == ("out of budget", Usage())


async def test_a_server_that_counts_nothing_is_taken_by_what_was_reserved() -> None:
    _, statistics, backend = await finish(
        lambda _: Say("ok", usage=Usage()), max_total_tokens=1_800, max_tokens=500, max_inflight=2
    )
    assert len(backend.requests) == 3
    assert (statistics.ended, statistics.ok) == ("out of budget", 3)


@pytest.mark.parametrize(("truncated", "end"), [("keep", "ok"), ("fail", "Truncated")])
async def test_an_answer_that_ran_into_its_limit_is_paid_for(truncated: str, end: str) -> None:
    def script(request: Request) -> Say:
        return Say("cut", finish_reason="length", usage=USAGE)

    results, statistics, _ = await finish(script, inputs=["a", "b"], prices=PRICES, truncated=truncated)
    assert ends(results) == [end] * 2
    assert [(result.usage, result.cost) for result in results] == [(USAGE, pytest.approx(COST))] * 2
    assert (statistics.usage, statistics.cost) == (USAGE + USAGE, pytest.approx(2 * COST))


@virtual_clock
async def test_cancelling_while_a_call_waits_for_the_budget_leaves_nothing() -> None:
    backend = ScriptedBackend(lambda _: Hang())
    async with BatchAgent.open(
        task="{input}", inputs=long_texts("abc"), backend=backend, max_total_tokens=12_700, max_tokens=50
    ) as run:
        await asyncio.sleep(1)
        assert backend.inflight == 2
        run.cancel()
        assert ends([result async for result in run.results()]) == ["Interrupted"] * 3
    assert backend.inflight == 0


@virtual_clock
async def test_an_agent_whose_time_is_up_while_it_waits_for_the_budget_lets_the_next_one_go() -> None:
    def script(request: Request) -> Say:
        return Say("ok", latency=5, usage=Usage(1, completion_tokens=1))

    results, _, _ = await finish(
        script, inputs=long_texts("abcde"), max_total_tokens=17_000, max_tokens=50, timeout_per_agent=8, max_inflight=4
    )
    assert sorted(ends(results)) == ["TimeoutError", "ok", "ok", "ok", "ok"]


def test_max_cost_without_a_price_is_refused_before_anything_starts() -> None:
    with pytest.raises(SpecError, match=r"max_cost: no price of m at scripted:// is known; give prices="):
        BatchAgent.plan(task="{input}", inputs=["a"], backend=ScriptedBackend(), model="m", max_cost=1)


async def test_a_run_that_is_out_of_budget_goes_on_with_a_higher_limit_and_what_was_spent_counts(
    tmp_path: Path,
) -> None:
    sent = 0
    for limit, sends, ended in ((600, 11, "out of budget"), (600, 0, "out of budget"), (9_000, 19, "complete")):
        _, statistics, backend = await finish(
            lambda _: Say("ok", usage=Usage(2, completion_tokens=50)),
            inputs=map(str, range(30)),
            max_total_tokens=limit,
            max_tokens=50,
            max_inflight=4,
            run_dir=tmp_path / "run",
            resume=True,
        )
        assert (len(backend.requests), statistics.ended) == (sends, ended)
        sent += sends
    assert (statistics.ok, sent) == (30, 30)


# The response cache


async def test_a_second_run_costs_nothing_and_says_what_it_saved(tmp_path: Path) -> None:
    events: list[Event] = []
    backend = ScriptedBackend(lambda request: Say(request.text, usage=USAGE))
    for _ in range(2):
        async with BatchAgent.open(
            task="{input}",
            inputs=["a", "b", "b"],
            backend=backend,
            model="m",
            temperature=0,
            cache=tmp_path,
            prices=PRICES,
            sinks=[events.append],
        ) as run:
            results = [result async for result in run.results()]
    assert len(backend.requests) == 2
    assert sorted(result.output or "" for result in results) == ["a", "b", "b"]
    assert [result.cost for result in results] == [0.0] * 3
    statistics = run.statistics()
    assert (statistics.cache_hits, statistics.saved) == (3, USAGE + USAGE + USAGE)
    assert (statistics.usage, statistics.cost) == (Usage(), 0.0)
    assert [event.saved for event in events if isinstance(event, TurnFinished)].count(USAGE) == 4


def test_a_cache_for_sampled_answers_is_refused() -> None:
    with pytest.raises(SpecError, match=r"cache: .*temperature=0 or a seed"):
        BatchAgent.plan(task="{input}", inputs=["a"], backend=ScriptedBackend(), cache=True)
    BatchAgent.plan(task="{input}", inputs=["a"], backend=ScriptedBackend(), cache=True, seed=1)


async def test_a_cached_answer_with_tool_calls_runs_its_tools(tmp_path: Path) -> None:
    ran = []

    @Tool.define(effect="read")
    def look(at: str) -> str:
        ran.append(at)
        return at * 2

    def script(request: Request) -> Say:
        if request.messages[-1]["role"] == "tool":
            return Say(str(request.messages[-1]["content"]))
        return CallTools(ToolUse("look", {"at": "x"}))

    for _ in range(2):
        results, _, backend = await finish(script, inputs=["a"], tools=[look], temperature=0, cache=tmp_path)
        assert results[0].output == "xx"
    assert ran == ["x", "x"]
    assert backend.requests == []


@pytest.mark.parametrize("as_list", [True, False])
@virtual_clock
async def test_a_run_that_a_budget_ends_has_a_result_for_each_row_of_a_list(as_list: bool) -> None:
    rows = [{"id": f"r{number}", "text": "x"} for number in range(20)]
    results = await BatchAgent.run(
        task="{text}",
        inputs=rows if as_list else iter(rows),
        backend=ScriptedBackend(lambda _: Say("done", latency=1)),
        max_inflight=2,
        max_wall_time=2.5,
    )
    assert [result.index for result in results] == list(range(20 if as_list else 6))
    assert [result.ok for result in results[:6]] == [True] * 6
    if as_list:
        assert [result.job_id for result in results] == [row["id"] for row, _ in zip(rows, results, strict=True)]
        assert {result.error.message for result in results.failed} == {
            "the run ended before this row finished (out of budget: max_wall_time, 2.5 s, is over)"
        }


@virtual_clock
async def test_a_resume_after_the_gpu_time_is_spent_delivers_what_is_recorded_and_sends_nothing(tmp_path: Path) -> None:
    async def run(rows: str) -> tuple[list[object], int]:
        backend = ScriptedBackend(lambda _: Say("ok", latency=2))
        results = await BatchAgent.run(
            task="{input}",
            inputs=list(rows),
            backend=backend,
            run_dir=tmp_path,
            resume=True,
            max_cost=5,
            prices={"gpu_hour": 3600.0},
            max_inflight=1,
            progress=False,
        )
        return [result.output for result in results], len(backend.requests)

    outputs, _ = await run("abcde")
    assert outputs[:2] == ["ok", "ok"] and outputs[-1] is None
    assert await run("abcde") == (outputs, 0)
    assert await run("ab") == (["ok", "ok"], 0)
