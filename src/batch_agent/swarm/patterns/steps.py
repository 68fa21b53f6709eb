"""What the patterns share: one deadline over several steps, templates, and the summarising request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import cast

from batch_agent.swarm.options import Response, SwarmOptions, above_zero
from batch_agent.swarm.pool import AgentPool

BETWEEN = "\n---\n"
LEAST_SECONDS = 0.001  # for a step after the deadline, which fails with a message about it


class Steps:
    """The options of each step of a pattern. ``n`` and ``run_dir`` apply to the first step, and ``schema`` to the last,
    which is the pattern's own answer. The deadline is one for all."""

    def __init__(self, options: SwarmOptions) -> None:
        self._options = options
        deadline = options.get("deadline")
        seconds = None if deadline is None else above_zero("deadline", deadline)
        self._ends = None if seconds is None else asyncio.get_running_loop().time() + seconds

    def options(self, *, first: bool = False, last: bool = False) -> SwarmOptions:
        """Return the options of the next step."""
        dropped = ([] if first else ["n", "run_dir"]) + ([] if last else ["schema"])
        own = {name: value for name, value in self._options.items() if name not in dropped}
        if not first and isinstance(own.get("seed"), Sequence):  # one for each prompt of the first step
            del own["seed"]
        if self._ends is not None:
            own["deadline"] = max(LEAST_SECONDS, self._ends - asyncio.get_running_loop().time())
        return cast(SwarmOptions, own)


def filled(template: str, **values: object) -> str:
    """Return the template with values in place of ``{name}``. Braces in a value stay unchanged."""
    pattern = re.compile(r"\{(" + "|".join(values) + r")\}")
    return pattern.sub(lambda match: str(values[match[1]]), template)


async def gather_and_collect(
    workers: AgentPool, prompt: str, pool: AgentPool, agent_index: int, template: str, options: SwarmOptions
) -> Response:
    """Return one agent's answer to the template, in which the answers of the workers to the prompt replace
    ``{responses}``. It has the token limit for summaries. If no worker answered, the response is a failed one."""
    steps = Steps(options)
    responses = await workers.broadcast_prompt(prompt, **steps.options(first=True))
    texts = [response.text for response in responses if response.success]
    if not texts:
        why = responses[0].error if responses else "no agent was asked"
        return Response(False, "", f"all {len(responses)} requests failed, so there is nothing to summarise: {why}")
    summary = filled(template, responses=BETWEEN.join(texts))
    last = steps.options(last=True)
    if last.get("dispatch") == "balanced":
        (response,) = await pool.send_all([summary], pool.aggregation_tokens, **last)
        return response
    return await pool.post(agent_index, summary, pool.aggregation_tokens, **last)
