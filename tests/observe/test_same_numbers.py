"""Every command, the page, the report and the API show the same numbers and words of a run, whatever kind it is."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest
from tests.observe.exposition_rules import read_page
from tests.record.redis_servers import needs_redis
from tests.run.process_work import WarmCrew
from tests.run.test_processes import process

from batch_agent import BatchAgent, Fleet, Pipeline
from batch_agent.cli.main import main
from batch_agent.events import Event, TurnFinished
from batch_agent.messages import JsonObject, Usage
from batch_agent.money import dollars
from batch_agent.observe.numbers import of_record, of_statistics
from batch_agent.observe.prometheus import RunNumbers
from batch_agent.observe.statistics import Statistics
from batch_agent.observe.summary import summary_lines
from batch_agent.record.reader import look, open_run
from batch_agent.testing import Hang, Request, Say, ScriptedBackend, ScriptedServer
from batch_agent.view.compare import compare_now
from batch_agent.view.record import RunRecord
from batch_agent.view.report import report_html

USAGE = Usage(60, completion_tokens=30)
EACH = USAGE.prompt_tokens + USAGE.completion_tokens
PRICES = {"input": 1.0, "output": 2.0}
COST = (60 * 1.0 + 30 * 2.0) / 1e6


def answer(request: Request) -> Say:
    return Say("ok", usage=USAGE)


def options(run_dir: object, rows: int = 6, **others: Any) -> dict[str, Any]:
    given = {"task": "Do {input}", "inputs": [str(number) for number in range(rows)], "model": "m", "prices": PRICES}
    return {**given, "run_dir": str(run_dir), "progress": False, **others}


def shown(*arguments: str) -> str:
    out = StringIO()
    with redirect_stdout(out):
        assert main(list(arguments)) == 0
    return out.getvalue()


def report_of(place: str) -> JsonObject:
    page, _ = report_html([open_run(place)], "all")
    found = re.search(rb'id="report">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    run = json.loads(found[1])["runs"][0]["overview"]
    return {**run["run"], **run["progress"]}


def surfaces(place: str) -> dict[str, JsonObject]:
    """Return what each surface shows of a recorded run, under one set of names."""
    found: dict[str, JsonObject] = {}
    status = json.loads(shown("status", place, "--json"))
    found["status"] = {**status, **status["rows"], "model": ", ".join(status["models"])}
    folder = place if "://" in place else str(Path(place).parent)
    listed = [run for run in json.loads(shown("runs", folder, "--json")) if run["run_dir"] == place]
    found["runs"] = {**listed[0], **listed[0]["rows"]}
    with open_run(place) as reader:
        record = RunRecord("run", reader)
        found["list of the page"] = record.in_short()
        overview = record.overview()
        found["page"] = {**cast(JsonObject, overview["run"]), **cast(JsonObject, overview["progress"])}
        while record.index_more():
            pass
        sides = cast("list[JsonObject]", compare_now(record, record, 1)["sides"])
        found["compare"] = cast(JsonObject, sides[0]["run"])
        record.close()
    found["report"] = report_of(place)
    return found


NAMES = ("state", "total", "ok", "failed", "resumed", "tokens", "cost", "cost_is_minimum", "model")


def agreed(place: str) -> JsonObject:
    """Return the numbers that all surfaces show, and check that the texts have them too."""
    found = surfaces(place)
    first = {name: found["status"][name] for name in NAMES}
    for surface, values in found.items():
        assert {name: _close(values[name]) for name in NAMES} == {n: _close(v) for n, v in first.items()}, surface
    numbers = of_record(look(place))
    text, lines = shown("status", place), shown("runs", place if "://" in place else str(Path(place).parent))
    assert f"  state    {numbers.state}\n" in text
    assert numbers.total_words in text
    assert numbers.state in lines and numbers.model in lines
    assert numbers.cost_words in lines
    return first


def _close(value: object) -> object:
    return round(value, 9) if isinstance(value, float) else value or None


def check_summary(place: str, statistics: Statistics) -> None:
    """Check that the summary of the run's own process has the numbers that the record has."""
    own, kept = of_statistics(statistics), of_record(look(place))
    assert (own.tokens, own.cost_words, own.at_least) == (kept.tokens, kept.cost_words, kept.at_least)
    assert (own.done, own.ok, own.failed, own.resumed) == (kept.done, kept.ok, kept.failed, kept.resumed)
    assert own.rate == pytest.approx(kept.rate, abs=0.001)
    text = "\n".join(summary_lines(statistics))
    assert kept.cost_words in text
    if kept.sessions > 1:
        assert kept.session_words in text and "in all sessions" in text


