"""Sends the same prompt to every agent, and lets one agent summarise the answers."""

from __future__ import annotations

from typing import Unpack

from batch_agent.swarm.options import Response, SwarmOptions
from batch_agent.swarm.patterns.steps import gather_and_collect
from batch_agent.swarm.pool import AgentPool


async def broadcast(pool: AgentPool, prompt: str, **options: Unpack[SwarmOptions]) -> list[Response]:
    """Return the response of each agent, in their order."""
    return await pool.broadcast_prompt(prompt, **options)


async def broadcast_and_reduce(
    pool: AgentPool, prompt: str, reduce_prompt: str, reducer_agent_index: int = 0, **options: Unpack[SwarmOptions]
) -> Response:
    """Return one agent's answer to ``reduce_prompt``, with all answers in place of ``{responses}``."""
    return await gather_and_collect(pool, prompt, pool, reducer_agent_index, reduce_prompt, options)
