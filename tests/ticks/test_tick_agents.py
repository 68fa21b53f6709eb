"""Agents of ticks: what they fall back on, remember, override; actions of a type; options."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from tests.ticks.worlds import move, registered, says, sources

from batch_agent.errors import SpecError
from batch_agent.testing import Fail, Say, ScriptedBackend, virtual_clock
from batch_agent.ticks import Action, Agent, AgentRuntime, Observation, TickRuntime, WindowMemory


@virtual_clock
async def test_an_agents_own_fallback_is_an_action_or_a_function_of_the_observation() -> None:
    runtime = AgentRuntime(backend=ScriptedBackend(lambda request: Fail(400)))
    runtime.register_agent(Agent("a", fallback=Action("hide", {"where": "cave"})))
    runtime.register_agent(Agent("b", fallback=lambda seen: Action("flee", {"from": seen["wolf"]})))
    runtime.register_agent(Agent("c", fallback=lambda seen: seen["no such thing"]))
    runtime.register_agent(Agent("d", fallback=lambda seen: "run!"))
    async with runtime:
        actions = await runtime.process_tick(1, {key: {"wolf": [1, 2]} for key in "abcd"})
    assert [(action.tool_name, action.source) for action in actions.values()] == [
        ("hide", "fallback"),
        ("flee", "fallback"),
        ("idle", "fallback"),
        ("idle", "fallback"),
    ]
    assert actions["b"].parameters == {"from": [1, 2]} and "400" in str(actions["b"].reasoning)
    assert "KeyError" in str(actions["c"].reasoning) and "not an Action" in str(actions["d"].reasoning)


@virtual_clock
async def test_an_agent_remembers_what_it_saw_and_did_until_the_tick_goes_back() -> None:
    backend = ScriptedBackend(lambda request: says())
    async with registered(AgentRuntime(backend=backend), "a") as runtime:
        for tick in range(1, 13):
            await runtime.process_tick(tick, {"a": {"saw": tick}})
        agent = runtime.get_agent("a")
        assert agent is not None
        state = agent.get_state()
        assert [seen.data["saw"] for seen in state.observations] == list(range(3, 13))
        last = backend.requests[-1].text
        assert "{'saw': 8}" in last and "{'saw': 7}" not in last and last.count("- move: ") == 3
        await runtime.process_tick(0, {"a": {"saw": 0}})
        assert "{'saw': 12}" not in backend.requests[-1].text and "Recent actions" not in backend.requests[-1].text
        assert [seen.data["saw"] for seen in state.observations] == [0]


@virtual_clock
async def test_what_an_old_episode_was_thinking_never_arrives() -> None:
    backend = ScriptedBackend(lambda request: says(latency=1.5))
    async with registered(AgentRuntime(backend=backend, deadline=1.0), "a") as runtime:
        await runtime.process_tick(9, {"a": {}})
        assert sources(await runtime.process_tick(0, {"a": {}})) == {"a": ("fallback", None)}
        assert sources(await runtime.process_tick(1, {"a": {}})) == {"a": ("late", 0)}


@virtual_clock
async def test_the_result_of_an_action_is_in_the_next_observation() -> None:
    backend = ScriptedBackend(lambda request: says())
    async with registered(AgentRuntime(backend=backend), "a") as runtime:
        agent = runtime.get_agent("a")
        assert agent is not None
        await runtime.process_tick(1, {"a": {}})
        agent.report({"ok": False, "why": "a wall"})
        await runtime.process_tick(2, {"a": {"x": 1}})
        assert agent.state.observations[-1].data == {"last_tool_result": {"ok": False, "why": "a wall"}, "x": 1}
        await runtime.process_tick(3, {"a": {"last_tool_result": "the world's own"}})
        assert agent.state.observations[-1].data == {"last_tool_result": "the world's own"}
    assert "a wall" in backend.requests[1].text


@virtual_clock
async def test_a_memory_of_ones_own_is_what_the_prompt_tells() -> None:
    class Diary(WindowMemory):
        def render(self) -> str:
            return f"Dear diary, {len(self.observations)} days, {len(self.actions)} deeds."

    backend = ScriptedBackend(lambda request: says())
    runtime = AgentRuntime(backend=backend)
    runtime.register_agent(Agent("a", memory=Diary()))
    async with runtime:
        await runtime.process_tick(1, {"a": {}})
        await runtime.process_tick(2, {"a": {}})
        await runtime.process_tick(1, {"a": {}})
    assert ["1 days, 0" in backend.requests[0].text, "2 days, 1" in backend.requests[1].text] == [True, True]
    assert "1 days, 0" in backend.requests[2].text


@virtual_clock
async def test_there_is_a_seed_for_each_agent_and_tick_and_it_is_the_same_again() -> None:
    async def seeds(**options: Any) -> list[object]:
        backend = ScriptedBackend(lambda request: says())
        async with registered(AgentRuntime(backend=backend, **options), "a", "b") as runtime:
            for tick in (1, 2):
                await runtime.process_tick(tick, {"a": {}, "b": {}})
        return [request.body.get("seed") for request in backend.requests]

    first = await seeds()
    assert len(set(first)) == 4 and first == await seeds()
    assert not set(first) & set(await seeds(seed=7))
    assert await seeds(seed=None) == [None] * 4


@virtual_clock
async def test_contexts_and_parsers_may_be_overridden() -> None:
    class Poet(Agent):
        def _build_context(self) -> str:
            return f"Rhyme with {self.state.observations[-1].data}."

        def _parse_action(self, text: str) -> Action | None:
            return Action("say", {"line": text}) if "orange" not in text else None

    backend = ScriptedBackend([says("door hinge"), says("orange"), says("orange")])
    runtime = AgentRuntime(backend=backend)
    runtime.register_agent(Poet("poet"))
    async with runtime:
        first = await runtime.process_tick(1, {"poet": "orange"})
        second = await runtime.process_tick(2, {"poet": "orange"})
    assert first["poet"].parameters == {"line": "door hinge"}
    assert second["poet"].source == "fallback"
    assert backend.requests[0].text == "Rhyme with orange." and backend.requests[0].schema is None


@pytest.mark.parametrize("error", [KeyError, SystemExit, asyncio.CancelledError])
@pytest.mark.parametrize("broken", ["_build_context", "_parse_action", "perceive", "reset", "decide_action"])
async def test_an_agent_whose_own_code_raises_falls_back_alone(broken: str, error: type[BaseException]) -> None:
    def raises(*given: object, **named: object) -> None:
        raise error("oops")

    runtime = registered(AgentRuntime(backend=ScriptedBackend(lambda request: says())), "good")
    runtime.register_agent(type("Broken", (Agent,), {broken: raises})("bad"))
    async with runtime:
        await runtime.process_tick(2, {"bad": {}, "good": {}})
        actions = await runtime.process_tick(1, {"bad": {}, "good": {}})  # another episode
    assert sources(actions) == {"bad": ("fallback", None), "good": ("answer", 1)}
    assert "oops" in str(actions["bad"].reasoning)


@pytest.mark.parametrize("broken", ["perceive", "act", "render", "clear"])
@virtual_clock
async def test_a_memory_that_raises_costs_its_own_agent_at_most(broken: str) -> None:
    def raises(*given: object) -> None:
        raise SystemExit("oops")

    runtime = registered(AgentRuntime(backend=ScriptedBackend(lambda request: says())), "good")
    runtime.register_agent(Agent("bad", tools=[move], memory=type("Broken", (WindowMemory,), {broken: raises})()))
    async with runtime:
        for tick in (2, 1):
            assert sources(await runtime.process_tick(tick, {"bad": {}, "good": {}}))["good"] == ("answer", tick)


@virtual_clock
async def test_other_odd_code_and_values_of_an_agent_cost_it_alone() -> None:
    def exits(seen: object) -> Action:
        raise SystemExit("oops")

    async def stubborn(self: Agent) -> None:
        raise asyncio.CancelledError

    runtime = registered(AgentRuntime(backend=ScriptedBackend(lambda request: says())), "good")
    runtime.register_agent(Agent("fallback", fallback=exits, tools=["sing"]))
    runtime.register_agent(Agent("priority", priority=exits))  # type: ignore[arg-type]
    runtime.register_agent(Agent("prompt", system_prompt="\ud800"))
    runtime.register_agent(Agent("goals", goals=[3]))  # type: ignore[list-item]
    runtime.register_agent(type("Stubborn", (Agent,), {"decide_action": stubborn})("cancels"))
    changed = Agent("changed")
    changed.system_prompt = 3  # type: ignore[assignment]
    runtime.register_agent(changed)
    async with runtime:
        actions = await runtime.process_tick(1, dict.fromkeys(runtime.agents))
    assert {name: action.source for name, action in actions.items()} == {
        "good": "answer",
        "fallback": "fallback",
        "priority": "answer",
        "prompt": "answer",
        "goals": "fallback",
        "cancels": "fallback",
        "changed": "fallback",
    }


@virtual_clock
async def test_a_perception_has_its_source_and_time() -> None:
    agent = Agent("a", goals=["eat"])
    agent.perceive({"sound": "a wolf"}, source="ears")
    agent.add_goal("live")
    seen = agent.get_state().observations[0]
    assert isinstance(seen, Observation) and (seen.source, seen.data) == ("ears", {"sound": "a wolf"})
    assert "Your goals: eat, live" in agent._build_context() and "[ears]" in agent._build_context()
    agent.clear_goals()
    assert "goals" not in agent._build_context()


class Move(BaseModel):
    to: Literal["north", "south"]


@virtual_clock
async def test_the_general_form_gives_decisions_of_a_type() -> None:
    backend = ScriptedBackend(lambda request: Say('{"to": "south"}', latency=0.5))
    async with TickRuntime[Move](["a", "b"], backend=backend, schema=Move, deadline=1.0) as runtime:
        decisions = await runtime.tick(3, {"a": {}, "b": {}})
        decision = decisions["a"]
        assert decision.action == Move(to="south")
        assert (decision.source, decision.seen_tick, decision.latency) == ("answer", 3, 0.5)
        assert decision.usage.completion_tokens > 0
        await runtime.tick(4, {"a": {}})
    assert "- act: {'to': 'south'}" in backend.requests[-1].text


@virtual_clock
async def test_the_general_form_takes_tools_and_agents_too() -> None:
    backend = ScriptedBackend(lambda request: says())
    agents = [Agent("own", tools=["sing"], fallback=Action("sulk")), "plain"]
    async with TickRuntime(agents, backend=backend, tools=[move]) as runtime:
        decisions = await runtime.tick(1, {"own": {}, "plain": {}})
    assert decisions["plain"].action == Action("move", {"direction": "north"}, "because")
    own = decisions["own"]
    assert own.action is not None and (own.action.tool_name, own.source) == ("sulk", "fallback")
    assert "there is no tool 'move'" in own.reason


@virtual_clock
async def test_without_a_fallback_a_typed_action_that_cannot_be_had_is_none() -> None:
    backend = ScriptedBackend(lambda request: Fail(400))
    async with TickRuntime[Move](["a"], backend=backend, schema=Move) as runtime:
        decision = (await runtime.tick(1, {"a": {}}))["a"]
    assert (decision.action, decision.source) == (None, "fallback") and "400" in decision.reason


@pytest.mark.parametrize(
    "options",
    [{"goals": "eat"}, {"fallback": "rest"}, {"priority": "high"}, {"tools": "move"}, {"system_prompt": 3}],
)
def test_what_is_wrong_with_an_agent_is_said_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(options))):
        Agent("a", **options)


@pytest.mark.parametrize(
    "options",
    [{"temperature": "hot"}, {"temperature": -1}, {"max_tokens": 0}, {"max_tokens": 1.5}, {"seed": "x"}],
)
def test_how_answers_are_drawn_is_checked_wherever_it_is_said(options: dict[str, Any]) -> None:
    for given in (options, {"backend_config": options}):
        with pytest.raises(SpecError, match=next(iter(options))):
            AgentRuntime(**given)


@pytest.mark.parametrize(
    "options",
    [
        {"deadline": 0},
        {"deadline": -1.0},
        {"deadline": "soon"},
        {"max_workers": 0},
        {"max_inflight": 1.5},
        {"timeout": 0},
        {"backend": "nonsense"},
        {"backend": object()},
        {"backend": "vllm://h:1", "backend_config": {"base_url": "vllm://h:2"}},
        {"backend_config": {"temprature": 1}},
        {"backend_config": {"base_url": "vllm://h:1", "url": "vllm://h:1"}},
        {"backend_config": {"n_gpu_layers": 20}},
        {"replay": "no/such/file"},
    ],
)
def test_what_is_wrong_with_the_options_is_said_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        AgentRuntime(**options)


def test_tools_and_a_schema_do_not_go_together() -> None:
    with pytest.raises(SpecError, match="give one of the two"):
        TickRuntime(["a"], schema=Move, tools=[move])


@virtual_clock
async def test_a_tick_is_a_whole_number() -> None:
    with pytest.raises(SpecError, match="whole number"):
        await AgentRuntime().process_tick("1", {})  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="observations is a list"):
        await AgentRuntime().process_tick(1, [{}])  # type: ignore[arg-type]


@virtual_clock
async def test_backend_config_says_the_model_and_how_to_draw_from_it() -> None:
    backend = ScriptedBackend(lambda request: says())
    config = {"backend": backend, "model": "m", "temperature": 0.3, "max_tokens": 99, "top_p": 0.9, "top_k": 40}
    runtime = registered(AgentRuntime(4, config), "a")
    async with runtime:
        await runtime.process_tick(1, {"a": {}})
    body = backend.requests[0].body
    assert {name: body[name] for name in ("model", "temperature", "max_tokens", "top_p", "top_k")} == {
        "model": "m",
        "temperature": 0.3,
        "max_tokens": 99,
        "top_p": 0.9,
        "top_k": 40,
    }
    assert runtime.backend_config == config