async def run(place: object, **others: Any) -> Statistics:
    results = await BatchAgent.run(**options(place, **others))
    return results.summary.statistics


async def test_a_plain_run(tmp_path: Path) -> None:
    events: list[Event] = []
    place = str(tmp_path / "run")
    statistics = await run(place, backend=ScriptedBackend(answer), sinks=[events.append])
    found = agreed(place)
    assert (found["state"], found["ok"], found["tokens"], found["model"]) == ("complete", 6, 6 * EACH, "m")
    assert found["cost"] == pytest.approx(6 * COST)
    turns = [event for event in events if isinstance(event, TurnFinished)]
    assert sum(turn.usage.prompt_tokens + turn.usage.completion_tokens for turn in turns) == found["tokens"]
    assert sum(turn.cost or 0.0 for turn in turns) == pytest.approx(cast(float, found["cost"]))
    metrics = read_page(RunNumbers(lambda: statistics).page())
    assert sum(metrics["batch_agent_tokens_total"].values()) == found["tokens"]
    assert metrics["batch_agent_cost_dollars_total"] == {"": pytest.approx(found["cost"])}
    check_summary(place, statistics)


async def test_a_resumed_run_shows_all_sessions_first(tmp_path: Path) -> None:
    place, backend = str(tmp_path / "run"), ScriptedBackend(answer)
    await run(place, rows=4, backend=backend)
    results = await BatchAgent.run(**options(place, rows=6, backend=backend, resume=True))
    statistics = results.summary.statistics
    assert results.cost == pytest.approx(6 * COST) and dollars(6 * COST) in repr(results)
    found = agreed(place)
    assert (found["ok"], found["resumed"], found["tokens"]) == (6, 4, 6 * EACH)
    check_summary(place, statistics)
    both = f"{6 * EACH} tokens, {dollars(6 * COST)}, {dollars(COST)} a row, in all sessions"
    words = f"{both}; this session {2 * EACH} tokens"
    assert f"{words}, {dollars(2 * COST)}" in shown("status", place)


