"""The stream of events: who is meant is never in doubt, times are those on the wall, and nothing private is told."""

from __future__ import annotations

import asyncio
import time

from batch_agent import BatchAgent, Tool
from batch_agent.events import (
    AnswerRejected,
    DrainStarted,
    Event,
    JobFinished,
    RunFinished,
    RunStarted,
    ToolFinished,
    ToolStarted,
)
from batch_agent.testing import CallTools, Request, Say, ScriptedBackend, ToolUse, virtual_clock


@Tool.define(effect="read", cacheable=False)
async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "confidential result"


def script(request: Request) -> Say:
    if request.turn < 2:
        # The first call of an answer ends after the second.
        return CallTools(ToolUse("wait", {"seconds": 3.5}), ToolUse("wait", {"seconds": 1.5}), text="secret thought")
    return Say("private answer")


async def listen(events: list[Event], rows: int = 2) -> None:
    async with BatchAgent.open(
        task="classified {input}",
        inputs=[str(n) for n in range(rows)],
        tools=[wait],
        backend=ScriptedBackend(script),
        sinks=[events.append],
    ) as run:
        assert [result.ok async for result in run.results()] == [True] * rows


@virtual_clock
async def test_every_call_s_end_is_paired_with_its_start_by_run_agent_turn_and_place() -> None:
    events: list[Event] = []
    await asyncio.gather(listen(events), listen(events))
    begun = {(e.run, e.index, e.turn, e.call): e for e in events if isinstance(e, ToolStarted)}
    ended = {(e.run, e.index, e.turn, e.call): e for e in events if isinstance(e, ToolFinished)}
    assert begun.keys() == ended.keys() and len(begun) == 2 * 2 * 2 * 2
    for key, end in ended.items():
        assert (begun[key].tool, begun[key].call_id) == (end.tool, end.call_id)
        assert abs((end.at - begun[key].at) - (3.5 if end.call == 0 else 1.5)) < 0.001


@virtual_clock
async def test_an_event_says_which_run_it_is_of() -> None:
    events: list[Event] = []
    await asyncio.gather(listen(events, 1), listen(events, 3))
    started = [event for event in events if isinstance(event, RunStarted)]
    assert len({event.run for event in started}) == 2
    for start in started:
        mine = [event for event in events if event.run == start.run]
        assert mine[0] is start and isinstance(mine[-1], RunFinished)
        assert len([event for event in mine if isinstance(event, JobFinished)]) == start.total


@virtual_clock
async def test_times_are_those_on_the_wall_and_go_only_forward() -> None:
    before = time.time()
    events: list[Event] = []
    await listen(events)
    times = [event.at for event in events]
    assert before <= times[0] <= time.time()
    assert times == sorted(times)


@virtual_clock
async def test_events_hold_no_prompt_no_answer_and_no_result_of_a_tool() -> None:
    events: list[Event] = []
    await listen(events)
    told = repr(events)
    for private in ("classified", "secret thought", "private answer", "confidential result", "3.5}"):
        assert private not in told
    [first, _] = [event for event in events if isinstance(event, JobFinished)]
    assert (first.ok, first.turns, first.resumed, first.usage.completion_tokens > 0) == (True, 3, False, True)


@virtual_clock
async def test_an_answer_that_is_rejected_and_asked_for_again_is_told() -> None:
    events: list[Event] = []
    answers = {0: "seven", 1: "7"}
    async with BatchAgent.open(
        task="Count {input}",
        inputs=["a"],
        output_schema=int,
        backend=ScriptedBackend(lambda request: Say(answers[request.turn])),
        sinks=[events.append],
    ) as run:
        assert [result.output async for result in run.results()] == [7]
        assert run.statistics().rejected == 1
    [rejected] = [event for event in events if isinstance(event, AnswerRejected)]
    assert (rejected.index, rejected.turn, rejected.error_type) == (0, 1, "NotJSON")


@virtual_clock
async def test_draining_is_told_once() -> None:
    events: list[Event] = []
    async with BatchAgent.open(
        task="Say {input}", inputs=["a"], backend=ScriptedBackend(lambda _: Say("x")), sinks=[events.append]
    ) as run:
        run.drain()
        run.drain()
        assert run.statistics().draining
        async for _ in run.results():
            pass
    assert len([event for event in events if isinstance(event, DrainStarted)]) == 1
