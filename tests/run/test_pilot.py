"""A pilot in Python: which rows go first, when the others follow, and that no row is asked twice, in every shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.run.process_work import WarmCrew

import batch_agent.files.read
from batch_agent import BatchAgent, Pipeline, SpecError
from batch_agent.job import UnreadableRow
from batch_agent.messages import Usage
from batch_agent.run.pilot import Pilot
from batch_agent.testing import BatchServer, Fail, Request, Say, ScriptedBackend, ScriptedServer
from batch_agent.trust.intervals import share
from batch_agent.trust.order import KeyedOrder
from batch_agent.trust.totals import total

FEW = 8
ROWS = [{"id": f"r{number}", "text": f"text {number}"} for number in range(60)]


def positions(count: int = FEW, rows: list[Any] = ROWS) -> list[int]:
    return sorted(KeyedOrder().first([row["id"] for row in rows], count))


class Asked(list[str]):
    """The last messages of all requests."""

    def backend(self) -> ScriptedBackend:
        def answer(request: Request) -> Say:
            self.append(request.text)
            return Say(f"answer to {request.text}")

        return ScriptedBackend(answer)


def options(asked: Asked, **more: Any) -> dict[str, Any]:
    return {"task": "{text}", "inputs": ROWS, "backend": asked.backend(), "pilot": FEW, **more}


async def test_run_asks_the_rows_of_the_pilot_first_and_continues_in_input_order() -> None:
    asked = Asked()
    results = await BatchAgent.run(**options(asked, max_inflight=1))
    assert [result.index for result in results] == [*range(len(ROWS))]
    assert results.summary.statistics.ended == "complete"
    first = KeyedOrder().first([row["id"] for row in ROWS], FEW)
    others = [number for number in range(len(ROWS)) if number not in first]
    assert asked == [f"text {number}" for number in (*first, *others)]


@pytest.mark.parametrize("table", ["list", "file", "large file", "frame"])
async def test_only_the_pilot_returns_its_rows_in_input_order(
    tmp_path: Path, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, inputs = Asked(), Any
    inputs = ROWS
    if "file" in table:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        inputs = batch_agent.files.read.read_inputs(path, at_once_bytes=0 if table == "large file" else 2**20)
    elif table == "frame":
        inputs = pytest.importorskip("pandas").DataFrame(ROWS)
    results = await BatchAgent.run(**options(asked, inputs=inputs, pilot_only=True))
    assert [result.index for result in results] == positions()
    assert results.summary.statistics.ended == "pilot" and results.summary.statistics.total == len(ROWS)
    assert len(asked) == FEW


async def test_a_larger_pilot_contains_a_smaller_one_and_pays_only_for_the_rest(tmp_path: Path) -> None:
    asked, place = Asked(), tmp_path / "run"
    small = await BatchAgent.run(**options(asked, pilot_only=True, run_dir=place))
    large = await BatchAgent.run(**options(asked, pilot=20, pilot_only=True, run_dir=place, resume=True))
    assert {result.job_id for result in small} < {result.job_id for result in large}
    assert len(asked) == 20 and sum(result.resumed for result in large) == FEW
    every = await BatchAgent.run(**options(asked, pilot=None, run_dir=place, resume=True))
    assert len(asked) == len(set(asked)) == len(every) == len(ROWS)


async def test_an_open_run_holds_the_other_rows_until_the_results_are_taken() -> None:
    asked = Asked()
    async with BatchAgent.open(**options(asked)) as run:
        pilot = await run.pilot()
        assert [result.index for result in pilot] == positions()
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(asked) == FEW
        results = [result async for result in run.results()]
    assert len(results) == len(asked) == len(ROWS)
    async with BatchAgent.open(**options(asked)) as run:
        await run.pilot()
    assert len(asked) == len(ROWS) + FEW  # leaving the run ends it
    async with BatchAgent.open(**options(asked, pilot=None)) as run:
        with pytest.raises(SpecError, match="this run has no pilot"):
            await run.pilot()


async def test_a_stream_and_a_callback_get_each_row_once() -> None:
    asked, called = Asked(), list[int]()
    more = options(asked, on_result=lambda result: called.append(result.index))
    streamed = [result.index async for result in BatchAgent.stream(**more)]
    assert sorted(streamed) == sorted(called) == [*range(len(ROWS))]
    assert set(streamed[:FEW]) == {*positions()}


async def test_failed_and_unreadable_rows_are_rows_of_the_pilot() -> None:
    asked = Asked()
    inputs: list[Any] = [dict(row) for row in ROWS]
    for number in positions()[:3]:
        inputs[number] = {"id": ROWS[number]["id"], "words": "no text"}
    results = await BatchAgent.run(**options(asked, inputs=inputs, pilot_only=True))
    assert [result.ok for result in results] == [False] * 3 + [True] * (FEW - 3)
    pilot = Pilot(5)
    chosen = pilot.choose([UnreadableRow("bad"), *ROWS[:9]], None)
    assert (len(chosen), pilot.of) == (5, 10)


async def test_rows_without_ids_use_their_position_and_repeated_ids_are_names_of_their_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bare = [{"text": row["text"]} for row in ROWS]
    results = await BatchAgent.run(**options(Asked(), inputs=bare, pilot_only=True))
    first = KeyedOrder().first(map(str, range(len(ROWS))), FEW)
    assert [result.index for result in results] == sorted(first)
    twice = [{"id": "same", "text": row["text"]} for row in ROWS]
    every = await BatchAgent.run(**options(Asked(), inputs=twice))
    assert [result.job_id for result in every] == ["same", *(f"same~{number}" for number in range(2, len(ROWS) + 1))]
    assert caplog.text.count("more than one row has the id") == 1


def lines() -> Iterator[dict[str, str]]:
    yield from ROWS


async def later() -> AsyncIterator[dict[str, str]]:
    for row in ROWS:
        yield row


@pytest.mark.parametrize(("inputs", "words"), [(lines, "an iterator .generator"), (later, "an async iterator")])
async def test_inputs_that_cannot_be_counted_are_refused_by_name(inputs: Any, words: str) -> None:
    asked = Asked()
    with pytest.raises(SpecError, match=f"pilot needs inputs that can be counted.*{words}"):
        await BatchAgent.run(**options(asked, inputs=inputs()))
    with pytest.raises(SpecError, match="pilot needs inputs"):
        Pipeline(inputs()).filter(bool).map(task="{text}").open(backend=asked.backend(), pilot=3)
    assert not asked


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many"])
async def test_a_pilot_is_a_whole_number_above_0(value: object) -> None:
    with pytest.raises(SpecError, match="pilot: must be a whole number above 0"):
        await BatchAgent.run(**options(Asked(), pilot=value))
    with pytest.raises(SpecError, match="pilot_key needs pilot"):
        await BatchAgent.run(**options(Asked(), pilot=None, pilot_key="key"))


def pipelines() -> dict[str, Pipeline[Any]]:
    rows = Pipeline(ROWS)
    one = rows.map(name="one", task="{text}")
    other = Pipeline([{"key": number, "town": f"town {number}"} for number in range(60)])
    return {
        "two stages": one.map(name="two", task="again {input}"),
        "a filter first": rows.filter(lambda row: row["text"][-1] in "02468").map(name="two", task="{text}"),
        "a filter that keeps no row": rows.filter(lambda row: False).map(name="two", task="{text}"),
        "rows that become several": one.flat_map(lambda text: [f"{text} a", f"{text} b"]).map(
            name="two", task="{input}"
        ),
        "a table that is looked up": rows.join(
            other, key=lambda row: int(row["text"].split()[1]), other_key=lambda row: row["key"]
        )
        .flat_map(lambda pair: [f"{pair[0]['text']} {pair[1]['town']}"])
        .map(name="two", task="{input}"),
        "a reduction at the end": one.reduce("Sum up {n}", name="two"),
    }


@pytest.mark.parametrize("kind", pipelines())
async def test_in_a_pipeline_the_rows_of_the_pilot_go_through_all_stages_and_then_the_others(
    kind: str, tmp_path: Path
) -> None:
    pipeline, plain, asked = pipelines()[kind], Asked(), Asked()
    want = await pipeline.run(backend=plain.backend())
    async with pipeline.open(backend=asked.backend(), pilot=FEW) as flow:
        await asyncio.wait_for(flow.pilot(), 20)
        at_the_pilot = len(asked)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(asked) == at_the_pilot <= 3 * FEW
        await flow.finish()
        outputs, ids = flow.outputs(), [result.job_id for result in flow.results()]
    if kind != "a reduction at the end":  # its answer repeats the rows in the order of the inputs
        assert sorted(asked) == sorted(plain)
    assert outputs == want.outputs
    assert ids == [result.job_id for result in [*want.results.values()][-1]] or "reduction" in kind


@pytest.mark.parametrize("kind", pipelines())
async def test_only_the_pilot_of_a_pipeline_is_asked_and_nothing_again_later(kind: str, tmp_path: Path) -> None:
    pipeline, plain, asked = pipelines()[kind], Asked(), Asked()
    want = await pipeline.run(backend=plain.backend())
    how = {"pilot": FEW, "run_dir": tmp_path / "run"}
    part = await asyncio.wait_for(pipeline.run(backend=asked.backend(), pilot_only=True, **how), 20)
    assert part.statistics.ended == "pilot"
    assert len(asked) <= 3 * FEW
    whole = await pipeline.run(backend=asked.backend(), resume=True, **how)
    assert sorted(asked) == sorted(plain)
    assert whole.outputs == want.outputs


async def test_a_pilot_that_cannot_finish_ends_with_the_run() -> None:
    async with ScriptedServer(lambda _: Fail(500, "broken"), models=["m"]) as server:
        how = {"backend": server.backend_url, "model": "m", "max_retries": 0, "max_total_tokens": 10}
        async with BatchAgent.open(**{**options(Asked()), **how}) as run:
            pilot = await asyncio.wait_for(run.pilot(), 30)
            run.drain()
    assert all(not result.ok for result in pilot)


async def test_what_the_pilot_says_of_all_rows_is_in_its_summary() -> None:
    def answer(request: Request) -> Say:
        return Say("word " * 20, usage=Usage(100, completion_tokens=20))

    prices = {"input": 10.0, "output": 100.0}
    how = options(Asked(), backend=ScriptedBackend(answer), prices=prices, max_tokens=30, pilot_only=True)
    found = (await BatchAgent.run(**how)).summary.pilot
    assert found is not None and found.cost is not None and found.most is not None
    each = (100 * 10 + 20 * 100) / 1e6
    assert found.cost.value == pytest.approx(len(ROWS) * each)
    assert found.cost.interval == pytest.approx((len(ROWS) * each,) * 2)  # all rows cost the same
    assert len(ROWS) * each < found.most < 20 * len(ROWS) * each
    assert found.unseen == share(0, FEW, len(ROWS)).at_most
    text = str((await BatchAgent.run(**how)).summary)
    assert "A row that is dearer or slower than those seen here is not in these numbers." in text
    unbounded = (await BatchAgent.run(**{**how, "max_tokens": None})).summary.to_json()["pilot"]
    assert isinstance(unbounded, dict) and unbounded["most_cost"] is None


async def test_the_cost_of_a_row_of_a_pipeline_is_that_of_all_its_stages() -> None:
    def answer(request: Request) -> Say:
        return Say("word", usage=Usage(100, completion_tokens=20))

    one = Pipeline(ROWS).map(name="one", task="{text}").flat_map(lambda text: [f"{text} a", f"{text} b"])
    pipeline = one.map(name="two", task="{input}")
    async with pipeline.open(backend=ScriptedBackend(answer), pilot=FEW, prices={"input": 10, "output": 100}) as flow:
        found = (await flow.pilot()).summary.pilot
    assert found is not None and found.cost is not None
    assert found.cost.value == pytest.approx(len(ROWS) * 3 * (100 * 10 + 20 * 100) / 1e6)
    how = {"prices": {"input": 10, "output": 100}, "pilot": FEW, "pilot_only": True}
    only = (await pipeline.run(backend=ScriptedBackend(answer), **how)).summary.pilot
    assert only is not None and only.cost == found.cost and only.done == FEW


async def test_worker_processes_stop_after_the_pilot_and_get_the_examples(tmp_path: Path) -> None:
    async with ScriptedServer(lambda request: Say(request.text), models=["m"]) as server:
        examples = [({"text": "an example"}, "its answer")]
        how = options(Asked(), backend=server.backend_url, model="m", examples=examples, run_dir=tmp_path / "run")
        async with BatchAgent.open(**how, cluster=WarmCrew()) as run:
            pilot = await asyncio.wait_for(run.pilot(), 60)
            assert [result.index for result in pilot] == positions() and all(result.ok for result in pilot)
        assert server.received == FEW
        only = await BatchAgent.run(**{**how, "pilot": 20}, cluster=WarmCrew(), pilot_only=True, resume=True)
        assert (len(only), server.received) == (20, 20)
        assert {"an example" in str(request.body["messages"][0]) for request in server.requests} == {True}
        assert len(await BatchAgent.run(**how, resume=True)) == server.received == len(ROWS)


async def test_the_pilot_is_a_job_of_its_own_in_a_batch_api_and_is_taken_over_by_a_resume(tmp_path: Path) -> None:
    async with BatchServer(lambda request: Say(request.text), polls=3) as server:
        where = f"openai-batch://{server.address}/v1?tls=false&gather=0.05&look=0.1"
        how = options(Asked(), backend=where, model="m", api_key="k", run_dir=tmp_path / "run", resume=True)
        first = asyncio.ensure_future(BatchAgent.run(**how, pilot_only=True))
        while not server.jobs or not server.jobs[0].polls:
            await asyncio.sleep(0.02)
        first.cancel()
        await asyncio.wait([first])
        async with BatchAgent.open(**how) as run:
            pilot = await run.pilot()
            assert [result.index for result in pilot] == positions() and all(result.ok for result in pilot)
            assert [len(job.requests) for job in server.jobs] == [FEW]
            assert len([result async for result in run.results()]) == len(ROWS)
        assert [len(job.requests) for job in server.jobs] == [FEW, len(ROWS) - FEW]


def test_a_pilot_of_a_sorted_table_says_what_all_rows_cost() -> None:
    """The first rows, or those that finish first, would say it wrongly each time."""
    count, few, keys = 1_000, 50, 20
    rows = [{"id": f"row {number}"} for number in range(count)]
    costs = [1 + number / 100 for number in range(count)]  # the table is sorted by cost
    covered = 0
    for key in range(keys):
        chosen = Pilot(few, f"key {key}").choose(rows, None)
        low, high = total([costs[row.index] for row in chosen], count).interval
        covered += low <= sum(costs) <= high
    assert covered >= 0.9 * keys
    low, high = total(costs[:few], count).interval
    assert not low <= sum(costs) <= high
