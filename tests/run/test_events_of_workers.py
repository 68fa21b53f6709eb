"""What observers see of a run is the same in every shape: the file of events, sinks, and the numbers for Prometheus.
Real processes, a real Redis."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.observe.exposition_rules import read_page
from tests.record.redis_servers import needs_redis
from tests.run.test_numbers import (
    COST,
    EACH,
    ROWS,
    SHAPES,
    SHARED,
    Script,
    notes_file,
    options,
    place,
    two_stages,
    until_second_turns,
    worker,
)

from batch_agent import BatchAgent
from batch_agent.events import (
    ControlFinished,
    Event,
    JobFinished,
    JobStarted,
    RowEvent,
    RunStarted,
    ToolFinished,
    TurnEvent,
    TurnFailed,
    TurnFinished,
    TurnStarted,
)
from batch_agent.messages import Usage
from batch_agent.observe.event_lines import event_json, read_events
from batch_agent.observe.prometheus import RunNumbers
from batch_agent.record.address import StoreAddress, place_of
from batch_agent.record.reader import open_run
from batch_agent.record.redis.reading import RedisReader
from batch_agent.record.redis.store import RedisRunStore
from batch_agent.testing import ScriptedServer

__all__ = ["notes_file", "place"]  # fixtures


class Observed:
    """A run with sinks: its events, and the page for Prometheus at its end."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._numbers = RunNumbers(lambda: self.run.statistics())

    async def work(self, given: dict[str, Any]) -> None:
        given.pop("progress", None)
        self.run = BatchAgent.open(**given, sinks=[self.events.append, self._numbers])
        async with self.run:
            assert all([result.ok async for result in self.run.results()])

    @property
    def page(self) -> dict[str, dict[str, float]]:
        """The values by name, without those that are 0."""
        page = read_page(self._numbers.page())
        return {name: {labels: value for labels, value in found.items() if value} for name, found in page.items()}

    @property
    def kinds(self) -> Counter[str]:
        return Counter(type(event).__name__ for event in self.events if isinstance(event, RowEvent))


@asynccontextmanager
async def at_work(script: Script) -> AsyncIterator[tuple[ScriptedServer, AsyncExitStack]]:
    async with AsyncExitStack() as extent:
        yield await extent.enter_async_context(ScriptedServer(script, models=["m"])), extent


def by_row(events: Sequence[Event]) -> dict[tuple[str, int], list[RowEvent]]:
    rows: dict[tuple[str, int], list[RowEvent]] = {}
    for event in events:
        if isinstance(event, RowEvent):
            rows.setdefault((event.run, event.index), []).append(event)
    return rows


