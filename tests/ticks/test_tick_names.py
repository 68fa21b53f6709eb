"""The names and defaults that users of ticks rely on."""

from __future__ import annotations

import inspect

import pytest

from batch_agent import ticks
from batch_agent.ticks import Action, Agent, AgentRuntime, GenerationResult, Observation, TextBackend, TickRuntime

PUBLIC = [
    "Action",
    "Agent",
    "AgentRuntime",
    "AgentState",
    "Decision",
    "GenerationResult",
    "Memory",
    "Observation",
    "Sampling",
    "TextBackend",
    "TickRuntime",
    "WindowMemory",
]


def test_the_names_are_these() -> None:
    assert ticks.__all__ == PUBLIC


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (AgentRuntime, {"max_workers": 4, "backend_config": None, "backend": None, "model": None, "deadline": None}),
        (Agent, {"agent_id": inspect.Parameter.empty, "backend": None, "tools": None, "goals": None}),
        (Agent.perceive, {"observation": inspect.Parameter.empty, "source": "world"}),
        (Action, {"tool_name": inspect.Parameter.empty, "reasoning": None, "source": "answer", "seen_tick": None}),
        (TextBackend.generate_with_tools, {"tools": inspect.Parameter.empty, "temperature": None}),
    ],
)
def test_parameters_have_these_defaults(function: object, parameters: dict[str, object]) -> None:
    given = inspect.signature(function).parameters  # type: ignore[arg-type]
    assert {name: given[name].default for name in parameters} == parameters


def test_values_are_made_by_position() -> None:
    assert Action("go", {"to": 1}, "why").reasoning == "why"
    assert GenerationResult("text", 3, "length", {"a": 1}).finish_reason == "length"
    assert list(inspect.signature(Observation).parameters) == ["timestamp", "data", "source"]


def test_a_runtime_has_the_methods_that_simulations_call() -> None:
    runtime = AgentRuntime()
    for name in ("register_agent", "unregister_agent", "process_tick", "start", "stop", "get_agent", "get_all_agents"):
        assert callable(getattr(runtime, name))
    assert isinstance(runtime, TickRuntime) and runtime.agents == {} and not runtime.running
