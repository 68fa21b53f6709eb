"""Sends different prompts to different agents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from batch_agent.swarm.options import Response, SwarmOptions
from batch_agent.swarm.patterns.steps import filled
from batch_agent.swarm.pool import AgentPool


async def scatter_gather(pool: AgentPool, prompts: Sequence[str], **options: Unpack[SwarmOptions]) -> list[Response]:
    """Return the responses in the order of the prompts. Prompt i goes to agent i mod size."""
    return await pool.send_all_batched(prompts, **options)


async def map_gather(
    pool: AgentPool, items: Sequence[object], prompt_template: str, **options: Unpack[SwarmOptions]
) -> list[Response]:
    """Like ``scatter_gather``, with prompts made from the template: each item replaces ``{item}``."""
    return await scatter_gather(pool, [filled(prompt_template, item=item) for item in items], **options)