@pytest.mark.parametrize("shape", SHAPES)
async def test_events_and_prometheus_say_the_same_in_every_shape(shape: str, place: str, tmp_path: Path) -> None:
    script, seen, file = Script(), Observed(), tmp_path / "events.jsonl"
    script.go_on.set()
    script.fails = {"row-1", "row-5"}
    async with at_work(script) as (server, extent):
        running = asyncio.ensure_future(seen.work(options(server, shape, place, events=file)))
        if shape == "Redis":
            await extent.enter_async_context(worker(place, server))
        await running
    assert seen.kinds == {"JobStarted": ROWS, "JobFinished": ROWS, "ToolStarted": ROWS, "ToolFinished": ROWS} | {
        "TurnStarted": 2 * ROWS + 2,
        "TurnFailed": 2,
        "TurnFinished": 2 * ROWS,
    }
    began = next(event.at for event in seen.events if isinstance(event, RunStarted))
    (run,) = {event.run for event in seen.events}
    for (of, _), events in by_row(seen.events).items():
        assert of == run
        assert [type(events[0]), type(events[1]), type(events[-1])] == [JobStarted, TurnStarted, JobFinished]
        times = [event.at for event in events]
        assert times == sorted(times) and times[0] >= began
        turns = [event for event in events if isinstance(event, TurnFinished)]
        assert [turn.turn for turn in turns] == [1, 2]
        assert all((turn.usage, turn.cost) == (Usage(60, completion_tokens=30), COST) for turn in turns)
        assert all(turn.seconds > 0 and turn.model == "m" for turn in turns)
        (started,) = [event for event in events if isinstance(event, JobStarted)]
        assert started.elsewhere == (shape != "local")
    retried = [event for event in seen.events if isinstance(event, TurnFailed)]
    assert {(event.index, event.turn, event.error_type) for event in retried} == {
        (1, 1, "Unavailable"),
        (5, 1, "Unavailable"),
    }
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == [json.loads(event_json(event)) for event in seen.events]
    page = seen.page
    assert page["batch_agent_retries_total"] == {'error_type="Unavailable"': 2}
    assert not page["batch_agent_turn_failures_total"]
    assert [*page["batch_agent_turns_total"].values()] == [2 * ROWS]
    assert page["batch_agent_tool_calls_total"] == {'tool="note",outcome="ok",source="run"': ROWS}
    assert page["batch_agent_tokens_total"] == {'kind="input"': 2 * ROWS * 60, 'kind="output"': 2 * ROWS * 30}
    assert page["batch_agent_cost_dollars_total"] == {"": pytest.approx(2 * ROWS * COST)}
    assert page["batch_agent_rows_finished_total"] == {'state="ok"': ROWS}
    for name, count in (("turn_duration", 2 * ROWS), ("row_duration", ROWS)):
        assert page[f"batch_agent_{name}_seconds_count"] == {"": count}


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_continued_session_shows_only_what_it_has_done(shape: str, place: str) -> None:
    """The first session is cancelled when each row has its first turn. The next one continues the rows."""
    script, seen = Script(), Observed()
    async with at_work(script) as (server, extent):
        first = asyncio.ensure_future(BatchAgent.run(**options(server, shape, place)))
        if shape == "Redis":
            victim = await extent.enter_async_context(worker(place, server))
        await until_second_turns(server, first)
        if shape == "Redis":
            os.kill(victim, signal.SIGKILL)
        first.cancel()
        await asyncio.wait([first])
        script.go_on.set()
        again = asyncio.ensure_future(seen.work(options(server, shape, place, resume=True)))
        if shape == "Redis":
            await extent.enter_async_context(worker(place, server))
        await again
    turns = [event for event in seen.events if isinstance(event, TurnFinished)]
    assert Counter((turn.index, turn.turn) for turn in turns) == Counter((row, 2) for row in range(ROWS))
    page = seen.page
    assert page["batch_agent_tokens_total"] == {'kind="input"': ROWS * 60, 'kind="output"': ROWS * 30}
    assert page["batch_agent_cost_dollars_total"] == {"": pytest.approx(ROWS * COST)}
    assert [*page["batch_agent_turns_total"].values()] == [ROWS]


@pytest.mark.parametrize("shape", SHARED)
async def test_no_event_of_a_killed_worker_comes_twice(shape: str, place: str) -> None:
    script, seen = Script(), Observed()
    async with at_work(script) as (server, extent):
        given = options(server, shape, place)
        running = asyncio.ensure_future(seen.work(given))
        if shape == "Redis":
            victim = await extent.enter_async_context(worker(place, server))
        await until_second_turns(server, running)
        if shape == "processes":
            victim = given["cluster"].pids[0]
        os.kill(victim, signal.SIGKILL)
        script.go_on.set()
        if shape == "Redis":
            await extent.enter_async_context(worker(place, server))
        await running
    for kind, turns in ((JobStarted, [0]), (TurnFinished, [1, 2]), (ToolFinished, [1]), (JobFinished, [0])):
        told = Counter(
            (event.index, event.turn if isinstance(event, TurnEvent) else 0)
            for event in seen.events
            if type(event) is kind
        )
        assert told == Counter((row, turn) for row in range(ROWS) for turn in turns), kind
    assert seen.page["batch_agent_tokens_total"] == {'kind="input"': 2 * ROWS * 60, 'kind="output"': 2 * ROWS * 30}


@pytest.mark.parametrize(
    ("shape", "heard"), [("local", True), ("local", False), pytest.param("Redis", True, marks=needs_redis)]
)
async def test_a_row_that_the_feeders_own_worker_takes_over_starts_once(shape: str, place: str, heard: bool) -> None:
    """``heard``: the feeder had passed on the events of the killed worker before."""
    script, seen, rows, half = Script(), Observed(), 3 * ROWS, ROWS // 2  # a worker takes 16 rows at once from Redis
    async with at_work(script) as (server, extent):
        given = options(server, shape, place, inputs=[f"row-{n}" for n in range(rows)], max_agents=half)
        given.pop("feed_only", None)
        running = asyncio.ensure_future(seen.work(given))
        await until_second_turns(server, running, half)
        victim = await extent.enter_async_context(worker(place, server))
        await until_second_turns(server, running, 2 * half)
        while heard and seen.kinds["JobStarted"] < 2 * half:
            await asyncio.sleep(0.05)
        os.kill(victim, signal.SIGKILL)
        script.go_on.set()
        await running
    assert Counter(event.index for event in seen.events if isinstance(event, JobStarted)) == Counter(range(rows))
    statistics = seen.run.statistics()
    assert (statistics.ended, statistics.done, statistics.alive) == ("complete", rows, 0)


