"""What the tests of ticks have in common: a tool, answers, and short forms of ticks and their actions."""

from __future__ import annotations

import json
from collections.abc import Mapping

from batch_agent.testing import Request, Say
from batch_agent.ticks import Action, Agent, AgentRuntime


def move(direction: str, steps: int = 1) -> None:
    """Walk."""


def call(direction: str = "north", tool: str = "move", **more: object) -> str:
    return json.dumps({"tool": tool, "params": {"direction": direction, **more}, "reasoning": "because"})


def says(text: str | None = None, latency: float = 0.0) -> Say:
    return Say(call() if text is None else text, latency=latency)


def agent_in(request: Request) -> str:
    """Whose prompt it is."""
    return request.text.partition("You are agent ")[2].partition(".")[0]


def registered(runtime: AgentRuntime, *ids: str) -> AgentRuntime:
    for agent_id in ids:
        runtime.register_agent(Agent(agent_id, tools=[move]))
    return runtime


def sources(actions: Mapping[str, Action]) -> dict[str, tuple[str, int | None]]:
    return {agent_id: (action.source, action.seen_tick) for agent_id, action in actions.items()}
