"""The numbers of a run as Prometheus reads them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.observe.exposition_rules import promtool, read_page

from batch_agent import BatchAgent, SpecError, Tool
from batch_agent.events import ToolFinished
from batch_agent.observe.exposition import MOST_SERIES, Counter, Gauge, Histogram, page, read_place
from batch_agent.observe.prometheus import LiveNumbers, RunNumbers
from batch_agent.scheduler.server import Endpoint
from batch_agent.testing import CallTools, Fail, Request, Say, ScriptedBackend, ToolUse, virtual_clock


@Tool.define(effect="read", cacheable=False)
async def look_up(key: str) -> str:
    await asyncio.sleep(0.5)
    return key


def script(request: Request) -> Say:
    if request.text == "broken":
        return Say("")
    return CallTools(ToolUse("look_up", {"key": "k"})) if request.turn == 0 else Say("done")


async def scrape(url: str) -> str:
    async with aiohttp.ClientSession() as client, client.get(url) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return await response.text()


async def test_a_run_is_scraped_while_it_works() -> None:
    scraped: list[str] = []

    async def scrape_at_the_end(_: object) -> None:
        url = run.metrics_url
        assert url is not None
        scraped.append(await scrape(url))

    run = BatchAgent.open(
        task="{input}",
        inputs=["a", "b", "broken"],
        tools=[look_up],
        backend=ScriptedBackend(script),
        max_retries=0,
        max_inflight=1,
        metrics_port=0,
        on_result=scrape_at_the_end,
    )
    async with run:
        assert sum([result.ok async for result in run.results()]) == 2
    values = read_page(scraped[-1])
    assert promtool("check", "metrics", text=scraped[-1]) in ("", None)
    assert values["batch_agent_rows_finished_total"]['state="ok"'] == 2
    assert sum(values["batch_agent_row_failures_total"].values()) == 1
    assert sum(values["batch_agent_turns_total"].values()) == 4
    assert values["batch_agent_tool_calls_total"]['tool="look_up",outcome="ok",source="run"'] >= 1
    assert values["batch_agent_row_duration_seconds_count"][""] == 3
    assert [*values["batch_agent_endpoint_limit"].values()] == [1]
    assert [*values["batch_agent_endpoint_up"].values()] == [1]
    assert values["batch_agent_rows"] == {'state="running"': 0, 'state="waiting"': 0}
    assert run.metrics_url is None


async def test_a_port_that_is_taken_ends_the_run_before_anything_is_sent() -> None:
    backend = ScriptedBackend(script)
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with taken:
        port = taken.sockets[0].getsockname()[1]
        with pytest.raises(SpecError, match="metrics_port: cannot listen on"):
            await BatchAgent.run(task="{input}", inputs=["a"], backend=backend, metrics_port=port)
    assert not backend.requests


@pytest.mark.parametrize("place", ["", ":80", "localhost", "localhost:70000", "a:b"])
async def test_a_place_that_is_none_is_refused(place: str) -> None:
    with pytest.raises(SpecError, match="metrics_port"):
        read_place(place)


def test_another_host_than_this_one_has_to_be_named() -> None:
    assert read_place(9464) == ("127.0.0.1", 9464)
    assert read_place("0.0.0.0:9464") == ("0.0.0.0", 9464)
    assert read_place("[::1]:0") == ("::1", 0)


def test_counters_with_known_labels_begin_at_zero() -> None:
    live = LiveNumbers([("gpu-1", Endpoint())])
    values = read_page(RunNumbers(live=lambda: live).page())
    assert values["batch_agent_outages_total"] == values["batch_agent_turns_total"] == {'endpoint="gpu-1"': 0}
    assert values["batch_agent_rows_finished_total"] == {'state="ok"': 0, 'state="failed"': 0}
    assert values["batch_agent_retries_total"]['error_type="RateLimited"'] == 0
    assert values["batch_agent_row_failures_total"]['error_type="Truncated"'] == 0


@virtual_clock
async def test_retries_and_outages_are_counted_by_their_reason() -> None:
    numbers = RunNumbers()
    failing = iter([Fail(429), Fail(503)])
    backend = ScriptedBackend(lambda request: next(failing, Say("ok")))
    await BatchAgent.run(task="{input}", inputs=["a"], backend=backend, sinks=[numbers], control_requests=False)
    retries = read_page(numbers.page())["batch_agent_retries_total"]
    assert sum(retries.values()) == 2 and len([count for count in retries.values() if count]) == 2


def test_labels_that_come_from_outside_cannot_fill_a_database() -> None:
    numbers = RunNumbers()
    for number in range(5 * MOST_SERIES):
        numbers(ToolFinished(1.0, "r", 0, 1, 0, "c", f"invented_{number}", 0.1, False, "run"))
    values = read_page(numbers.page())
    assert len(values["batch_agent_tool_calls_total"]) == MOST_SERIES + 1
    assert len(values["batch_agent_tool_duration_seconds_count"]) == MOST_SERIES + 1
    assert sum(values["batch_agent_tool_calls_total"].values()) == 5 * MOST_SERIES


@given(st.text(), st.text(), st.floats(allow_nan=False, allow_infinity=False))
def test_any_text_makes_a_page_that_can_be_read(label: str, text: str, value: float) -> None:
    counter, gauge = Counter("batch_agent_a_total", text, ("x",)), Gauge("batch_agent_b", text, ("x", "y"))
    histogram = Histogram("batch_agent_c_seconds", text, ("x",))
    counter.add(abs(value), label)
    gauge.set(value, label, label)
    histogram.observe(value, label)
    lines = page([counter, gauge, histogram]).split("\n")
    assert len(lines) == 6 + 1 + 1 + 16 + 2 + 1


@virtual_clock
async def test_events_are_appended_to_a_file_as_lines_of_json(tmp_path: Path) -> None:
    file, seen = tmp_path / "events.jsonl", []
    for _ in range(2):
        results = await BatchAgent.run(
            task="{input}", inputs=["a"], backend=ScriptedBackend(lambda _: Say("x")), events=file, sinks=[seen.append]
        )
        assert results[0].ok
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["event"] for line in lines] == [type(event).__name__ for event in seen]
    finished = next(line for line in lines if line["event"] == "TurnFinished")
    assert finished["usage"]["completion_tokens"] >= 0 and finished["turn"] == 1


async def test_a_file_of_events_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="events: cannot write"):
        await BatchAgent.run(task="{input}", inputs=["a"], backend=ScriptedBackend(script), events=tmp_path)
