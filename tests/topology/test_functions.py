"""The user's own functions in a pipeline: beside the event loop, and bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from typing import Any

import pytest

from batch_agent import Pipeline, SpecError
from batch_agent.testing import Request, Say, ScriptedBackend, virtual_clock


def reply(request: Request) -> Say:
    return Say(request.text, latency=0.01)


def numbers(made: list[int]) -> Iterator[str]:
    for number in count():
        made.append(number)
        yield str(number)


@virtual_clock
async def test_agents_go_on_while_a_function_takes_long() -> None:
    asked_again = threading.Event()

    def slow(text: str) -> bool:
        return text != "a" or asked_again.wait(30)

    def script(request: Request) -> Say:
        if request.text == "last b":
            asked_again.set()
        return Say(request.text.split()[-1])

    left = Pipeline(["b", "a"]).map(name="first", task="{input}").map(name="last", task="last {input}")
    right = Pipeline(["a"]).map(name="other", task="{input}").filter(slow)
    joined = left.join(right, key=lambda text: "a", other_key=lambda text: text)
    outcome = await joined.run(backend=ScriptedBackend(script))
    assert outcome.outputs == [("b", "a"), ("a", "a")]


async def test_an_endless_flat_map_is_read_as_slots_need_it_and_ends_with_the_runs_time() -> None:
    made: list[int] = []
    pipeline = Pipeline(["a"]).map(task="{input}").flat_map(lambda text: numbers(made)).map(name="each", task="{input}")
    outcome = await pipeline.run(backend=ScriptedBackend(reply), max_inflight=4, max_wall_time=0.5)
    done = [result.output for result in outcome.results["each"] if result.ok]
    assert done == [str(number) for number in range(len(done))]
    assert len(done) <= len(made) < len(done) + 100
    assert outcome.statistics.ended == "out of budget"


@pytest.mark.parametrize("end", ["outputs", "agents", "reduction"])
async def test_a_function_that_never_returns_ends_with_the_runs_time(end: str) -> None:
    stuck, never = threading.Event(), threading.Event()

    def hang(text: str) -> list[str]:
        stuck.set()
        never.wait()
        return []

    pipeline: Pipeline[Any] = Pipeline(["a"]).map(task="{input}").flat_map(hang)
    if end == "agents":
        pipeline = pipeline.map(name="each", task="{input}")
    elif end == "reduction":
        pipeline = pipeline.reduce("Sum up")
    outcome = await pipeline.run(backend=ScriptedBackend(reply), max_wall_time=0.3)
    never.set()
    assert stuck.is_set()
    assert outcome.outputs == []
    assert outcome.statistics.ended == "out of budget"


@virtual_clock
async def test_rows_that_a_generator_gave_before_it_raised_go_on() -> None:
    def torn(text: str) -> Iterator[str]:
        yield "one"
        raise ValueError("no more")

    pipeline = Pipeline(["a", "b"]).flat_map(torn).map(task="{input}")
    outcome = await pipeline.run(backend=ScriptedBackend(reply))
    said = [result.output if result.ok else result.error.message for result in outcome.results["map"]]
    assert said == ["one", "the function of flat_map raised ValueError: no more"] * 2


@virtual_clock
async def test_a_drained_pipeline_stops_to_read_inputs_that_never_come() -> None:
    async def inputs() -> AsyncIterator[str]:
        yield "a"
        await asyncio.get_running_loop().create_future()

    flow = Pipeline(inputs()).filter(bool).map(task="{input}").reduce("Sum up").open(backend=ScriptedBackend(reply))
    async with flow:
        await asyncio.sleep(1)
        flow.drain()
        await flow.finish()
    assert [result.output for result in flow.nodes[0].results] == ["a"]
    assert flow.statistics().ended == "drained"


@pytest.mark.parametrize(
    "pipeline",
    [
        lambda row: Pipeline(["a"]).map(task="{input}").filter(row),
        lambda row: Pipeline(["a"]).map(task="{input}").flat_map(row),
        lambda row: Pipeline(["a"]).map(task="{input}").join(Pipeline(["a"]), key=row, other_key=len),
    ],
)
@virtual_clock
async def test_an_async_function_fails_its_row_with_an_error_that_says_so(
    pipeline: Callable[[Any], Pipeline[Any]],
) -> None:
    async def later(text: str) -> bool:
        return True

    flow = pipeline(later).open(backend=ScriptedBackend(reply))
    async with flow:
        await flow.finish()
    [item] = flow.collector.items
    assert item.error is not None and "it is async, but a plain function is needed here" in item.error.message


@virtual_clock
async def test_a_key_that_raises_on_the_side_that_is_looked_up_ends_the_pipeline() -> None:
    joined = Pipeline(["a"]).map(task="{input}").join(Pipeline([1]), key=len, other_key=len)
    with pytest.raises(SpecError, match="the key of a row raised TypeError"):
        await joined.run(backend=ScriptedBackend(reply))
