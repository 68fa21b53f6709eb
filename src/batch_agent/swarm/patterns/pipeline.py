"""Stages of agents; each gets the output of the one before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from batch_agent.errors import SpecError
from batch_agent.swarm.aggregators import concat
from batch_agent.swarm.options import Response, SwarmOptions, whole
from batch_agent.swarm.patterns.steps import Steps, filled, gather_and_collect
from batch_agent.swarm.pool import AgentPool


@dataclass
class Stage:
    """The stage's input replaces ``{input}``. Its answers are filtered, then transformed; without a transform the
    successful ones are joined by newlines."""

    name: str
    prompt_template: str
    n_agents: int
    output_transform: Callable[[list[Response]], object] | None = None
    output_filter: Callable[[Response], bool] | None = None


async def run_pipeline(
    pool: AgentPool,
    stages: Sequence[Stage],
    initial_input: object,
    reuse_agents: bool = True,
    **options: Unpack[SwarmOptions],
) -> Any:  # the type of the last transform's value
    """Return the output of the last stage. A stage uses the first ``n_agents`` of the pool; without ``reuse_agents``,
    the first ones that no earlier stage has used."""
    if options.get("n", 1) != 1 or options.get("run_dir") is not None:
        raise SpecError("a pipeline takes no n and no run_dir: BatchAgent's Pipeline has stages that are recorded")
    steps = Steps(options)
    current = initial_input
    for place, agents in enumerate(_agents(pool, stages, reuse_agents)):
        stage = stages[place]
        own = steps.options(last=place == len(stages) - 1)
        responses = await agents.broadcast_prompt(filled(stage.prompt_template, input=current), **own)
        if stage.output_filter is not None:
            responses = [response for response in responses if stage.output_filter(response)]
        current = (stage.output_transform or concat)(responses)
    return current


async def fan_out_fan_in(
    pool: AgentPool, prompt: str, collect_prompt: str, n_workers: int | None = None, **options: Unpack[SwarmOptions]
) -> Response:
    """Return agent 0's answer to ``collect_prompt``, in which the answers of the first ``n_workers`` agents replace
    ``{responses}``."""
    workers = pool if n_workers is None else pool.slice(0, whole("n_workers", n_workers))
    return await gather_and_collect(workers, prompt, pool, 0, collect_prompt, options)


def _agents(pool: AgentPool, stages: Sequence[Stage], reuse: bool) -> list[AgentPool]:
    """Return the agents of each stage. Raises SpecError if a stage would have none."""
    parts, begin = [], 0
    for stage in stages:
        part = pool.slice(begin, begin + whole(f"n_agents of the stage {stage.name!r}", stage.n_agents))
        if not part.size:
            raise SpecError(
                f"no agent is left for the stage {stage.name!r}: the pool has {pool.size}, and each serves one stage; "
                "give the stages fewer n_agents, or reuse_agents=True"
            )
        parts.append(part)
        begin = 0 if reuse else begin + part.size
    return parts
