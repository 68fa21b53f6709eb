"""Whole ticks on a virtual clock, against a scripted model."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
from tests.ticks.worlds import agent_in, call, move, registered, says, sources

from batch_agent.backends.base import Capabilities, ModelRequest, OnToolCall
from batch_agent.errors import SpecError, Unavailable
from batch_agent.messages import Reply
from batch_agent.testing import CallTools, Fail, Hang, Request, Say, ScriptedBackend, ToolUse, virtual_clock
from batch_agent.ticks import Agent, AgentRuntime


def now() -> float:
    return asyncio.get_running_loop().time()


@virtual_clock
async def test_a_tick_of_many_agents_takes_as_long_as_one() -> None:
    backend = ScriptedBackend(lambda request: says(latency=1.0))
    async with registered(AgentRuntime(backend=backend), *map(str, range(20))) as runtime:
        began = now()
        actions = await runtime.process_tick(1, {str(number): {"x": number} for number in range(20)})
        assert now() - began == 1.0
    assert list(actions) == [str(number) for number in range(20)]
    assert set(sources(actions).values()) == {("answer", 1)}
    assert actions["3"].parameters == {"direction": "north"}
    assert actions["3"].reasoning == "because"


@virtual_clock
async def test_only_agents_that_observed_decide() -> None:
    backend = ScriptedBackend(lambda request: says())
    async with registered(AgentRuntime(backend=backend), "a", "b") as runtime:
        assert list(await runtime.process_tick(1, {"b": {}})) == ["b"]
    assert len(backend.requests) == 1


@virtual_clock
async def test_every_answer_reaches_its_own_agent() -> None:
    def script(request: Request) -> Say:
        name = agent_in(request)
        return says(call(name), latency=float(name) % 7)

    async with registered(AgentRuntime(backend=ScriptedBackend(script)), *map(str, range(30))) as runtime:
        actions = await runtime.process_tick(1, {str(number): None for number in range(30)})
    assert all(action.parameters["direction"] == name for name, action in actions.items())


@virtual_clock
async def test_the_request_is_held_to_the_tools_by_a_schema_and_shares_what_is_alike() -> None:
    backend = ScriptedBackend(lambda request: says())
    runtime = registered(AgentRuntime(backend=backend, system_prompt="You live in a maze."), "a", "b")
    async with runtime:
        await runtime.process_tick(1, {"a": {"food": "north"}, "b": {}})
    first, second = backend.requests
    schema = first.schema
    assert schema is not None and schema["properties"]["tool"] == {"type": "string", "enum": ["move"]}  # type: ignore[index,call-overload]
    assert first.body["messages"][0] == second.body["messages"][0]  # type: ignore[index]
    system = str(first.body["messages"][0]["content"])  # type: ignore[index,call-overload]
    assert system.startswith("You live in a maze.") and "- move: Walk." in system
    assert "{'food': 'north'}" in first.text


@virtual_clock
async def test_where_no_schema_can_be_forced_tools_are_offered_and_one_must_be_called() -> None:
    script = [CallTools(ToolUse("move", {"direction": "west"}))]
    backend = ScriptedBackend(script, capabilities=Capabilities())
    async with registered(AgentRuntime(backend=backend), "a") as runtime:
        actions = await runtime.process_tick(1, {"a": {}})
    assert backend.requests[0].body["tool_choice"] == "required"
    assert actions["a"].parameters == {"direction": "west"}


@virtual_clock
async def test_an_answer_that_is_no_action_is_shown_to_the_model_once() -> None:
    backend = ScriptedBackend([says("fly!"), says()])
    async with registered(AgentRuntime(backend=backend), "a") as runtime:
        assert sources(await runtime.process_tick(1, {"a": {}})) == {"a": ("answer", 1)}
    assert "not JSON" in backend.requests[1].text
    assert len(backend.requests) == 2


@virtual_clock
async def test_garbage_is_idling_with_the_reason() -> None:
    backend = ScriptedBackend(lambda request: says("fly!"))
    async with registered(AgentRuntime(backend=backend), "a") as runtime:
        action = (await runtime.process_tick(1, {"a": {}}))["a"]
    assert (action.tool_name, action.parameters, action.source) == ("idle", {}, "fallback")
    assert action.reasoning and "not JSON" in action.reasoning


@virtual_clock
async def test_an_answer_that_was_cut_off_is_completed_where_it_can_be() -> None:
    cut = '{"tool": "move", "params": {"direction": "north"}, "reasoning": "since I am hun'
    backend = ScriptedBackend([Say(cut, finish_reason="length")])
    async with registered(AgentRuntime(backend=backend), "a") as runtime:
        action = (await runtime.process_tick(1, {"a": {}}))["a"]
    assert (action.source, action.parameters) == ("answer", {"direction": "north"})


@virtual_clock
async def test_one_slow_agent_holds_nobody_at_the_deadline_and_its_answer_comes_late_and_once() -> None:
    def script(request: Request) -> Say:
        return says(call(str(len(backend.requests))), latency=1.5 if agent_in(request) == "slow" else 0.1)

    backend = ScriptedBackend(script)
    async with registered(AgentRuntime(backend=backend, deadline=1.0), "slow", "quick") as runtime:
        began = now()
        first = await runtime.process_tick(1, {"slow": {}, "quick": {}})
        assert now() - began == 1.0
        assert sources(first) == {"slow": ("fallback", None), "quick": ("answer", 1)}
        assert "deadline" in str(first["slow"].reasoning)
        second = await runtime.process_tick(2, {"slow": {}, "quick": {}})
        assert sources(second) == {"slow": ("late", 1), "quick": ("answer", 2)}
        third = await runtime.process_tick(3, {"slow": {}})
        assert sources(third) == {"slow": ("last", 1)}
        assert third["slow"].parameters == second["slow"].parameters


@virtual_clock
async def test_an_answer_that_came_between_ticks_is_delivered_at_the_next_even_if_the_model_is_quick_by_then() -> None:
    latencies = iter([2.0, 0.0, 0.0])
    backend = ScriptedBackend(lambda request: says(latency=next(latencies)))
    async with registered(AgentRuntime(backend=backend, deadline=1.0), "a") as runtime:
        assert sources(await runtime.process_tick(1, {"a": {}})) == {"a": ("fallback", None)}
        await asyncio.sleep(5)
        assert sources(await runtime.process_tick(2, {"a": {}})) == {"a": ("late", 1)}
        await asyncio.sleep(5)
        assert sources(await runtime.process_tick(3, {"a": {}})) == {"a": ("answer", 3)}


@virtual_clock
async def test_with_a_deadline_of_half_the_latency_every_tick_is_on_time_with_an_action_for_all() -> None:
    backend = ScriptedBackend(lambda request: says(latency=1.0))
    ids = [str(number) for number in range(50)]
    async with registered(AgentRuntime(backend=backend, deadline=0.5), *ids) as runtime:
        for tick in range(1, 20):
            began = now()
            actions = await runtime.process_tick(tick, {key: {"tick": tick} for key in ids})
            assert now() - began <= 0.5 and list(actions) == ids
    assert backend.peak_inflight == 50  # never two thoughts of one agent


@virtual_clock
async def test_a_hung_server_holds_nobody_and_is_asked_again_after_the_timeout() -> None:
    backend = ScriptedBackend(lambda request: Hang() if len(backend.requests) == 1 else says())
    async with registered(AgentRuntime(backend=backend, deadline=0.5, timeout=2.0), "a") as runtime:
        for tick in range(1, 6):
            assert sources(await runtime.process_tick(tick, {"a": {}}))["a"][0] in ("fallback", "answer")
        assert sources(await runtime.process_tick(6, {"a": {}})) == {"a": ("answer", 6)}


@virtual_clock
async def test_without_a_deadline_a_hung_server_is_given_up_after_the_timeout() -> None:
    backend = ScriptedBackend(lambda request: Hang())
    async with registered(AgentRuntime(backend=backend, timeout=2.0), "a") as runtime:
        action = (await runtime.process_tick(1, {"a": {}}))["a"]
    assert action.source == "fallback" and "2 s" in str(action.reasoning)


@virtual_clock
async def test_a_server_error_is_tried_again_and_a_refusal_is_not() -> None:
    backend = ScriptedBackend([Fail(500), says()])
    async with registered(AgentRuntime(backend=backend), "a") as runtime:
        assert sources(await runtime.process_tick(1, {"a": {}})) == {"a": ("answer", 1)}
    backend = ScriptedBackend(lambda request: Fail(401))
    async with registered(AgentRuntime(backend=backend), "a", "b", "c", "d") as runtime:
        for tick in (1, 2):
            actions = await runtime.process_tick(tick, dict.fromkeys("abcd"))
            assert all("401" in str(action.reasoning) for action in actions.values())
    assert len(backend.requests) == 4, "the server refuses everything: the next request is a trial, after a pause"


@virtual_clock
async def test_while_the_server_is_down_one_agent_tries_it_and_the_others_do_not_wait() -> None:
    up = asyncio.Event()

    def script(request: Request) -> Say | Fail:
        return says() if up.is_set() else Fail(500)

    backend = ScriptedBackend(script)
    ids = [str(number) for number in range(10)]
    async with registered(AgentRuntime(backend=backend), *ids) as runtime:
        await runtime.process_tick(1, dict.fromkeys(ids))
        asked = len(backend.requests)
        began = now()
        actions = await runtime.process_tick(2, dict.fromkeys(ids))
        assert now() == began and len(backend.requests) == asked
        assert all("is down" in str(action.reasoning) for action in actions.values())
        up.set()
        await asyncio.sleep(1)
        await runtime.process_tick(3, dict.fromkeys(ids))  # whose first one finds out
        assert set(sources(await runtime.process_tick(4, dict.fromkeys(ids))).values()) == {("answer", 4)}


@virtual_clock
async def test_after_an_hour_without_a_server_or_with_a_wrong_key_the_next_ticks_are_answered() -> None:
    class Away(ScriptedBackend):
        away = True

        async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
            if self.away:
                raise Unavailable("connection refused", unreached=True)
            return await super().infer(request, on_tool_call)

    refuses = True
    backend = Away(lambda request: Fail(401) if refuses else says())
    ids = ["a", "b", "c", "d"]
    async with registered(AgentRuntime(backend=backend), *ids) as runtime:
        for tick in range(1, 61):
            actions = await runtime.process_tick(tick, dict.fromkeys(ids))
            assert all("connection refused" in str(action.reasoning) for action in actions.values())
            await asyncio.sleep(60)
        backend.away = False
        for tick in (61, 62, 63):  # the first one's trial finds out
            actions = await runtime.process_tick(tick, dict.fromkeys(ids))
        assert all("401" in str(action.reasoning) for action in actions.values())
        refuses = False
        await asyncio.sleep(1)
        await runtime.process_tick(64, dict.fromkeys(ids))  # the first one's trial finds out
        assert set(sources(await runtime.process_tick(65, dict.fromkeys(ids))).values()) == {("answer", 65)}


@virtual_clock
async def test_an_agent_whose_prompt_fails_does_not_keep_the_others_from_finding_that_the_server_is_back() -> None:
    class Broken(Agent):
        def _build_context(self) -> str:
            raise ValueError("no prompt")

    up = False
    backend = ScriptedBackend(lambda request: says() if up else Fail(500))
    runtime = registered(AgentRuntime(backend=backend), *"abcdef")
    async with runtime:
        await runtime.process_tick(1, dict.fromkeys("abcdef"))
        up = True
        runtime.register_agent(Broken("first", tools=[move], priority=1))
        await asyncio.sleep(1)
        actions = await runtime.process_tick(2, dict.fromkeys(["first", *"abcdef"]))
        assert "no prompt" in str(actions["first"].reasoning)
        assert sources(actions)["a"] == ("answer", 2)


@virtual_clock
async def test_agents_are_asked_in_order_of_priority() -> None:
    backend = ScriptedBackend(lambda request: says(latency=1.0))
    runtime = AgentRuntime(backend=backend, max_inflight=1)
    runtime.register_agent(Agent("far", priority=lambda seen: -seen["distance"]))
    runtime.register_agent(Agent("near", priority=lambda seen: -seen["distance"]))
    runtime.register_agent(Agent("player", priority=100))
    async with runtime:
        await runtime.process_tick(1, {name: {"distance": at} for name, at in [("far", 9), ("near", 2), ("player", 0)]})
    assert [agent_in(request) for request in backend.requests] == ["player", "near", "far"]


@virtual_clock
async def test_who_waits_for_a_slot_is_asked_about_the_newest_and_nobody_starves() -> None:
    backend = ScriptedBackend(lambda request: says(latency=1.0))
    ids = ["a", "b", "c"]
    async with registered(AgentRuntime(backend=backend, max_inflight=1, deadline=0.6), *ids) as runtime:
        for tick in range(1, 8):
            await runtime.process_tick(tick, {key: {"tick": tick} for key in ids})
    asked = [agent_in(request) for request in backend.requests]
    assert asked[:3] == ids
    assert "'tick': 2" in backend.requests[1].text  # the newest when its slot came


@virtual_clock
async def test_two_ticks_overlap_without_mixing_agents_up() -> None:
    backend = ScriptedBackend(lambda request: says(call(agent_in(request)), latency=1.0))
    async with registered(AgentRuntime(backend=backend), "a", "b", "both") as runtime:
        first, second = await asyncio.gather(
            runtime.process_tick(1, {"a": {}, "both": {}}), runtime.process_tick(2, {"b": {}, "both": {}})
        )
    assert sources(first) == {"a": ("answer", 1), "both": ("answer", 1)}
    assert sources(second) == {"b": ("answer", 2), "both": ("answer", 2)}
    assert all(action.parameters["direction"] == name for name, action in {**first, **second}.items())
    assert backend.peak_inflight == 3


@virtual_clock
async def test_thoughts_of_one_agent_overlap_where_that_is_asked_for() -> None:
    backend = ScriptedBackend(lambda request: says(latency=1.5))
    async with registered(AgentRuntime(backend=backend, deadline=1.0, overlap=True), "a") as runtime:
        for tick in range(1, 4):
            await runtime.process_tick(tick, {"a": {}})
    assert backend.peak_inflight == 2


@virtual_clock
async def test_a_tick_that_is_cancelled_leaves_its_answer_to_the_next() -> None:
    backend = ScriptedBackend(lambda request: says(latency=1.0))
    async with registered(AgentRuntime(backend=backend), "a") as runtime:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await runtime.process_tick(1, {"a": {}})
        assert sources(await runtime.process_tick(2, {"a": {}})) == {"a": ("late", 1)}
    assert len(backend.requests) == 1


@virtual_clock
async def test_observations_that_have_not_changed_may_be_skipped() -> None:
    backend = ScriptedBackend(lambda request: says())
    async with registered(AgentRuntime(backend=backend, skip_unchanged=True), "a") as runtime:
        await runtime.process_tick(1, {"a": {"x": 1}})
        assert sources(await runtime.process_tick(2, {"a": {"x": 1}})) == {"a": ("last", 1)}
        assert sources(await runtime.process_tick(3, {"a": {"x": 2}})) == {"a": ("answer", 3)}
    assert len(backend.requests) == 2


@virtual_clock
async def test_a_result_that_was_reported_is_a_change() -> None:
    backend = ScriptedBackend(lambda request: says())
    async with registered(AgentRuntime(backend=backend, skip_unchanged=True), "a") as runtime:
        await runtime.process_tick(1, {"a": {"x": 1}})
        runtime.agents["a"].report("a wall")
        assert sources(await runtime.process_tick(2, {"a": {"x": 1}})) == {"a": ("answer", 2)}
    assert backend.requests[1].text.count("a wall") == 1


@virtual_clock
async def test_a_world_may_fill_the_same_dict_again() -> None:
    backend = ScriptedBackend(lambda request: says())
    seen = {"x": 1}
    async with registered(AgentRuntime(backend=backend, skip_unchanged=True), "a") as runtime:
        await runtime.process_tick(1, {"a": seen})
        seen["x"] = 2
        assert sources(await runtime.process_tick(2, {"a": seen})) == {"a": ("answer", 2)}
    assert "{'x': 1}" in backend.requests[1].text


@virtual_clock
async def test_an_unknown_agent_idles_with_the_reason_and_the_others_are_asked() -> None:
    async with registered(AgentRuntime(backend=ScriptedBackend(lambda request: says())), "a") as runtime:
        actions = await runtime.process_tick(1, {"ghost": {}, "a": {}})
    assert sources(actions) == {"ghost": ("fallback", None), "a": ("answer", 1)}
    assert actions["ghost"].tool_name == "idle" and "'ghost'" in str(actions["ghost"].reasoning)


@virtual_clock
async def test_an_agent_that_is_unregistered_in_a_tick_falls_back_at_once() -> None:
    backend = ScriptedBackend(lambda request: says(latency=1.0))
    async with registered(AgentRuntime(backend=backend), "a", "b") as runtime:
        ticking = asyncio.create_task(runtime.process_tick(1, {"a": {}, "b": {}}))
        await asyncio.sleep(0.5)
        runtime.unregister_agent("a")
        actions = await ticking
        assert sources(actions) == {"a": ("fallback", None), "b": ("answer", 1)}
        assert "unregistered" in str(actions["a"].reasoning)
        assert runtime.get_agent("a") is None and [agent.agent_id for agent in runtime.get_all_agents()] == ["b"]


@virtual_clock
async def test_an_agent_that_is_registered_again_replaces_the_one_before() -> None:
    backend = ScriptedBackend(lambda request: says(latency=1.0))
    async with registered(AgentRuntime(backend=backend, deadline=0.5), "a") as runtime:
        await runtime.process_tick(1, {"a": {}})
        registered(runtime, "a")
        await asyncio.sleep(2)
        assert sources(await runtime.process_tick(2, {"a": {}})) == {"a": ("fallback", None)}
        assert len(runtime.agents) == 1


@virtual_clock
async def test_stopping_ends_a_tick_at_once_with_an_action_for_all_and_leaves_nothing_behind() -> None:
    backend = ScriptedBackend(lambda request: Hang())
    runtime = registered(AgentRuntime(backend=backend), "a", "b")
    ticking = asyncio.create_task(runtime.process_tick(1, {"a": {}, "b": {}}))
    await asyncio.sleep(1)
    await runtime.stop()
    actions = await ticking
    assert set(sources(actions).values()) == {("fallback", None)}
    assert (backend.inflight, backend.entered) == (0, 0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    with pytest.raises(RuntimeError, match="start"):
        await runtime.process_tick(2, {"a": {}})


@virtual_clock
async def test_a_stopped_runtime_starts_again_when_it_has_closed() -> None:
    backend = ScriptedBackend(lambda request: says() if backend.entered == 1 else Fail(400))
    runtime = registered(AgentRuntime(backend=backend), "a")
    for tick in (1, 2):
        with runtime:
            assert sources(await runtime.process_tick(tick, {"a": {}})) == {"a": ("answer", tick)}
    await runtime.stop()
    assert backend.entered == 0 and not runtime.running


def test_each_tick_may_have_an_event_loop_of_its_own() -> None:
    backend = ScriptedBackend(lambda request: says())
    with registered(AgentRuntime(backend=backend), "a") as runtime:
        for tick in (1, 2):
            assert sources(asyncio.run(runtime.process_tick(tick, {"a": {}}))) == {"a": ("answer", tick)}
            assert backend.entered == 0


async def test_a_runtime_in_use_in_another_event_loop_says_so() -> None:
    asked = threading.Event()

    def script(request: Request) -> Say:
        asked.set()
        return says(latency=60.0)

    runtime = registered(AgentRuntime(backend=ScriptedBackend(script)), "a")
    other = asyncio.create_task(asyncio.to_thread(asyncio.run, runtime.process_tick(1, {"a": {}})))
    await asyncio.to_thread(asked.wait)
    with pytest.raises(SpecError, match="another event loop"):
        await runtime.process_tick(2, {"a": {}})
    runtime.stop()
    assert sources(await other) == {"a": ("fallback", None)}
    async with runtime:  # that event loop has ended
        assert runtime.running


@virtual_clock
async def test_stopping_does_not_wait_for_ever_for_code_that_ignores_its_cancellation() -> None:
    free = asyncio.Event()

    class Stubborn(Agent):
        async def decide_action(self) -> None:  # type: ignore[override]
            while not free.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await free.wait()

    class StubbornBackend:
        async def generate_batch(self, prompts: list[str]) -> list[str]:
            while not free.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await free.wait()
            return []

    runtime = registered(AgentRuntime(backend=StubbornBackend(), deadline=1.0), "a")
    runtime.register_agent(Stubborn("b"))
    assert set(sources(await runtime.process_tick(1, {"a": {}, "b": {}})).values()) == {("fallback", None)}
    await runtime.stop()
    free.set()


@virtual_clock
async def test_agents_may_come_and_go_while_a_tick_begins() -> None:
    class Kills(Agent):
        def perceive(self, observation: object, source: str = "world") -> None:
            runtime.unregister_agent("b")
            registered(runtime, "c")

    backend = ScriptedBackend(lambda request: says(latency=1.0))
    runtime = registered(AgentRuntime(backend=backend), "b", "c")
    runtime.register_agent(Kills("a", tools=[move], priority=1))
    async with runtime:
        actions = await runtime.process_tick(1, dict.fromkeys("abc"))
        assert list(actions) == ["a", "b", "c"] and actions["b"].source == "fallback"
        assert sources(await runtime.process_tick(2, {"c": {}})) == {"c": ("answer", 2)}
        assert backend.inflight == 0


@virtual_clock
async def test_ticks_that_always_overlap_keep_nothing_of_the_old_ones() -> None:
    backend = ScriptedBackend(lambda request: says(latency=1.0))
    async with registered(AgentRuntime(backend=backend), "a") as runtime:
        ticking = [asyncio.create_task(runtime.process_tick(tick, {"a": {}})) for tick in (1, 2)]
        for tick in range(3, 30):
            await ticking.pop(0)
            ticking.append(asyncio.create_task(runtime.process_tick(tick, {"a": {}})))
            await asyncio.sleep(0)
        kept, thought = 0, runtime._minds["a"].thoughts[-1].after
        while thought is not None:
            kept, thought = kept + 1, thought.after
        assert kept == 1
        await asyncio.gather(*ticking)
