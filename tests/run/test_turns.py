"""Slots, turns and conversations, on a virtual clock: nothing here waits for real time."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from pydantic import BaseModel

from batch_agent import BatchAgent, Tool
from batch_agent.agent.fingerprint import fingerprint_of
from batch_agent.backends.base import Capabilities
from batch_agent.errors import SpecError
from batch_agent.events import Event, StreamingDecided
from batch_agent.scheduler.numbers import N
from batch_agent.testing import CallTools, Request, Say, ScriptedBackend, ToolUse, virtual_clock


class Answer(BaseModel):
    word: str


@Tool.define(effect="read")
async def look_up(word: str) -> str:
    await asyncio.sleep(1)
    return f"about {word}"


def tool_then_answer(request: Request) -> Say:
    if request.turn == 0:
        return CallTools(ToolUse("look_up", {"word": request.text}), latency=0.1)
    return Say("done", latency=0.1)


@virtual_clock
async def test_results_come_in_input_order_whatever_finishes_first() -> None:
    backend = ScriptedBackend(lambda request: Say(request.text, latency=10 - int(request.text)))
    results = await BatchAgent.run(task="{input}", inputs=[str(n) for n in range(8)], backend=backend)
    assert [result.output for result in results] == [str(n) for n in range(8)]


@virtual_clock
async def test_a_stream_yields_results_as_they_finish() -> None:
    backend = ScriptedBackend(lambda request: Say(request.text, latency=10 - int(request.text)))
    stream = BatchAgent.stream(task="{input}", inputs=[str(n) for n in range(8)], backend=backend)
    assert [result.output async for result in stream] == [str(n) for n in reversed(range(8))]


@virtual_clock
async def test_max_inflight_is_never_exceeded_and_is_used_in_full() -> None:
    backend = ScriptedBackend(lambda request: Say("ok", latency=1))
    results = await BatchAgent.run(task="{input}", inputs=map(str, range(50)), backend=backend, max_inflight=7)
    assert backend.peak_inflight == 7
    assert len(results) == 50


@virtual_clock
async def test_a_slot_is_free_while_a_tool_runs() -> None:
    backend = ScriptedBackend(tool_then_answer)
    loop = asyncio.get_running_loop()
    began = loop.time()
    results = await BatchAgent.run(
        task="{input}", inputs=map(str, range(10)), tools=[look_up], backend=backend, max_inflight=1
    )
    # Ten agents, two calls of 0.1 s each, one at a time; the seconds in the tool overlap.
    assert loop.time() - began == pytest.approx(2.0, abs=0.2)
    assert all(result.ok for result in results)
    assert backend.peak_inflight == 1


@virtual_clock
async def test_max_agents_bounds_the_agents_alive_and_max_dispatched_is_its_old_name() -> None:
    alive = peak = 0

    @Tool.define(effect="write")
    async def count() -> str:
        nonlocal alive, peak
        alive += 1
        peak = max(peak, alive)
        await asyncio.sleep(5)
        alive -= 1
        return "counted"

    def script(request: Request) -> Say:
        return CallTools(ToolUse("count")) if request.turn == 0 else Say("done")

    for options in ({"max_agents": 3}, {"max_dispatched": 3}):
        peak = 0
        await BatchAgent.run(
            task="{input}", inputs=map(str, range(12)), tools=[count], backend=ScriptedBackend(script), **options
        )
        assert peak == 3


@virtual_clock
async def test_the_agent_nearest_its_end_is_served_before_newcomers() -> None:
    order: list[tuple[str, int]] = []

    def script(request: Request) -> Say:
        question = str(request.messages[0]["content"])
        order.append((question, request.turn))
        return CallTools(ToolUse("look_up", {"word": "x"}), latency=2) if request.turn == 0 else Say("ok", latency=2)

    await BatchAgent.run(
        task="{input}", inputs=["a", "b", "c"], tools=[look_up], backend=ScriptedBackend(script), max_inflight=1
    )
    assert order.index(("a", 1)) < order.index(("c", 0))


@virtual_clock
async def test_each_turn_extends_the_one_before_it_byte_for_byte() -> None:
    def script(request: Request) -> Say:
        if request.turn < 3:
            return CallTools(ToolUse("look_up", {"word": f"w{request.turn}"}), text="Let me see…")
        return Say("done")

    backend = ScriptedBackend(script)
    await BatchAgent.run(
        task="Say {input}", system_prompt="Be brief.", inputs=["é {x}"], tools=[look_up], backend=backend
    )
    bodies = [request.raw.removesuffix(b"]}") for request in backend.requests]
    assert len(bodies) == 4
    assert all(later.startswith(earlier + b",") for earlier, later in itertools.pairwise(bodies))


@virtual_clock
async def test_a_model_that_still_wants_tools_at_max_turns_fails_and_its_text_is_kept() -> None:
    backend = ScriptedBackend(lambda request: CallTools(ToolUse("look_up", {"word": "x"}), text="one more"))
    [result] = await BatchAgent.run(task="{input}", inputs=["a"], tools=[look_up], backend=backend, max_turns=3)
    assert not result.ok
    assert result.error is not None
    assert result.error.type == "LimitExceeded"
    assert "look_up" in result.error.message
    assert (result.turns, result.raw_text, result.attempts) == (3, "one more", 1)


@virtual_clock
async def test_without_a_value_max_turns_is_one_without_tools_and_ten_with() -> None:
    backend = ScriptedBackend(lambda request: CallTools(ToolUse("look_up", {"word": "x"})))
    [bare] = await BatchAgent.run(task="{input}", inputs=["a"], backend=backend, max_retries=0)
    [armed] = await BatchAgent.run(task="{input}", inputs=["a"], backend=backend, tools=[look_up])
    [endless] = await BatchAgent.run(
        task="{input}", inputs=["a"], backend=backend, tools=[look_up], max_turns=None, timeout_per_agent=60
    )
    assert (bare.turns, armed.turns) == (1, 10)
    assert endless.turns > 10
    assert endless.error is not None
    assert endless.error.type == "TimeoutError"


@virtual_clock
async def test_a_forced_tool_choice_holds_for_the_first_turn_only() -> None:
    backend = ScriptedBackend(tool_then_answer)
    await BatchAgent.run(task="{input}", inputs=["a"], tools=[look_up], backend=backend, tool_choice="look_up")
    first, second = (request.body["tool_choice"] for request in backend.requests)
    assert first == {"type": "function", "function": {"name": "look_up"}}
    assert second == "auto"


@pytest.mark.parametrize(("choice", "tools"), [("lookup", [look_up]), ("required", []), (3, [look_up])])
async def test_a_tool_choice_that_cannot_be_is_refused(choice: object, tools: list[Tool]) -> None:
    with pytest.raises(SpecError, match="tool_choice"):
        await BatchAgent.run(task="{input}", inputs=["a"], tools=tools, backend=ScriptedBackend(), tool_choice=choice)


@virtual_clock
async def test_timings_tell_queueing_inference_and_tools_apart() -> None:
    backend = ScriptedBackend(tool_then_answer)
    results = await BatchAgent.run(
        task="{input}", inputs=["a", "b"], tools=[look_up], backend=backend, max_inflight=1, system_prompt="s"
    )
    timings = results[1].timings
    assert timings.inference == pytest.approx(0.2)
    assert timings.tool_wait == pytest.approx(1.0)
    assert timings.total == pytest.approx(timings.queued + timings.inference + timings.tool_wait)
    assert timings.first_token == pytest.approx(0.1)


@virtual_clock
async def test_usage_is_summed_over_turns_and_the_transcript_is_whole() -> None:
    backend = ScriptedBackend(tool_then_answer)
    [result] = await BatchAgent.run(task="{input}", inputs=["a"], tools=[look_up], backend=backend, system_prompt="s")
    assert [message.role for message in result.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert result.messages[3].content == "about a"
    assert result.usage.prompt_tokens > 0
    assert result.turns == 2


@virtual_clock
async def test_an_engine_that_cannot_compose_gets_the_schema_only_in_a_turn_without_tools() -> None:
    def script(request: Request) -> Say:
        return Say('{"word": "fits"}' if request.schema else "no JSON at all")

    backend = ScriptedBackend(script, capabilities=Capabilities(native_schema=True, schema_with_tools=False))
    [result] = await BatchAgent.run(
        task="{input}", inputs=["a"], tools=[look_up], backend=backend, output_schema=Answer, system_prompt="s"
    )
    free, constrained = backend.requests
    assert free.tools and free.schema is None
    assert not constrained.tools and constrained.schema is not None
    assert "JSON schema" in str(free.messages[0]["content"])
    assert result.output == Answer(word="fits")
    assert (result.attempts, result.turns) == (2, 2)


@virtual_clock
async def test_an_engine_that_keeps_to_a_schema_beside_tools_is_shown_them_so_that_the_prompt_begins_as_before() -> (
    None
):
    def script(request: Request) -> Say:
        return Say('{"word": "fits"}' if request.schema else "no JSON at all")

    backend = ScriptedBackend(script, capabilities=Capabilities(native_schema=True, schema_beside_tools=True))
    options = {"task": "{input}", "inputs": ["a"], "tools": [look_up], "output_schema": Answer}
    [result] = await BatchAgent.run(backend=backend, **options)
    free, constrained = backend.requests
    assert (free.schema, constrained.tools, constrained.body["tool_choice"]) == (None, free.tools, "none")
    assert result.output == Answer(word="fits")
    other = ScriptedBackend(script, capabilities=Capabilities(native_schema=True))
    plans = [BatchAgent.plan(backend=each, **options) for each in (backend, other)]
    assert fingerprint_of(plans[0]) == fingerprint_of(plans[1])


@virtual_clock
async def test_an_engine_that_composes_gets_both_and_the_prompt_stays_as_written() -> None:
    backend = ScriptedBackend(
        lambda request: Say('{"word": "fits"}'), capabilities=Capabilities(native_schema=True, schema_with_tools=True)
    )
    await BatchAgent.run(
        task="{input}", inputs=["a"], tools=[look_up], backend=backend, output_schema=Answer, system_prompt="s"
    )
    [request] = backend.requests
    assert request.tools and request.schema is not None
    assert request.messages[0]["content"] == "s"


@virtual_clock
async def test_without_tools_nothing_is_streamed() -> None:
    backend = ScriptedBackend(lambda request: Say("plain"))
    await BatchAgent.run(task="{input}", inputs=["a"], backend=backend)
    await BatchAgent.run(task="{input}", inputs=["a"], backend=backend, tools=[look_up], streaming_tool_dispatch=False)
    assert [request.streamed for request in backend.requests] == [False, False]


@virtual_clock
async def test_a_reading_tool_starts_while_the_model_is_still_talking_and_a_writing_one_does_not() -> None:
    loop = asyncio.get_running_loop()
    started: dict[str, float] = {}

    @Tool.define(effect="read")
    async def read(n: int) -> str:
        started["read"] = loop.time()
        return "read"

    @Tool.define(effect="write")
    async def write(n: int) -> str:
        started["write"] = loop.time()
        return "written"

    def script(request: Request) -> Say:
        if request.turn == 0:
            return CallTools(ToolUse("read", {"n": 1}), ToolUse("write", {"n": 2}), chunk_delay=1.0)
        return Say("done")

    [result] = await BatchAgent.run(task="{input}", inputs=["a"], tools=[read, write], backend=ScriptedBackend(script))
    assert result.ok
    assert started["read"] < started["write"]
    assert [message.content for message in result.messages if message.role == "tool"] == ["read", "written"]


@virtual_clock
async def test_a_tool_started_early_is_not_run_again_when_the_answer_is_complete() -> None:
    runs = 0

    @Tool.define(cacheable=False)
    async def once(n: int) -> str:
        nonlocal runs
        runs += 1
        return "x"

    def script(request: Request) -> Say:
        return CallTools(ToolUse("once", {"n": 1}), chunk_delay=0.5) if request.turn == 0 else Say("done")

    await BatchAgent.run(task="{input}", inputs=["a"], tools=[once], backend=ScriptedBackend(script))
    assert runs == 1


@virtual_clock
async def test_answers_are_streamed_while_early_tools_gain_by_it_and_the_events_say_so() -> None:
    async def run(chunk_delay: float, max_inflight: int = 64) -> tuple[list[bool], list[StreamingDecided]]:
        def script(request: Request) -> Say:
            if request.turn:
                return Say("done")
            use, late = ToolUse("look_up", {"word": request.text}), ToolUse("look_up", {"word": "x" * 400})
            return CallTools(use, late, chunk_delay=chunk_delay)

        backend, events = ScriptedBackend(script), list[Event]()
        inputs = [str(n) for n in range(2 * N.enough)]
        async with BatchAgent.open(
            task="{input}",
            inputs=inputs,
            tools=[look_up],
            backend=backend,
            max_inflight=max_inflight,
            sinks=[events.append],
        ) as run:
            assert all([result.ok async for result in run.results()])
        decided = [event for event in events if isinstance(event, StreamingDecided)]
        return [request.streamed for request in backend.requests], decided

    streamed, [decision] = await run(chunk_delay=0.05)
    assert decision.streams and all(streamed)
    streamed, [decision] = await run(chunk_delay=0.0)
    assert not decision.streams and streamed[0] and not streamed[-1]
    streamed, _ = await run(chunk_delay=0.05, max_inflight=4)
    assert not any(streamed[: N.enough]), (
        "other agents take each slot that becomes free, so a tool that ends sooner gains nothing"
    )


@virtual_clock
async def test_nothing_is_streamed_where_no_tool_could_start_early() -> None:
    @Tool.define(effect="write")
    async def write(n: int) -> str:
        return "written"

    backend = ScriptedBackend(lambda request: Say("done"))
    await BatchAgent.run(task="{input}", inputs=["a"], tools=[write], backend=backend)
    await BatchAgent.run(task="{input}", inputs=["a"], tools=[look_up], tool_choice="none", backend=backend)
    assert [request.streamed for request in backend.requests] == [False, False]


@virtual_clock
async def test_a_model_without_a_name_is_the_one_the_backend_serves() -> None:
    backend = ScriptedBackend()
    await BatchAgent.run(task="{input}", inputs=["a"], backend=backend)
    assert backend.requests[0].model == "scripted"


@pytest.mark.parametrize("schema", [None, Answer])
async def test_a_call_although_no_tools_are_offered_is_repaired(schema: type[BaseModel] | None) -> None:
    def script(request: Request) -> Say:
        return CallTools(ToolUse("search", {"q": "x"})) if request.turn == 0 else Say('{"word": "w"}')

    backend = ScriptedBackend(script)
    [result] = await BatchAgent.run(task="{input}", inputs=["a"], backend=backend, output_schema=schema)
    assert (result.ok, result.turns, result.attempts) == (True, 2, 2)
    assert [message.role for message in result.messages][-3:] == ["assistant", "tool", "assistant"]
    assert "no tools are offered" in backend.requests[1].text
    stubborn = ScriptedBackend(lambda _: CallTools(ToolUse("search", {"q": "x"})))
    [failed] = await BatchAgent.run(task="{input}", inputs=["a"], backend=stubborn, max_retries=1, output_schema=schema)
    assert failed.error is not None and (failed.error.type, failed.turns) == ("Invalid", 2)
    assert "calls search, although no tools are offered" in failed.error.message