@pytest.mark.parametrize("shape", SHARED[1:])
async def test_rows_that_the_feeders_own_worker_loses_end_once(shape: str, place: str) -> None:
    script, seen = Script(), Observed()
    async with at_work(script) as (server, extent):
        given = options(server, shape, place, max_inflight=4 * ROWS)
        del given["feed_only"]
        running = asyncio.ensure_future(seen.work(given))
        await until_second_turns(server, running)
        await extent.enter_async_context(worker(place, server))
        with open_run(place) as reader:
            assert isinstance(reader, RedisReader)
            while len(await asyncio.to_thread(reader.workers)) < 2:
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)  # the worker finds the server now: later it would try again only after half a minute
        time.sleep(1.5 * given["lease"])  # as if this process was suspended: its leases end
        await until_second_turns(server, running, 2 * ROWS)  # the other worker has its rows
        script.go_on.set()
        await running
    assert (seen.kinds["JobStarted"], seen.kinds["JobFinished"]) == (ROWS, ROWS)
    told = seen.run.statistics()
    assert (told.ended, told.started, told.done, told.interrupted) == ("complete", ROWS, ROWS, 0)


@pytest.mark.parametrize("shape", SHARED)
async def test_the_events_of_a_pipeline_are_those_of_its_stages(shape: str, place: str) -> None:
    script, events = Script(), list[Event]()
    script.go_on.set()
    numbers = RunNumbers(lambda: outcome.statistics)
    async with at_work(script) as (server, extent):
        given = options(server, shape, place, sinks=[events.append, numbers])
        running = asyncio.ensure_future(two_stages(given))
        if shape == "Redis":
            await extent.enter_async_context(worker(place, server))
        outcome = await running
    found = by_row(events)
    assert len(found) == 2 * ROWS and len({run for run, _ in found}) == 2
    told = ["JobStarted", "TurnStarted", "TurnFinished", "ToolStarted", "ToolFinished", "TurnStarted", "TurnFinished"]
    assert {tuple(type(event).__name__ for event in row) for row in found.values()} == {(*told, "JobFinished")}
    page = read_page(numbers.page())
    assert sum(page["batch_agent_turns_total"].values()) == 4 * ROWS
    assert sum(page["batch_agent_tokens_total"].values()) == 4 * ROWS * EACH
    assert page["batch_agent_rows"]['state="running"'] == 0


@pytest.mark.parametrize("shape", SHARED[1:])
@pytest.mark.parametrize("observed", [True, False])
async def test_redis_keeps_events_only_for_observers_and_only_during_the_run(
    shape: str, place: str, observed: bool
) -> None:
    script, seen, address = Script(), list[Event](), place_of(place)
    assert isinstance(address, StoreAddress)
    store = RedisRunStore.at(address)

    def kept() -> int:
        return int(store.connection.call(lambda client: client.execute_command("XLEN", store.key("events"))))

    async with at_work(script) as (server, extent):
        given = options(server, shape, place, sinks=[seen.append] if observed else [])
        running = asyncio.ensure_future(BatchAgent.run(**given))
        await extent.enter_async_context(worker(place, server))
        await until_second_turns(server, running)
        assert store.standing().observed == observed
        if observed:  # events come also before a row has its result
            while sum(isinstance(event, TurnStarted) for event in seen) < 2 * ROWS or kept():
                await asyncio.sleep(0.05)
        assert kept() == 0
        script.go_on.set()
        await running
    assert not store.connection.call(lambda client: client.execute_command("EXISTS", store.key("events")))
    store.close()


def test_an_event_that_workers_do_not_send_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    sent = [
        ControlFinished(1.0, "theirs", "gpu", 0.5, Usage(3), None, "refused \ud800"),
        TurnFinished(1.5, "theirs", 0, 1, Usage(1), 0.5, None, 0.25, Usage(2), "gpu", "m"),
    ]
    forged = [b"", b"[]", b'{"event": "RunFinished"}', b'{"event": "TurnStarted", "at": "now"}', b"{"]
    found = list(read_events(b"\n".join([*map(event_json, sent), *forged]), "ours"))
    assert [(type(event), event.run) for event in found] == [(ControlFinished, "ours"), (TurnFinished, "ours")]
    assert found[1] == TurnFinished(1.5, "ours", 0, 1, Usage(1), 0.5, None, 0.25, Usage(2), "gpu", "m")
    assert len(caplog.records) == len(forged)