async def test_a_pipeline_with_a_stage_of_unknown_price(tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    rows = Pipeline([str(number) for number in range(4)])
    stages = rows.map(name="one", task="Do {input}", model="m", prices=PRICES).map(
        name="two", task="Check {input}", model="n"
    )
    outcome = await stages.run(backend=ScriptedBackend(answer), run_dir=place, progress=False)
    found = agreed(place)
    assert (found["tokens"], found["model"], found["cost_is_minimum"]) == (8 * EACH, "m, n", True)
    assert f"at least {dollars(4 * COST)}" in shown("status", place)
    check_summary(place, outcome.statistics)


async def test_a_run_with_worker_processes(tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    async with ScriptedServer(answer, models=["m"]) as server:
        statistics = await run(place, backend=server.backend_url, cluster=WarmCrew())
    assert agreed(place)["tokens"] == 6 * EACH
    check_summary(place, statistics)


@needs_redis
async def test_a_run_in_redis(url: str) -> None:
    async with ScriptedServer(answer, models=["m"]) as server:
        statistics = await run(url, backend=server.backend_url)
    found = await asyncio.to_thread(agreed, url)
    assert (found["state"], found["tokens"]) == ("complete", 6 * EACH)
    check_summary(url, statistics)


async def test_a_run_that_was_killed(tmp_path: Path) -> None:
    place, hang = str(tmp_path / "run"), asyncio.Event()

    async def script(request: Request) -> Say:
        if server.received > 4:
            await hang.wait()
        return Say("ok", usage=USAGE)

    async with ScriptedServer(script, models=["m"]) as server:
        (tmp_path / "rows.txt").write_text("\n".join(map(str, range(12))))
        words = ("run", "--task", "Do {input}", str(tmp_path / "rows.txt"), "--backend", server.backend_url)
        more = ("--model", "m", "--run-dir", place, "--max-inflight", "2", "--set", 'prices={"input":1,"output":2}')
        async with process("-m", "batch_agent", *words, *more) as started:
            await server.wait_requests(6)
            await _until(lambda: look(place).progress.ok == 4)
            started.send_signal(signal.SIGKILL)
            await started.wait()
        hang.set()
    found = agreed(place)
    assert (found["state"], found["ok"], found["tokens"]) == ("interrupted", 4, 4 * EACH)
    assert of_record(look(place)).rate == 0.0


async def test_a_run_that_was_cancelled(tmp_path: Path) -> None:
    place = str(tmp_path / "run")

    def script(request: Request) -> Say | Hang:
        return Hang() if len(backend.requests) > 3 else Say("ok", usage=USAGE)

    backend = ScriptedBackend(script)
    given = options(place, backend=backend, max_inflight=1)
    given.pop("progress")
    async with BatchAgent.open(**given) as running:
        await _until(lambda: running.statistics().ok == 3)
        running.cancel()
        async for _ in running.results():
            pass
    found = agreed(place)
    assert (found["state"], found["ok"], found["tokens"]) == ("interrupted", 3, 3 * EACH)


@pytest.mark.parametrize("is_pipeline", [False, True])
async def test_a_run_that_is_paused(tmp_path: Path, is_pipeline: bool) -> None:
    place = str(tmp_path / "run")
    go_on = asyncio.Event()

    async def script(request: Request) -> Say:
        if len(backend.requests) > 3:
            await go_on.wait()
        return Say("ok", usage=USAGE)

    backend = ScriptedBackend(script)
    given = options(place, backend=backend, max_inflight=1)
    given.pop("progress")
    if is_pipeline:
        rows, task = given.pop("inputs"), given.pop("task")
        opened: Any = Pipeline(rows).map(name="one", task=task).open(**given)
    else:
        opened = BatchAgent.open(**given)
    async with opened as running:
        await _until(lambda: running.statistics().ok == 3)
        running.pause()
        await _until(lambda: of_record(look(place)).state == "paused")
        found = await asyncio.to_thread(agreed, place)
        live = json.loads(await asyncio.to_thread(shown, "control", place, "status", "--json"))
        assert (found["state"], live["state"], found["ok"], live["rows"]["ok"]) == ("paused", "paused", 3, 3)
        assert live["all_sessions"]["tokens"] == found["tokens"] == 3 * EACH
        running.resume()
        await _until(lambda: of_record(look(place)).state == "running")
        running.drain()
        await _until(lambda: of_record(look(place)).state == "draining")
        go_on.set()
        if is_pipeline:
            await running.finish()
        else:
            async for _ in running.results():
                pass


async def test_a_fleet_with_a_server_down(tmp_path: Path) -> None:
    place, go_on = str(tmp_path / "run"), asyncio.Event()

    async def works(request: Request) -> Say:
        if one.received + other.received > 6:
            await go_on.wait()
        return Say("ok", usage=USAGE)

    async with (
        ScriptedServer(works, models=["m"]) as one,
        ScriptedServer(works, models=["m"]) as other,
    ):
        fleet = Fleet([one.backend_url, other.backend_url, "vllm://127.0.0.1:9"])
        given = options(place, rows=12, backend=fleet, max_inflight=6, control_requests=False)
        given.pop("progress")
        async with BatchAgent.open(**given) as running:
            await _until(lambda: bool(of_record(look(place)).degraded))
            text = await asyncio.to_thread(shown, "status", place)
            live = await asyncio.to_thread(shown, "control", place, "status")
            words = of_record(look(place)).degraded
            assert words.startswith("1 of 3 servers down: ")
            assert f"  degraded {words}" in text and "blocked" not in text
            assert "  degraded 1 of 3 servers down: " in live
            found = await asyncio.to_thread(surfaces, place)
            assert found["page"]["degraded"] == found["status"]["degraded"] == words
            assert found["page"]["trouble"] is None
            go_on.set()
            async for _ in running.results():
                pass
    agreed(place)


async def test_a_run_whose_price_is_not_known(tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    await run(place, backend=ScriptedBackend(answer), prices=None)
    found = agreed(place)
    assert (found["cost"], found["cost_is_minimum"], found["tokens"]) == (None, False, 6 * EACH)
    assert "price unknown" in shown("status", place)


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        (0, "$0"),
        (8.2e-05, "$0.000082"),
        (0.00048, "$0.00048"),
        (0.12, "$0.12"),
        (1, "$1.00"),
        (1234.5, "$1,234.50"),
    ],
)
def test_money_is_written_without_exponents(cost: float, words: str) -> None:
    assert dollars(cost) == words


async def _until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while True:
            with suppress(Exception):  # the run has no record yet
                if is_true():
                    return
            await asyncio.sleep(0.02)
