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
# SwarmOptions of the first step only, if a pattern has several: the number of samples, and the record.
_FIRST = ("n", "run_dir")


class Steps:
    """The options of each step of a pattern. ``schema`` applies to the last step, the pattern's own answer."""

    def __init__(self, options: SwarmOptions) -> None:
        self._options = options
        deadline = options.get("deadline")
        seconds = None if deadline is None else above_zero("deadline", deadline)
        self._ends = None if seconds is None else asyncio.get_running_loop().time() + seconds

    def first(self) -> SwarmOptions:
        return self._timed({name: value for name, value in self._options.items() if name != "schema"})

    def between(self) -> SwarmOptions:
        """Return the options of a step that is neither the first nor the last."""
        own = {name: value for name, value in self._options.items() if name not in (*_FIRST, "schema")}
        if isinstance(own.get("seed"), Sequence):
            del own["seed"]
        return self._timed(own)

    def last(self) -> SwarmOptions:
        own = dict(self.between())
        if "schema" in self._options:
            own["schema"] = self._options["schema"]
        return cast(SwarmOptions, own)

    def _timed(self, options: dict[str, object]) -> SwarmOptions:
        if self._ends is not None:
            options["deadline"] = max(LEAST_SECONDS, self._ends - asyncio.get_running_loop().time())
        return cast(SwarmOptions, options)


def filled(template: str, **values: object) -> str:
    """Return the template with values in place of ``{name}``. Braces in a value stay unchanged."""
    pattern = re.compile(r"\{(" + "|".join(values) + r")\}")
    return pattern.sub(lambda match: str(values[match[1]]), template)


async def collect(
    pool: AgentPool, agent_index: int, template: str, responses: Sequence[Response], steps: Steps
) -> Response:
    """Return one answer made from the successful ones, with the token limit for summaries, or a failed response."""
    texts = [response.text for response in responses if response.success]
    if not texts:
        why = responses[0].error if responses else "no agent was asked"
        return Response(False, "", f"all {len(responses)} requests failed, so there is nothing to summarise: {why}")
    prompt, options = filled(template, responses=BETWEEN.join(texts)), steps.last()
    if options.get("dispatch") == "balanced":
        (response,) = await pool.send_all([prompt], pool.aggregation_tokens, **options)
        return response
    return await pool.post(agent_index, prompt, pool.aggregation_tokens, **options)
