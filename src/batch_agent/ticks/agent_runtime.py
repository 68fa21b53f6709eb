"""AgentRuntime: TickRuntime with the method names that simulations use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from batch_agent.errors import SpecError
from batch_agent.ticks.action import Action, Decision, idle
from batch_agent.ticks.agent import Agent
from batch_agent.ticks.config import Sampling, read_config
from batch_agent.ticks.runtime import WORKERS, TickRuntime

NOT_GIVEN: Any = object()


class AgentRuntime(TickRuntime[Action]):
    """Its options are those of TickRuntime, and those of Sampling one by one."""

    def __init__(
        self,
        max_workers: int = WORKERS,
        backend_config: Mapping[str, Any] | None = None,
        *,
        backend: object = None,
        model: str | None = None,
        deadline: float | None = None,
        system_prompt: str | None = None,
        temperature: float | None = NOT_GIVEN,
        max_tokens: int | None = NOT_GIVEN,
        seed: int | None = NOT_GIVEN,
        timeout: float | None = NOT_GIVEN,
        api_key: str | None = None,
        max_inflight: int | None = None,
        overlap: bool = False,
        skip_unchanged: bool = False,
        repeat_last: bool = True,
        trace: str | Path | None = None,
        replay: str | Path | None = None,
    ) -> None:
        self.backend_config = dict(backend_config or {})
        options = read_config(self.backend_config)
        for name, value in (("backend", backend), ("model", model), ("api_key", api_key)):
            if value is not None and name in options:
                raise SpecError(f"{name} is given twice, by itself and in backend_config: give one of them")
            options.setdefault(name, value)
        given = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed, "timeout": timeout}
        options |= {name: value for name, value in given.items() if value is not NOT_GIVEN}
        drawn = {field.name: options.pop(field.name) for field in fields(Sampling) if field.name in options}
        super().__init__(
            **options,
            sampling=Sampling(**drawn),
            max_workers=max_workers,
            deadline=deadline,
            system_prompt=system_prompt,
            max_inflight=max_inflight,
            overlap=overlap,
            skip_unchanged=skip_unchanged,
            repeat_last=repeat_last,
            trace=trace,
            replay=replay,
        )

    def register_agent(self, agent: Agent) -> None:
        """Add an agent. It replaces one with the same id."""
        if not isinstance(agent, Agent):
            raise SpecError(f"register_agent takes an Agent, not a {type(agent).__name__}")
        self.add(agent)

    def unregister_agent(self, agent_id: str) -> None:
        self.remove(agent_id)

    def get_agent(self, agent_id: str) -> Agent | None:
        return self.agents.get(agent_id)

    def get_all_agents(self) -> list[Agent]:
        return list(self.agents.values())

    async def process_tick(self, tick: int, observations: Mapping[str, Any]) -> dict[str, Action]:
        """Return an action for each agent in ``observations``, always. Each action states its origin."""
        decisions = await self.tick(tick, observations)
        return {agent_id: _action(decision) for agent_id, decision in decisions.items()}


def _action(decision: Decision[Action]) -> Action:
    return (decision.action or idle(decision.reason)).marked(decision.source, decision.seen_tick)
